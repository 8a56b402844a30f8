"""Work of an idle engine: saving prefixes and refining the staircase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import define, field

from uma_trio.backend.base import Backend
from uma_trio.costing.neighbours import Reader, cpu_times
from uma_trio.costing.refine import Refinement
from uma_trio.costing.remeasure import Remeasurement
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.planner import Planner
from uma_trio.engine.registry import Registry
from uma_trio.engine.side import Desk
from uma_trio.policy.cost import CostModel
from uma_trio.telemetry.metrics import Metrics

# How long the engine is idle before the staircase is refined, and between two decodes of that:
# others may have waited for the processor.
IDLE_S: Final = 0.5
_BREATH_S: Final = 0.01


@define(eq=False)
class IdleTime:
    """A little work at a time, so that whoever comes is noticed soon. For the engine's thread.

    `keep` is called with a cost model that replaces one of a busy machine; `read` tells how busy it is. Both may be
    replaced before the engine runs.
    """

    backend: Backend
    inbox: Inbox
    planner: Planner
    registry: Registry
    metrics: Metrics
    clock: Callable[[], float]
    side: Desk
    keep: Callable[[CostModel], None] = lambda _cost: None
    read: Reader = cpu_times
    _refinement: Refinement = field(init=False)
    _remeasurement: Remeasurement | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._refinement = Refinement(self.backend, self.clock)

    def use(self) -> float | None:
        """Do a little of what can wait; return how long to be idle then, None if that was all."""
        return 0.0 if self.side.while_idle() else self._refine()

    def _refine(self) -> float | None:
        """Refine the staircase by a decode; return how long to be idle then, None if that was all.

        Where a decode can be interrupted, a request that comes does so.
        """
        cost, refinement = self.planner.memory.cost, self._refinement
        if self.registry.running:
            return IDLE_S  # who is parked holds slots: later, and who waits may get one meanwhile
        if cost is None:
            return None
        if not cost.others and not refinement.due(
            cost, interruptible=self.backend.traits.interruptible
        ):
            return None
        if self.registry.prefix.room.lingers():
            return None
        interrupt = self.backend.arm()
        if interrupt is not None:
            self.inbox.watch(lambda _request: interrupt())
        try:
            if cost.others:
                return self._measure_again(cost, interruptible=interrupt is not None)
            refined = refinement.refine(cost, interruptible=interrupt is not None)
        finally:
            self.inbox.watch(None)
        if refined is None:
            return None
        self.planner.refined(refined)
        return _BREATH_S

    def _measure_again(self, cost: CostModel, *, interruptible: bool) -> float:
        """Replace a table of a busy machine, by a decode if it is quiet now; return how long to be idle then."""
        if self._remeasurement is None:
            self._remeasurement = Remeasurement(self.backend, self.clock, cost, self.read)
        found, idle_s = self._remeasurement.advance(cost, interruptible=interruptible)
        if found is not cost:
            self.planner.refined(found)
        if not found.others:
            self._remeasurement = None
            self._refinement = Refinement(self.backend, self.clock)
            self.metrics.promise.measured(found)
            self.keep(found)
        return idle_s
