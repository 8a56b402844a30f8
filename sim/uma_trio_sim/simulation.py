"""The engine on a modelled machine, in virtual time.

The whole engine runs; only the time of a decode comes from a machine
(:mod:`uma_trio_sim.machine`). Where that overlaps, as a GPU does, the engine prepares the next tick
while a decode runs and publishes tokens beside it. Where it does not, tokens are published when
their tick ends; the daemon publishes them right before the next decode, a fraction of a millisecond
later.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from attrs import evolve, frozen

from uma_trio.backend.base import (
    ContextLimits,
    IntArray,
    Interrupt,
    Overlap,
    Traits,
    nothing,
)
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import Credit, SamplingParams, Submit
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.accounting import planned_work
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.state import Contract, Memory
from uma_trio_sim.fake import N_VOCAB, FakeBackend, FakeVocabulary
from uma_trio_sim.guesses import NO_GUESSES, Guesses, SimulatedDrafter, Texts
from uma_trio_sim.machine import MachineRun, Profile, built_in, gaussian
from uma_trio_sim.world import SimulatedRequest, World

# One slot is for ballast.
LIMITS = ContextLimits(n_ctx=32_768, n_ctx_seq=32_768, n_slots=17, n_batch=512)
CREDIT = 20  # places of a stream, as in the daemon; readers take what is shown at once
DRAFT_ROWS = 16  # what the backend of llama.cpp has beside a row for each slot
_MOST_WAITING = 10_000


def settings_for(profile: Profile, contract: Contract | None = None) -> EngineSettings:
    """Return what the daemon would hand to its engine on this machine."""
    return EngineSettings(contract=contract or Contract(), scratch_slots=1, cost=profile.believed)


class SimulatedBackend(FakeBackend):
    """A fake whose decodes take virtual time.

    `let_pass` is called in the middle of each decode and returns when its time has passed, or when
    the decode was interrupted. One that `overlaps` runs the engine's callback while that time
    passes and cannot be interrupted, as a GPU does; else the callback comes first.
    """

    def __init__(
        self,
        limits: ContextLimits,
        let_pass: Callable[[], object],
        *,
        overlaps: bool,
        n_vocab: int = N_VOCAB,
    ) -> None:
        super().__init__(
            n_ctx=limits.n_ctx,
            n_slots=limits.n_slots,
            n_batch=limits.n_batch,
            n_rows=limits.n_rows,
            vocabulary=FakeVocabulary(n_vocab),
            interruptible=not overlaps,
        )
        self.meanwhile = let_pass
        self.interrupted = False
        self._overlaps = overlaps
        self._told: dict[int, int] = {}

    def tell(self, prompt: IntArray, answer: IntArray) -> None:
        """From now on, answer `prompt` with `answer`."""
        history = self.history(prompt)
        for token in answer.tolist():
            self._told[history] = token
            history = self.history([token], history)

    def _choice(self, history: int) -> int:
        told = self._told.get(history)
        return super()._choice(history) if told is None else told

    @property
    def traits(self) -> Traits:
        """The host is free during a decode where it `overlaps`."""
        return evolve(super().traits, overlaps=self._overlaps)

    def arm(self) -> Interrupt | None:
        """Let the next decode be interrupted, and note it when it is."""
        interrupt = super().arm()
        if interrupt is None:
            return None

        def interrupt_and_note() -> None:
            self.interrupted = True
            interrupt()

        return interrupt_and_note

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute the batch, unless it is interrupted."""
        status = super().decode(n_tokens, while_computing)
        self.interrupted = False
        return status


@frozen(eq=False)
class Told:
    """A recorded text as tokens: what was asked, and what was answered."""

    prompt: IntArray
    answer: IntArray


