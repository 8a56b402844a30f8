"""The tick: drain, snapshot, plan, batch, decode, sample, and tell beside the next decode.

The engine owns the backend, the sequences and the ledger of slots, and runs on one thread. It
knows nothing of sockets, clients or trio: requests come in through the inbox, everything that
happens to them leaves through the outlet. A tick has three steps so that a test can put virtual
time between them: :meth:`Engine.prepare`, :meth:`Engine.compute`, :meth:`Engine.finish`.

What decides the next tick is done between two decodes, and nothing else: every microsecond there
is one in which nothing is computed. Where a GPU computes, the next tick is drawn up meanwhile
(:mod:`uma_trio.engine.ahead`) for what will be if nobody comes, ends or is changed: then choosing
tokens is all that keeps it waiting, and they are booked beside it. Otherwise they are booked first,
and it is planned again if somebody is not where that said. What the outside hears of a tick (items,
figures, the trace) is told by :meth:`Engine.tell` while the next one is computed, or at once when
there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from uma_trio.backend.base import Backend, DecodeStatus
from uma_trio.engine.figures import Done, Job, publish_load, record
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
from uma_trio.engine.planner import EngineSettings, Planner
from uma_trio.engine.policy_failures import PolicyFailures
from uma_trio.engine.preemption import GIVEN_UP, Preemption
from uma_trio.engine.recorder import NEEDED, Recorder
from uma_trio.engine.recovery import Recovery
from uma_trio.engine.refine import Refinement
from uma_trio.engine.registry import Registry
from uma_trio.engine.sampling import NOT_FINITE, Sampler
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.abort import abortable
from uma_trio.policy.admission import admit, gives_place
from uma_trio.policy.fallback import Fallback
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.state import Memory
from uma_trio.telemetry.metrics import Metrics
from uma_trio.text.stream import TokenText

_NOT_FINITE = (
    "the model produced logits that are not numbers; "
    "send the request again, and check the model file if it happens again"
)


# So long a rest comes before the staircase is refined, and so long a one between two decodes of that:
# others may have waited for the processor.
IDLE_S, BREATH_S = 0.5, 0.01


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
        self._inbox = inbox
        self._metrics = metrics
        self._clock = clock
        settings = settings or EngineSettings()
        policy = Fallback(policy, PolicyFailures(metrics))
        self._pieces = backend.vocabulary.pieces()
        n_slots = backend.limits.n_slots - settings.scratch_slots
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
        self._planner = Planner(
            backend, policy, self.registry, self._recovery, settings, self._scratch_slot
        )
        self._preemption = Preemption(backend.arm, inbox.watch, clock)
        self._refinement: Refinement | None = None
        if settings.cost is not None:
            self._refinement = Refinement(backend, clock)
            metrics.promise.measured(settings.cost)
        self._unbooked: Done | None = None
        self._later: list[InboxMessage] = []  # what is to be handled once that is booked
        self._decoding_since = self._decoded_at = clock()
        self._idle = True
        self._unrecorded: list[Callable[[], None]] = []  # ticks that are not in the metrics yet

    @property
    def memory(self) -> Memory:
        """What the policy remembers: the cost model, the guard's ledger, the counters."""
        return self._planner.memory

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
        cost = self.memory.cost
        if self._refinement is None or cost is None:
            return None
        if self.registry.running:
            return IDLE_S  # who is parked holds slots: later
        interrupt = self._backend.arm()
        if interrupt is not None:
            self._inbox.watch(lambda _who: interrupt())
        try:
            refined = self._refinement.refine(cost, interruptible=interrupt is not None)
        finally:
            self._inbox.watch(None)
        if refined is None:
            return None
        self._planner.refined(refined)
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
        messages = self._inbox.drain()
        job = self._at_once(messages) or self._considered(messages, began)
        # Whoever had the last answer hears of it beside the next decode, and may ask again.
        if job is None or not (job.state.riders or job.state.before.company):
            self._backend.kv_settle()
        if job is None:
            self.tell()
            self._idle = True
        return job

    def compute(self, job: Job) -> int:
        """Run the backend; the only step that takes long, and that may be given up meanwhile.

        Beside it the tick before is told, and booked if it is not; on a GPU the next one is drawn up.
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
            self._planner.draw_up(job, self._decoding_since)

    def finish(self, job: Job, status: int) -> None:
        """Choose a token for each row; sequences move on when these are booked, which is later."""
        now = self._clock()
        decode_s = now - self._decoding_since
        # What passed while there was nothing to do is nobody's cost.
        host_s = 0.0 if self._idle else max(0.0, self._decoding_since - self._decoded_at)
        self._idle = False
        self._decoded_at = now
        if job.plan.ballast:
            self._backend.kv_remove(self._scratch_slot)
        if status == DecodeStatus.OK:
            self._recovery.succeeded()
            tokens = job.choice(self._backend.logits(len(job.rows))).tokens if job.rows else []
            choosing_s = self._clock() - now
            self._unbooked = Done(job, tokens, now, decode_s, host_s, choosing_s)
            return
        self._planner.tried()
        self._recorder.tick(job.state, job.plan, status, decode_s, host_s, now)
        if self._preemption.gave_up:
            # As if it had never been: nobody moves, and the policy learns nothing.
            self._recorder.recovered(GIVEN_UP)
            self._metrics.aborted()
        else:
            views = tuple(s.view() for s in self.registry.running.values())
            self._recorder.recovered(self._recovery.failed(status, job.plan, views, now))

    def tell(self) -> None:
        """Book what is not booked, then tell the outside what it has not heard yet, in order.

        The streams first, with one wake, then figures and the trace. Called at any other time than
        beside a decode it costs the tick that was drawn up its head start, and nothing else.
        """
        self._book()
        self.registry.say()
        self._outlet.flush()
        ticks, self._unrecorded = self._unrecorded, []
        for to_metrics in ticks:
            to_metrics()
        publish_load(self._metrics, self.registry)
        self._recorder.hand_on()

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error: the engine is gone. Its thread must have ended.

        Tokens that were chosen are told first. The backend is not touched: nobody ends by a token
        that was left unbooked when the next decode began, and all others are booked before that.
        """
        self._book()
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
        if not registry.to_be_asked:
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

    def _at_once(self, messages: list[InboxMessage]) -> Job | None:
        """Return the tick that was drawn up if it comes next; then all else is left to be booked."""
        if self._unbooked is None:
            return None
        job = self._planner.take_ahead(self._unbooked.tokens, messages)
        if job is not None:
            self._later = messages
        return job

    def _considered(self, messages: Iterable[InboxMessage], now: float) -> Job | None:
        """Return the next tick after all that has happened; None if there is nothing to compute."""
        self._book()
        for message in messages:
            self._handle(message, now)
        self._admit(now)
        self._recorder.queued(self.registry.ledger)
        return self._planner.plan(now)

    def _book(self) -> None:
        """Move everybody on by the latest tick, then handle what came since; if that is to be done."""
        done, self._unbooked = self._unbooked, None
        if done is None:
            return
        job, now, running = done.job, done.at, self.registry.running
        self._planner.tried()
        self._recorder.tick(job.state, job.plan, DecodeStatus.OK, done.decode_s, done.host_s, now)
        for item in job.plan.items:
            running[item.key].computed += item.n_tokens
        gaps: dict[int, float] = {}
        for sequence, token in zip(job.rows, done.tokens, strict=True):
            gap_s = self._sampled(sequence, token, now)
            if gap_s is not None:
                gaps[sequence.handle] = gap_s
        self._planner.learn(done, gaps)
        n_vocab = self._backend.model.n_vocab
        self._unrecorded.append(partial(record, self._metrics, done, n_vocab))
        later, self._later = self._later, []
        for message in later:
            self._handle(message, now)

    def _sampled(self, sequence: Sequence, token: int, now: float) -> float | None:
        """Take a token, or end the request if there is none; return its gap, if it has one."""
        if token != NOT_FINITE:
            return self.registry.sampled(sequence, token, now)
        self.registry.end(sequence, "error", now, code="E_RUNTIME_003", message=_NOT_FINITE)
        return None
