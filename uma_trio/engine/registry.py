"""All requests inside the engine, from the queue to their terminal items.

The registry moves sequences between *waiting* and *running* and keeps the accounting of the KV
cache consistent with that. It is the only place that ends a request: each request gets exactly one
:class:`Finished`, and its slot and cells are free before the next plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from attrs import frozen

from uma_trio.engine.cells import Cells
from uma_trio.engine.chunk import Outcome, fault_of
from uma_trio.engine.first_tokens import FirstTokenBook
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.messages import Cancel, Finished, FinishReason, Submit
from uma_trio.engine.publisher import (
    FAILED_AT,
    FAILED_CODE,
    Ending,
    Progress,
    Publisher,
    Refused,
    Scored,
)
from uma_trio.engine.recorder import AWAY, NEEDED, Recorder
from uma_trio.engine.sequences import NO_SLOT, Delivery, Sequence
from uma_trio.machine.work import Work
from uma_trio.observe import log
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.admission import is_away, preempt_for_reader
from uma_trio.policy.floor import BUCKET_S, is_spared, next_tenant
from uma_trio.policy.state import AdmissionState, Holder
from uma_trio.words import Lane

# So many prompts that wait for a slot are looked for in the cache in a tick.
SEARCHED = 16


@frozen
class _Conditions:
    """The conditions under which admission took no request.

    `candidates` are the requests that might have lost their slots, the one with the least loss first, by key, and whether
    their readers were away. Background work was `owed` a slot or not.
    """

    candidates: tuple[tuple[int, bool], ...]
    owed: bool
    free_cells: int


class Registry:
    """The requests of one engine.

    Other modules read `waiting` and `running`; only this one changes them. The machine sets `delayed_by`. `readers_s` counts the seconds in
    which readers could give credit back (:class:`uma_trio.service.loop.Presence`); without it, all are.
    """

    def __init__(
        self,
        cells: Cells,
        inbox: Inbox,
        publisher: Publisher,
        metrics: Metrics,
        recorder: Recorder,
        clock: Callable[[], float],
        first_tokens: FirstTokenBook,
        readers_s: Callable[[], float] | None = None,
    ) -> None:
        self.cells = cells
        self.first_tokens = first_tokens
        self._inbox = inbox
        self._publisher = publisher
        self._metrics = metrics
        self._recorder = recorder
        self._clock = clock
        self._readers_s = readers_s
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        #: The requests of another model that has the machine, while this one's work waits for it.
        self.delayed_by: Work | None = None
        self.bucket_s = BUCKET_S  # what background work is owed, see :mod:`uma_trio.policy.floor`
        # Where admission took no request, and nothing has happened since.
        self._declined: _Conditions | None = None
        self._broken: set[int] = set()  # requests that failed, and end once nothing is computed
        self._late: set[int] = set()  # requests whose mask was not there in time

    def has(self, handle: int) -> bool:
        """Whether a request is in the engine."""
        return handle in self.running or handle in self.waiting

    @property
    def absent(self) -> Collection[int]:
        """Requests with a slot that are left out of plans, for a restore or a mask."""
        if not self._late:
            return self.cells.blocked
        running = self.running
        self._late = {
            key for key in self._late if key in running and running[key].sampler.waits_for_mask
        }
        return {*self.cells.blocked, *self._late}

    @property
    def awaits_masks(self) -> bool:
        """Whether requests wait for masks; each finished mask wakes the engine."""
        return any(key in self.running for key in self._late)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a new request to the queue."""
        self._declined = None
        self.waiting[sequence.handle] = sequence
        self._recorder.submitted(sequence)

    def admit(self, keys: Collection[int], now: float) -> None:
        """Give each admitted request a slot; count those that a later arrival has passed."""
        for key in keys:
            sequence = self.waiting.pop(key)
            sequence.tenancy.begin()
            self.cells.admit(sequence)
            if sequence.admitted is None:
                sequence.admitted = now
                self._inbox.left_queue(now - sequence.submit.submitted)
            self.running[key] = sequence
            self._recorder.admitted(key, now)
            found = self.cells.begin(sequence, self.running)
            self.first_tokens.note(sequence, found.covered, now)
            if sequence.submit.progress and key not in self.cells.blocked:
                self._report_progress(sequence, now)
            for other in self._queued():
                if other.submit.submitted < sequence.submit.submitted:
                    other.passed_over += 1
        if keys:
            self.first_tokens.refresh(now, self.running.values(), self.waiting.values())
        self._give_tenure()
        self._declined = None if keys else self._conditions(now)

    @property
    def is_contended(self) -> bool:
        """Whether an interactive request waits for a slot while background requests have some."""
        holds = any(sequence.lane == "background" for sequence in self.running.values())
        return holds and any(sequence.lane == "interactive" for sequence in self._queued())

    def may_admit(self, now: float) -> bool:
        """Whether a request waits that might get a slot at the time `now`.

        Tokens only take room, so where no request was admitted none will be until something else happens;
        where one was, others were passed over once more, and may be next by that. Which requests may give
        their slots changes with tokens and with time: admission is tried again when these are others, or
        in another order.
        """
        if not self.waiting:
            return False
        declined = self._declined
        if declined is None and self.cells.free_slots > 0:
            return True
        found = self._conditions(now)
        if declined is None or not found.candidates:
            return len(found.candidates) > 0
        return found.free_cells > declined.free_cells or (
            (found.candidates, found.owed) != (declined.candidates, declined.owed)
        )

    def _conditions(self, now: float) -> _Conditions:
        could: list[tuple[int, int, bool]] = []
        free_cells = self.cells.free_cells
        if not any(self._queued()):
            return _Conditions((), owed=False, free_cells=free_cells)
        person = any(sequence.lane == "interactive" for sequence in self._queued())
        tenured, late = False, now >= self.first_tokens.late_from
        for holder in self._holders(now):
            tenured = tenured or holder.tenured
            away = is_away(holder)
            gives = person and holder.lane == "background" and not is_spared(holder, self.bucket_s)
            if away or gives or (late and (holder.yields or holder.due is not None)):
                could.append((holder.computed, -holder.key, away))
        order = tuple([(key, away) for _, key, away in sorted(could)])
        owed = self.bucket_s >= BUCKET_S and not tenured
        return _Conditions(order, owed=owed, free_cells=free_cells)

    def owe(self, bucket_s: float) -> None:
        """Note the machine time that background work is owed from now on."""
        if self.bucket_s < BUCKET_S <= bucket_s:
            self._declined = None  # it may be a background request's turn
        self.bucket_s = bucket_s
        self._give_tenure()

    def _give_tenure(self) -> None:
        if self.bucket_s >= BUCKET_S:
            key = next_tenant(self._background(), self.bucket_s)
            if key is not None:
                self.running[key].tenancy.tenured = True

    def _background(self) -> list[Holder]:
        running = self.running.values()
        return [sequence.holder(0.0) for sequence in running if sequence.lane == "background"]

    def note_waiting(self, now: float) -> None:
        """Note when the prompts are due that wait for a slot, and the stretch that they all have.

        What of a prompt is cached is looked for once here where not all get a slot, and of a few
        prompts at a time: others stand behind them until it is. Without a cost nothing is due.
        """
        if self.first_tokens.memory.cost is None:
            return
        free_slots, free_cells = self.cells.free_slots, self.cells.free_cells
        new = [s for s in self._queued() if s.view.first is None and s.lane == "interactive"]
        if len(self.waiting) > free_slots or sum([s.cells for s in new]) > free_cells:
            for sequence in new[:SEARCHED]:
                covered = self.cells.cached(sequence, self.running).covered
                self.first_tokens.note(sequence, covered, now)
        self.first_tokens.refresh(now, self.running.values(), self.waiting.values())

    def admission(self, now: float) -> AdmissionState:
        """Return what admission may see. A preempted request that is still parked is not in line.

        What a request would share with running ones is looked for only where it does not fit.
        """
        free_cells = self.cells.free_cells
        return AdmissionState(
            waiting=tuple(
                sequence.waiting(
                    self.first_tokens.due(sequence),
                    self.cells.shared_with(sequence, self.running)
                    if sequence.cells > free_cells
                    else 0,
                )
                for sequence in self._queued()
            ),
            running=tuple(self._holders(now)),
            free_slots=self.cells.free_slots,
            free_cells=free_cells,
            bucket_s=self.bucket_s,
            now=now,
            used_s=self.first_tokens.memory.used_s,
        )

    def give_credit(self, handle: int, n: int) -> None:
        """Note that a stream has room for `n` more tokens."""
        sequence = self.running.get(handle) or self.waiting.get(handle)
        if sequence is not None:
            parked = sequence.credit <= 0
            # A stream whose places hold what is not due yet waits for that, and not for its reader. What it
            # computes next is shown behind that: with the time since its last token unknown, all would go.
            away = parked and not sequence.holds(self._clock())
            sequence.give_credit(n, reader_was_away=away)
            if parked and sequence.credit > 0:
                self._resume(sequence)

    def lend(self, now: float) -> bool:
        """Free what requests have reserved beyond their tokens whose readers are away; return whether any was freed.

        They take it back when their readers are, or go to the queue if it is not free then.
        """
        lent, readers_s = False, self._reader_time(now)
        for sequence in self.running.values():
            spare = sequence.reserved - sequence.known
            if spare > 0 and is_away(sequence.holder(readers_s)):
                self.cells.reserve(sequence, sequence.known)
                sequence.lent, lent = spare, True
        return lent

    def set_lane(self, handle: int, lane: Lane) -> None:
        """Move a request, waiting or running, to the other lane."""
        sequence = self.running.get(handle) or self.waiting.get(handle)
        if sequence is None:
            return
        self._declined = None
        self.first_tokens.changed = True
        sequence.move_to(lane)
        self.cells.lane_set(handle)
        if sequence.slot != NO_SLOT:
            sequence.lent = 0
            self.cells.reserve(sequence, sequence.cells)

    def commit(
        self,
        outcomes: Iterable[Outcome],
        now: float,
        paces: Mapping[int, float],
        playout_s: float,
        *,
        computing: bool = False,
    ) -> dict[int, float]:
        """Move sequences on by what came of their chunks, and end those whose last token it was.

        `paces` (by key) and `playout_s` say when tokens are shown, see :meth:`Sequence.advance`.
        While the next tick is `computing` no request ends: it was prepared only because none should.
        Returns the inter-token latency of each stream that got tokens, by key and for each of
        them. What readers are to hear waits for the publisher.
        """
        itl_s: dict[int, float] = {}
        for outcome in outcomes:
            chunk = outcome.chunk
            if self._broken and chunk.key in self._broken:
                continue
            sequence = self.running[chunk.key]
            try:
                delivery = sequence.advance(outcome, now, paces.get(chunk.key, 0.0), playout_s)
            except Exception as error:  # its text or its constraint: no other request's business
                self._broke(sequence, error, now, computing=computing)
                continue
            if outcome.late:
                self._late.add(chunk.key)
                sequence.sampler.notify_of_mask(self._inbox.wake)
            # Cells of wrong drafts, of what came behind the end, and of what is computed again.
            if chunk.drafts or outcome.late:
                self.cells.truncate(sequence)
            if chunk.n_scored:
                self._publisher.add(Scored(sequence, chunk, outcome.scores))
            if outcome.tokens:
                self._give(sequence, delivery, now)
                if delivery.itl_s is not None:
                    itl_s[chunk.key] = delivery.itl_s / len(delivery.tokens)
            elif outcome.fault is not None:
                fault = fault_of(outcome.fault, sequence.sampler.constraint)
                self.end(sequence, "error", now, code=fault.code, message=fault.message)
            elif sequence.submit.progress:
                self._report_progress(sequence, now)
        return itl_s

    def _broke(self, sequence: Sequence, error: Exception, now: float, *, computing: bool) -> None:
        handle = sequence.handle
        log.get("engine").error(FAILED_AT, request=handle, exc_info=error)
        if computing:
            self._broken.add(handle)
            self._inbox.put(Cancel(handle, FAILED_CODE, FAILED_AT))
        else:
            self.end(sequence, "error", now, code=FAILED_CODE, message=FAILED_AT)

    def refuse(self, submit: Submit, now: float, code: str, message: str) -> None:
        """End a request that cannot be accepted; it holds no slot and no cells."""
        waited_s = now - submit.submitted
        self._inbox.left_queue(waited_s)
        finished = Finished(
            reason="error",
            text="",
            prompt_tokens=len(submit.prompt),
            completion_tokens=0,
            cached_tokens=0,
            queue_s=waited_s,
            ttft_s=None,
            total_s=waited_s,
            code=code,
            message=message,
        )
        self._publisher.add(Refused(submit.sink, finished))
        self._metrics.finished(code, waited_s)

    def _give(self, sequence: Sequence, delivery: Delivery, now: float) -> None:
        if delivery.first:
            self.first_tokens.changed = True
            self._declined = None  # waiting requests can share its prompt
            if sequence.submit.progress:
                self._report_progress(sequence, now)
        self._publisher.add(delivery)
        if delivery.tokens:
            view = sequence.view
            self._recorder.sampled(view.key, delivery.gap_s, delivery.held_s)
            if view.credit <= 0:
                sequence.parked_since = self._reader_time(now)
                self._recorder.parked(view.key, now)
                self._declined = None  # requests that were held back for it may be admitted
            if view.computed + view.pending > sequence.reserved:
                self.cells.reserve(sequence, sequence.known)
        if delivery.reason is not None:
            self.end(sequence, delivery.reason, now)

    def _report_progress(self, sequence: Sequence, now: float) -> None:
        for item in sequence.progress(now):
            self._publisher.add(Progress(sequence, item))

    def preempt(self, handle: int, reason: str) -> None:
        """Take the slot and the cells of a running sequence and return it to the queue.

        Its tokens are kept and computed again; its stream only pauses.
        """
        sequence = self.running.pop(handle)
        self._drop(sequence)
        if sequence.has_begun or sequence.lane == "background":
            sequence.preempted = True
            sequence.wait_for(None)
        sequence.tenancy.lose(sequence.computed)
        sequence.rewind(0)
        self.waiting[handle] = sequence
        self._recorder.preempted(handle, self._clock(), reason)
        self._metrics.preempted()

    def made_way(self, handles: Collection[int], chosen: Collection[int]) -> None:
        """Note to whom those that were just preempted have lost their places."""
        self._recorder.made_way(handles, chosen)

    def cancel(self, cancel: Cancel, now: float) -> None:
        """End a request from outside. A request that has ended is ignored."""
        sequence = self.running.get(cancel.handle) or self.waiting.get(cancel.handle)
        if sequence is not None:
            reason: FinishReason = cancel.reason if cancel.code is None else "error"
            self.end(sequence, reason, now, code=cancel.code, message=cancel.message)

    def fail_all(self, code: str, message: str, now: float) -> None:
        """End everything with an error, without touching the backend."""
        for sequence in [*self.running.values(), *self.waiting.values()]:
            sequence.slot = NO_SLOT
            self._finish(sequence, "error", now, code, message)
        self.running.clear()
        self.waiting.clear()

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        code: str | None = None,
        message: str | None = None,
    ) -> None:
        """End one request: free its slot and cells, and pass its terminal item to the publisher."""
        if self.running.pop(sequence.handle, None) is not None:
            self._drop(sequence, keep=reason != "error")
        elif self.waiting.pop(sequence.handle, None) is not None:
            self._declined = None
            if sequence.admitted is None:
                self._inbox.left_queue(now - sequence.submit.submitted)
        self._finish(sequence, reason, now, code, message)

    def _drop(self, sequence: Sequence, *, keep: bool = True) -> None:
        self.cells.release(sequence, keep=keep)
        self._declined = None
        sequence.lent = 0

    def _reader_time(self, now: float) -> float:
        return now if self._readers_s is None else self._readers_s()

    def _holders(self, now: float) -> Iterator[Holder]:
        readers_s = self._reader_time(now)
        due = self.first_tokens.due
        return (
            sequence.holder(readers_s, None if sequence.has_begun else due(sequence))
            for sequence in self.running.values()
        )

    def _queued(self) -> Iterator[Sequence]:
        return (sequence for sequence in self.waiting.values() if sequence.credit > 0)

    def _resume(self, sequence: Sequence) -> None:
        sequence.parked_since = None
        self._declined = None
        self._recorder.resumed(sequence.handle, self._clock())
        if not sequence.lent:
            return
        if sequence.lane == "interactive":
            for key in preempt_for_reader(self.admission(self._clock()), sequence.lent):
                self.preempt(key, NEEDED)
        if sequence.lent > self.cells.free_cells:
            self.preempt(sequence.handle, AWAY)
        else:
            self.cells.reserve(sequence, sequence.reserved + sequence.lent)
            sequence.lent = 0

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        code: str | None,
        message: str | None,
    ) -> None:
        self._broken.discard(sequence.handle)
        sequence.sampler.drop_mask()
        submitted, first = sequence.submit.submitted, sequence.first_token
        admitted = sequence.admitted if sequence.admitted is not None else now
        drafted, accepted = self._recorder.drafts(sequence.handle)
        finished = Finished(
            reason=reason,
            text="",
            prompt_tokens=sequence.n_prompt,
            completion_tokens=sequence.n_generated,
            cached_tokens=sequence.cached_tokens,
            queue_s=admitted - submitted,
            ttft_s=None if first is None else first - submitted,
            total_s=now - submitted,
            code=code,
            message=message,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
        )
        self.first_tokens.changed = True
        self._publisher.add(Ending(sequence, finished))
        self._recorder.ended(sequence, reason, now, code)
        self._metrics.finished(reason if code is None else code, admitted - submitted)
