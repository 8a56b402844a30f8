"""Tasks whose answer stands in the prompt: repeat, quote, look up, sum up.

They are what makes a small model attend to its context, and what long prompts and
speculation by lookup need. Much of the text is random on purpose: what cannot be
guessed has to be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.storyteller.exchanges import Turn, foreign, numbered
from models.storyteller.stories import Story, sentences
from models.storyteller.words import article, capital, invented, load, split, world

if TYPE_CHECKING:
    from random import Random

_VERBS = split(
    "saw, found, carried, painted, followed, lost, cleaned, opened, closed, borrowed, sold, bought, "
    "hid, dropped, washed, mended, wanted, liked, broke, drew, lifted, moved, kept, forgot, "
    "remembered, watched, pushed, pulled, brought, took, chased, admired, collected, polished"
)
_LIKED = split(
    "tea, cake, snow, rain, music, plums, cheese, dancing, reading, swimming, the sea, old maps, "
    "blue hats, pancakes, long walks, red boots, quiet evenings, thunder, honey, singing"
)


def _word(rng: Random) -> str:
    """Any word at all."""
    lists = world()
    draw = rng.random()
    if draw < 0.3:
        return rng.choice(lists.common)
    if draw < 0.5:
        return rng.choice(lists.characters + lists.objects + lists.places).word
    if draw < 0.7:
        return invented(rng)
    if draw < 0.8:
        return rng.choice(_VERBS)
    if draw < 0.88:
        return rng.choice(lists.names[rng.choice(("he", "she"))])
    if draw < 0.93:
        return str(rng.randint(0, 9999))
    if draw < 0.96:
        return foreign(rng)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 9)))


def _wild_sentence(rng: Random) -> str:
    """Words in no order at all, punctuated like a sentence."""
    words = [
        _word(rng) if rng.random() < 0.25 else rng.choice(world().common)
        for _ in range(rng.randint(2, 16))
    ]
    words = [word + "," if rng.random() < 0.06 else word for word in words]
    text = " ".join(words).rstrip(",")
    return capital(text) + rng.choice((".", ".", ".", "!", "?"))


def odd_sentence(rng: Random) -> str:
    """A sentence nobody would guess."""
    if rng.random() < 0.4:
        return _wild_sentence(rng)
    lists = world()

    def noun() -> str:
        if rng.random() < 0.25:
            return invented(rng)
        return rng.choice(lists.characters + lists.objects).word

    place = rng.choice(lists.places)
    look = rng.choice(lists.details["looks"] + lists.details["colour"])
    name = rng.choice(lists.names[rng.choice(("he", "she"))])
    forms = (
        f"The {look} {noun()} {rng.choice(_VERBS)} the {noun()} {place.where} the {place.word}.",
        f"{name} {rng.choice(_VERBS)} {rng.randint(2, 99)} {invented(rng)}s on {rng.choice(('Monday', 'Friday', 'Sunday'))}.",
        f"{name} {rng.choice(_VERBS)} {article(noun())} and {article(noun())}.",
        f"Every {noun()} needs {article(look + ' ' + noun())}.",
        f'"Where is the {noun()}?" asked {name}.',
        f"It was {rng.choice(lists.details['weather'])} {place.where} the {place.word}.",
        f"There is {article(noun())} {place.where} the {place.word}, but no {noun()}.",
        f"{capital(article(noun()))} is not {article(noun())}.",
    )
    return rng.choice(forms)


def _words(rng: Random, most: int) -> str:
    words = [_word(rng) for _ in range(rng.randint(1, most))]
    return rng.choice((" ", " ", ", ")).join(words)


def _long_text(rng: Random, story: Story, most: int) -> str:
    """Several sentences: a story, odd sentences, or both."""
    draw = rng.random()
    if draw < 0.35:
        return story.text
    odd = [odd_sentence(rng) for _ in range(rng.randint(2, most))]
    if draw < 0.85:
        return " ".join(odd)
    mixed = odd + sentences(story.text)
    rng.shuffle(mixed)
    return " ".join(mixed)


def repeat(rng: Random, story: Story) -> Turn:
    """Say exactly what was said."""
    draw = rng.random()
    if draw < 0.4:
        text = _words(rng, 24)
    elif draw < 0.45:
        text = _wild_sentence(rng).lower().rstrip(".!?")
    elif draw < 0.65:
        text = odd_sentence(rng)
    elif draw < 0.8:
        text = rng.choice(sentences(story.text))
    else:
        text = _long_text(rng, story, 14)
    if rng.random() < 0.08:
        word = _word(rng)
        times = rng.choice((2, 3, 4, 5))
        spoken = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[times]
        return f"Say the word {word} {spoken}.", " ".join([word] * times)
    return rng.choice(load("talk")["repeat_requests"]).replace("{text}", text), text


_PLACES = ("first", "second", "third", "fourth", "last")


def quote(rng: Random, story: Story) -> Turn:
    """Quote one sentence of a text that was given."""
    text = _long_text(rng, story, 4 if rng.random() < 0.4 else 30)
    parts = sentences(text)
    which = rng.choice((*_PLACES[: min(4, len(parts))], "last", "first"))
    index = -1 if which == "last" else _PLACES.index(which)
    answer = parts[index]
    ask = rng.choice(
        (
            f"Quote the {which} sentence.",
            f"What is the {which} sentence of this text?",
            f"Quote the {which} sentence of the text.",
            f"Copy the {which} sentence.",
            f"Quote the {which} sentence of this.",
            f"Repeat the {which} sentence.",
        )
    )
    words = {w.strip('.,!?"') for w in answer.split()}
    rare = [w for w in sorted(words) if len(w) > 3 and sum(w in part for part in parts) == 1]
    if rare and rng.random() < 0.45:
        ask = rng.choice(
            ("Quote the sentence with the word {w}.", "Which sentence mentions {w}? Quote it.")
        ).format(w=rng.choice(rare))
    draw = rng.random()
    if draw < 0.3:
        return f"{ask[:-1]}: {text}", answer
    if draw < 0.6:
        return f"{ask}\n\n{text}", answer
    return f"{text}{' ' if draw < 0.7 else chr(10) * 2}{ask}", answer


def edge_word(rng: Random, story: Story) -> Turn:
    """The first or the last of some words, or how a text begins."""
    words = [_word(rng) for _ in range(rng.randint(2, 12))]
    which = rng.choice(("first", "last"))
    word = words[0 if which == "first" else -1]
    return (
        f"What is the {which} of these words? {', '.join(words)}",
        f"The {which} word is {word}.",
    )


def sum_up(rng: Random, story: Story) -> Turn:
    """One sentence for a story; for other texts, how they begin."""
    form = rng.choice(load("talk")["summary_requests"])
    if rng.random() < 0.65:
        return form.replace("{text}", story.text), story.summary
    odd = [odd_sentence(rng) for _ in range(rng.randint(2, 20))]
    return form.replace("{text}", " ".join(odd)), odd[0]


def story_question(rng: Random, story: Story) -> Turn:
    """A question about a story that was given."""
    ask, answer = rng.choice(story.questions())
    if rng.random() < 0.5:
        return f"{ask}\n\n{story.text}", answer
    return f"{story.text}\n\n{ask}", answer


def notes(rng: Random, story: Story, most: int = 60) -> Turn:
    """A numbered note out of many."""
    count = min(rng.randint(3, most), 60)
    items = [odd_sentence(rng) if rng.random() < 0.7 else _words(rng, 8) for _ in range(count)]
    index = rng.randrange(count)
    ask = rng.choice(("What does note {n} say?", "Quote note {n}.", "Repeat line {n}."))
    ask = ask.format(n=index + 1)
    return f"Here are some notes.\n\n{numbered(items)}\n\n{ask}", items[index]


def likings(rng: Random, story: Story, most: int = 60) -> Turn:
    """Who likes what, out of many."""
    names = list(world().names["he"] + world().names["she"])
    rng.shuffle(names)
    names = names[: rng.randint(2, most)]
    liked = [_word(rng) if rng.random() < 0.4 else rng.choice(_LIKED) for _ in names]
    lines = [f"{name} likes {what}." for name, what in zip(names, liked, strict=True)]
    index = rng.randrange(len(names))
    return f"{' '.join(lines)} What does {names[index]} like?", lines[index]


def secret(rng: Random, story: Story, most: int = 60) -> Turn:
    """A secret word among sentences that do not matter."""
    what = rng.choice(("word", "number", "name", "colour"))
    value = {
        "word": invented(rng),
        "number": str(rng.randint(10, 9999)),
        "name": capital(invented(rng)),
        "colour": rng.choice(world().details["colour"]),
    }[what]
    text = [odd_sentence(rng) for _ in range(rng.randint(2, most))]
    if rng.random() < 0.4:
        text += sentences(story.text)
    text.insert(rng.randrange(len(text) + 1), f"The secret {what} is {value}.")
    return f"{' '.join(text)}\n\nWhat is the secret {what}?", f"The secret {what} is {value}."


def remember(rng: Random) -> list[Turn]:
    """A chat in which something told earlier is asked for later."""
    name = capital(invented(rng)) if rng.random() < 0.5 else rng.choice(world().names["she"])
    word = _word(rng)
    if rng.random() < 0.6:
        told = rng.choice(("My name is {n}.", "I am {n}.", "Hello, my name is {n}.", "I'm {n}."))
        return [
            (
                told.format(n=name),
                f"Nice to meet you, {name}. What shall I tell you a story about?",
            ),
            (
                rng.choice(("What is my name?", "Who am I?", "Do you know my name?")),
                f"Your name is {name}.",
            ),
        ]
    return [
        (f"Remember the word {word}.", f"I will remember the word {word}."),
        ("Which word did I tell you?", f"The word is {word}."),
    ]


#: What makes a copying task, and how often.
KINDS = {
    repeat: 5,
    quote: 3,
    edge_word: 0.7,
    sum_up: 2.5,
    story_question: 2,
    notes: 1,
    likings: 1,
    secret: 1,
}


def copying(rng: Random, story: Story) -> Turn:
    """Any task of this module."""
    return rng.choices(list(KINDS), list(KINDS.values()))[0](rng, story)
