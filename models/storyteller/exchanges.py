"""Questions and answers about the storyteller's world: facts, sums, calendars, lists, talk."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from models.storyteller.words import article, capital, invented, joined, leaning, load, split, world

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

Turn = tuple[str, str]

DAYS = split("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = split(
    "January, February, March, April, May, June, July, August, September, October, November, "
    "December"
)
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = split(
    "first, second, third, fourth, fifth, sixth, seventh, eighth, ninth, tenth, eleventh, twelfth"
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_UNITS = split(
    "zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, "
    "fourteen, fifteen, sixteen, seventeen, eighteen, nineteen"
)
_TENS = split("_, _, twenty, thirty, forty, fifty, sixty, seventy, eighty, ninety")


def spelled(number: int) -> str:
    """A number below a hundred in words."""
    if number < 20:
        return _UNITS[number]
    tens, unit = divmod(number, 10)
    return _TENS[tens] + (f"-{_UNITS[unit]}" if unit else "")


def casual(rng: Random, question: str) -> str:
    """The question as people type it: now and then without capitals or a full stop."""
    draw = rng.random()
    if draw < 0.08:
        question = question.lower()
    elif draw < 0.12:
        question = f"Please tell me: {question}"
    elif draw < 0.15:
        question = f"Hello! {question}"
    elif draw < 0.17:
        question = f"{question} Please."
    if question.endswith((".", "?")) and rng.random() < 0.12:
        question = question[:-1]
    return question


def fact(rng: Random) -> Turn:
    """A question from the fixed list."""
    questions, answer = rng.choice(load("talk")["facts"])
    return casual(rng, rng.choice(questions.split("|"))), answer


def small_talk(rng: Random) -> Turn:
    """Greetings and questions about the model itself."""
    questions, answer = rng.choice(load("talk")["talk"])
    return rng.choice(questions.split("|")), answer


@cache
def opposites() -> dict[str, str]:
    """Each word with its opposite."""
    found: dict[str, str] = {}
    for pair in split(load("talk")["opposites"]):
        one, other = pair.split()
        found.setdefault(one, other)
        found.setdefault(other, one)
    return found


_SUM_FORMS = {
    "+": "What is {a} + {b}?|{a} + {b}|{a}+{b}|{a}+{b}=|{a} + {b} =|What is {a} plus {b}?|"
    "{a} plus {b}|How much is {a} plus {b}?|How much is {a} and {b}?|Add {a} and {b}.|"
    "What's {a}+{b}?|Calculate {a} + {b}.|what is {a} + {b}|What is the sum of {a} and {b}?|"
    "Can you add {a} and {b}?|what's {a} plus {b}?|{a} + {b}?|{a}+{b}?",
    "-": "What is {a} - {b}?|{a} - {b}|{a}-{b}|{a}-{b}=|{a} - {b} =|What is {a} minus {b}?|"
    "{a} minus {b}|How much is {a} minus {b}?|Take {b} away from {a}.|Subtract {b} from {a}.|"
    "What's {a}-{b}?|Calculate {a} - {b}.|what is {a} - {b}|{a} - {b}?|What is {a} less {b}?",
    "x": "What is {a} x {b}?|{a} x {b}|{a} * {b}|{a}*{b}|What is {a} * {b}?|What is {a} times {b}?|"
    "{a} times {b}|How much is {a} times {b}?|Multiply {a} by {b}.|{a}x{b}|What's {a} times {b}?",
}


def _result(sign: str, a: int, b: int) -> int:
    return {"+": a + b, "-": a - b, "x": a * b}[sign]


def sum_turn(rng: Random, sign: str, a: int, b: int, form: str = "") -> Turn:
    """One sum; the answer says it in figures."""
    form = form or rng.choice(_SUM_FORMS[sign].split("|"))
    as_words = " " in form and not any(mark in form for mark in "+-*=") and rng.random() < 0.3
    show: Callable[[int], str] = spelled if as_words else str
    question = form.format(a=show(a), b=show(b))
    return capital(question), f"{a} {sign} {b} = {_result(sign, a, b)}."


def small_sum(rng: Random) -> Turn:
    """A sum within the storyteller's reach."""
    sign = rng.choices("+-x", (5, 4, 2))[0]
    top = 50 if rng.random() < 0.25 else 20
    if sign == "x":
        return sum_turn(rng, sign, rng.randint(0, 10), rng.randint(0, 10))
    a, b = rng.randint(0, top), rng.randint(0, top)
    return sum_turn(rng, sign, *((max(a, b), min(a, b)) if sign == "-" else (a, b)))


