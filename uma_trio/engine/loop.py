"""The tick: drain, snapshot, plan, batch, decode, sample, and tell beside the next decode.

The engine owns the backend, the sequences and the ledger of slots, and runs on one thread. It
knows nothing of sockets, clients or trio: requests come in through the inbox, everything that
happens to them leaves through the outlet. A tick has three steps so that a test can put virtual
time between them: :meth:`Engine.prepare`, :meth:`Engine.compute`, :meth:`Engine.finish`.

What decides the next tick is done between two decodes, and nothing else: every microsecond there
is one in which nothing is computed. Where nobody is there but streams that are read, what is
computed is foregone, and where a GPU computes it the policy is asked meanwhile. What the outside
hears of a tick (items, figures, the trace) is told by :meth:`Engine.tell` while the next one is
computed, or at once when there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import evolve, field, frozen

from uma_trio.backend.base import Backend, DecodeStatus
from uma_trio.engine.batch import BatchBuilder
from uma_trio.engine.figures import Job, publish_load, record
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.messages import (
    Abort,
    Credit,
    Explain,
    InboxMessage,
    Inspect,
    SetLane,
    Submit,
)
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.preemption import GIVEN_UP, Preemption
from uma_trio.engine.recorder import NEEDED, Recorder
from uma_trio.engine.recovery import Recovery
from uma_trio.engine.refine import Refinement
from uma_trio.engine.registry import Registry
from uma_trio.engine.sampling import NOT_FINITE, Sampler, choose
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.abort import abortable
from uma_trio.policy.admission import admit, gives_place
from uma_trio.policy.cost import CostModel
from uma_trio.policy.pipeline import Pipeline, Policy, PolicyError, check_plan
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import Contract, LastTick, Memory, SchedulerState
from uma_trio.policy.traffic import Traffic
from uma_trio.telemetry.metrics import Metrics
from uma_trio.text.stream import TokenText

_NOT_FINITE = (
    "the model produced logits that are not numbers; "
    "send the request again, and check the model file if it happens again"
)


# So long a rest comes before the staircase is refined, and so long a one between two decodes of that:
# others may have waited for the processor.
IDLE_S, BREATH_S = 0.5, 0.01
ASK_ANEW = 64  # one tick in so many is planned before it is computed, whoever is there


@frozen
class EngineSettings:
    """What the engine hands to its policy unchanged.

    `scratch_slots` (0 or 1) of the backend's slots are kept for ballast rows. `cost` is the
    measured staircase and `traffic` what the model moves, if they are known.
    """

    tick_budget_s: float = 0.030
    start_tokens: int = 32
    contract: Contract = field(factory=Contract)
    scratch_slots: int = 0
    cost: CostModel | None = None
    traffic: Traffic | None = None


class Engine:
    """Continuous batching over one backend.

    `clock` gives seconds and is the only clock there is. Every method but :meth:`fail_all` is
    called on the engine's thread.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Policy,
        inbox: Inbox,
        outlet: Outlet,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        settings: EngineSettings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._backend = backend
        self._policy = policy
        self._inbox = inbox
        self._metrics = metrics
        self._clock = clock
        self._settings = settings = settings or EngineSettings()
        self._pieces = backend.vocabulary.pieces()
        n_slots = backend.limits.n_slots - settings.scratch_slots
        self._builder = BatchBuilder(backend.batch, backend.limits.n_ctx, n_slots)
        self._scratch_slot = n_slots
        self._recorder = recorder = recorder or Recorder()
        self.registry = Registry(
            backend,
            inbox,
            outlet,
            metrics,
            clock,
            n_slots,
            recorder,
            settings.contract.young_s,
            captured=settings.cost is not None and settings.cost.switch_s > 0,
        )
        self._outlet = outlet
        self._recovery = Recovery(backend, self.registry)
        self._preemption = Preemption(backend.arm, inbox.watch, clock)
        self._memory = Memory(target_tokens=settings.start_tokens, cost=settings.cost)
        self._refinement: Refinement | None = None
        if settings.cost is not None:
            self._refinement = Refinement(backend, clock)
            metrics.promise.measured(settings.cost)
        self._last = LastTick()
        self._ticks = 0
        self._decoding_since = self._decoded_at = clock()
        self._idle = True
        self._bare = 0  # of how many streams alone the last plan was that took no ballast
        self._unrecorded: list[Callable[[], None]] = []  # ticks that are not in the metrics yet

    @property
    def memory(self) -> Memory:
        """What the policy remembers: the cost model, the guard's ledger, the counters."""
        return self._memory

    def run(self) -> None:
        """Tick until the inbox is closed, sleeping while there is nothing to do.

        A rest is used to refine the staircase, a decode at a time: whoever comes is noticed before
        the next one.
        """
        rest: float | None = IDLE_S
        while not self._inbox.closed:
            rest = IDLE_S if self.tick() or self._inbox.wait(rest) else self._refine()
        self.tell()

    def _refine(self) -> float | None:
        """Refine the staircase by a decode; return how long to rest then, None if that was all.

        Where a decode can be interrupted, a request that comes does so.
        """
        if self._refinement is None or self._memory.cost is None:
            return None
        if self.registry.running:
            return IDLE_S  # who is parked holds slots: later
        interrupt = self._backend.arm()
        if interrupt is not None:
            self._inbox.watch(lambda _who: interrupt())
        try:
            cost = self._refinement.refine(self._memory.cost, interruptible=interrupt is not None)
        finally:
            self._inbox.watch(None)
        if cost is None:
            return None
        self._memory = evolve(self._memory, cost=cost)
        return BREATH_S

    def tick(self) -> bool:
        """Do one tick. False if there was nothing to compute, and then all has been told."""
        job = self.prepare()
        if job is None:
            return False
        self.finish(job, self.compute(job))
        return True

    def prepare(self) -> Job | None:
        """Take in what arrived, decide, and fill the batch.

        None if there is nothing to compute; then nothing is left untold.
        """
        began = self._clock()
        for message in self._inbox.drain():
            self._handle(message, began)
        self._admit(began)
        self._recorder.queued(self.registry.ledger)
        streams = self._foregone()
        if streams:
            self._backend.kv_settle()
            rows = self._builder.fill([(stream, 1) for stream in streams])
            return Job(len(rows), rows, partial(self._plan_of, streams, began), foregone=True)
        state = self._state(began)
        plan = self._plan(state)
        if not plan.items:
            self._backend.kv_settle()
            self.tell()
            self._idle = True
            return None
        running = self.registry.running
        shares = [(running[item.key], item.n_tokens) for item in plan.items]
        rows = self._builder.fill(shares, plan.ballast, extra_rows=plan.extra_rows)
        return Job(plan.n_tokens + plan.ballast, rows, lambda: (state, plan))

    def compute(self, job: Job) -> int:
        """Run the backend; the only step that takes long, and that may be given up meanwhile.

        Beside it all is told that the tick before, and what arrived since, left to be told.
        """
        self._decoding_since = since = self._clock()
        free_slots = self.registry.ledger.free_slots
        tick = None if job.foregone else abortable(job.state, job.plan, free_slots)
        self._preemption.begin(tick, since)
        status = self._backend.decode(job.n_tokens, partial(self._beside, job))
        self._preemption.end(status)
        return status

    def _beside(self, job: Job) -> None:
        self.tell()
        _ = job.work  # the plan of a tick that was foregone is made here

    def finish(self, job: Job, status: int) -> None:
        """Sample and move every sequence on; what there is to say of it is told later."""
        now = self._clock()
        decode_s = now - self._decoding_since
        # What passed while there was nothing to do is nobody's cost.
        host_s = 0.0 if self._idle else max(0.0, self._decoding_since - self._decoded_at)
        self._idle = False
        self._decoded_at = now
        self._ticks += 1
        if not job.foregone:
            others = job.plan.ballast or job.state.riders
            self._bare = 0 if others else len(job.plan.items)
        if job.plan.ballast:
            self._backend.kv_remove(self._scratch_slot)
        self._recorder.tick(job.state, job.plan, status, decode_s, host_s, now)
        if self._preemption.gave_up:
            # As if it had never been: nobody moves, and the policy learns nothing.
            self._recorder.recovered(GIVEN_UP)
            self._metrics.aborted()
            return
        if status == DecodeStatus.OK:
            self._recovery.succeeded()
            self._advance(job.plan)
            self._sample(job.rows, now)
            self._last = LastTick(decode_s, host_s, job.work)
            self._memory = job.plan.memory
            sampling_s = self._clock() - now
            n_vocab = self._backend.model.n_vocab
            self._unrecorded.append(
                partial(record, self._metrics, job, n_vocab, decode_s, host_s, sampling_s)
            )
        else:
            views = tuple(s.view() for s in self.registry.running.values())
            self._recorder.recovered(self._recovery.failed(status, job.plan, views, now))

    def tell(self) -> None:
        """Tell the outside what it has not heard yet, with one wake, and in order.

        The streams first, then figures and the trace. Harmless when there is nothing to tell.
        """
        self.registry.say()
        self._outlet.flush()
        ticks, self._unrecorded = self._unrecorded, []
        for to_metrics in ticks:
            to_metrics()
        publish_load(self._metrics, self.registry)
        self._recorder.hand_on()

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error: the engine is gone. Its thread must have ended."""
        for submitted in self._inbox.drain():
            if isinstance(submitted, Submit):
                self.registry.enqueue(self._sequence(submitted))
        self.registry.fail_all(code, message, self._clock())
        self.tell()

    def _handle(self, message: InboxMessage, now: float) -> None:
        registry = self.registry
        match message:
            case Credit(handle, n):
                registry.give_credit(handle, n)
            case Submit():
                registry.enqueue(self._sequence(message))
            case Abort(handle, code, text):
                registry.abort(handle, now, code, text)
            case SetLane(handle, lane):
                registry.say()
                registry.set_lane(handle, lane)
            case Inspect(reply):
                reports = registry.reports(now)
                self._outlet.call(lambda: reply(reports))
            case Explain(answer, handle, ticks):
                registry.say()
                recorded = self._recorder.explain(now, handle, ticks)
                self._outlet.call(lambda: answer(recorded))

    def _sequence(self, submit: Submit) -> Sequence:
        end_tokens = self._backend.vocabulary.end_tokens
        return Sequence(
            submit, Sampler(submit.params, end_tokens), TokenText(self._pieces, submit.stop)
        )

    def _admit(self, now: float) -> None:
        registry = self.registry
        made_room = self._recovery.just_made_room()
        if not registry.waiting or not (registry.ledger.free_slots or registry.crowded):
            return
        # Admission right after room was made would undo it, unless there is nobody it was for.
        if made_room and any(sequence.credit > 0 for sequence in registry.running.values()):
            return
        state = registry.admission()
        chosen = admit(state)
        places = () if chosen else gives_place(state)
        if places:
            for place in places:
                registry.preempt(place, NEEDED)
            chosen = admit(registry.admission())
        registry.admit(chosen, now)

    def _state(self, now: float, *, ballast: bool = True) -> SchedulerState:
        running = self.registry.running
        suspect = self._recovery.suspect
        return SchedulerState(
            now=now,
            tick=self._ticks,
            sequences=tuple(
                sequence.view()
                for key, sequence in running.items()
                if suspect is None or key == suspect
            ),
            n_batch=self._recovery.batch_limit,
            free_cells=self.registry.ledger.free_cells,
            tick_budget_s=self._settings.tick_budget_s,
            contract=self._settings.contract,
            traffic=self._settings.traffic,
            # Every slot may ask for a row; those that do not can be asked for by ballast.
            spare_rows=self._backend.limits.n_slots - len(running)
            if ballast and self._settings.scratch_slots
            else 0,
            empty_cells=self._backend.limits.n_ctx - sum([s.computed for s in running.values()]),
            last=self._last,
            memory=self._memory,
        )

    def _foregone(self) -> list[Sequence]:
        """Return the streams, where any plan computes a token of each and nothing else.

        None where asking beside the decode saves no time. Whether ballast would make such a tick
        quicker is asked anew now and then.
        """
        policy, recovery = self._policy, self._recovery
        if not self._bare or not self._backend.computes_beside:
            return []
        if not isinstance(policy, Pipeline) or not policy.serves_streams:
            return []
        if recovery.suspect is not None:
            return []
        if self._ticks % ASK_ANEW == 1:  # and not 0, when a policy may leave ballast out for once
            return []
        ready = [sequence for sequence in self.registry.running.values() if sequence.credit > 0]
        if len(ready) != self._bare or len(ready) > recovery.batch_limit:
            return []
        streams = all(s.decoding and s.lane == "interactive" for s in ready)
        return ready if streams else []

    def _plan_of(self, streams: list[Sequence], now: float) -> tuple[SchedulerState, Plan]:
        """Return what was planned `now`, and from what, for `streams` that are being computed."""
        state = self._state(now, ballast=False)  # it is too late for that
        plan = self._plan(state)
        served = {item.key: item.n_tokens for item in plan.items}
        if served != {stream.handle: 1 for stream in streams} or plan.ballast:
            raise PolicyError("the plan of a tick that was foregone is another one")
        return state, plan

    def _plan(self, state: SchedulerState) -> Plan:
        if not state.sequences:
            return Plan(memory=state.memory)
        plan = self._policy(state)
        check_plan(state, plan)
        return plan

    def _advance(self, plan: Plan) -> None:
        running = self.registry.running
        for sequence in running.values():
            sequence.gap_s = None
        for item in plan.items:
            running[item.key].computed += item.n_tokens

    def _sample(self, rows: tuple[Sequence, ...], now: float) -> None:
        """Draw one token for each sequence whose row came back, and say so."""
        if not rows:
            return
        tokens = choose(self._backend.logits(len(rows)), [sequence.sampler for sequence in rows])
        for sequence, token in zip(rows, tokens, strict=True):
            if token == NOT_FINITE:
                self.registry.end(sequence, "error", now, code="E_RUNTIME_003", message=_NOT_FINITE)
            else:
                self.registry.sampled(sequence, token, now)
