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

#: How many times the time that was lost is computed to its end before the next tick of that kind may be aborted.
LOST_TIMES = 2.0
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
    hook. Called on the engine's thread only. Arrivals do not starve other work: after a tick was aborted, ticks of its kind (with
    interactive prompts, or without) are computed to their ends until they took twice the time that was lost. So at most a
    third of the time of such ticks is lost.
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
        self._since = 0.0
        self._armed = False
        self.gave_up = False
        self._debt_s: dict[
            float, float
        ] = {}  # to compute before the next abort, by kind (`most_tokens`)

    @property
    def in_debt(self) -> bool:
        """Whether there are ticks that may not be aborted, so that they should be brief."""
        return bool(self._debt_s)

    def begin(self, tick: Abortable | None, since: float) -> None:
        """A tick is about to be computed: let it be given up if it may be."""
        self._tick, self._since = tick, since
        self._armed = False
        if tick is None or tick.most_tokens in self._debt_s:
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
        if self._tick is None:
            return
        kind, took_s = self._tick.most_tokens, self._clock() - self._since
        if self.gave_up:
            self._debt_s[kind] = LOST_TIMES * took_s
        elif status == DecodeStatus.OK and kind in self._debt_s:
            self._debt_s[kind] -= took_s
            if self._debt_s[kind] <= 0:
                del self._debt_s[kind]