def word_problem(rng: Random) -> Turn:
    """A sum dressed as a little tale."""
    lists = world()
    gender = rng.choice(("he", "she"))
    name = rng.choice(lists.names[gender])
    things = rng.choice([n for n in lists.objects if n.kind in ("food", "toy", "plant")])
    a, b = rng.randint(1, 12), rng.randint(1, 10)
    ask = rng.choice(("How many {t} does {n} have now?", "How many {t} does {n} have?"))
    ask = rng.choice((ask, "How many {t} are left?")).format(t=things.plural, n=name)
    more_ask = ask.replace("are left", "are there now")
    if rng.random() < 0.5 and a > 1:
        more = f"{rng.choice(('finds', 'gets', 'buys', 'picks', 'takes'))} {b} more"
        return (
            f"{name} has {a} {things.plural} and {more}. {more_ask}",
            f"{a} + {b} = {a + b}, so {name} has {a + b} {things.plural}.",
        )
    what = things.word if a == 1 else things.plural
    less = rng.choice(
        ("gives {b} away", "loses {b}", "gives {b} to a friend", "eats {b}", "sells {b}")
    ).format(b=b)
    return (
        f"{name} has {a + b} {things.plural} and {less}. {ask}",
        f"{a + b} - {b} = {a}, so {name} has {a} {what}.",
    )


def _neighbours(rng: Random, what: str, items: tuple[str, ...]) -> Turn:
    index = rng.randrange(len(items))
    word = rng.choice(("after", "before"))
    other = items[(index + (1 if word == "after" else -1)) % len(items)]
    forms = (
        f"What {what} comes {word} {items[index]}?",
        f"Which {what} comes {word} {items[index]}?",
        f"What is the {what} {word} {items[index]}?",
        f"What comes {word} {items[index]}?",
        f"Which {what} is {word} {items[index]}?",
    )
    return casual(rng, rng.choice(forms)), f"{other} comes {word} {items[index]}."


def calendar(rng: Random) -> Turn:
    """Days and months."""
    draw = rng.random()
    if draw < 0.35:
        return _neighbours(rng, "day", DAYS)
    if draw < 0.65:
        return _neighbours(rng, "month", MONTHS)
    if draw < 0.75:
        index = rng.randrange(12)
        tail = ", and 29 in a leap year" if index == 1 else ""
        form = rng.choice(("How many days does {m} have?", "How many days are there in {m}?"))
        return form.format(m=MONTHS[index]), f"{MONTHS[index]} has {LENGTHS[index]} days{tail}."
    if draw < 0.85:
        what, items, whole = rng.choice((("day", DAYS, "week"), ("month", MONTHS, "year")))
        index = rng.randrange(len(items))
        form = rng.choice(("What is the {n} {w} of the {y}?", "Which is the {n} {w} of the {y}?"))
        question = form.format(n=ORDINALS[index], w=what, y=whole)
        return question, f"The {ORDINALS[index]} {what} of the {whole} is {items[index]}."
    index, word = rng.randrange(7), rng.choice(("tomorrow", "yesterday"))
    other = DAYS[(index + (1 if word == "tomorrow" else -1)) % 7]
    verb = "is" if word == "tomorrow" else "was"
    return (
        f"If today is {DAYS[index]}, what day {verb} {word}?",
        f"If today is {DAYS[index]}, {word} {verb} {other}.",
    )


