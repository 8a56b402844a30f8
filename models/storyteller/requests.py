"""What people ask stories about, and how they put it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from models.storyteller.stories import Asked
from models.storyteller.words import (
    Noun,
    article,
    capital,
    held_out,
    invented,
    joined,
    load,
    world,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

#: Which slots of a story a request names, and how often.
_SHAPES = {
    "h o": 26,
    "h f": 13,
    "o q": 9,
    "h p": 9,
    "o p": 8,
    "h": 7,
    "o": 5,
    "p": 2,
    "h o p": 7,
    "h f o": 6,
    "h f p": 3,
    "h o q": 3,
    "p home": 2,
}
_INVENTED = 0.11


def _pool(slot: str) -> Sequence[Noun]:
    if slot in ("h", "f"):
        return world().characters
    return world().places if slot in ("p", "home") else world().objects


def _made_up(rng: Random, slot: str) -> Noun:
    """A noun the world does not have."""
    kind = {"h": "animal", "f": "animal", "o": "odd", "q": "odd"}.get(slot, "place")
    word = invented(rng)
    if rng.random() < 0.15:
        word = f"{rng.choice(world().details['colour'])} {word}"
    return Noun(word, word + "s", kind, where="in" if kind == "place" else "")


def draw(rng: Random, shape: str = "", *, inventing: float = _INVENTED) -> Asked:
    """A request: the nouns it names, and now and then a name or a trait."""
    shape = shape or rng.choices(list(_SHAPES), list(_SHAPES.values()))[0]
    slots: dict[str, Noun] = {}
    while len(slots) < len(shape.split()):
        for slot in shape.split():
            new = rng.random() < inventing
            slots[slot] = _made_up(rng, slot) if new else rng.choice(_pool(slot))
        if len({noun.word for noun in slots.values()}) < len(slots):
            slots = {}
    if rng.random() < 0.15:
        slots = dict(rng.sample(list(slots.items()), len(slots)))
    asked = Asked(slots)
    if rng.random() < 0.05 and slots:
        return _named_only(rng, slots)
    for slot in ("h", "f"):
        if slot in slots and rng.random() < 0.08:
            pool = world().names[slots[slot].gender or rng.choice(("he", "she"))]
            name = capital(invented(rng)) if rng.random() < 0.4 else rng.choice(pool)
            if name not in asked.names.values():
                asked.names[slot] = name
    return asked


def _named_only(rng: Random, slots: dict[str, Noun]) -> Asked:
    """A request that gives the hero no more than a name: "about Anna and a lantern"."""
    gender = rng.choice(("he", "she"))
    hero = next(n for n in world().people if n.word == ("boy" if gender == "he" else "girl"))
    rest = {slot: noun for slot, noun in slots.items() if slot != "h" and noun != hero}
    rest = dict(list(rest.items())[:1])
    asked = Asked({"h": hero, **rest}, {"h": rng.choice(world().names[gender])}, bare=True)
    if rng.random() < 0.25:
        asked.names["h"] = capital(invented(rng))
    return asked


def draw_held_out(rng: Random, shape: str) -> Asked:
    """A request for two known nouns whose pair is kept out of training."""
    while True:
        asked = replace(draw(rng, shape, inventing=0.0), names={})
        if len(asked.words) == 2 and not asked.bare and held_out(*asked.words):
            return asked


def _item(rng: Random, asked: Asked, slot: str, manner: float) -> str:
    """How a request names one thing."""
    noun = asked.slots[slot]
    if slot in asked.names:
        return f"{article(noun.word)} {rng.choice(('named', 'called'))} {asked.names[slot]}"
    if manner < 0.84:
        return article(noun.word)
    return noun.word if manner < 0.93 else f"the {noun.word}"


_HIS = {"he": "his", "she": "her", "": "its"}


def _together(rng: Random, asked: Asked) -> str:
    """A character and a thing in one phrase: "a fox who finds a lantern"."""
    hero, thing = asked.slots["h"], asked.slots["o"]
    form = rng.choice(
        (
            *("{h} who finds {o}", "{h} with {o}", "{h} who has {o}", "{h} who wants {o}"),
            *("{h} that loses {o}", "{h} and {his} {bare}", "{h} who lost {his} {bare}"),
            *("{h} looking for {o}", "{h} who loves {his} {bare}", "{h} who makes {o}"),
        )
    )
    return form.format(
        h=_item(rng, asked, "h", 0.0),
        o=article(thing.word),
        bare=thing.word,
        his=_HIS[hero.gender],
    )


def things(rng: Random, asked: Asked) -> str:
    """The part of a request that names what the story shall be about."""
    manner = rng.random()
    slots = list(asked.slots)
    if asked.bare:
        rest = [_item(rng, asked, slot, manner) for slot in slots[1:]]
        return joined([asked.names["h"], *rest])
    if slots == ["h", "o"] and rng.random() < 0.12:
        return _together(rng, asked)
    if slots[0] == "h" and "h" in asked.names and rng.random() < 0.5:
        name, noun = asked.names["h"], asked.slots["h"].word
        own = rng.choice((f"my {noun} {name}", f"{name} the {noun}", f"{name}, {article(noun)},"))
        rest = [_item(rng, asked, slot, manner) for slot in slots[1:]]
        return joined([own, *rest]).rstrip(",")
    if len(slots) == 1 and slots[0] != "p" and not asked.names and rng.random() < 0.12:
        number = rng.choice(("", "", "two ", "three ", "some "))
        return number + asked.slots[slots[0]].plural
    tail = ""
    last = slots[-1]
    if len(slots) > 1 and last == "p" and rng.random() < 0.5:
        place = asked.slots[slots.pop()]
        where = f"{place.where} {'the' if rng.random() < 0.7 else 'a'} {place.word}"
        if where.split()[1] == "a":
            where = f"{place.where} {article(place.word)}"
        tail = " " + rng.choice((where, where, f"set {where}", f"that takes place {where}"))
    items = [_item(rng, asked, slot, manner) for slot in slots]
    text = ", ".join(items) if len(items) > 1 and rng.random() < 0.08 else joined(items)
    return text + tail


def phrase(rng: Random, asked: Asked) -> str:
    """The whole request."""
    talk = load("talk")
    if not asked.slots:
        if rng.random() < 0.4:
            frame = rng.choice(talk["story_requests"])
            return frame.format(things=rng.choice(world().abstract))
        return rng.choice(talk["open_requests"])
    text = rng.choice(talk["story_requests"]).format(things=things(rng, asked))
    if rng.random() < 0.05:
        text = text.lower() if not asked.names else text
    return capital(text) if text[0] != text[0].lower() or rng.random() < 0.3 else text
