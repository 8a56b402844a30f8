"""Measure what the calibration had no time for, while the daemon rests.

One decode at a time (a few, of a tiny model), so that whoever comes waits for no more than that. The
machine may have another mood now than when the table was measured. So a shape is timed in turn
with one that is known, and the model learns how many times as long it takes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import evolve, frozen

from uma_trio.backend.base import Backend
from uma_trio.engine.calibrate import ORDER, UNCOUNTED
from uma_trio.engine.stopwatch import Samples, Shape, Stopwatch
from uma_trio.policy.cost import CostModel, Work

# A shape is timed if it takes no longer than this: who comes meanwhile waits for it.
UNNOTICED_S = 0.1


@frozen
class Gap:
    """A shape that the model has not got, and the one it has that it is held against."""

    unknown: Shape
    known: Shape


class Refinement:
    """Fills the gaps of a model, the most useful first.

    Only for a backend whose slots are empty; they are empty after each call.
    """

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._watch = Stopwatch(backend, clock)
        self._given_up: set[Shape] = set()
        self._gap: Gap | None = None
        self._samples = Samples()  # of this gap

    def refine(self, cost: CostModel) -> CostModel | None:
        """Take one sample; return `cost`, with a step more if that was the last one it took.

        None when there is no gap left.
        """
        self._watch.uncounted = UNCOUNTED if cost.switch_s else 0
        gap = self._next_gap(cost)
        if gap is None:
            return None
        if gap != self._gap:
            self._gap, self._samples = gap, Samples()
        samples = self._samples
        behind = min((gap.known, gap.unknown), key=samples.count)
        samples.add(behind, self._watch.sample(behind))
        if not (samples.settled(gap.known) and samples.settled(gap.unknown)):
            return cost
        times = samples.seconds(gap.unknown) / samples.seconds(gap.known)
        if not np.isfinite(times) or times <= 0:
            self._given_up.add(gap.unknown)
            return cost
        return _filled(cost, gap, times)

    def _next_gap(self, cost: CostModel) -> Gap | None:
        for shape in self._watch.able(ORDER):
            if shape in self._given_up or _has(cost, shape):
                continue
            decodes = 1 + self._watch.uncounted
            if decodes * cost.seconds(Work(shape.tokens, shape.rows)) > UNNOTICED_S:
                continue
            if shape.rows == 1:
                below = (n for n in cost.steps if n < shape.tokens)
                return Gap(shape, Shape(max(below, default=cost.steps[0])))
            if shape.tokens in cost.steps:
                return Gap(shape, Shape(shape.tokens))
        return None


def _has(cost: CostModel, shape: Shape) -> bool:
    return shape.tokens in (cost.steps if shape.rows == 1 else cost.output.at)


def _filled(cost: CostModel, gap: Gap, times: float) -> CostModel:
    """Return `cost` with a shape that takes so many `times` as long as one that it has."""
    n, m = gap.unknown.tokens, gap.known.tokens
    if gap.unknown.rows > 1:
        extra = (times - 1.0) * cost.computing(m)
        return evolve(cost, output=cost.output.with_step(n, max(extra, -0.5 * cost.computing(m))))
    return evolve(
        cost,
        computing=cost.computing.with_step(n, times * cost.computing(m)),
        measured=cost.measured.with_step(n, times * cost.measured(m)),
    )