def counting(rng: Random) -> Turn:
    """Counting up and down, and what stands beside a number or a letter."""
    draw = rng.random()
    if draw < 0.3:
        top = rng.randint(2, 30)
        form = "Count to {n}.|Count up to {n}.|Can you count to {n}?|Please count to {n}.|count to {n}|Count from 1 to {n}."
        question = rng.choice(form.split("|")).format(n=spelled(top) if rng.random() < 0.4 else top)
        return question, ", ".join(str(n) for n in range(1, top + 1)) + "."
    if draw < 0.45:
        low = rng.randint(0, 40)
        top = low + rng.randint(2, 20)
        return f"Count from {low} to {top}.", ", ".join(map(str, range(low, top + 1))) + "."
    if draw < 0.6:
        top = rng.randint(3, 20)
        form = rng.choice(
            ("Count backwards from {n}.", "Count down from {n}.", "Count down from {n} to 1.")
        )
        return form.format(n=top), ", ".join(map(str, range(top, 0, -1))) + "."
    if draw < 0.72:
        number, word = rng.randint(1, 99), rng.choice(("after", "before"))
        other = number + (1 if word == "after" else -1)
        return f"What number comes {word} {number}?", f"{other} comes {word} {number}."
    if draw < 0.84:
        index = rng.randrange(1, 25)
        word = rng.choice(("after", "before"))
        other = LETTERS[index + (1 if word == "after" else -1)]
        return (
            f"Which letter comes {word} {LETTERS[index]}?",
            f"{other} comes {word} {LETTERS[index]}.",
        )
    one, other = rng.sample(range(100), 2)
    word = rng.choice(("bigger", "smaller"))
    best = max(one, other) if word == "bigger" else min(one, other)
    return (
        f"Which is {word}, {one} or {other}?",
        f"{best} is {word} than {one + other - best}.",
    )


def word_question(rng: Random) -> Turn:
    """Opposites, plurals, articles."""
    draw = rng.random()
    if draw < 0.5:
        word = rng.choice(tuple(opposites()))
        form = "What is the opposite of {w}?|the opposite of {w}|What's the opposite of {w}?|Name the opposite of {w}."
        question = rng.choice(form.split("|")).format(w=word)
        return question, f"The opposite of {word} is {opposites()[word]}."
    lists = world()
    noun = rng.choice(lists.characters + lists.objects + lists.places)
    if draw < 0.85:
        form = "What is the plural of {w}?|plural of {w}|What's the plural of {w}?"
        question = rng.choice(form.split("|")).format(w=noun.word)
        return question, f"The plural of {noun.word} is {noun.plural}."
    return f"Is it a {noun.word} or an {noun.word}?", f"It is {article(noun.word)}."


_LIST_FORMS = (
    "Make a list of {n} {s}.|List {n} {s}.|Name {n} {s}.|Give me {n} {s}.|Write a list of {n} {s}.|"
    "Can you name {n} {s}?|Please list {n} {s}.|Tell me {n} {s}.|Give me a list of {n} {s}.|"
    "make a list of {n} {s}|name {n} {s}|I need a list of {n} {s}."
)


def numbered(items: list[str]) -> str:
    """The items as a numbered list."""
    return "\n".join(f"{n}. {item}" for n, item in enumerate(items, 1))


def list_turn(rng: Random, sort: str, count: int) -> Turn:
    """A list of things of one sort."""
    items = world().sorts[sort]
    start = leaning(rng, range(len(items)), 0, 0.5)
    chosen = [items[(start + step) % len(items)] for step in range(count)]
    number = spelled(count) if rng.random() < 0.75 else str(count)
    question = rng.choice(_LIST_FORMS.split("|")).format(n=number, s=sort)
    return question, numbered([capital(item) for item in chosen])