class Simulation(World):
    """One engine with one policy on one machine; the default machine is ``q4_0``, noise 2 %.

    `settings` is what the engine is told, instead of what follows from `profile` and `contract`.
    `recorder` is given every tick. With `guesses` answers are guessed at as these say; without, the texts of prompts and answers are looked up where
    `limits` have rows for drafts. Public parts are for
    reading: the `engine`, its `metrics` and `backend`, and the `machine`, which counts time and
    tokens by client.
    """

    def __init__(
        self,
        policy: Policy,
        contract: Contract | None = None,
        *,
        profile: Profile | None = None,
        seed: int = 0,
        settings: EngineSettings | None = None,
        limits: ContextLimits = LIMITS,
        recorder: Recorder | None = None,
        n_vocab: int = N_VOCAB,
        guesses: Texts | None = None,
    ) -> None:
        super().__init__()
        profile = profile or built_in("q4_0", gaussian(0.02))
        if guesses is not None and limits.n_rows == limits.n_slots:
            limits = evolve(limits, n_rows=limits.n_slots + DRAFT_ROWS)
        self.machine = MachineRun.of(profile, seed)
        self.backend = SimulatedBackend(
            limits, self._decode, overlaps=profile.overlaps, n_vocab=n_vocab
        )
        self._texts, self._seed = guesses, seed
        self._drafter = None if guesses is None else SimulatedDrafter(self.backend)
        self.metrics = Metrics()
        self.inbox = Inbox(_MOST_WAITING)
        self.engine = Engine(
            self.backend,
            policy,
            self.inbox,
            Outlet(lambda deliver: deliver()),
            self.metrics,
            self.clock,
            settings=settings or settings_for(profile, contract),
            recorder=recorder,
            drafter=self._drafter,
        )
        self._decode_s = 0.0

    @property
    def memory(self) -> Memory:
        """What the policy remembers."""
        return self.engine.memory

    def tell(
        self, told: Told, *, client: int, on_end: Callable[[], None] | None = None
    ) -> SimulatedRequest:
        """Send a request now whose prompt and answer are those of a recorded text."""
        self.backend.tell(told.prompt, told.answer)
        n_prompt, n_answer = len(told.prompt), len(told.answer)
        return self.submit(n_prompt, n_answer, client=client, on_end=on_end, prompt=told.prompt)

    def tick(self) -> bool:
        """Do one tick of the engine, in the machine's time. False if there was nothing to do."""
        job = self.engine.next_tick()
        if job is None:
            self.machine.idle()
            return False
        work = planned_work(job.state, job.plan)
        host_s, self._decode_s = self.machine.times(work, job.state, job.plan)
        self._pass(host_s)
        status = self.engine.compute(job)
        completed = self.engine.finish(job, status)
        if completed is not None:
            self.machine.charge(completed, host_s + self._decode_s)
        if not self.machine.profile.overlaps:
            self.engine.publish()
        return True

    def _decode(self) -> None:
        self._pass(self._decode_s, lambda: self.backend.interrupted)

    def _guesses(self, request: SimulatedRequest) -> Guesses:
        if self._texts is None:
            return NO_GUESSES
        draw = random.Random(f"{self._seed}/guesses/{request.handle}")
        return self._texts(draw).settled(draw)

    def _send(self, request: SimulatedRequest) -> None:
        if self._drafter is not None:
            self._drafter.expect(request.handle, self._guesses(request))
        request.on_shown = lambda n: self.inbox.put(Credit(request.handle, n))
        request.wake_at = lambda when: self.at(when, request.show_due)
        self.inbox.submit(
            Submit(
                handle=request.handle,
                prompt=np.ones(request.prompt_tokens, np.int32)
                if request.prompt is None
                else request.prompt,
                max_tokens=request.answer_tokens,
                params=SamplingParams(ignore_eos=True),
                stop=(),
                lane=request.lane,
                client=request.client,
                credit=CREDIT,
                sink=request,
                submitted=request.arrived,
                targets=request.targets,
                namespace=None if request.prompt is None else "told",
                smooth=request.awaits == "tokens",
                awaits=request.awaits,
            )
        )
