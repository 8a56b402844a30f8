"""The engine in virtual time: real code, a modelled machine, scripted applications.

The whole engine runs (queue, admission, policy, batches, recovery, streams) on the fake backend;
only the time of a decode comes from a staircase, with noise. No thread, no sleep: a simulated
minute takes about a second, and the same seed gives the same run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
from attrs import Factory, define

from uma_trio.backend.fake import FakeBackend
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine, EngineSettings
from uma_trio.engine.messages import Finished, SamplingParams, StreamItem, Submit, Targets, TokenOut
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.recorder import Recorder
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.state import Contract, Lane
from uma_trio.telemetry.metrics import Metrics

# Milliseconds of one llama_decode by tokens; 0.5B shape, Q4_0, two cores of an AVX-512 server,
# llama.cpp 0c1e57098 (docs/BENCHMARKS.md).
Q4_0 = {
    1: 8.0,
    2: 11.7,
    3: 16.2,
    4: 11.1,
    5: 15.2,
    6: 19.9,
    7: 24.8,
    8: 18.8,
    12: 25.2,
    16: 25.9,
    17: 29.5,
    20: 34.0,
    32: 48.7,
    64: 93.5,
    128: 192.0,
    256: 384.0,
    512: 770.0,
}
HOST_S = 0.0004  # what passes between two decodes


def staircase(milliseconds: dict[int, float]) -> Staircase:
    """Return the staircase of a table in milliseconds."""
    return Staircase(tuple(milliseconds), tuple(ms / 1e3 for ms in milliseconds.values()))


@define
class Clock:
    """Virtual seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class Machine(FakeBackend):
    """A fake whose decodes move a clock by a staircase, with seeded noise."""

    def __init__(self, steps: Staircase, clock: Clock, seed: int = 0, noise: float = 0.02) -> None:
        super().__init__(n_ctx=32_768, n_slots=17, n_batch=512)
        self._steps, self._clock, self._noise = steps, clock, noise
        self._random = random.Random(seed)

    def decode(self, n_tokens: int) -> int:
        """Compute, and let the time pass that it takes."""
        status = super().decode(n_tokens)
        factor = max(0.9, self._random.gauss(1.0, self._noise))
        self._clock.now += self._steps(n_tokens) * factor + HOST_S
        return status


@define(eq=False)
class Stream:
    """What one simulated request saw, and when."""

    clock: Clock
    arrived: float
    handle: int
    prompt_tokens: int
    lane: Lane
    token_times: list[float] = Factory(list)
    end: Finished | None = None
    on_end: Callable[[], None] | None = None

    def send_nowait(self, item: StreamItem) -> None:
        """Note the time of a token, or the end."""
        if isinstance(item, TokenOut):
            self.token_times.append(self.clock.now)
        elif isinstance(item, Finished):
            self.end = item
            if self.on_end is not None:
                self.on_end()

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def young_gaps(self) -> list[float]:
        """The gaps within three seconds of the first token."""
        first = self.token_times[0]
        later = self.token_times[1:]
        return [g for t, g in zip(later, self.gaps, strict=True) if t <= first + 3.0]


class Simulation:
    """One engine on one machine; `at` schedules what applications do."""

    def __init__(
        self,
        policy: Policy,
        contract: Contract | None = None,
        *,
        steps: Staircase | None = None,
        seed: int = 0,
        noise: float = 0.02,
        recorder: Recorder | None = None,
        believed: Staircase | None = None,
    ) -> None:
        """Make a machine of `steps`; the policy begins with what it `believed` of it, if given."""
        steps = steps or staircase(Q4_0)
        self.clock = Clock()
        self.random = random.Random(seed)
        self.machine = Machine(steps, self.clock, seed, noise)
        self.inbox = Inbox(10_000)
        self.metrics = Metrics()
        settings = EngineSettings(
            contract=contract or Contract(),
            scratch_slots=1,
            cost=CostModel(believed or steps, host_s=HOST_S),
        )
        self.engine = Engine(
            self.machine,
            policy,
            self.inbox,
            Outlet(lambda deliver: deliver()),
            self.metrics,
            self.clock,
            settings=settings,
            recorder=recorder,
        )
        self.streams: list[Stream] = []
        self.ticks = 0
        self._handles: Iterator[int] = count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at the virtual time `when`."""
        heapq.heappush(self._events, (when, next(self._handles), action))

    def submit(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        client: int,
        lane: Lane = "interactive",
        targets: Targets | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> Stream:
        """Submit a request with a prompt that nobody else has."""
        handle = next(self._handles)
        stream = Stream(self.clock, self.clock.now, handle, prompt_tokens, lane, on_end=on_end)
        self.streams.append(stream)
        self.inbox.submit(
            Submit(
                handle=handle,
                prompt=np.array([self.random.randrange(1, 250) for _ in range(prompt_tokens)]),
                max_tokens=max_tokens,
                params=SamplingParams(ignore_eos=True),
                stop=(),
                lane=lane,
                client=client,
                credit=1_000_000,
                sink=stream,
                submitted=self.clock.now,
                targets=targets or Targets(),
            )
        )
        return stream

    def computed(self, stream: Stream) -> int:
        """Return how many tokens of this request the machine has computed so far."""
        if stream.end is not None:
            return stream.prompt_tokens + stream.end.completion_tokens
        sequence = self.engine.registry.running.get(stream.handle)
        return 0 if sequence is None else sequence.computed

    def run(self, seconds: float) -> None:
        """Let `seconds` pass."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            while self._events and self._events[0][0] <= self.clock.now:
                heapq.heappop(self._events)[2]()
            if self.engine.tick():
                self.ticks += 1
            else:  # idle: jump to whatever happens next
                self.clock.now = min(self._events[0][0], until) if self._events else until

    def storm(self, client: int, prompt_tokens: int = 506, lane: Lane = "background") -> None:
        """Send prompts one after the other for ever, each for one token."""

        def again() -> None:
            self.at(self.clock.now, send)

        def send() -> None:
            self.submit(prompt_tokens, 1, client=client, lane=lane, on_end=again)

        send()