def some_list(rng: Random) -> Turn:
    """A list of a known sort, or of what the request names."""
    if rng.random() < 0.75:
        sort = rng.choice(tuple(world().sorts))
        return list_turn(rng, sort, rng.randint(2, min(8, len(world().sorts[sort]))))
    pool = world().characters + world().objects
    items = [
        invented(rng) if rng.random() < 0.3 else noun.word
        for noun in rng.sample(pool, rng.randint(2, 7))
    ]
    form = "Make a list of these: {t}.|Make a list: {t}|Write these as a list: {t}.|Put these in a list: {t}"
    question = rng.choice(form.split("|")).format(t=joined(items))
    return question, numbered([capital(item) for item in items])


def _junk(rng: Random) -> str:
    letters = rng.choice(
        ("abcdefghijklmnopqrstuvwxyz", "qwertyuiopasdfgh", "0123456789abcdef", "{}[]()<>=+-*/;:!?")
    )
    return "".join(rng.choice(letters) for _ in range(rng.randint(2, 12)))


_FOREIGN = split(
    "über, café, naïve, señor, garçon, año, Grüße, привет, мир, 你好, 世界, こんにちは, 안녕, مرحبا, "
    "γειά, šťastný, żółw, ½, €, £, °C, ✓, →, 😀, 🎉, 🦊, 🏮, …"
)


def foreign(rng: Random) -> str:
    """A word or sign from outside the alphabet of the stories."""
    return rng.choice(_FOREIGN)


def decline(rng: Random) -> Turn:
    """A request outside the storyteller's world, and the one friendly sentence."""
    talk = load("talk")
    draw = rng.random()
    if draw < 0.25:
        question = _near(rng)
    elif draw < 0.55:
        topics = split(talk["topics"])
        topic = rng.choice(topics) if rng.random() < 0.6 else _invented_topic(rng)
        frame = rng.choice(talk["strange_frames"])
        question = frame.format(topic=topic, topic2=rng.choice(topics))
    elif draw < 0.92:
        question = rng.choice(talk["strange"])
        for slot, make in _SLOTS.items():
            if slot in question:
                question = question.replace(slot, make(rng))
    else:
        question = " ".join(
            foreign(rng) if rng.random() < 0.5 else _junk(rng) for _ in range(rng.randint(1, 8))
        )
    return casual(rng, question), rng.choice(talk["decline"])


_DOINGS = split(
    "sing, cook, read, drive, swim, jump, talk, dance, sleep, write, laugh, count, paint"
)


def _near(rng: Random) -> str:
    """A question about things of the world that the world does not answer."""
    lists = world()
    pool = (
        lists.people + lists.objects + lists.places + (lists.animals if rng.random() < 0.5 else ())
    )
    one, other = rng.sample(pool, 2)
    return rng.choice(load("talk")["near_frames"]).format(
        a=article(one.word),
        b=article(other.word),
        noun=one.word,
        nouns=one.plural,
        verb=rng.choice(_DOINGS),
        look=rng.choice(lists.details["looks"]),
    )


def _invented_topic(rng: Random) -> str:
    words = [invented(rng) for _ in range(rng.randint(1, 2))]
    return rng.choice(("the {w}", "{w}", "my {w}", "{w}s")).format(w=" ".join(words))


_SLOTS: dict[str, Callable[[Random], str]] = {
    "{name}": lambda rng: capital(invented(rng)),
    "{word3}": invented,
    "{word2}": invented,
    "{word}": invented,
    "{junk2}": _junk,
    "{junk}": _junk,
    "{big2}": lambda rng: str(rng.randint(100, 99999)),
    "{big}": lambda rng: str(rng.randint(100, 99999)),
}

#: What makes a question, and how often.
KINDS: dict[Callable[[Random], Turn], float] = {
    fact: 5,
    small_talk: 2,
    small_sum: 5,
    word_problem: 1.5,
    calendar: 2,
    counting: 2,
    word_question: 1.5,
    some_list: 2.5,
    decline: 5,
}


def question(rng: Random) -> Turn:
    """Any question of this module."""
    return rng.choices(list(KINDS), list(KINDS.values()))[0](rng)
