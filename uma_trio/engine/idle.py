"""Work of an idle engine: saving prefixes and refining the staircase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import define, field

from uma_trio.backend.base import Backend
from uma_trio.costing.refine import Refinement
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.planner import Planner
from uma_trio.engine.registry import Registry

# How long the engine is idle before the staircase is refined, and between two decodes of that:
# others may have waited for the processor.
IDLE_S: Final = 0.5
_BREATH_S: Final = 0.01


@define(eq=False)
class IdleTime:
    """A little work at a time, so that whoever comes is noticed soon. For the engine's thread."""

    backend: Backend
    inbox: Inbox
    planner: Planner
    registry: Registry
    clock: Callable[[], float]
    _refinement: Refinement = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._refinement = Refinement(self.backend, self.clock)

    def use(self) -> float | None:
        """Do a little of what can wait; return how long to be idle then, None if that was all."""
        return 0.0 if self.registry.prefix.idle() else self._refine()

    def _refine(self) -> float | None:
        """Refine the staircase by a decode; return how long to be idle then, None if that was all.

        Where a decode can be interrupted, a request that comes does so.
        """
        cost, refinement = self.planner.memory.cost, self._refinement
        if self.registry.running:
            return IDLE_S  # who is parked holds slots: later, and who waits may get one meanwhile
        if cost is None:
            return None
        interruptible = self.backend.traits.interruptible
        if not refinement.due(cost, interruptible=interruptible):
            return None
        if self.registry.prefix.room.lingers():
            return None
        interrupt = self.backend.arm()
        if interrupt is not None:
            self.inbox.watch(lambda _request: interrupt())
        try:
            refined = refinement.refine(cost, interruptible=interrupt is not None)
        finally:
            self.inbox.watch(None)
        if refined is None:
            return None
        self.planner.refined(refined)
        return _BREATH_S
