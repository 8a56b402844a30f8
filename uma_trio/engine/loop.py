"""The tick: drain, snapshot, plan, batch, decode, sample, and tell beside the next decode.

The engine owns the backend, the sequences and the ledger of slots, and runs on one thread. It
knows nothing of sockets, clients or trio: requests come in through the inbox, everything that
happens to them leaves through the outlet. A tick has three steps so that a test can put virtual
time between them: :meth:`Engine.prepare`, :meth:`Engine.compute`, :meth:`Engine.finish`.

What decides the next tick is done between two decodes, and nothing else: every microsecond there
is one in which nothing is computed. Where a GPU computes, the policy is asked meanwhile: the next
tick is planned for what will be if nobody comes, ends or is changed, and planned again if somebody
was. What the outside hears of a tick (items, figures, the trace) is told by :meth:`Engine.tell`
while the next one is computed, or at once when there is none.
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
from uma_trio.policy.pipeline import Policy, check_plan
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import (
    NO_WORK,
    Contract,
    MeasuredTick,
    Memory,
    SchedulerState,
    SequenceView,
)
from uma_trio.policy.tally import as_measured
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
        self._measured: tuple[MeasuredTick, ...] = ()  # what the memory knows nothing of yet
        self._before = NO_WORK
        self._ahead: tuple[SchedulerState, Plan] | None = None
        self._ticks = 0
        self._decoding_since = self._decoded_at = clock()
        self._idle = True
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
        state, plan = self._foreseen() or self._asked(self._state(began))
        # Whoever had the last answer hears of it beside the next decode, and may ask again.
        if not plan.items or not (state.riders or state.before.company):
            self._backend.kv_settle()
        if not plan.items:
            self.tell()
            self._idle = True
            return None
        running = self.registry.running
        shares = [(running[item.key], item.n_tokens) for item in plan.items]
        rows = self._builder.fill(shares, plan.ballast, extra_rows=plan.extra_rows)
        return Job(state, plan, rows)

    def compute(self, job: Job) -> int:
        """Run the backend; the only step that takes long, and that may be given up meanwhile.

        Beside it all is told that the tick before, and what arrived since, left to be told, and on
        a GPU the next tick is planned.
        """
        self._decoding_since = since = self._clock()
        free_slots = self.registry.ledger.free_slots
        self._preemption.begin(abortable(job.state, job.plan, free_slots), since)
        status = self._backend.decode(job.n_tokens, partial(self._beside, job))
        self._preemption.end(status)
        return status

    def _beside(self, job: Job) -> None:
        self.tell()
        if self._backend.computes_beside:
            self._ahead = self._plan_ahead(job)

    def finish(self, job: Job, status: int) -> None:
        """Sample and move every sequence on; what there is to say of it is told later."""
        now = self._clock()
        decode_s = now - self._decoding_since
        # What passed while there was nothing to do is nobody's cost.
        host_s = 0.0 if self._idle else max(0.0, self._decoding_since - self._decoded_at)
        self._idle = False
        self._decoded_at = now
        self._ticks += 1
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
            gaps = self._sample(job.rows, now)
            tick = as_measured(job.plan, job.work, decode_s, host_s, gaps)
            self._measured = (*self._measured[len(job.state.measured) :], tick)
            self._memory, self._before = job.plan.memory, job.work
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

    def _state(self, now: float) -> SchedulerState:
        """Return what the next tick is planned from, when none is computed."""
        running, suspect = self.registry.running, self._recovery.suspect
        views = [s.view() for key, s in running.items() if suspect is None or key == suspect]
        return self._state_of(views, now)

    def _plan_ahead(self, job: Job) -> tuple[SchedulerState, Plan] | None:
        """Plan what follows `job`, which is computed, unless it is known to end somebody's answer."""
        if self._recovery.suspect is not None:
            return None
        now = self._decoding_since + job.plan.predicted_s
        computed = {item.key: item.n_tokens for item in job.plan.items}
        views = []
        for key, sequence in self.registry.running.items():
            view = sequence.view_after(computed.get(key, 0), now)
            if view is None:
                return None
            views.append(view)
        return self._asked(self._state_of(views, now, job))

    def _foreseen(self) -> tuple[SchedulerState, Plan] | None:
        """Return what was planned ahead, if everybody is where that said."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        state, running, recovery = ahead[0], self.registry.running, self._recovery
        same = len(state.sequences) == len(running) and state.n_batch == recovery.batch_limit
        if not same or recovery.suspect is not None:
            return None
        for view in state.sequences:
            sequence = running.get(view.key)
            if sequence is None or not sequence.is_at(view):
                return None
        return ahead

    def _state_of(
        self, views: list[SequenceView], now: float, computing: Job | None = None
    ) -> SchedulerState:
        """Return the state with these sequences, after the tick that is `computing`."""
        limits, running = self._backend.limits, self.registry.running
        tick, before, measured, memory = self._ticks, self._before, self._measured, self._memory
        used = sum([sequence.computed for sequence in running.values()])
        if computing is not None:
            plan = computing.plan
            tick, before, memory = tick + 1, computing.work, plan.memory
            measured = measured[len(computing.state.measured) :]
            used += plan.n_tokens
        return SchedulerState(
            now=now,
            tick=tick,
            sequences=tuple(views),
            n_batch=self._recovery.batch_limit,
            free_cells=self.registry.ledger.free_cells,
            tick_budget_s=self._settings.tick_budget_s,
            contract=self._settings.contract,
            traffic=self._settings.traffic,
            # Every slot may ask for a row; those that do not can be asked for by ballast.
            spare_rows=limits.n_slots - len(running) if self._settings.scratch_slots else 0,
            empty_cells=limits.n_ctx - used,
            before=before,
            measured=measured,
            ahead=computing is not None,
            memory=memory,
        )

    def _asked(self, state: SchedulerState) -> tuple[SchedulerState, Plan]:
        """Return the state with what the policy makes of it."""
        if not state.sequences:
            return state, Plan(memory=state.memory)
        plan = self._policy(state)
        check_plan(state, plan)
        return state, plan

    def _advance(self, plan: Plan) -> None:
        running = self.registry.running
        for item in plan.items:
            running[item.key].computed += item.n_tokens

    def _sample(self, rows: tuple[Sequence, ...], now: float) -> dict[int, float]:
        """Draw one token for each sequence whose row came back, and say so; return their gaps."""
        gaps: dict[int, float] = {}
        if not rows:
            return gaps
        tokens = choose(self._backend.logits(len(rows)), [sequence.sampler for sequence in rows])
        for sequence, token in zip(rows, tokens, strict=True):
            if token == NOT_FINITE:
                self.registry.end(sequence, "error", now, code="E_RUNTIME_003", message=_NOT_FINITE)
                continue
            gap_s = self.registry.sampled(sequence, token, now)
            if gap_s is not None:
                gaps[sequence.handle] = gap_s
        return gaps
