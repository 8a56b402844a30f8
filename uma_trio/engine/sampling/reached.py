"""Choosing along chains, as far as their guesses are right.

A row is as long as the vocabulary, so a look at one behind a wrong guess is time for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from uma_trio.backend.base import FloatArray
from uma_trio.engine.sampling.checking import UNREACHED
from uma_trio.engine.sampling.likeliest import NOT_FINITE, greedy, likeliest_but
from uma_trio.engine.sampling.shortlist import IdArray
from uma_trio.text.inner import Constraint


class Chooser(Protocol):
    """The sampler of a sequence, as far as its rows are chosen from one by one."""

    @property
    def greedy(self) -> bool:
        """Whether it takes the likeliest token."""

    @property
    def never(self) -> IdArray | None:
        """What must not be drawn; in a row that is drawn from, these tokens are -inf."""

    @property
    def constraint(self) -> Constraint | None:
        """What its answer has to keep to."""

    def pick(self, row: FloatArray, likeliest: int) -> int:
        """Return the next token, by the row and the likeliest token of it."""


def one_by_one(
    choosers: Sequence[Chooser],
    follows: Collection[int],
    logits: FloatArray,
    guesses: Sequence[int],
) -> list[int]:
    """Return the token of each row of ``logits[n, vocab]``; those that follow a wrong guess are `UNREACHED`.

    `follows` are the rows that were computed with the guess of the row before them.
    """
    tokens: list[int] = []
    for row, chooser in enumerate(choosers):
        # A token that a constraint may replace later says nothing yet.
        final = row in follows and chooser.constraint is None
        if final and tokens[row - 1] != guesses[row - 1]:
            tokens.append(UNREACHED)
            continue
        (token,) = greedy(logits[row : row + 1]).tolist()
        if not chooser.greedy:
            token = chooser.pick(logits[row], token) if token != NOT_FINITE else token
        elif chooser.never is not None and token in chooser.never:
            token = likeliest_but(logits[row], chooser.never)
        tokens.append(token)
    return tokens
