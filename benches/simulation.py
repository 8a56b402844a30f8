"""The engine in virtual time: real code, a modelled machine, scripted applications.

The whole engine runs (queue, admission, policy, batches, recovery, streams) on the fake backend;
only the time of a decode comes from a machine (:mod:`benches.machine`). No thread, no sleep: a
simulated minute takes about a second, and the same seed gives the same run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import define

from benches.machine import HOST_S, TABLES, Machine, Profile, gaussian, modelled, staircase
from benches.virtual import ENDLESS_CREDIT, Request, World
from uma_trio.backend.base import Aside, DecodeStatus, Interrupt, Limits, nothing
from uma_trio.backend.fake import FakeBackend
from uma_trio.engine.figures import Job
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import Finished, SamplingParams, StreamItem, Submit, TokenOut
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.state import Contract
from uma_trio.telemetry.metrics import Metrics

__all__ = ["HOST_S", "LIMITS", "Q4_0", "Simulation", "Stream", "settings_for", "staircase"]

Q4_0 = TABLES["q4_0"]
LIMITS = Limits(n_ctx=32_768, n_ctx_seq=32_768, n_slots=17, n_batch=512)  # one slot for ballast


def settings_for(profile: Profile, contract: Contract | None = None) -> EngineSettings:
    """Return what the daemon would tell its engine on this machine."""
    return EngineSettings(contract=contract or Contract(), scratch_slots=1, cost=profile.believed)


@define(eq=False, kw_only=True)
class Stream(Request):
    """A request that hears of its tokens as a connection would."""

    end: Finished | None = None

    def send_nowait(self, item: StreamItem) -> None:
        """Note the time of a token, or the end."""
        if isinstance(item, TokenOut):
            self.has_token()
        elif isinstance(item, Finished):
            self.end = item
            self.has_all()


class TimedEngine(Engine):
    """An engine whose ticks take the time of a machine; `let_pass` lets time pass."""

    def __init__(
        self, machine: Machine, let_pass: Callable[[float], None], *parts: Any, **options: Any
    ) -> None:
        super().__init__(*parts, **options)
        self._machine = machine
        self._let_pass = let_pass
        self._backend.meanwhile = self._meanwhile
        self._decode_s = 0.0

    def prepare(self) -> Job | None:
        """Prepare; note when there is nothing to do."""
        job = super().prepare()
        if job is None:
            self._machine.rest()
        return job

    def compute(self, job: Job) -> int:
        """Compute, and let the time pass that it takes; what does not fit is refused at once."""
        work = planned_work(job.state, job.plan)
        host_s, self._decode_s = self._machine.times(work, job.state, job.plan)
        self._let_pass(host_s)
        status = super().compute(job)
        if status == DecodeStatus.OK:
            self._machine.book(job.state, job.plan, host_s + self._decode_s)
        return status

    def finish(self, job: Job, status: int) -> None:
        """Finish, and tell at once: before more time passes, and also when it does not go on."""
        super().finish(job, status)
        self.tell()

    def _meanwhile(self) -> None:
        self._let_pass(self._decode_s)


class Interruptible(FakeBackend):
    """A fake that knows, while it decodes, whether that was given up."""

    given_up = False

    def arm(self) -> Interrupt | None:
        """Let the next decode be interrupted, and note it when it is."""
        interrupt = super().arm()

        def give_up() -> None:
            self.given_up = True
            if interrupt is not None:
                interrupt()

        return give_up

    def decode(self, n_tokens: int, aside: Aside = nothing) -> int:
        """Compute, unless it is given up."""
        status = super().decode(n_tokens, aside)
        self.given_up = False
        return status


class Simulation(World[Stream]):
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
        profile: Profile | None = None,
    ) -> None:
        """Make a machine of `profile`, or of `steps` with normal noise.

        The policy begins with what it `believed` of its staircase, if given.
        """
        super().__init__(Stream)
        if profile is None:
            truth = CostModel(steps or staircase(Q4_0), host_s=HOST_S)
            told = None if believed is None else CostModel(believed, host_s=HOST_S)
            profile = modelled("steps", truth, gaussian(noise), believed=told)
        self.random = random.Random(seed)
        self.books = Machine.of(profile, seed)
        self.machine = Interruptible(
            n_ctx=LIMITS.n_ctx, n_slots=LIMITS.n_slots, n_batch=LIMITS.n_batch
        )
        self.inbox = Inbox(10_000)
        self.metrics = Metrics()
        self.engine = TimedEngine(
            self.books,
            lambda seconds: self._pass(seconds, lambda: self.machine.given_up),
            self.machine,
            policy,
            self.inbox,
            Outlet(lambda deliver: deliver()),
            self.metrics,
            self.clock,
            settings=settings_for(profile, contract),
            recorder=recorder,
        )

    def _send(self, request: Stream) -> None:
        n = request.prompt_tokens
        self.inbox.submit(
            Submit(
                handle=request.handle,
                prompt=np.array([self.random.randrange(1, 250) for _ in range(n)]),
                max_tokens=request.answer_tokens,
                params=SamplingParams(ignore_eos=True),
                stop=(),
                lane=request.lane,
                client=request.client,
                credit=ENDLESS_CREDIT,
                sink=request,
                submitted=request.arrived,
                targets=request.targets,
            )
        )

    def _tick(self) -> bool:
        return self.engine.tick()
