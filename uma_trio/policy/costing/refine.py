"""Measure while idle what the calibration had no time for, and measure its table again.

One decode at a time (a few, of a tiny model), so that an arriving request waits for no more than that,
and where a decode can be interrupted not even for that. The machine may be faster or slower than
when the table was measured, so a shape is timed in turn with one token alone, and the model learns the
ratio. If the time of one token is wrong, all sizes are, by the same factor, which ticks correct.

A table that was measured while other programs were busy is marked (`others`). Its sizes are measured again while the
machine is quiet; corrections of a second that turns out not to be quiet are undone.

A 0.5B model on two cores has 11 to 15 of 30 sizes after calibration. Refining takes 15 to 18 s and reduces
the mean error of the model from 15 to 7 %, on a busy machine from 21 to 16 %.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import evolve, frozen

from uma_trio.backend.base import Backend
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.costing.calibrate import ONE, ORDER, UNCOUNTED
from uma_trio.policy.costing.neighbours import WINDOW_S, QuietWatch, Reader, cpu_times
from uma_trio.policy.costing.stopwatch import BatchShape, Samples, Stopped, Stopwatch

# Longest decode that an arriving request may have to wait for; longest one that can be interrupted (the processor
# should rest, too).
UNNOTICED_S, LONGEST_S = 0.1, 1.0
# A size of the table that is further off than this was disturbed when it was measured.
DOUBTFUL = 0.2
# One token that takes less than the table has by this part shows that the table is of a busy machine.
TOO_SLOW = 0.1
# Seconds between two decodes, since other programs may have waited for the processor.
BREATH_S = 0.01


@frozen
class _Checkpoint:
    """What was known when a window of :class:`QuietWatch` began."""

    cost: CostModel
    seen: frozenset[BatchShape]
    disturbed: frozenset[BatchShape]
    doubtful: float


class Refinement:
    """Looks at every shape once: those that a model lacks first, the most useful first.

    Only for a backend whose slots are empty; they are empty after each call.
    """

    def __init__(
        self, backend: Backend, clock: Callable[[], float], read: Reader = cpu_times
    ) -> None:
        self._watch = Stopwatch(backend, clock)
        self._seen = {ONE}
        self._disturbed: set[BatchShape] = set()
        self._doubtful = DOUBTFUL
        self._shape = ONE
        self._samples = Samples()  # of that shape, and of the one that it is compared with
        self._quiet = QuietWatch(read)
        self._is_quiet = False  # in the latest whole window
        self._before: _Checkpoint | None = None  # the present window
        self._knows_one = (
            False  # of a table of a busy machine: whether one token was measured again
        )

    def advance(self, cost: CostModel, *, interruptible: bool) -> tuple[CostModel, float]:
        """Take one sample; return `cost`, corrected, and how many seconds to be idle then.

        A table of a busy machine loses its mark when its last size was measured in a quiet window.
        """
        if not cost.others:
            return self.refine(cost, interruptible=interruptible) or cost, BREATH_S
        quiet = self._quiet.verdict()
        if quiet is not None:
            if self._before is not None and not quiet:
                cost = self._undo(self._before)
            elif self._knows_one and not self.due(cost, interruptible=interruptible):
                return _finished(cost), BREATH_S
            self._is_quiet = quiet
            self._doubtful = min(self._doubtful, TOO_SLOW / 2)
            seen, disturbed = frozenset(self._seen), frozenset(self._disturbed)
            self._before = _Checkpoint(cost, seen, disturbed, self._doubtful) if quiet else None
        if not self._is_quiet:
            return cost, WINDOW_S
        if not self._knows_one:  # before it no expectation of a longer decode is of any use
            return self._measure_one(cost), BREATH_S
        found = self.refine(cost, interruptible=interruptible)
        return (cost, WINDOW_S / 4) if found is None else (found, BREATH_S)

    def _measure_one(self, cost: CostModel) -> CostModel:
        try:
            self._samples.add(ONE, self._watch.sample(ONE))
        except Stopped:
            return cost
        if not self._samples.settled(ONE):
            return cost
        self._knows_one = True
        seconds, self._samples = self._samples.seconds(ONE), Samples()
        factor = seconds / (cost.scale * cost.computing(ONE.tokens))
        return cost.quicker(factor, ONE.tokens) if factor < 1.0 else cost

    def _undo(self, before: _Checkpoint) -> CostModel:
        self._seen, self._disturbed = set(before.seen), set(before.disturbed)
        self._doubtful, self._samples, self._knows_one = before.doubtful, Samples(), False
        return before.cost

    def due(self, cost: CostModel, *, interruptible: bool = False) -> bool:
        """Return whether there is anything to measure."""
        return self._next(cost, LONGEST_S if interruptible else UNNOTICED_S) is not None

    def refine(self, cost: CostModel, *, interruptible: bool = False) -> CostModel | None:
        """Take one sample; return `cost`, corrected if that was the last one of a shape.

        None when there is nothing to look at. A sample that is interrupted is lost.
        """
        self._watch.uncounted = UNCOUNTED if cost.recapture_s else 0
        shape = self._next(cost, LONGEST_S if interruptible else UNNOTICED_S)
        if shape is None:
            return None
        if shape != self._shape:
            self._shape, self._samples = shape, Samples()
        known, samples = _beside(shape), self._samples
        behind = min((known, shape), key=samples.count)
        try:
            samples.add(behind, self._watch.sample(behind))
        except Stopped:
            return cost
        if not (samples.settled(known) and samples.settled(shape)):
            return cost
        known_s = samples.seconds(known)
        times = samples.seconds(shape) / known_s
        if not np.isfinite(times) or times <= 0:
            self._seen.add(shape)
            return cost
        believed_s = cost.scale * cost.computing(known.tokens)
        if known == ONE and believed_s > (1.0 + TOO_SLOW) * known_s:
            # Other programs ran when it was measured: nothing makes a machine faster by chance. What they took
            # from each shape differs, so all are measured again.
            self._seen, self._disturbed = {ONE}, set()
            self._doubtful = TOO_SLOW / 2
            return cost.quicker(known_s / believed_s, known.tokens)
        if _has(cost, shape) and _off(known_s, cost.scale * cost.computing(known.tokens)):
            # Other programs run: what they take from each shape differs. Once more, later.
            self._samples = Samples()
            (self._seen if shape in self._disturbed else self._disturbed).add(shape)
            return cost
        self._seen.add(shape)
        return _corrected(cost, shape, times, self._doubtful)

    def _next(self, cost: CostModel, longest_s: float) -> BatchShape | None:
        """Return what to look at: what goes unnoticed before the rest, and gaps before sizes."""
        decodes = 1 + self._watch.uncounted
        found = [
            (shape in self._disturbed, expected_s > UNNOTICED_S, _has(cost, shape), place, shape)
            for place, shape in enumerate(self._watch.able(ORDER))
            if shape not in self._seen
            and _has(cost, _beside(shape))
            and (expected_s := decodes * cost.seconds(Work(shape.tokens, shape.rows))) <= longest_s
        ]
        return min(found)[-1] if found else None


def _finished(cost: CostModel) -> CostModel:
    """Return `cost` with its scale factor applied, and without the mark of a busy machine."""
    host_s, contended_s = cost.host_s, cost.contended_host_s
    now = evolve(cost.for_storage(), host_s=host_s, contended_host_s=contended_s)
    return evolve(now, others=0.0)


def _beside(shape: BatchShape) -> BatchShape:
    """Return what `shape` is held against: one token, or the same tokens with one row."""
    return ONE if shape.rows == 1 else BatchShape(shape.tokens)


def _has(cost: CostModel, shape: BatchShape) -> bool:
    return shape.tokens in (cost.sizes if shape.rows == 1 else cost.output.at)


def _off(seconds: float, believed: float, doubtful: float = DOUBTFUL) -> bool:
    return abs(seconds - believed) > doubtful * seconds


def _corrected(cost: CostModel, shape: BatchShape, times: float, doubtful: float) -> CostModel:
    """Return `cost` with a `shape` that takes so many `times` as long as what is beside it.

    A size that is off by no more than the part `doubtful` stays.
    """
    n, known = shape.tokens, _beside(shape).tokens
    believed = cost.computing(n) + (cost.output(n) if shape.rows > 1 else 0.0)
    seconds = times * cost.computing(known)
    if _has(cost, shape) and not _off(seconds, believed, doubtful):
        return cost
    if shape.rows > 1:
        extra = max(seconds - cost.computing(n), -0.5 * cost.computing(n))
        return evolve(cost, output=cost.output.with_size(n, extra))
    return evolve(
        cost,
        computing=cost.computing.with_size(n, seconds),
        measured=cost.measured.with_size(n, times * cost.measured(known)),
    )
