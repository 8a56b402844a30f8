"""The tick: drain, snapshot, plan, batch, decode, sample, commit, publish.

The engine owns the backend, the sequences and the KV cache, and runs on one thread. It does not
know sockets, clients or trio: requests arrive through the inbox, and all results leave through the
publisher. A tick has three parts, :meth:`Engine.next_tick`, :meth:`Engine.compute` and
:meth:`Engine.finish`, so that a test can advance virtual time between them.

The time between two decodes is lost for computing, so as little as possible happens there. What
happens when, on a CPU and on a GPU, is spelled out in :mod:`uma_trio.engine.orders`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from attrs import evolve

from uma_trio.backend.base import Backend, DecodeStatus
from uma_trio.engine import tick_metrics
from uma_trio.engine.cells import Cells, ModelDisk, PageStore
from uma_trio.engine.chunk import Completed, Outcome, Tick, ends_prompt, outcomes
from uma_trio.engine.drafts import Drafting, Feeding, drafter_for
from uma_trio.engine.first_tokens import FirstTokenBook
from uma_trio.engine.handler import Handler
from uma_trio.engine.idle import Refining
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.kv.works import works_of
from uma_trio.engine.messages import Cancel, Finished, InboxMessage, Submit
from uma_trio.engine.orders import Order, Overlapped, Serial, TickParts
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.places import Places
from uma_trio.engine.planner import EngineSettings, Planner
from uma_trio.engine.policy_failures import PolicyFailures
from uma_trio.engine.publisher import FAILED_AT, FAILED_CODE, Publisher, TickFigures
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.recovery import Recovery
from uma_trio.engine.registry import Registry
from uma_trio.engine.sampling import AT_ONCE, Masks
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.side import QUICK_S, Desk, Ledger, SavingBudget
from uma_trio.engine.tick_abort import GIVEN_UP, TickAbort
from uma_trio.engine.turn import TickClaim
from uma_trio.observe import log
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.abort import abortable
from uma_trio.policy.check import Fallback
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.state import Memory, SchedulerState


class Engine:
    """Continuous batching over one backend.

    `clock` gives seconds; the engine uses no other clock. `drafter` replaces the drafter that looks
    up texts. `store` has the saved prefixes of an earlier engine of the same model, `disk` those in files, and `saving_budget` is that of all
    engines. All methods except :meth:`fail_all` are called on the engine's thread.
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
        drafter: Drafting | None = None,
        masks: Masks = AT_ONCE,
        readers_s: Callable[[], float] | None = None,
        store: PageStore | None = None,
        saving_budget: SavingBudget | None = None,
        disk: ModelDisk | None = None,
    ) -> None:
        self._backend = backend
        self.inbox = self._inbox = inbox
        self._metrics, self._clock = metrics, clock
        settings, policy = settings or EngineSettings(), Fallback(policy, PolicyFailures(metrics))
        self._recorder = recorder = recorder or Recorder()
        ledger = Ledger()
        self.cells = _cells(backend, settings, clock, recorder, ledger, store, disk)
        contract = settings.contract
        self._publisher = Publisher(
            *(outlet, metrics, contract.startup_s, self._stream_failed, self._ended)
        )
        self.registry = Registry(
            *(self.cells, inbox, self._publisher, metrics, recorder, clock),
            *(FirstTokenBook(backend.limits.n_batch, contract.newcomer_tokens), readers_s),
        )
        self._recovery = Recovery(backend.limits.n_batch, self.registry)
        self._places = Places(self.registry, self._recovery, contract)
        self._abort = abort = TickAbort(backend.arm, inbox.watch, clock)
        self._planner = Planner(
            *(backend, policy, self.registry, self._recovery, settings, masks),
            in_debt=lambda: abort.in_debt,
        )
        if settings.cost is not None:
            metrics.promise.measured(settings.cost)
        self._drafter = drafter_for(backend.limits, drafter, wanted=_guesses_pay(settings))
        self._handler = Handler(
            *(backend, self.registry, self._publisher, recorder, self._planner, self._drafter)
        )
        self.side = self._desk(ledger, contract.reading_pace_s, saving_budget or SavingBudget())
        self._arrived: deque[InboxMessage] = deque()  # what is not handled yet
        self._uncommitted: Completed | None = None
        self._decode_began = self._decode_ended = clock()
        # The second: whether the latest tick gave a first token.
        self._idle, self._untold, self._paused_s = True, False, 0.0
        self._leads = self._disturbed = False
        self._serial = Serial(self._parts())
        self._overlapped = Overlapped(self._serial.do, unforeseen=self._serial)
        #: Called in pauses of a tick, where the backend has any, with the seconds that are left of it.
        self.paused: Callable[[float], object] | None = None

    @property
    def memory(self) -> Memory:
        """The policy's memory: the cost model, the shares, the counters."""
        return self._planner.memory

    #: Who has nothing to compute is asked again after so long at the latest: some of what it waits for only needs time.
    rest_s = 0.1

    @property
    def pauses(self) -> bool:
        """Whether the ticks of others can be computed within its own."""
        return self._backend.traits.longest_part < 1

    def tick(self) -> bool:
        """Run one tick.

        Returns False if there was nothing to compute; then all results are published.
        """
        tick = self.next_tick()
        if tick is None:
            return False
        self.finish(tick, self.compute(tick))
        return True

    def claim(self, now: float) -> TickClaim:
        """Take in what has arrived, and return what is to be computed: another model may come first."""
        self._arrived += self._inbox.drain()
        self._commit()
        self._take_in(now)
        found = self._planner.claim(now)
        # What those that are blocked wait for is done between ticks.
        return evolve(found, works=True) if self.cells.blocked else found

    def limit(self, seconds: float, *, leads: bool, disturbed: bool = False) -> None:
        """Let the next tick take at most so long, as far as its size decides that: another model has readers.

        If this one `leads`, its tokens are shown a step apart, for what others compute between them. If it is `disturbed`,
        another thread of this process makes its ticks longer for a while.
        """
        self._leads, self._disturbed = leads, disturbed
        self._planner.limit(seconds)

    def interrupted(self) -> None:
        """Note that another model was computed since the latest tick: what passed says nothing of this one."""
        self._idle = True

    def aside(self) -> bool:
        """Do a little side work where no tick is to be computed; False if there is none that is quick."""
        return self.side.while_idle(QUICK_S) is not None

    def while_idle(self) -> float | None:
        """Do side work while nothing is computed; return how long to be idle before the next, None if there is none."""
        return self.side.while_idle()

    def next_tick(self) -> Tick | None:
        """Handle the inbox, plan, and fill the batch.

        Returns None if there is nothing to compute; then all results are published.
        """
        began = self._clock()
        self._arrived += self._inbox.drain()
        tick = self._order.next_tick(began)
        # Whoever had the last answer hears of it during the next decode, and may ask again.
        self.cells.lower_mark(others=tick is not None and _is_contended(tick.state))
        if tick is None:
            self.publish()
            self._idle = True
        else:
            running = self.registry.running
            slots = [running[chunk.key].slot for chunk in tick.chunks]
            self.cells.make_room(slots, tick.n_tokens)
        return tick

    def compute(self, tick: Tick) -> int:
        """Run the backend: the only long part of a tick, and the only one that may be aborted."""
        self._decode_began, self._paused_s = self._clock(), 0.0
        may_abort = abortable(tick.state, tick.plan, self.cells.free_slots)
        self._abort.begin(may_abort, self._decode_began)
        if self.paused is not None and self.pauses:
            self._backend.let_pause(partial(self._pause, tick, self.paused), tick.plan.predicted_s)
        status = self._backend.decode(tick.n_tokens, lambda: self._order.beside(tick))
        self._abort.end(status)
        return status

    def finish(self, tick: Tick, status: int) -> Completed | None:
        """Sample a token for each row of logits; return the completed tick, or None if it failed.

        It is committed with the next tick.
        """
        now = self._clock()
        decode_s = now - self._decode_began - self._paused_s
        # What passed while there was nothing to do is nobody's cost.
        between_s = self._decode_began - self._decode_ended - self.side.spent_s
        after_idle = self._idle
        host_s = 0.0 if after_idle else max(0.0, between_s)
        self.side.spent_s = 0.0
        self._idle, self._decode_ended = False, now
        if tick.plan.ballast:
            self.cells.clear_scratch()
        if status != DecodeStatus.OK:
            self._failed(tick, status, decode_s, host_s, now)
            return None
        self._recovery.succeeded()
        sampled, scores = tick.read(self._backend.logits)
        results = outcomes(tick.chunks, sampled, scores)
        self._untold = ends_prompt(results)
        sampling_s = self._clock() - now
        self._uncommitted = Completed(
            tick,
            results,
            now,
            decode_s,
            host_s,
            sampling_s,
            sampled.masks_s,
            after_idle=after_idle,
        )
        return self._uncommitted

    def publish(self) -> None:
        """Commit the pending outcomes, then publish all results, in order.

        Outside of a decode this call costs the prepared tick its head start, and has no other
        effect.
        """
        self._commit()
        self._publish()

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error, after the engine's thread has ended.

        Tokens that were sampled are published first, if possible. The backend is not touched: if a
        decode began before the commit of the previous tick, no request ends by that commit.
        """
        now = self._clock()
        try:
            self._commit()
        except Exception as error:
            log.get("engine").error("the last tick is lost", exc_info=error)
        self._arrived += self._inbox.drain()
        for submit in self._arrived:
            if isinstance(submit, Submit) and not self.registry.knows(submit.handle):
                self.registry.refuse(submit, now, code, message)
        self._arrived.clear()
        self.registry.fail_all(code, message, now)
        self.publish()

    @property
    def _order(self) -> Order:
        """The order of the parts of a tick, as the backend computes now."""
        return self._overlapped if self._backend.traits.overlaps else self._serial

    def _desk(self, ledger: Ledger, reading_pace_s: float, saving_budget: SavingBudget) -> Desk:
        """Make all kinds of side work, most urgent first."""
        backend, clock, planner = self._backend, self._clock, self._planner
        self.refining = Refining(
            *(backend, self.inbox, planner, self.registry, self._metrics, clock, ledger)
        )
        self._feeding = Feeding(self._drafter, ledger, clock, lambda: backend.traits.overlaps)
        works = (*works_of(self.cells.prefix), self._feeding, self.refining)
        return Desk(
            works, ledger, planner.charge, reading_pace_s, clock, planner.spare_s, saving_budget
        )

    def _parts(self) -> TickParts:
        planner = self._planner
        return TickParts(
            commit=self._commit,
            commit_beside=partial(self._commit, computing=True),
            take_in=self._take_in,
            side_work=self._work_aside,
            plan=self._planned,
            take_prepared=self._prepared,
            prepare=self._prepare,
            publish=self._publish,
            masks_here=partial(planner.foresee_masks, elsewhere=False),
            masks_elsewhere=partial(planner.foresee_masks, elsewhere=True),
            decode_begins=self._decode_begins,
        )

    def _take_in(self, now: float) -> None:
        """Handle what has arrived, and give slots to those who wait. All outcomes must be committed."""
        while self._arrived:  # one that raises stays, for `fail_all`
            self._handler.handle(self._arrived[0], now)
            self._arrived.popleft()
        self.registry.first_tokens.memory = self.memory
        self._places.give(now)
        self._recorder.queued(self.cells, self.registry.running)

    def _planned(self, now: float) -> Tick | None:
        """Return the next tick after all that has happened; None if there is nothing to compute."""
        self._drafter.propose(self.registry.running)
        return self._planner.plan(now)

    def _prepared(self) -> Tick | None:
        """Return the prepared tick if it comes next; what has arrived is handled behind the commit before it."""
        completed = self._uncommitted
        if completed is None or not self._planner.has_prepared:
            return None
        if self._drafter.expects(completed.outcomes, self.registry.running):
            return None
        tick = self._planner.take_prepared(completed, self._arrived)
        if tick is not None:
            self._uncommitted = evolve(completed, messages=tuple(self._arrived))
            self._arrived.clear()
        return tick

    def _prepare(self, computing: Tick) -> None:
        """Prepare the tick behind the one that is `computing`, and take in texts for later guesses."""
        self._planner.prepare(computing, self._decode_began)
        self._feeding.beside(self.registry.running)

    def _publish(self) -> None:
        """Publish all results, in order."""
        self._publisher.publish()
        tick_metrics.publish_load(self._metrics, self.registry)

    def _decode_begins(self) -> None:
        self._decode_began = self._clock()  # publishing is no part of the decode

    def _pause(self, tick: Tick, paused: Callable[[float], object]) -> None:
        """Let others compute while `tick` stands still. What that takes is not its time."""
        now = self._clock()
        paused(tick.plan.predicted_s - (now - self._decode_began - self._paused_s))
        self._paused_s += self._clock() - now

    def _commit(self, *, computing: bool = False) -> None:
        """Move every sequence on by the latest tick, then handle what arrived since.

        While the next tick is `computing` no cell may be dropped: where its own lie was chosen before.
        """
        completed, self._uncommitted = self._uncommitted, None
        if completed is None:
            return
        tick, now = completed.tick, completed.at
        self._planner.tried()
        self._record(
            tick, DecodeStatus.OK, completed.decode_s, completed.host_s, now, completed.outcomes
        )
        running = self.registry.running
        paces, playout_s = tick.plan.paces, tick.state.contract.playout_s
        if paces:
            dues = tick_metrics.dues(running, completed)
            self._publisher.add(
                TickFigures(partial(tick_metrics.count_late, self._metrics, completed, dues))
            )
        outcomes = completed.outcomes
        pairs = [(running[outcome.chunk.key], outcome) for outcome in outcomes]
        self._places.charge(completed, [(sequence, outcome.chunk) for sequence, outcome in pairs])
        if self._leads:
            # Shown evenly: what a tick waits less than it may for other models is a lead, and not lost.
            paces = self._planner.steps(now)
        itl_s = self.registry.commit(outcomes, now, paces, playout_s, computing=computing)
        for sequence, outcome in pairs:
            self._drafter.learn(sequence, outcome)
        self._planner.learn(completed, itl_s, disturbed=self._disturbed)
        self.cells.tick(tick.n_tokens, self.memory.cost)
        self._publisher.add(
            TickFigures(partial(tick_metrics.record, self._metrics, completed, itl_s))
        )
        for message in completed.messages:
            self._handler.handle(message, now)

    def _failed(self, tick: Tick, status: int, decode_s: float, host_s: float, now: float) -> None:
        """Nobody moves on; decide what makes the next tick succeed."""
        self._planner.tried()
        self._record(tick, status, decode_s, host_s, now)
        if self._abort.gave_up:
            # As if it had never been: the policy learns nothing from it.
            self._recorder.recovered(GIVEN_UP)
            self._metrics.count("irregular_ticks_total", "aborted")
        else:
            views = tuple(s.view for s in self.registry.running.values())
            self._recorder.recovered(self._recovery.failed(status, tick.plan, views, now))

    def _record(
        self,
        tick: Tick,
        status: int,
        decode_s: float,
        host_s: float,
        now: float,
        outcomes: tuple[Outcome, ...] = (),
    ) -> None:
        state, plan, trace = tick.state, tick.plan, self._recorder.trace
        record = self._recorder.tick(state, plan, status, decode_s, host_s, now, outcomes)
        if trace is not None:
            self._publisher.add(TickFigures(partial(trace, state, plan, record)))

    def _stream_failed(self, handle: int, error: Exception) -> None:
        """End a request whose tokens cannot be published, before the next tick is planned."""
        log.get("engine").error(FAILED_AT, request=handle, exc_info=error)
        # By the inbox, since the tick that is being computed may have its next token.
        self._inbox.put(Cancel(handle, FAILED_CODE, FAILED_AT))

    def _ended(self, sequence: Sequence, finished: Finished) -> None:
        """Let later answers be guessed from one that is whole."""
        if finished.reason in ("stop", "length"):
            self._drafter.keep(sequence)

    def _work_aside(self) -> None:
        """Do side work as far as the streams that are read can bear it."""
        untold, self._untold = self._untold, False
        if untold:
            return  # it would delay a first token, which the next decode publishes
        tick_s = self._decode_ended - self._decode_began - self._paused_s
        self.side.between_ticks(self.registry.running, len(self.cells.blocked), tick_s)


def _is_contended(state: SchedulerState) -> bool:
    """Whether there is best-effort work, or was in the tick before."""
    return bool(state.best_effort) or state.before.contended


def _guesses_pay(settings: EngineSettings) -> bool:
    """Whether drafts may pay: without a cost model nobody knows what a row is worth.

    Where graphs are captured a change of shape costs more than guesses give.
    """
    cost = settings.cost
    return settings.drafts and cost is not None and not cost.recapture_s


def _cells(
    backend: Backend,
    settings: EngineSettings,
    clock: Callable[[], float],
    recorder: Recorder,
    ledger: Ledger,
    store: PageStore | None,
    disk: ModelDisk | None,
) -> Cells:
    return Cells(
        *(backend, clock, recorder.began),
        scratch=settings.scratch_slots > 0,
        keeps_high_water=settings.keeps_high_water,
        prefix_bytes=settings.prefix_bytes,
        session_ttl_s=settings.session_ttl_s,
        copying=settings.copying,
        ledger=ledger,
        store=store,
        disk=disk,
    )
