"""The side work of an idle engine: refining the staircase, one decode at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from attrs import define, field

from uma_trio.backend.base import Backend
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.planner import Planner
from uma_trio.engine.registry import Registry
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.side import QUICK_S, Ledger, Yields
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.cost import CostModel
from uma_trio.policy.costing.neighbours import Reader, cpu_times
from uma_trio.policy.costing.refine import Refinement
from uma_trio.policy.costing.remeasure import Remeasurement

# How long the engine is idle before the staircase is refined, and between two decodes of that:
# others may have waited for the processor.
IDLE_S: Final = 0.5
_BREATH_S: Final = 0.01


@define(eq=False)
class Refining:
    """Measures what calibration had no time for (:class:`uma_trio.engine.side.SideWork`).

    Its parts are decodes of an empty KV cache, which are done only where nobody has a slot. They serve everybody, so
    nobody is charged for them. `keep` is called with a cost model that replaces one of a busy machine; `read` tells how
    busy it is. Both may be replaced before the engine runs.
    """

    backend: Backend
    inbox: Inbox
    planner: Planner
    registry: Registry
    metrics: Metrics
    clock: Callable[[], float]
    ledger: Ledger
    keep: Callable[[CostModel], None] = lambda _cost: None
    read: Reader = cpu_times
    yields_to: Yields = "ticks"
    makes_room: bool = False
    _refinement: Refinement = field(init=False)
    _remeasurement: Remeasurement | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._refinement = Refinement(self.backend, self.clock)

    def look(self, running: Mapping[int, Sequence], *, alone: bool) -> bool:
        """Beside ticks there is nothing to do."""
        return False

    def do(self, most_s: float) -> float:
        """Do nothing beside ticks: a part needs the KV cache for itself."""
        return 0.0

    def falls_short(self, left_s: float) -> bool:
        """Nothing waits beside ticks."""
        return False

    def do_idle(self, most_s: float) -> float | None:
        """Refine the staircase by a decode; return how long to be idle then, None if that was all.

        How long a decode takes is what is measured, so none is done where a part has to be quick. Where a decode can be
        interrupted, a request that comes does so.
        """
        if most_s <= QUICK_S:
            return None
        cost, refinement = self.planner.memory.cost, self._refinement
        if self.registry.running:
            return IDLE_S  # who is parked holds slots: later, and who waits may get one meanwhile
        if cost is None:
            return None
        if not cost.others and not refinement.due(
            cost, interruptible=self.backend.traits.interruptible
        ):
            return None
        if not self.registry.cells.empty():
            return None
        interrupt = self.backend.arm()
        if interrupt is not None:
            self.inbox.watch(lambda _request: interrupt())
        began = self.clock()
        try:
            if cost.others:
                return self._measure_again(cost, interruptible=interrupt is not None)
            refined = refinement.refine(cost, interruptible=interrupt is not None)
        finally:
            self.inbox.watch(None)
            self.ledger.spend((), self.clock() - began)
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
