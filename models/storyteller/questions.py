"""The set questions of the evaluation, with what counts as right."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import TYPE_CHECKING

from models.storyteller import copying, exchanges
from models.storyteller.requests import draw
from models.storyteller.stories import make_story
from models.storyteller.words import load, world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Judge = Callable[[str], bool]
    Question = tuple[str, str, Judge]


def _same(expected: str, answer: str) -> bool:
    return answer.strip() == expected.strip()


def _listed(sort: str, count: int, answer: str) -> bool:
    """So many different things, numbered, each of the sort."""
    lines = answer.strip().split("\n")
    items = [re.fullmatch(r"(\d+)\. (.+)", line) for line in lines]
    if len(lines) != count or not all(items):
        return False
    named = [item.group(2).lower() for item in items if item]
    known = {thing.lower() for thing in world().sorts[sort]}
    return len(set(named)) == count and set(named) <= known


def _facts() -> Iterator[Question]:
    for kind in ("facts", "talk"):
        for questions, answer in load("talk")[kind]:
            for question in questions.split("|")[:2]:
                yield kind, question, partial(_same, answer)


def _sums(rng: random.Random) -> Iterator[Question]:
    pairs = [(a, b) for a in range(21) for b in range(21)]
    for sign, form, count in (("+", "What is {a} + {b}?", 100), ("-", "What is {a} - {b}?", 60)):
        for one, other in rng.sample(pairs, count):
            a, b = (max(one, other), min(one, other)) if sign == "-" else (one, other)
            question, answer = exchanges.sum_turn(rng, sign, a, b, form)
            yield "sums", question, partial(_same, answer)
    for one, other in rng.sample([(a, b) for a in range(11) for b in range(11)], 40):
        question, answer = exchanges.sum_turn(rng, "x", one, other, "What is {a} x {b}?")
        yield "sums", question, partial(_same, answer)


def _drawn(rng: random.Random) -> Iterator[Question]:
    for kind, make, count in (
        ("days, months", exchanges.calendar, 60),
        ("counting", exchanges.counting, 60),
        ("words", exchanges.word_question, 40),
        ("outside", exchanges.decline, 60),
    ):
        for _ in range(count):
            question, answer = make(rng)
            yield kind, question, partial(_same, answer)
    for sort in world().sorts:
        yield "lists", f"Make a list of three {sort}.", partial(_listed, sort, 3)


def _copied(rng: random.Random) -> Iterator[Question]:
    for kind, make, count in (
        ("repeat", copying.repeat, 60),
        ("quote", copying.quote, 40),
        ("sum up", copying.sum_up, 40),
        ("about a story", copying.story_question, 40),
        ("notes", copying.notes, 20),
        ("secret", copying.secret, 20),
    ):
        for _ in range(count):
            asked = draw(rng, "h o", inventing=0.0)
            question, answer = make(rng, make_story(rng, asked, evaluation=True, tries=2000))
            if kind == "sum up":
                # Two sentences may sum up the same story; the hero and the thing must be there.
                yield kind, question, partial(_names_hero, answer)
            else:
                yield kind, question, partial(_same, answer)


def _names_hero(expected: str, answer: str) -> bool:
    """Whether the summary names whom the expected one names."""
    names = re.findall(r"(?<=named )[A-Z]\w+", expected)
    return all(name in answer for name in names) if names else len(answer.split()) > 4


def set_questions() -> list[Question]:
    """Every question, always the same ones."""
    rng = random.Random("questions")
    drawn = (_facts(), _sums(rng), _drawn(rng), _copied(rng))
    return [question for part in drawn for question in part]
