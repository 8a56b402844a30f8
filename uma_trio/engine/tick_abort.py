"""Aborting a tick while it is computed, for an arriving interactive request.

The engine's thread reads no messages during a decode, so it installs a hook in the inbox. The
thread that submits a request calls the hook: a pure function (:mod:`uma_trio.policy.abort`)
decides, and that one decode is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from uma_trio.backend.base import DecodeStatus, Interrupt
from uma_trio.engine.messages import Submit
from uma_trio.policy.abort import Abortable, gives_way

GIVEN_UP = "given up for an interactive request that came"


@frozen(eq=False)
class ArrivalHook:
    """The tick that is computed `since` then, and what interrupts it."""

    tick: Abortable
    since: float
    clock: Callable[[], float]
    interrupt: Interrupt

    def came(self, request: Submit) -> None:
        """Abort the tick if `request` is worth it. Called on any thread."""
        if gives_way(self.tick, self.clock() - self.since, request.newcomer):
            self.interrupt()


class TickAbort:
    """Whether the running tick may be aborted, and whether the last one was (`gave_up`).

    `arm` (the backend's) lets the next decode be interrupted, `watch` (the inbox's) installs the
    hook. Called on the engine's thread only. Arrivals do not starve background work: after a tick
    was aborted, the next one that could be is computed to its end. So less than half a tick is lost
    for each that is finished, which is a third of the time of such ticks at most.
    """

    def __init__(
        self,
        arm: Callable[[], Interrupt | None],
        watch: Callable[[Callable[[Submit], None] | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._arm = arm
        self._watch = watch
        self._clock = clock
        self._tick: Abortable | None = None
        self._armed = False
        self.gave_up = False
        self._owed = False  # one was given up, and none was finished since

    def begin(self, tick: Abortable | None, since: float) -> None:
        """A tick is about to be computed: let it be given up if it may be."""
        self._tick = tick
        self._armed = False
        if tick is None or self._owed:
            return
        interrupt = self._arm()
        if interrupt is not None:
            self._armed = True
            self._watch(ArrivalHook(tick, since, self._clock, interrupt).came)

    def end(self, status: int) -> None:
        """It has ended with `status`: nobody can give it up any more."""
        if self._armed:
            self._watch(None)
        self.gave_up = self._armed and status == DecodeStatus.ABORTED
        if self.gave_up:
            self._owed = True
        elif self._tick is not None and status == DecodeStatus.OK:
            self._owed = False
