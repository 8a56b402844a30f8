"""The tick: drain, snapshot, plan, batch, decode, sample, commit, publish.

The engine owns the backend, the sequences and the KV cache, and runs on one thread. It does not
know sockets, clients or trio: requests arrive through the inbox, and all results leave through the
publisher. A tick has three parts, :meth:`Engine.next_tick`, :meth:`Engine.compute` and
:meth:`Engine.finish`, so that a test can advance virtual time between them.

The time between two decodes is lost for computing, so as little as possible happens there. On a CPU the decode needs the
engine's thread and all cores; a tick is planned from what is so, never from a prediction, and published last before the
next decode, so that the thread that was just woken writes the tokens meanwhile::

    engine    commit 1, plan 2 | publish 1, decode 2 | sample 2 | commit 2, plan 3 | publish 2, decode 3 | ...
    trio                         ...writes tokens of 1...                            ...of 2...

A GPU computes without the host::

    GPU       | decode 2                         |          | decode 3                         |
    engine    | commit 1, publish 1, prepare 3   | sample 2 | commit 2, publish 2, prepare 4   | sample 3

Tick 3 is prepared from the predicted state: every sequence of tick 2 one token further. It lacks only the tokens of
tick 2, which are written into its batch when they are sampled. If something else happened meanwhile (a request
came, an answer ended, a draft is likely), the order of a CPU is kept for this once: commit 2, plan 3.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from attrs import evolve

from uma_trio.backend.base import Backend, DecodeStatus
from uma_trio.engine import tick_metrics
from uma_trio.engine.cells import Cells, ModelDisk, PageStore
from uma_trio.engine.chunk import Outcome, Tick, TickResult, ends_prompt, outcomes
from uma_trio.engine.drafts import Drafting, Feeding, drafter_for
from uma_trio.engine.first_tokens import FirstTokenBook
from uma_trio.engine.idle import Refining
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.intake import Handler, SlotAdmission
from uma_trio.engine.kv.works import works_of
from uma_trio.engine.messages import Cancel, Finished, InboxMessage, Submit
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings, Planner
from uma_trio.engine.publisher import FAILED_AT, FAILED_CODE, Publisher, TickFigures
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.recovery import Recovery
from uma_trio.engine.registry import Registry
from uma_trio.engine.sampling import AT_ONCE, Masks
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.tick_abort import GIVEN_UP, TickAbort
from uma_trio.engine.tick_metrics import PolicyFailures
from uma_trio.machine.background import Background, BackgroundScheduler, Charges, Load
from uma_trio.machine.work import Claim, Grant, Work
from uma_trio.observe import log
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.abort import abortable
from uma_trio.policy.check import Fallback
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.state import Memory, SchedulerState


class Engine:
    """Continuous batching over one backend.

    `clock` gives seconds; the engine uses no other clock. `drafter` replaces the drafter that looks
    up texts. `store` has the saved prefixes of an earlier engine of the same model, `disk` those in files, and `scheduler`
    gives the background work of all models its time. All methods except :meth:`fail_all` and :meth:`close` are called on
    the compute thread.
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
        scheduler: BackgroundScheduler | None = None,
        disk: ModelDisk | None = None,
    ) -> None:
        self._backend = backend
        self.inbox = self._inbox = inbox
        self._metrics, self._clock = metrics, clock
        settings, policy = settings or EngineSettings(), Fallback(policy, PolicyFailures(metrics))
        self._recorder = recorder = recorder or Recorder()
        charges = Charges()
        self._scheduler = scheduler or BackgroundScheduler(clock)
        self.cells = Cells(
            backend,
            clock,
            recorder.began,
            scratch=settings.scratch_slots > 0,
            keeps_high_water=settings.keeps_high_water,
            prefix_bytes=settings.prefix_bytes,
            session_ttl_s=settings.session_ttl_s,
            copying=settings.copying,
            charges=charges,
            store=store,
            disk=disk,
            until_others_s=self._scheduler.until_others_s,
        )
        contract = self._contract = settings.contract
        self._publisher = Publisher(
            outlet, metrics, contract.startup_s, self._stream_failed, self._ended
        )
        self.registry = Registry(
            cells=self.cells,
            inbox=inbox,
            publisher=self._publisher,
            metrics=metrics,
            recorder=recorder,
            clock=clock,
            first_tokens=FirstTokenBook(backend.limits.n_batch, contract.newcomer_tokens),
            readers_s=readers_s,
        )
        self._recovery = Recovery(backend.limits.n_batch, self.registry)
        self._admission = SlotAdmission(self.registry, self._recovery, contract)
        self._abort = abort = TickAbort(backend.arm, inbox, clock)
        self._planner = Planner(
            backend=backend,
            policy=policy,
            registry=self.registry,
            recovery=self._recovery,
            settings=settings,
            masks=masks,
            in_debt=lambda: abort.in_debt,
        )
        if settings.cost is not None:
            metrics.cost_measured(settings.cost)
        self._drafter = drafter_for(backend.limits, drafter, wanted=_guesses_pay(settings))
        self._handler = Handler(
            backend=backend,
            registry=self.registry,
            publisher=self._publisher,
            recorder=recorder,
            planner=self._planner,
            drafter=self._drafter,
        )
        self.refining = Refining(
            backend=backend,
            inbox=inbox,
            planner=self._planner,
            registry=self.registry,
            metrics=metrics,
            clock=clock,
        )
        self._feeding = Feeding(
            self._drafter,
            charges,
            clock,
            lambda: backend.traits.overlaps,
            self.registry.running,
        )
        works = (*works_of(self.cells.prefix, self.registry), self._feeding, self.refining)
        self.background = Background(works, charges, self._planner.charge)
        self._arrived: deque[InboxMessage] = deque()  # what is not handled yet
        self._uncommitted: TickResult | None = None
        self._decode_began = self._decode_ended = clock()
        self._idle, self._first_token_pending = True, False
        self._grant = Grant()
        # A tick that is computed in parts, what was claimed for it, and when its latest part ended.
        self._begun: Tick | None = None
        self._claimed = Claim()
        self._stopped_at = self._paused_s = 0.0

    @property
    def memory(self) -> Memory:
        """The policy's memory: the cost model, the shares, the counters."""
        return self._planner.memory

    #: Seconds between two claims of an engine without work: some conditions only depend on time.
    rest_s = 0.1

    @property
    def can_stop(self) -> bool:
        return self._backend.traits.longest_part < 1

    @property
    def running(self) -> Mapping[int, object]:
        return self.registry.running

    @property
    def delayed_by(self) -> Work | None:
        return self.registry.delayed_by

    @delayed_by.setter
    def delayed_by(self, work: Work | None) -> None:
        self.registry.delayed_by = work

    @property
    def is_called(self) -> bool:
        return self.inbox.is_rung

    def close(self) -> None:
        self.inbox.close()

    def claim(self, now: float) -> Claim:
        self.inbox.is_rung = False
        if self._begun is not None:
            left_s = self._begun.plan.predicted_s - self._computed_s
            return evolve(self._claimed, has_work=True, takes_s=left_s, wants_s=0.0)
        self._arrived += self._inbox.drain()
        self._commit()
        self._take_in(now)
        found = self._planner.claim(now)
        if self.cells.blocked:
            # What those wait for is done between ticks.
            least_s = max(found.least_s, self.cells.next_restore_s)
            found = evolve(found, has_work=True, least_s=least_s)
        return found

    def advance(self, grant: Grant) -> bool:
        self.inbox.is_rung = False
        self._grant = grant
        tick = self._begun
        if tick is None:
            self._planner.limit(grant.most_s)
            if grant.is_resumed:
                self._idle = True
            tick = self.next_tick()
            if tick is None:
                return self.cells.next_restore_s > 0
            if not (grant.is_shared and self.can_stop):
                self.finish(tick, self.compute(tick))
                return True
            self._begin(tick)
        else:
            paused_s = self._clock() - self._stopped_at
            self._paused_s += paused_s
            self._abort.resume(paused_s)
        most_s = min(grant.most_s, grant.turn_s)
        status = self._backend.advance_decode(most_s, self._is_wanted)
        self._stopped_at = self._clock()
        if status is None:
            return True
        self._begun = None
        self._abort.end(status)
        self.finish(tick, status)
        return True

    def interrupt(self) -> None:
        self._idle = True

    def tick(self) -> bool:
        """Compute a whole tick, as if there were no other model.

        Returns False if there was nothing to compute, and no page is to be restored; then all results are published.
        """
        grant = self._grant
        if grant.is_shared or grant.is_resumed:
            grant = evolve(grant, is_shared=False, is_resumed=False)
        return self.advance(grant)

    def next_tick(self) -> Tick | None:
        """Handle the inbox, plan, and fill the batch.

        Returns None if there is nothing to compute; then all results are published.
        """
        began = self._clock()
        self._arrived += self._inbox.drain()
        tick = self._take_prepared() if self._backend.traits.overlaps else None
        if tick is None:
            self._commit()
            self._take_in(began)
            self._do_background()
            self._drafter.propose(self.registry.running)
            tick = self._planner.plan(began)
        else:
            self._do_background()
        # A client whose answer has ended is notified during the next decode, and may send another request.
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
        """Compute a tick as a whole: its only long part, and the only one that may be aborted."""
        self._decode_begins()
        may_abort = abortable(tick.state, tick.plan, self.cells.free_slots)
        self._abort.begin(may_abort, self._decode_began)
        status = self._backend.decode(tick.n_tokens, partial(self._while_computing, tick))
        self._abort.end(status)
        return status

    def _begin(self, tick: Tick) -> None:
        self._begun, self._claimed = tick, self._planner.claim(self._clock())
        self._decode_begins()
        may_abort = abortable(tick.state, tick.plan, self.cells.free_slots)
        self._abort.begin(may_abort, self._decode_began, stops=True)
        self._backend.begin_decode(
            tick.n_tokens,
            partial(self._while_computing, tick),
            predicted_s=tick.plan.predicted_s,
        )

    def _is_wanted(self) -> bool:
        return self._inbox.bell.rang

    def _decode_begins(self) -> None:
        self._decode_began, self._paused_s = self._clock(), 0.0

    @property
    def _computed_s(self) -> float:
        return self._stopped_at - self._decode_began - self._paused_s

    def _while_computing(self, tick: Tick) -> None:
        if self._backend.traits.overlaps:
            self._commit(computing=True)
            self._publish()
            self._planner.foresee_masks(tick, elsewhere=False)
            self._planner.prepare(tick, self._decode_began)
            self._feeding.take_in_all()
        else:
            self._publish()
            self._planner.foresee_masks(tick, elsewhere=True)
            self._decode_began = self._clock()  # publishing is no part of the decode

    def finish(self, tick: Tick, status: int) -> TickResult | None:
        """Sample a token for each row of logits; return the completed tick, or None if it failed.

        It is committed with the next tick.
        """
        now = self._clock()
        decode_s = now - self._decode_began - self._paused_s
        # What passed while there was nothing to do is no request's cost.
        between_s = self._decode_began - self._decode_ended - self.background.spent_s
        after_idle = self._idle
        host_s = 0.0 if after_idle else max(0.0, between_s)
        self.background.spent_s = 0.0
        self._idle, self._decode_ended = False, now
        if tick.plan.ballast:
            self.cells.clear_scratch()
        if status != DecodeStatus.OK:
            self._failed(tick, status, decode_s, host_s, now)
            return None
        self._recovery.succeeded()
        sampled, scores = tick.read(self._backend.logits)
        results = outcomes(tick.chunks, sampled, scores)
        self._first_token_pending = ends_prompt(results)
        sampling_s = self._clock() - now
        self._uncommitted = TickResult(
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
            if isinstance(submit, Submit) and not self.registry.has(submit.handle):
                self.registry.refuse(submit, now, code, message)
        self._arrived.clear()
        self.registry.fail_all(code, message, now)
        self.publish()

    def _take_in(self, now: float) -> None:
        while self._arrived:  # one that raises stays, for `fail_all`
            self._handler.handle(self._arrived[0], now)
            self._arrived.popleft()
        self.registry.first_tokens.memory = self.memory
        self._admission.admit(now)
        self._recorder.queued(self.cells, self.registry.running)

    def _take_prepared(self) -> Tick | None:
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

    def _publish(self) -> None:
        self._publisher.publish()
        tick_metrics.publish_load(self._metrics, self.registry)

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
        self._admission.charge(
            completed, [(sequence, outcome.chunk) for sequence, outcome in pairs]
        )
        if self._grant.leads:
            # Shown evenly: what a tick waits less than it may for other models is a lead, and not lost.
            paces = self._planner.steps(now)
        itl_s = self.registry.commit(outcomes, now, paces, playout_s, computing=computing)
        for sequence, outcome in pairs:
            self._drafter.learn(sequence, outcome)
        self._planner.learn(completed, itl_s, disturbed=self._grant.disturbed)
        self.cells.tick(tick.n_tokens, self.memory.cost)
        self._metrics.measured["overlap_active"] = int(self._backend.traits.overlaps)
        self._publisher.add(
            TickFigures(partial(tick_metrics.record, self._metrics, completed, itl_s))
        )
        for message in completed.messages:
            self._handler.handle(message, now)

    def _failed(self, tick: Tick, status: int, decode_s: float, host_s: float, now: float) -> None:
        self._planner.tried()
        self._record(tick, status, decode_s, host_s, now)
        if self._abort.was_aborted:
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
        log.get("engine").error(FAILED_AT, request=handle, exc_info=error)
        # By the inbox, since the tick that is being computed may have its next token.
        self._inbox.put(Cancel(handle, FAILED_CODE, FAILED_AT))

    def _ended(self, sequence: Sequence, finished: Finished) -> None:
        if finished.reason in ("stop", "length"):
            self._drafter.keep(sequence)

    def _do_background(self) -> None:
        running = self.registry.running
        pending, self._first_token_pending = self._first_token_pending, False
        if pending:
            return  # it would delay a first token, which the next decode publishes
        self.cells.settle(running)
        self._scheduler.between_ticks(self.background, self._load if running else None)
        if self._grant.most_s < math.inf:
            most_s = self._scheduler.others_at - self._clock()
            self._planner.limit(min(self._grant.most_s, most_s))

    def _load(self) -> Load:
        running = self.registry.running.values()
        views = [s.view for s in running if s.lane == "interactive" and s.credit > 0]
        alone = len(self.cells.blocked) >= len(running)
        return Load(
            tick_s=self._decode_ended - self._decode_began - self._paused_s,
            spare_s=self._planner.spare_s(self._clock()),
            pace_s=self._contract.reading_pace_s,
            is_read=any(view.protected for view in views) and not alone,
            has_people=len(views) > 0,
            has_others=any(not sequence.view.protected for sequence in running),
        )


def _is_contended(state: SchedulerState) -> bool:
    return bool(state.best_effort) or state.before.contended


def _guesses_pay(settings: EngineSettings) -> bool:
    """Whether drafts may pay: without a cost model the value of a row is unknown.

    Where graphs are captured a change of shape costs more than guesses give.
    """
    cost = settings.cost
    return settings.drafts and cost is not None and not cost.recapture_s
