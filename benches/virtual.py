"""Virtual time: a clock that jumps from event to event, and what each request saw of it.

Two worlds live in it: the whole engine (:mod:`benches.simulation`) and the policy alone
(:mod:`benches.quick`). Applications (:mod:`benches.workload`) do not know which one they are in.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

from attrs import Factory, define

from benches.pace import young_gaps
from benches.rates import gaps
from uma_trio.engine.messages import Targets
from uma_trio.policy.state import Lane

ENDLESS_CREDIT = 1_000_000  # readers keep up


@define
class Clock:
    """Virtual seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@define(eq=False, kw_only=True)
class Request:
    """One request, and when its tokens came; `on_end` is called when it has had all of them."""

    clock: Clock
    handle: int
    client: int
    lane: Lane
    arrived: float
    prompt_tokens: int
    answer_tokens: int
    targets: Targets = Factory(Targets)
    on_end: Callable[[], None] | None = None
    token_times: list[float] = Factory(list)

    def has_token(self) -> None:
        """Note that a token has come."""
        self.token_times.append(self.clock.now)

    def has_all(self) -> None:
        """Say that the answer is over."""
        if self.on_end is not None:
            self.on_end()

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return gaps(self.token_times)

    @property
    def young_gaps(self) -> list[float]:
        """The gaps that began within three seconds of the first token."""
        return young_gaps(self.token_times)


R = TypeVar("R", bound=Request)


class World(ABC, Generic[R]):
    """Requests, of one `kind`, come at moments; between them a machine computes, tick after tick."""

    def __init__(self, kind: type[R]) -> None:
        self._kind = kind
        self.clock = Clock()
        self.streams: list[R] = []
        self.ticks = 0
        self._handles: Iterator[int] = count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def submit(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        client: int,
        lane: Lane = "interactive",
        targets: Targets | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> R:
        """Send a request now, with a prompt that nobody else has; it gets `max_tokens` tokens."""
        request = self._kind(
            clock=self.clock,
            handle=next(self._handles),
            client=client,
            lane=lane,
            arrived=self.clock.now,
            prompt_tokens=prompt_tokens,
            answer_tokens=max_tokens,
            targets=targets or Targets(),
            on_end=on_end,
        )
        self.streams.append(request)
        self._send(request)
        return request

    @abstractmethod
    def _send(self, request: R) -> None:
        """Hand a request to whoever computes."""

    @abstractmethod
    def _tick(self) -> bool:
        """Compute one tick and let its time pass. False if there was nothing to compute."""

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at the virtual time `when`, in the order in which it was asked for."""
        heapq.heappush(self._events, (when, next(self._handles), action))

    def run(self, seconds: float) -> None:
        """Let `seconds` pass."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self._happen(self.clock.now)
            if self._tick():
                self.ticks += 1
            else:  # idle: jump to whatever happens next
                self.clock.now = min(self._events[0][0], until) if self._events else until

    def _pass(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, with what happens in it, until it is `enough`."""
        end = self.clock.now + seconds
        if not self._happen(end, enough):
            self.clock.now = end

    def _happen(self, until: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Let happen what is due, each at its moment, until it is `enough`; return whether it is."""
        while not enough() and self._events and self._events[0][0] <= until:
            when, _, action = heapq.heappop(self._events)
            self.clock.now = max(self.clock.now, when)
            action()
        return enough()

    def storm(self, client: int, prompt_tokens: int = 506, lane: Lane = "background") -> None:
        """Send prompts one after the other for ever, each for one token."""

        def again() -> None:
            self.at(self.clock.now, send)

        def send() -> None:
            self.submit(prompt_tokens, 1, client=client, lane=lane, on_end=again)

        send()
