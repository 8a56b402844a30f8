"""The background work of an idle machine: refining the staircase, one decode at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

from attrs import define, field

from uma_trio.backend.base import Backend
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.planner import Planner
from uma_trio.engine.registry import Registry
from uma_trio.machine.background import IDLE_S, Bound, Part
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.cost import CostModel
from uma_trio.policy.costing.neighbours import Reader, cpu_times
from uma_trio.policy.costing.refine import Refinement


@define(eq=False)
class Refining:
    """Measures what calibration had no time for, by decodes in an empty KV cache, which no user is charged for.

    `keep` is called with a cost model that replaces one of a busy machine; `read` returns how
    busy it is. Both may be replaced before the engine runs.
    """

    backend: Backend
    inbox: Inbox
    planner: Planner
    registry: Registry
    metrics: Metrics
    clock: Callable[[], float]
    keep: Callable[[CostModel], None] = lambda _cost: None
    read: Reader = cpu_times
    bound: Bound = "ticks"
    makes_room: bool = False
    _at: float = field(default=-math.inf, init=False)  # when the next decode may begin
    _refinement: Refinement = field(init=False)

    def __attrs_post_init__(self) -> None:
        read = lambda: self.read()  # noqa: E731, PLW0108 - it may be replaced
        self._refinement = Refinement(self.backend, self.clock, read)

    def claim(self, *, idle: bool) -> Part | None:
        cost = self.planner.memory.cost
        if not idle or cost is None or self.registry.awaits_masks:
            return None
        if self.registry.running:
            return None  # a parked request holds its slot
        interruptible = self.backend.traits.interruptible
        if not cost.others and not self._refinement.due(cost, interruptible=interruptible):
            return None
        return Part(math.inf, self._at)

    def advance(self, most_s: float, *, idle: bool) -> float:
        """Measure by a decode. Where that can be interrupted, a request for any model does so."""
        cost = self.planner.memory.cost
        if cost is None or not self.registry.cells.empty():
            self._at = self.clock() + IDLE_S
            return 0.0
        interrupt = self.backend.arm()
        bell = self.inbox.bell
        if interrupt is not None:
            bell.watch(lambda _inbox, _request: interrupt())
        began = self.clock()
        try:
            found, idle_s = self._refinement.advance(cost, interruptible=interrupt is not None)
        finally:
            bell.watch(None)
        self.planner.refined(found)
        if cost.others and not found.others:
            self.metrics.cost_measured(found)
            self.keep(found)
        ended = self.clock()
        self._at = ended + idle_s
        return ended - began
