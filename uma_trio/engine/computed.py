"""What the compute task computes: the engine of a model that writes, or of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from uma_trio.engine.inbox import Inbox
from uma_trio.engine.turn import TickClaim


class ComputedRequests(Protocol):
    """The requests of one engine, as those of others are told of them."""

    #: The requests of another model that has the machine, while the work of this one waits for it.
    beside: ComputedRequests | None

    @property
    def running(self) -> Mapping[int, object]:
        """Those that are computed, by their handles."""

    @property
    def awaits_masks(self) -> bool:
        """Whether requests wait for masks; each finished mask wakes the engine."""


class Computed(Protocol):
    """One engine. Everything but :meth:`fail_all` is for the compute thread."""

    inbox: Inbox
    #: Called in pauses of a tick, where it has any, with the seconds that are left of it.
    paused: Callable[[float], object] | None

    @property
    def registry(self) -> ComputedRequests:
        """Its requests."""

    @property
    def rest_s(self) -> float:
        """For how long it need not be asked where it had nothing to compute and no message came."""

    @property
    def pauses(self) -> bool:
        """Whether the ticks of others can be computed within its own."""

    def claim(self, now: float) -> TickClaim:
        """Take in what has arrived, and return what is to be computed."""

    def limit(self, seconds: float, *, leads: bool, disturbed: bool = False) -> None:
        """Let the next tick take at most so long, if that is possible.

        If it `leads`, its tokens are shown a step apart; if it is `disturbed`, what it takes says nothing of others.
        """

    def interrupted(self) -> None:
        """Note that another engine was computed since the latest tick."""

    def tick(self) -> bool:
        """Compute a tick; False if there is none."""

    def aside(self) -> bool:
        """Do a little work that can wait, where no tick is to be computed; False if there is none."""

    def while_idle(self) -> float | None:
        """Do work that can wait; return how long to be idle before the next, None if there is none."""

    def publish(self) -> None:
        """Publish all results."""

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error, when the engine is computed no more."""
