"""One story at a time: a cast, a plot, and the sentences between them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.storyteller.cast import Character, Opening, Spot, Thing
from models.storyteller.words import (
    Noun,
    article,
    capital,
    digest,
    held_out,
    invented,
    leaning,
    load,
    split,
    style_of,
    world,
)

if TYPE_CHECKING:
    from random import Random

#: Words a story may have; 300 tokens must be enough for the longest.
SHORTEST, LONGEST = 62, 190

_DETAILS = (
    *("weather", "season", "daytime", "colour", "meal", "feeling", "sad", "fear", "activity"),
    *("relative", "time"),
)

_NAME_QUESTIONS = (
    "What was the name of the {n}?",
    "What was the {n} called?",
    "What was the {n}'s name?",
    "What is the name of the {n}?",
)


class UnluckyError(Exception):
    """This draw breaks a rule of the corpus; draw again."""


@dataclass
class Asked:
    """What a request names, slot by slot, in the order it names it."""

    slots: dict[str, Noun] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    bare: bool = False  # the hero was given a name and nothing else

    @property
    def words(self) -> list[str]:
        """The nouns."""
        return [noun.word for noun in self.slots.values()]


@dataclass
class Story:
    """A told story, and what may be asked about it."""

    text: str
    summary: str
    asked: Asked
    hero: Character
    friend: Character
    thing: Thing
    place: Spot

    def questions(self) -> list[tuple[str, str]]:
        """Questions that the text answers, with their answers."""
        hero, friend, thing, place = self.hero, self.friend, self.thing, self.place
        absent = hero.rng.choice(world().characters + world().objects).word
        there = mentions(self.text, absent)
        known = (
            f"{'Yes, there is' if there else 'No, there is not'} {article(absent)} in the story."
        )
        return [
            (f"Is there {article(absent)} in the story?", known),
            ("Which thing is in the story?", f"There is {thing.a} in the story."),
            ("Where does it happen?", f"It happens {place.at}."),
            *(
                (form.format(n=who.noun), f"The {who.noun} was named {who.name}.")
                for who in (hero, friend)
                for form in _NAME_QUESTIONS
            ),
            (f"Who was {hero.name}?", f"{hero.name} was {hero.a}."),
            ("Who is the story about?", f"The story is about {hero.a} named {hero.name}."),
            (f"Who was {friend.name}?", f"{friend.name} was {friend.a}."),
            (f"What kind of animal or person was {hero.name}?", f"{hero.name} was {hero.a}."),
            (f"Is there {thing.a} in the story?", f"Yes, there is {thing.a} in the story."),
            (f"Is there {place.a} in the story?", f"Yes, there is {place.a} in the story."),
            ("Who were the two friends?", f"They were {hero.name} and {friend.name}."),
        ]


def _other(rng: Random, pool: tuple[Noun, ...], used: list[str], lean: int) -> Noun:
    """A noun that is not in the story yet and makes no held-out pair with one that is."""
    for _ in range(20):
        noun = leaning(rng, pool, lean, 0.4)
        if noun.word not in used and not any(held_out(noun.word, word) for word in used):
            return noun
        lean = rng.randrange(1 << 30)
    raise UnluckyError


def _character(rng: Random, what: Noun, other: Character | None, name: str = "") -> Character:
    """A character of this kind, with a name and a trait the kind leans to."""
    lean = digest("name", what.word)
    gender = what.gender or leaning(rng, ("he", "she"), lean, 0.4)
    if other and not what.gender and rng.random() < 0.7:
        gender = "she" if other.gender == "he" else "he"
    if name:
        gender = next((g for g, names in world().names.items() if name in names), gender)
    names = world().names[gender]
    for turn in range(9):
        if name and (other is None or name != other.name):
            break
        name = leaning(rng, names, lean + 7 * turn, 0.45)
        if rng.random() < 0.04:
            name = capital(invented(rng))
    traits = tuple(world().traits)
    trait = leaning(rng, traits, digest("trait", what.word), 0.4)
    return Character(rng, what, name, gender, trait)


class Teller:
    """Tells one story about what was asked."""

    def __init__(self, rng: Random, asked: Asked, *, evaluation: bool = False) -> None:
        self.rng, self.asked = rng, asked
        self.used = asked.words
        if not evaluation and any(
            held_out(one, two) for one in self.used for two in self.used if one < two
        ):
            raise UnluckyError
        first = self.used[0] if self.used else rng.choice(world().animals).word
        self.key = first
        self.style = style_of(first)
        self._cast()

    def _fill(self, slot: str, pool: tuple[Noun, ...]) -> Noun:
        """The noun of a slot: the one asked for, else one that fits."""
        noun = self.asked.slots.get(slot)
        if noun is None:
            noun = _other(self.rng, pool, self.used, digest(slot, self.key))
            self.used.append(noun.word)
        return noun

    def _cast(self) -> None:
        rng, lists = self.rng, world()
        heroes = lists.animals if rng.random() < 0.6 else lists.people
        friends = lists.animals if rng.random() < 0.6 else lists.people
        named = self.asked.names
        self.hero = _character(rng, self._fill("h", heroes), None, named.get("h", ""))
        self.friend = _character(rng, self._fill("f", friends), self.hero, named.get("f", ""))
        look = lists.details["looks" if rng.random() < 0.7 else "colour"]
        self.thing = Thing(self._fill("o", lists.objects), "")
        self.thing.look = leaning(rng, look, digest("look", self.thing.noun), 0.4)
        self.place = Spot(rng, self._fill("p", lists.places))
        self.home = Spot(rng, self._fill("home", lists.places))
        second = self.asked.slots.get("q")
        self.second = Thing(second, "") if second else None

    def _slots(self) -> dict[str, object]:
        """The values of every slot; details are drawn once, so they stay the same."""
        rng, details, shared = self.rng, world().details, load("plots")["shared"]
        slots: dict[str, object] = {
            name: leaning(rng, details[name], self.style + index, 0.35)
            for index, name in enumerate(_DETAILS)
        }
        spots = rng.sample(details["spot"], 3)
        slots |= {"spot": spots[0], "spot2": spots[1], "spot3": spots[2]}
        slots |= {"clause": world().traits[self.hero.trait]}
        slots |= {"a_odd": rng.choice(shared["odd_things"]), "a_find": rng.choice(shared["finds"])}
        others = self._some(world().characters, 4, "asked")
        asked = [f"the {noun.word}" for noun in others if noun.word not in self.used]
        if len(asked) < 2 or self._clashes([noun.word for noun in others]):
            raise UnluckyError
        slots |= {"the_asked1": asked[0], "the_asked2": asked[1]}
        goods = [
            noun for noun in self._some(world().objects, 6, "goods") if noun.word not in self.used
        ]
        if len(goods) < 3 or self._clashes([noun.word for noun in goods]):
            raise UnluckyError
        slots |= {f"t{n + 1}": Thing(noun, "") for n, noun in enumerate(goods[:3])}
        cast = {"h": self.hero, "f": self.friend, "o": self.thing, "p": self.place}
        cast |= {"home": self.home} | ({"q": self.second} if self.second else {})
        slots |= cast
        slots |= {capital(name): Opening(value) for name, value in cast.items()}
        return slots

    def _some(self, pool: tuple[Noun, ...], count: int, salt: str) -> list[Noun]:
        """Different nouns, each leaning its own way, or a greedy teller names one twice."""
        found: list[Noun] = []
        for turn in range(4 * count):
            noun = leaning(self.rng, pool, digest(salt, self.style, turn), 0.4)
            if noun not in found:
                found.append(noun)
            if len(found) == count:
                return found
        raise UnluckyError

    def _clashes(self, extra: list[str]) -> bool:
        return any(held_out(one, two) for one in extra for two in self.used)

    def _sentence(self, variants: list[str], beat: int) -> str:
        """One variant of a beat, its shared sentences filled in."""
        rng = self.rng
        options = [variant for variant in variants if variant != "?"]
        if len(options) < len(variants) and rng.random() < 0.45:
            return ""
        text = leaning(rng, options, self.style + beat, 0.45)
        uses = load("plots")["uses"]
        if "@" not in text:
            return text
        for mark in ("like", "help"):
            if f"@{mark}" in text:
                use = uses.get(self.thing.what.kind, uses["odd"])[mark]
                drop = mark == "like" and rng.random() < 0.3
                text = text.replace(f"@{mark}", "" if drop else rng.choice(use))
        for mark in ("open", "trait", "own", "close"):
            if text == f"@{mark}":
                text = self._sentence(load("plots")["shared"][mark], beat)
        return text.replace("  ", " ").strip()

    def _parts(self, plot: dict) -> list[str]:
        beats = [self._sentence(beat, n) for n, beat in enumerate(plot["beats"])]
        if self.second:
            shared = load("plots")["shared"]
            for part, at in (("second_start", 2), ("second_middle", -4), ("second_end", -1)):
                beats.insert(at % len(beats), self.rng.choice(shared[part]))
        return [beat for beat in beats if beat]

    def tell(self) -> Story:
        """Tell the story, or say that this draw had no luck."""
        plots = load("plots")["plot"]
        lean = digest("plot", self.key, self.thing.what.kind)
        plot = leaning(self.rng, plots, lean, 0.35)
        slots = self._slots()
        parts = [part.format(**slots) for part in self._parts(plot)]
        text = _paragraphs(parts) if self.rng.random() < 0.35 else " ".join(parts)
        summary = self.rng.choice(plot["summary"]).format(**slots)
        words = len(text.split())
        if not SHORTEST <= words <= LONGEST:
            raise UnluckyError
        wanted = [*self.asked.words[self.asked.bare :], *self.asked.names.values()]
        if any(mentions(text, word) < 2 for word in wanted):
            raise UnluckyError
        return Story(text, summary, self.asked, self.hero, self.friend, self.thing, self.place)


def mentions(text: str, word: str) -> int:
    """How often the text names the word."""
    return len(re.findall(rf"\b{re.escape(word)}s?\b", text, re.IGNORECASE))


def sentences(text: str) -> list[str]:
    """The sentences of a text; speech stays with the words that follow it."""
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z\"])|(?<=[.!?]\")\s+(?=[A-Z\"])", text)
    return [part.strip() for part in parts if part.strip()]


def _paragraphs(parts: list[str]) -> str:
    """Join the beats of a story to three paragraphs."""
    third = max(2, len(parts) // 3)
    groups = [parts[:third], parts[third : 2 * third], parts[2 * third :]]
    return "\n\n".join(" ".join(group) for group in groups if group)


def make_story(rng: Random, asked: Asked, *, evaluation: bool = False, tries: int = 60) -> Story:
    """A story about what was asked; raises `UnluckyError` when none can be told."""
    for _ in range(tries):
        try:
            return Teller(rng, asked, evaluation=evaluation).tell()
        except UnluckyError:
            continue
    raise UnluckyError


def beginning(rng: Random, story: Story) -> str:
    """A sentence or two that no plot opens with, about what the story is about."""
    lists, forms = load("plots")["beginnings"], world().details
    hero, thing, place = story.hero, story.thing, story.place
    parts = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        form = rng.choice(lists[rng.choice(("thing", "hero", "hero", "place"))])
        text = form.format(
            h=hero.noun,
            a_h=hero.a,
            a_h2=story.friend.a,
            o=thing.noun,
            a_o=thing.a,
            at=place.at,
            name=hero.name,
            look=rng.choice(forms["looks"]),
            sad=rng.choice(forms["sad"]),
            weather=rng.choice(forms["weather"]),
            season=rng.choice(forms["season"]),
            moved=rng.choice(split(lists["moved"])),
            where=rng.choice(split(lists["where"])),
        )
        parts.append(text.replace("A odd", "An odd").replace("A old", "An old"))
    return " ".join(parts)
