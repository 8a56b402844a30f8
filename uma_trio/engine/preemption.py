"""Giving up a tick while it computes, for a person who has just come.

Nobody can tell the engine anything while it computes, so it leaves word at the door: what to do
when a request comes. Whoever brings one decides on the spot, by a pure function
(:mod:`uma_trio.policy.abort`), and interrupts that one decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from attrs import frozen

from uma_trio.backend.base import DecodeStatus, Interrupt
from uma_trio.policy.abort import Abortable, Newcomer, gives_way

GIVEN_UP = "given up for an interactive request that came"


class Arrival(Protocol):
    """A request that has come."""

    @property
    def newcomer(self) -> Newcomer:
        """What of it decides whether a tick is given up."""


@frozen(eq=False)
class Word:
    """What is left at the door: the tick that is computed `since` then, and what ends it."""

    tick: Abortable
    since: float
    clock: Callable[[], float]
    interrupt: Interrupt

    def came(self, request: Arrival) -> None:
        """Give the tick up if `request` is worth it. Called on any thread."""
        if gives_way(self.tick, self.clock() - self.since, request.newcomer):
            self.interrupt()


class Preemption:
    """Whether the running tick may be given up, and whether the last one was (`gave_up`).

    `arm` lets the next decode be interrupted, `watch` leaves word: the backend's and the inbox's.
    Called on the engine's thread only. Background work is not starved by arrivals: after a tick
    was given up, the next one that could be is computed to its end. So less than half a tick is
    lost for each that is finished, which is a third of the time of such ticks at most.
    """

    def __init__(
        self,
        arm: Callable[[], Interrupt | None],
        watch: Callable[[Callable[[Arrival], None] | None], None],
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
            self._watch(Word(tick, since, self._clock, interrupt).came)

    def end(self, status: int) -> None:
        """It has ended with `status`: nobody can give it up any more."""
        if self._armed:
            self._watch(None)
        self.gave_up = self._armed and status == DecodeStatus.ABORTED
        if self.gave_up:
            self._owed = True
        elif self._tick is not None and status == DecodeStatus.OK:
            self._owed = False
