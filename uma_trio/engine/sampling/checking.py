"""Tokens that constraints refuse, and what comes in their place.

A token is chosen like any other, and then its constraint is asked about this one. Only if it is
refused all that is allowed is found (:mod:`uma_trio.engine.sampling.masks`), and one of these is
chosen. The masks of all refused rows are begun first and waited for then, for `PATIENCE_S` together.
A row whose mask is not there by then is `LATE`: its sequence sits out until it is, and computes its
last token again then. So a schema that is slow delays its own answer only.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from uma_trio.backend.base import FloatArray
from uma_trio.engine.sampling.logprobs import NOT_FINITE
from uma_trio.engine.sampling.masks import Mask, Masks, await_any
from uma_trio.engine.sampling.shortlist import IdArray
from uma_trio.text.constraint import Constraint, holds

IMPOSSIBLE: Final = -2  # for a row for which no token is allowed
UNREACHED: Final = -3  # for one behind a guess that was wrong: what would follow is not needed
LATE: Final = -4  # for one whose mask is not there in time

# What structure may add to a tick: 99 of 100 masks take less than 1 ms (docs/explained/structured-output.md), and no
# reader sees 2 ms between two tokens.
PATIENCE_S: Final = 0.002
# Where no row has its token, the tick is lost without waiting for the first mask: a decode takes longer than
# this. What takes longer still may delay requests that are only about to arrive.
ALONE_S: Final = 0.020


class Bound(Protocol):
    """The sampler of a constrained sequence, as far as checking needs it."""

    @property
    def constraint(self) -> Constraint | None:
        """What its answer has to keep to."""

    @property
    def ends(self) -> Collection[int]:
        """The tokens that end its answer."""

    def mask(self, masks: Masks, behind: int) -> Mask:
        """Return what its constraint allows, which stands `behind` tokens behind the answer."""

    def not_excluded(self, ids: IdArray) -> IdArray:
        """Return those of the allowed tokens that are no excluded end; all, if nothing else is left."""

    def redraw(self, row: FloatArray, ids: IdArray, behind: int) -> int:
        """Return one of the tokens `ids`, by the logits of `row`; `IMPOSSIBLE` if none can be.

        The row is `behind` tokens behind the answer.
        """


class Chain(NamedTuple):
    """The rows of one constrained sequence, in order."""

    sampler: Bound
    constraint: Constraint
    rows: tuple[int, ...]


def chains(samplers: Sequence[Bound]) -> list[Chain]:
    """Return which rows belong to each constrained sequence; its rows follow one another."""
    rows: dict[int, list[int]] = {}
    for row, sampler in enumerate(samplers):
        if sampler.constraint is not None:
            rows.setdefault(id(sampler), []).append(row)
    found = [(samplers[its[0]], tuple(its)) for its in rows.values()]
    return [Chain(s, s.constraint, its) for s, its in found if s.constraint is not None]


class _Walk(NamedTuple):
    """A chain that waits for a mask since `began`."""

    chain: Iterator[Mask]
    mask: Mask
    began: float


def check(
    logits: FloatArray,
    tokens: list[int],
    guesses: Sequence[int],
    chains: Sequence[Chain],
    masks: Masks,
    among: dict[int, IdArray],
    *,
    alone: bool,
) -> Sequence[float]:
    """Replace tokens that constraints refuse, along each chain up to its first wrong guess.

    `alone` says that no other sequence has a row in this tick. In `among` it is written down by row
    which tokens the one was chosen from that came in place of a refused one. Returns how long each
    refused token took whose mask was there in time.
    """
    walks = [
        walk
        for chain in chains
        if (walk := _begun(_walk(chain, logits, tokens, guesses, masks, among))) is not None
    ]
    took: list[float] = []
    if not walks:
        return took
    late: list[_Walk] = []
    deadline = time.perf_counter() + PATIENCE_S
    served = not alone or len(walks) < len(chains)
    while walks:
        walk = walks.pop(0)
        if not walk.mask.wait(deadline - time.perf_counter()):
            late.append(walk)
            continue
        served = True
        _go_on(walk, walks, took)
    if late and not served:
        await_any([walk.mask for walk in late], ALONE_S)
    for walk in late:
        _go_on(walk, late, took)
    return took


def _begun(chain: Iterator[Mask]) -> _Walk | None:
    began = time.perf_counter()
    mask = next(chain, None)
    return None if mask is None else _Walk(chain, mask, began)


def _go_on(walk: _Walk, waiting: list[_Walk], took: list[float]) -> None:
    there = walk.mask.wait(0.0)
    following = _begun(walk.chain)
    if there:
        took.append(time.perf_counter() - walk.began)
    if following is not None:
        waiting.append(following)


def _walk(
    chain: Chain,
    logits: FloatArray,
    tokens: list[int],
    guesses: Sequence[int],
    masks: Masks,
    among: dict[int, IdArray],
) -> Iterator[Mask]:
    sampler, constraint, rows = chain
    behind = 0
    try:
        for row in rows:
            if row != rows[0]:
                before = tokens[row - 1]
                if before != guesses[row - 1] or before in sampler.ends:
                    tokens[row] = UNREACHED
                    continue
                constraint.accept(before)
                behind += 1
            if tokens[row] == NOT_FINITE:
                continue
            elsewhere = constraint.elsewhere
            if not elsewhere and constraint.allows(tokens[row]):
                continue
            mask = sampler.mask(masks, behind)
            yield mask
            if not mask.wait(0.0):
                tokens[row] = LATE
                continue
            ids = sampler.not_excluded(mask.ids())
            if elsewhere and holds(ids, tokens[row]):
                continue
            among[row] = ids
            tokens[row] = sampler.redraw(logits[row], ids, behind)
    finally:
        for _ in range(behind):
            constraint.take_back()
