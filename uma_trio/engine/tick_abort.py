"""Aborting a tick while it is computed, for an arriving interactive request.

The compute thread reads no messages during a decode, so it installs a hook at the bell. The
thread that submits a request, to whatever model, calls the hook: a pure function
(:mod:`uma_trio.policy.abort`) decides, and that one decode is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, evolve

from uma_trio.backend.base import DecodeStatus, Interrupt
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.messages import Submit
from uma_trio.policy.abort import Abortable, should_abort

#: How many times the time that was lost is computed to its end before the next tick of that kind may be aborted.
LOST_TIMES = 2.0
GIVEN_UP = "given up for an interactive request that came"


@define(eq=False)
class ArrivalHook:
    """The tick that is computed `since` then, for requests of `inbox`, and what interrupts it.

    If it `stops` between two parts, requests to other models are computed then.
    """

    tick: Abortable
    since: float
    clock: Callable[[], float]
    interrupt: Interrupt
    inbox: Inbox
    stops: bool = False

    def arrived(self, inbox: Inbox, request: Submit) -> None:
        """Abort the tick if `request` is worth it. Called on any thread."""
        newcomer = request.newcomer
        if inbox is not self.inbox:
            if self.stops:
                return
            newcomer = evolve(newcomer, cells=0)  # it needs none of this model's
        if should_abort(self.tick, self.clock() - self.since, newcomer):
            self.interrupt()


class TickAbort:
    """Whether the running tick may be aborted, and whether the last one was (`was_aborted`).

    `arm` (the backend's) lets the next decode be interrupted; the hook is installed at the bell of the `inbox`. Called
    on the engine's thread only. Arrivals do not starve other work: after a tick was aborted, ticks of its kind (with
    interactive prompts, or without) are computed to their ends until they took twice the time that was lost. So at most a
    third of the time of such ticks is lost.
    """

    def __init__(
        self,
        arm: Callable[[], Interrupt | None],
        inbox: Inbox,
        clock: Callable[[], float],
    ) -> None:
        self._arm = arm
        self._inbox, self._bell = inbox, inbox.bell
        self._clock = clock
        self._tick: Abortable | None = None
        self._since = 0.0
        self._hook: ArrivalHook | None = None
        self.was_aborted = False
        self._debt_s: dict[
            float, float
        ] = {}  # to compute before the next abort, by kind (`most_tokens`)

    @property
    def in_debt(self) -> bool:
        """Whether there are ticks that may not be aborted, so that they should be brief."""
        return bool(self._debt_s)

    def begin(self, tick: Abortable | None, since: float, *, stops: bool = False) -> None:
        """A tick is about to be computed: let it be given up if it may be."""
        self._tick, self._since = tick, since
        self._hook = None
        if tick is None or tick.most_tokens in self._debt_s:
            return
        interrupt = self._arm()
        if interrupt is not None:
            self._hook = ArrivalHook(tick, since, self._clock, interrupt, self._inbox, stops)
            self._bell.watch(self._hook.arrived)

    def resume(self, paused_s: float) -> None:
        """Go on with a tick that was stopped for `paused_s`, in which others may have replaced the hook."""
        self._since += paused_s
        if self._hook is not None:
            self._hook.since += paused_s
            self._bell.watch(self._hook.arrived)

    def end(self, status: int) -> None:
        """Note that it has ended with `status`: it can be aborted no more."""
        if self._hook is not None:
            self._bell.watch(None)
        self.was_aborted = self._hook is not None and status == DecodeStatus.ABORTED
        if self._tick is None:
            return
        kind, took_s = self._tick.most_tokens, self._clock() - self._since
        if self.was_aborted:
            self._debt_s[kind] = LOST_TIMES * took_s
        elif status == DecodeStatus.OK and kind in self._debt_s:
            self._debt_s[kind] -= took_s
            if self._debt_s[kind] <= 0:
                del self._debt_s[kind]
