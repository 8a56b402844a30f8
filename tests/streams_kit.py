"""Engines of several models on one machine in virtual time, and streams that note when each token is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import evolve
from encoder_kit import FakeEncoder
from engine_kit import Doze, Sink
from machine_kit import Clock, Machine

from uma_trio.backend.base import IntArray
from uma_trio.engine.encoder import EncoderEngine, Encodings
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import Encode, SamplingParams, Submit
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.machine.machine import Machine as Compute
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.deadline import deadline
from uma_trio.policy.state import Contract
from uma_trio.words import Lane

COST = CostModel(Staircase((1, 16, 512), (0.010, 0.014, 0.400)))
STEP_S = 0.040


class Streams:
    """Engines in virtual time, and the time of each token of each stream.

    The ticks of the last one take `slower` times as long, and have so many `parts`. Saving or restoring a page takes
    `page_s`.
    """

    def __init__(
        self,
        n: int,
        truth: CostModel = COST,
        *,
        slower: float = 1.0,
        parts: int = 1,
        drafts: bool = False,
        page_s: float = 0.0,
        prefix_bytes: int = 0,
    ) -> None:
        self.clock = Clock()
        bell = Doze(self._sleeps)
        self.compute = Compute(bell, self.clock)
        self.engines, self.machines, self.encoders = [], [], list[EncoderEngine]()
        self.later: list[Callable[[], object]] = []  # called one by one where nothing is left to do
        self.deaths: list[Exception] = []
        self.raises = True  # what an engine raised
        for index in range(n):
            cost = truth.times(slower) if index == n - 1 else truth
            machine = Machine(cost, self.clock, parts=parts if index == n - 1 else 1)
            machine.page_s = page_s
            machine.limits = evolve(machine.limits, n_rows=40)  # some are for drafts
            engine = Engine(
                *(machine, deadline, Inbox(99, bell=bell), Outlet(lambda deliver: deliver())),
                *(Metrics(), self.clock),
                settings=EngineSettings(
                    cost=cost,
                    contract=Contract(reading_pace_s=STEP_S, paid_drafts=drafts),
                    drafts=drafts,
                    prefix_bytes=prefix_bytes,
                ),
                scheduler=self.compute.background,
            )
            self.machines.append(machine)
            self.engines.append(engine)
            self.compute.add(engine, partial(self._died, engine))
        self._handles = 0

    def encoder(self, **options: Any) -> EncoderEngine:
        """Let an encoder be computed, too; return its engine."""
        model = FakeEncoder(passes=self.clock.passes, **options)
        queue = Encodings(model, lambda call: call(), self.clock)
        inbox = Inbox(99, bell=self.engines[0].inbox.bell)
        engine = EncoderEngine(queue, inbox, lambda call: call(), self.clock)
        self.compute.add(engine)
        self.encoders.append(engine)
        return engine

    def encode(self, engine: EncoderEngine, lengths: Sequence[int], user: str = "u") -> list[float]:
        """Ask for vectors; return a list that gets the time at which they are there."""
        self._handles += 1
        answered: list[float] = []
        order = list(reversed(range(len(lengths))))
        engine.inbox.put(
            Encode(
                *(self._handles, user, [tokens(n) for n in lengths], order),
                lambda _found: answered.append(self.clock.now),
                self.clock.now,
            )
        )
        return answered

    def ask(
        self,
        model: int,
        n_prompt: int,
        n: int,
        lane: Lane = "interactive",
        namespace: str | None = None,
        **params: Any,
    ) -> Timed:
        """Submit a request; return its stream. Its prefix is kept for others of the same `namespace`."""
        self._handles += 1
        sink = Timed(self.clock)
        self.engines[model].inbox.submit(
            Submit(
                *(self._handles, tokens(n_prompt), n, SamplingParams(**params), (), lane),
                client=self._handles,
                credit=10_000,
                sink=sink,
                submitted=self.clock.now,
                smooth=True,
                namespace=namespace,
            )
        )
        return sink

    def run(self, idle_s: float = 0.0) -> None:
        """Compute until nothing is left to do, each time with so much idle time."""
        self._idle_s = self._idle_left_s = idle_s
        self.compute.run()
        if self.deaths and self.raises:
            raise self.deaths[0]

    def _sleeps(self, seconds: float | None) -> bool:
        if any(e.registry.running or e.registry.waiting for e in self.engines):
            self.clock.now += seconds or 0.0
            return False
        if any(each.queue.has_work for each in self.encoders):
            raise AssertionError("it sleeps while texts wait")
        if seconds is not None and self._idle_left_s > 0:
            self.clock.now += seconds
            self._idle_left_s -= seconds
            return False
        self._idle_left_s = self._idle_s
        if self.later:
            self.later.pop()()
            return True
        self.compute.close()
        return True

    def _died(self, engine: Engine, error: Exception) -> None:
        self.deaths.append(error)
        engine.fail_all("E_RUNTIME_004", str(error))


class Timed(Sink):
    """A stream that notes when each item is shown, and calls `heard` when it comes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.times = clock, list[float]()
        self.heard: Callable[[], object] = lambda: None

    def send_nowait(self, item: object) -> None:
        """Keep it, with the time."""
        super().send_nowait(item)  # type: ignore[arg-type]
        self.times.append(max(self.clock.now, getattr(item, "show_at", 0.0)))
        self.heard()

    @property
    def gaps(self) -> list[float]:
        """The seconds between two tokens."""
        times = self.times[1:-1]  # the end of the prompt and that of the answer are no tokens
        return [b - a for a, b in pairwise(times)]


def tokens(n: int) -> IntArray:
    """Return a prompt of so many tokens."""
    return np.arange(n, dtype=np.int32) % 200
