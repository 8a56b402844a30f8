"""Virtual time: a clock that jumps from event to event, and what each request saw of it."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from attrs import Factory, define

from uma_trio.backend.base import IntArray
from uma_trio.engine.messages import Finished, StreamItem, Targets, TokenOut
from uma_trio.engine.playout import moved_forward
from uma_trio.words import Awaits, Lane
from uma_trio_sim.latency import gaps, itl, startup_itl


@define
class Clock:
    """Virtual seconds; calling it returns the time."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@define(eq=False, kw_only=True)
class SimulatedRequest:
    """One request, and when its tokens were shown. Seconds of the virtual clock.

    It is the sink of its own stream: the engine sends it what a connection would be sent. A token
    that is not to be shown yet is held, as a connection holds it. `on_end` is called when
    the last token or an error has come; `end` then says which.

    `token_times` is when each token was shown, `computed_times` when it was there.
    """

    clock: Clock
    handle: int
    client: int
    lane: Lane
    arrived: float
    prompt_tokens: int
    answer_tokens: int
    targets: Targets = Factory(Targets)
    prompt: IntArray | None = None
    awaits: Awaits = "tokens"
    on_end: Callable[[], None] | None = None
    on_shown: Callable[[int], None] | None = None
    wake_at: Callable[[float], None] | None = None
    token_times: list[float] = Factory(list)
    computed_times: list[float] = Factory(list)
    held: deque[float] = Factory(deque)
    shown_at: float = -math.inf  # when the latest of these was due
    end: Finished | None = None

    def send_nowait(self, item: StreamItem) -> None:
        """Note the time of a token, or the end."""
        now = self.clock.now
        if isinstance(item, TokenOut):
            self.computed_times.append(now)
            self._hold(item.show_at)
            if item.show_at <= now:
                self._show(len(self.held))
        elif isinstance(item, Finished):
            self._show(len(self.held))
            self.end = item
            if self.on_end is not None:
                self.on_end()

    def flush(self) -> None:
        """All was taken as it came."""

    def show_due(self) -> None:
        """Show what is due now."""
        self._show(sum(at <= self.clock.now for at in self.held))

    def _hold(self, due: float) -> None:
        """Hold a token until it is due; those before it come no later, as a pipe has it."""
        held, now = self.held, self.clock.now
        moved = bool(held) and due < held[-1]
        if moved:
            held = self.held = deque(moved_forward(held, due, now, self.shown_at))
        held.append(due)
        if self.wake_at is not None and due > now:
            for at in held if moved else (due,):
                self.wake_at(at)

    def _show(self, n: int) -> None:
        for _ in range(n):
            self.shown_at = self.held.popleft()
            self.token_times.append(self.clock.now)
        if n and self.on_shown is not None:
            self.on_shown(n)

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token, which must have come."""
        return self.token_times[0] - self.arrived

    @property
    def itl(self) -> list[float]:
        """Seconds for each token; those that came together took equal parts."""
        return itl(self.token_times)

    @property
    def computed_itl(self) -> list[float]:
        """Seconds between tokens as they were computed."""
        return itl(self.computed_times)

    @property
    def gaps(self) -> list[float]:
        """Seconds between deliveries of one or several tokens."""
        return gaps(self.token_times)

    @property
    def startup_itl(self) -> list[float]:
        """The latencies that began within three seconds of the first token."""
        return startup_itl(self.token_times)


class World(ABC):
    """Requests arrive at moments; between them a machine computes, tick after tick."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.requests: list[SimulatedRequest] = []
        self.ticks = 0
        self._handles: Iterator[int] = count(1)
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def submit(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        client: int,
        lane: Lane = "interactive",
        targets: Targets | None = None,
        on_end: Callable[[], None] | None = None,
        prompt: IntArray | None = None,
        awaits: Awaits = "tokens",
    ) -> SimulatedRequest:
        """Send a request now, whose `prompt` is any tokens. It generates `max_tokens` tokens."""
        request = SimulatedRequest(
            clock=self.clock,
            handle=next(self._handles),
            client=client,
            lane=lane,
            arrived=self.clock.now,
            prompt_tokens=prompt_tokens,
            answer_tokens=max_tokens,
            targets=targets or Targets(),
            on_end=on_end,
            prompt=prompt,
            awaits=awaits,
        )
        self.requests.append(request)
        self._send(request)
        return request

    @abstractmethod
    def _send(self, request: SimulatedRequest) -> None:
        """Hand a request to the engine."""

    @abstractmethod
    def tick(self) -> bool:
        """Compute one tick and let its time pass. False if there was nothing to compute."""

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Call `action` at the virtual time `when`; of equal times the first given comes first."""
        heapq.heappush(self._events, (when, next(self._handles), action))

    def run(self, seconds: float) -> None:
        """Let `seconds` pass. A tick that has begun is finished."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self._handle_events(self.clock.now)
            if self.tick():
                self.ticks += 1
            else:  # idle: jump to the next event
                self.clock.now = min(self._events[0][0], until) if self._events else until

    def _pass(self, seconds: float, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Let time pass with the events in it, until an event has `interrupted` it."""
        end = self.clock.now + seconds
        if not self._handle_events(end, interrupted):
            self.clock.now = end

    def _handle_events(self, until: float, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Handle the events that are due, each at its time; return whether one `interrupted`."""
        while not interrupted() and self._events and self._events[0][0] <= until:
            when, _, action = heapq.heappop(self._events)
            self.clock.now = max(self.clock.now, when)
            action()
        return interrupted()

    def storm(self, client: int, prompt_tokens: int = 506, lane: Lane = "background") -> None:
        """Have a client send prompts one after another without end, each for one token."""

        def again() -> None:
            self.at(self.clock.now, send)

        def send() -> None:
            self.submit(prompt_tokens, 1, client=client, lane=lane, on_end=again)

        send()
