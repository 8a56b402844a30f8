"""Every request inside the engine, from the queue to its one terminal item.

The registry moves sequences between *waiting* and *running*, keeps the ledger and the backend's
KV cache in step with that, and is the only place that ends a request: whoever is in here gets
exactly one :class:`Finished`, and its slot and cells are free before the next plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from uma_trio.backend.base import Backend
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.ledger import KvLedger
from uma_trio.engine.messages import (
    Finished,
    FinishReason,
    PromptDone,
    SequenceReport,
    TokenOut,
)
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.sequences import NO_SLOT, Sequence
from uma_trio.policy.state import AdmissionState, Lane
from uma_trio.telemetry.metrics import Metrics

FIRST_FEW = 5


class Registry:
    """The requests of one engine. `waiting` and `running` are read by the loop, not changed.

    `captured` says that ticks are slow after the KV cache shrank.
    """

    def __init__(
        self,
        backend: Backend,
        inbox: Inbox,
        outlet: Outlet,
        metrics: Metrics,
        clock: Callable[[], float],
        n_slots: int,
        recorder: Recorder,
        young_s: float,
        *,
        captured: bool = False,
    ) -> None:
        self._backend = backend
        self._inbox = inbox
        self._outlet = outlet
        self._metrics = metrics
        self._clock = clock
        self._recorder = recorder
        self._young_s = young_s
        self._vacate = backend.kv_retire if captured else backend.kv_remove
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.ledger = KvLedger(n_slots, backend.limits.n_ctx)
        self._unsaid: list[tuple[Sequence, int, float | None, float]] = []  # a tick's tokens
        self._declined = False  # admission took nobody, and nothing has happened since

    def enqueue(self, sequence: Sequence) -> None:
        """Put a new request into the queue."""
        self._declined = False
        self.waiting[sequence.handle] = sequence
        self._recorder.submitted(sequence)

    def admit(self, keys: Collection[int], now: float) -> None:
        """Give each that admission took a slot; note who was passed over by a later arrival."""
        self._declined = not keys
        for key in keys:
            sequence = self.waiting.pop(key)
            sequence.reserved = sequence.cells
            sequence.slot = self.ledger.take(key, sequence.reserved)
            if sequence.admitted is None:
                sequence.admitted = now
                self._inbox.left_queue(now - sequence.submit.submitted)
            self.running[key] = sequence
            self._recorder.admitted(key, now)
            for other in self.waiting.values():
                if other.submit.submitted < sequence.submit.submitted:
                    other.passed_over += 1

    @property
    def crowded(self) -> bool:
        """Whether a person waits for a place while background requests have theirs."""
        held = any(sequence.lane == "background" for sequence in self.running.values())
        return held and any(sequence.lane == "interactive" for sequence in self.waiting.values())

    @property
    def to_be_asked(self) -> bool:
        """Whether somebody waits who might get a place.

        Tokens only take room, so where nobody was taken nobody will be until something else happens;
        where somebody was, others were passed over once more, and may be next by that. Whether a
        background request may give its place to a person does change with its tokens.
        """
        if not self.waiting:
            return False
        return (self.ledger.free_slots > 0 and not self._declined) or self.crowded

    def admission(self) -> AdmissionState:
        """Return what admission may see."""
        return AdmissionState(
            waiting=tuple(sequence.waiting() for sequence in self.waiting.values()),
            running=tuple(sequence.holder() for sequence in self.running.values()),
            free_slots=self.ledger.free_slots,
            free_cells=self.ledger.free_cells,
        )

    def give_credit(self, handle: int, n: int) -> None:
        """Note that a stream has room for `n` more tokens."""
        sequence = self.running.get(handle) or self.waiting.get(handle)
        if sequence is not None:
            if sequence.credit <= 0:
                sequence.last_token = None  # the pause was its reader's: no gap of ours
                self._recorder.resumed(handle, self._clock())
            sequence.credit += n

    def set_lane(self, handle: int, lane: Lane) -> None:
        """Move a request, waiting or running, to the other lane."""
        sequence = self.running.get(handle) or self.waiting.get(handle)
        if sequence is None:
            return
        self._declined = False
        sequence.lane = lane
        if sequence.slot != NO_SLOT:
            self._reserve(sequence, sequence.cells)

    def sampled(self, sequence: Sequence, token: int, now: float) -> float | None:
        """Take one sampled token, and end the request if this was the last.

        Returns how many seconds it came after the one before; None if it was the first, or none.

        What there is to say of it waits for :meth:`say`: on a GPU the next decode does not.
        """
        if sequence.first_token is None:
            sequence.first_token = now
            self._outlet.emit(sequence.submit.sink, PromptDone(now))
            waited = now - sequence.submit.submitted
            self._metrics.first_token(waited)
            self._metrics.promise.compare("ttft", waited, sequence.submit.targets.ttft_s)
        if token in self._backend.vocabulary.end_tokens and not sequence.submit.params.ignore_eos:
            self.end(sequence, "stop", now)
            return None
        gap_s = None if sequence.last_token is None else now - sequence.last_token
        sequence.last_token = now
        sequence.forgiven = sequence.passed_over
        sequence.append(token)
        sequence.credit -= 1
        if sequence.credit <= 0:
            self._recorder.parked(sequence.handle, now)
        if sequence.known > sequence.reserved:
            self._reserve(sequence, sequence.known)
        self._unsaid.append((sequence, token, gap_s, now))
        if sequence.submit.stop:
            self.say()  # only its text tells whether it has ended
        if sequence.text.stopped:
            self.end(sequence, "stop", now)
        elif sequence.n_generated >= sequence.submit.max_tokens:
            self.end(sequence, "length", now)
        return gap_s

    def say(self) -> None:
        """Tell streams and figures of the tokens of the latest tick, where that is still to do.

        To be called before the next tick is finished; whatever ends a request does it first.
        """
        unsaid, self._unsaid = self._unsaid, []
        for sequence, token, gap_s, now in unsaid:
            if gap_s is not None:
                self._metrics.gap(gap_s, sequence.lane)
                self._metrics.promise.compare("tbt", gap_s, sequence.submit.targets.gap_s)
                if sequence.lane == "interactive":
                    self._note_youth(sequence, gap_s, now)
            self._recorder.sampled(sequence.handle, gap_s)
            text = sequence.text.push(token)
            self._outlet.emit(sequence.submit.sink, TokenOut(token, text))

    def _note_youth(self, sequence: Sequence, gap_s: float, now: float) -> None:
        """Record the worst pause of its youth once that is over, and the fifth token."""
        if sequence.n_generated == FIRST_FEW:
            self._metrics.promise.first_five(now - sequence.submit.submitted)
        if sequence.worst_young_s is None or sequence.first_token is None:
            return
        began = now - gap_s  # a stall that began while it was young counts whole
        if began - sequence.first_token <= self._young_s:
            sequence.worst_young_s = max(sequence.worst_young_s, gap_s)
        else:
            self._metrics.promise.young_pause(sequence.worst_young_s)
            sequence.worst_young_s = None

    def preempt(self, handle: int, reason: str) -> None:
        """Take the slot and the cells of a running sequence; it goes back to the queue.

        Nothing it generated is lost: it is computed again, and its stream only pauses.
        """
        self.say()
        sequence = self.running.pop(handle)
        self._drop(sequence)
        sequence.preempted = True
        sequence.computed = 0
        self.waiting[handle] = sequence
        self._recorder.preempted(handle, self._clock(), reason)
        self._metrics.preempted()

    def abort(self, handle: int, now: float, code: str | None, message: str | None) -> None:
        """End a request from outside; one that is unknown has ended already."""
        sequence = self.running.get(handle) or self.waiting.get(handle)
        if sequence is not None:
            reason: FinishReason = "cancelled" if code is None else "error"
            self.end(sequence, reason, now, code=code, message=message)

    def fail_all(self, code: str, message: str, now: float) -> None:
        """End everything with an error, without touching the backend."""
        self.say()
        for sequence in [*self.running.values(), *self.waiting.values()]:
            sequence.slot = NO_SLOT
            self._say_finished(sequence, "error", now, code, message)
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
        """End one request: free what it holds, and emit its terminal item."""
        self.say()
        if self.running.pop(sequence.handle, None) is not None:
            self._drop(sequence)
        elif self.waiting.pop(sequence.handle, None) is not None:
            self._declined = False
            if sequence.admitted is None:
                self._inbox.left_queue(now - sequence.submit.submitted)
        if sequence.worst_young_s:  # it did not live to grow old
            self._metrics.promise.young_pause(sequence.worst_young_s)
        self._say_finished(sequence, reason, now, code, message)

    def reports(self, now: float) -> tuple[SequenceReport, ...]:
        """Describe every request, running ones first."""
        return tuple(s.report(now) for s in [*self.running.values(), *self.waiting.values()])

    def _drop(self, sequence: Sequence) -> None:
        slot = self.ledger.release(sequence.handle)
        self._vacate(slot)
        self._declined = False
        sequence.slot = NO_SLOT
        sequence.reserved = 0

    def _reserve(self, sequence: Sequence, cells: int) -> None:
        sequence.reserved = cells
        self.ledger.reserve(sequence.handle, cells)

    def _say_finished(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        code: str | None,
        message: str | None,
    ) -> None:
        submitted = sequence.submit.submitted
        admitted = sequence.admitted if sequence.admitted is not None else now
        ttft = None if sequence.first_token is None else sequence.first_token - submitted
        self._outlet.emit(
            sequence.submit.sink,
            Finished(
                reason=reason,
                text=sequence.text.finish(),
                prompt_tokens=sequence.n_prompt,
                completion_tokens=sequence.n_generated,
                cached_tokens=0,
                queue_s=admitted - submitted,
                ttft_s=ttft,
                total_s=now - submitted,
                code=code,
                message=message,
            ),
        )
        self._recorder.ended(sequence, reason, now, code)
        self._metrics.finished(reason if code is None else code, admitted - submitted)
