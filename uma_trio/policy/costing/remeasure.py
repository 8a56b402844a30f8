"""Measure a whole table again that was measured beside other programs, while idle and quiet.

Unlike a refinement (:mod:`uma_trio.policy.costing.refine`) it uses only the proportions of the old table, to tell how long
the next decode may take; the times that it finds are absolute. Samples of a second in which other programs used the
machine are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from attrs import evolve

from uma_trio.backend.base import Backend
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.costing.calibrate import ONE, ORDER, UNCOUNTED
from uma_trio.policy.costing.neighbours import WINDOW_S, QuietWatch, Reader, cpu_times
from uma_trio.policy.costing.refine import LONGEST_S, UNNOTICED_S
from uma_trio.policy.costing.stopwatch import LEAST_S, BatchShape, Samples, Stopped, Stopwatch

# How long the engine is idle between two decodes, since others may have waited for the processor; and where the
# end of a window has to be awaited.
BREATH_S, TO_WAIT_S = 0.01, WINDOW_S / 4


class Remeasurement:
    """Times each shape until two samples agree, one decode a call (a few, of a tiny model).

    Only for a backend whose slots are empty; they are empty after each call. `cost` is the model to replace.
    """

    def __init__(
        self,
        backend: Backend,
        clock: Callable[[], float],
        cost: CostModel,
        read: Reader = cpu_times,
    ) -> None:
        self._watch = Stopwatch(backend, clock)
        self._watch.uncounted = UNCOUNTED if cost.recapture_s else 0
        self._quiet = QuietWatch(read)
        self._calm = False  # whether the latest window was quiet
        self._old = cost.times(cost.scale)
        self._sure = Samples()  # of quiet windows
        self._tentative = Samples()  # these, and those of the present window

    def advance(self, cost: CostModel, *, interruptible: bool) -> tuple[CostModel, float]:
        """Take a sample if the machine is quiet. Return `cost`, corrected, and how long to be idle then.

        The mark of the model is gone (`others` is 0) when the last shape was timed. A sample that is interrupted
        is lost.
        """
        quiet = self._quiet.verdict()
        if quiet is not None:
            self._calm = quiet
            if quiet:
                cost = self._confirmed(cost)
                if self._next(self._sure, interruptible=interruptible) is None:
                    return evolve(cost, others=0.0), BREATH_S
            self._tentative = deepcopy(self._sure)
        if not self._calm:
            return cost, WINDOW_S
        shape = self._next(self._tentative, interruptible=interruptible)
        if shape is None:
            return cost, TO_WAIT_S
        try:
            self._tentative.add(shape, self._watch.sample(shape))
        except Stopped:
            return cost, BREATH_S
        return cost, BREATH_S

    def _confirmed(self, cost: CostModel) -> CostModel:
        """Return `cost` with what was timed in quiet windows, the present one included."""
        first = not self._sure.settled(ONE)
        self._sure = deepcopy(self._tentative)
        timed = self._sure.sizes()
        if not self._sure.settled(ONE) or ONE.tokens not in timed:
            return cost
        sizes = {n: self._expected(n) for n in self._old.sizes} | timed
        computing = _staircase(sizes)
        rows = {
            n: seconds * computing(n) / max(self._old.computing(n), LEAST_S)
            for n, seconds in self._old.output.table().items()
        }
        for n, seconds in self._sure.by_rows().items():
            rows[n] = max(seconds - computing(n), -0.5 * computing(n))
        # What cells cost is not measured here: ticks correct it, from what one token tells of the machine.
        others = cost.times(cost.scale)
        if first:
            others = others.times(timed[ONE.tokens] / max(others.computing(1), LEAST_S))
        return evolve(
            others,
            computing=computing,
            measured=computing,
            output=_staircase(rows),
            scale=1.0,
            error=0.0,
            table_error=0.0,
        )

    def _next(self, samples: Samples, *, interruptible: bool) -> BatchShape | None:
        """Return the most useful shape of which `samples` say too little.

        One token comes first and alone: only when its time is sure can be told how long other decodes take.
        """
        if not self._sure.settled(ONE):
            return None if samples.settled(ONE) else ONE
        for shape in self._watch.able(ORDER):
            if not samples.settled(shape) and self._bearable(shape, interruptible=interruptible):
                return shape
        return None

    def _bearable(self, shape: BatchShape, *, interruptible: bool) -> bool:
        """Whether a request that comes meanwhile waits for no long decode.

        What the table has is measured in any case where decodes can be interrupted.
        """
        if interruptible and shape.tokens in (
            self._old.sizes if shape.rows == 1 else self._old.output.at
        ):
            return True
        longest_s = LONGEST_S if interruptible else UNNOTICED_S
        return (1 + self._watch.warming(shape)) * self._expected(shape.tokens) <= longest_s

    def _expected(self, tokens: int) -> float:
        """Return the seconds of a size: the nearest one that was timed, in the proportions of the old table."""
        timed, old = self._sure.sizes(), self._old.computing
        near = max((n for n in timed if n <= tokens), default=0)
        return timed[near] * old(tokens) / old(near) if near else old(tokens)


def _staircase(seconds: dict[int, float]) -> Staircase:
    at = tuple(sorted(seconds))
    return Staircase(at, tuple(seconds[n] for n in at))
