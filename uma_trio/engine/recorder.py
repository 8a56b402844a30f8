"""The flight recorder: the latest ticks, and a record of each request.

It is written on the engine's thread in every tick, so each write is cheap: a tick is one record that refers to the
values of the plan, and a request is a few counters. Ticks and ended requests are kept in rings.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Several

from attrs import define, evolve, field

from uma_trio.backend.base import DecodeStatus
from uma_trio.engine.cells import Cells
from uma_trio.engine.chunk import Outcome
from uma_trio.engine.sequences import Sequence
from uma_trio.observe.records import (
    Beginning,
    Drafted,
    Gap,
    Phase,
    Recorded,
    RequestRecord,
    TickRecord,
    Wait,
    explained,
)
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

TICKS, REQUESTS = 4096, 256
SHOWN = 64  # running requests, and ended ones, in an explanation of all
#: Requests that are named as a cause.
MOST_NAMED = 8
LEAST_ASIDE_S = 1e-4
LOOKED_AT = 16  # of the latest ticks, to find which requests were computed instead
DECODE_FAILED, ABORTED = "the decode failed", "its tick was given up for a newcomer"
NO_ROOM = "preempted: the KV cache had no room"
NEEDED = "preempted: an interactive request had no slot or no room"
AWAY = "preempted: its reader was away, and its room was needed"
LATE = "the mask of what it is held to was late"

Trace = Callable[[SchedulerState, Plan, TickRecord], None]
"""Receives every tick in order, on the engine's thread: it must neither wait nor raise."""


def nothing_known(_sequence: Sequence) -> None:
    """Return no reason why a request waits."""


@define(eq=False)
class _Live:
    """The record of a running request, with the state from which it is continued."""

    sequence: Sequence
    record: RequestRecord
    preempted_at: float | None = None
    preempted_why: Wait | None = None
    parked_at: float | None = None
    since: float = 0.0  # when it was admitted, or its reader came back
    late_at: float | None = None  # since when it waits for a mask
    missed: Counter[str] = field(
        factory=Counter
    )  # ticks without it since its latest token, by reason

    @property
    def phase(self) -> Phase:
        record = self.record
        return record.decode if self.sequence.view.decoding else record.prefill

    def skip(self, reason: str, seconds: float) -> None:
        self.phase.skip(reason, seconds)
        self.missed[reason] += 1

    def wait_for_mask(self, now: float) -> None:
        """Count a tick without a token for it: its latest token is computed again."""
        self.late_at = now
        self.phase.tokens -= 1
        self.skip(LATE, 0.0)

    def end_of_wait_for_mask(self, now: float) -> None:
        if self.late_at is not None:
            self.record.mask_s += now - self.late_at
            self.late_at, self.since = None, now

    def at(self, now: float, reason: str = "", code: str | None = None) -> RequestRecord:
        """Return a copy of the record as it is `now`; with a `reason` the request ends."""
        found = self.record.copy()
        self.sequence.describe(found, now)
        if self.preempted_at is not None:
            found.preempted_s += now - self.preempted_at
        if self.parked_at is not None:
            found.parked_s += now - self.parked_at
        if self.late_at is not None:
            found.mask_s += now - self.late_at
        if reason:
            found.state = found.reason = reason
            found.ended, found.code = now, code
        return found


class Recorder:
    """See the module. Every method is called on the engine's thread, or after its end.

    The publisher hands every tick to `trace`, if there is one.
    """

    def __init__(
        self, trace: Trace | None = None, *, ticks: int = TICKS, requests: int = REQUESTS
    ) -> None:
        self.trace = trace
        self._ticks: deque[TickRecord] = deque(maxlen=ticks)
        self._ended: deque[RequestRecord] = deque(maxlen=requests)
        self._live: dict[int, _Live] = {}
        self._new: list[_Live] = []
        self._late: set[int] = set()  # requests that wait for a mask

    # --- requests ---

    def submitted(self, sequence: Sequence) -> None:
        """Record a new request."""
        record = sequence.report(sequence.submit.submitted)
        live = self._live[sequence.handle] = _Live(sequence, record)
        self._new.append(live)

    def queued(self, cells: Cells, running: Iterable[int]) -> None:
        """Record why the new requests were not admitted, and which are `running`."""
        for live in self._new:
            if live.sequence.admitted is not None:
                continue
            needs, record = live.sequence.cells, live.record
            record.queue_by = tuple(itertools.islice(running, MOST_NAMED))
            if cells.free_slots <= 0:
                n = cells.n_slots
                record.queue_reason = "the slot was busy" if n == 1 else f"all {n} slots were busy"
            elif needs > cells.free_cells:
                record.queue_reason = (
                    f"it reserves {needs} KV cells, {max(0, cells.free_cells)} were free"
                )
            else:
                record.queue_reason = "room was kept for requests before it"
                record.queue_by = ()
        self._new.clear()

    def admitted(self, handle: int, now: float) -> None:
        """Record that a request has a slot, for the first time or again."""
        live = self._live[handle]
        live.since = now
        if live.preempted_at is not None:
            live.record.preempted_s += now - live.preempted_at
            live.preempted_at = None
        if live.sequence.credit <= 0:
            live.parked_at = now

    def began(self, handle: int, beginning: Beginning) -> None:
        """Record the cached part of a prompt, once."""
        record = self._live[handle].record
        if record.beginning is None:
            record.beginning = beginning

    def preempted(self, handle: int, now: float, reason: str) -> None:
        """Record that a request lost its slot and will be computed again."""
        self.resumed(handle, now)  # what its reader does does not matter until then
        live = self._live[handle]
        live.end_of_wait_for_mask(now)
        live.record.preemptions += 1
        live.preempted_at = now
        live.preempted_why = Wait(reason)
        live.missed = Counter({reason: live.missed.total() + 1})  # outweighs the other reasons

    def made_way(self, handles: Collection[int], chosen: Collection[int]) -> None:
        """Record that the requests just preempted gave way to the `chosen` ones."""
        for handle in handles:
            live = self._live.get(handle)
            if live is not None and live.preempted_why is not None:
                live.preempted_why = evolve(live.preempted_why, by=tuple(chosen))

    def preemption(self, handle: int) -> Wait | None:
        """Return why a running request lost its slot; None if it did not."""
        live = self._live.get(handle)
        return None if live is None or live.preempted_at is None else live.preempted_why

    def parked(self, handle: int, now: float) -> None:
        """Record that the reader of a request is behind."""
        self._live[handle].parked_at = now

    def resumed(self, handle: int, now: float) -> None:
        """Record that the reader of a request has caught up."""
        live = self._live[handle]
        if live.parked_at is not None:
            live.record.parked_s += now - live.parked_at
            live.parked_at, live.since = None, now

    def sampled(self, handle: int, gap_s: float | None, held_s: float = 0.0) -> None:
        """Record a token of the latest tick, shown in `held_s`, `gap_s` after the previous one."""
        live = self._live[handle]
        record = live.record
        record.held_s = max(record.held_s, held_s)
        if gap_s is not None and (record.worst_gap is None or gap_s > record.worst_gap.seconds):
            tick = self._ticks[-1]
            ((reason, _),) = live.missed.most_common(1) or ((tick.limit.reason, 0),)
            record.worst_gap = Gap(gap_s, tick, reason, live.missed.total())
        if live.missed:
            live.missed = Counter()

    def drafts(self, handle: int) -> tuple[int, int]:
        """Return the numbers of guessed and of right tokens of a running request."""
        live = self._live.get(handle)
        return (live.record.decode.drafted, live.record.decode.accepted) if live else (0, 0)

    def ended(self, sequence: Sequence, reason: str, now: float, code: str | None) -> None:
        """Record the end of a request."""
        live = self._live.pop(sequence.handle, None)
        if live is not None:
            live.end_of_wait_for_mask(now)
            self._ended.append(live.at(now, reason, code))

    # --- ticks ---

    def tick(
        self,
        state: SchedulerState,
        plan: Plan,
        status: int,
        decode_s: float,
        host_s: float,
        now: float,
        outcomes: Several[Outcome] = (),
    ) -> TickRecord:
        """Record a decode that ended at `now`, before its commit; `outcomes` are empty if it failed."""
        record = TickRecord(
            state.tick,
            now,
            plan.items,
            plan.skipped,
            plan.ballast,
            plan.limit,
            plan.predicted_s,
            plan.moved_bytes,
            decode_s,
            host_s,
            status,
            drafted=tuple([_drafted(outcome) for outcome in outcomes if outcome.chunk.drafts]),
            late=frozenset([outcome.chunk.key for outcome in outcomes if outcome.late]),
        )
        self._aside(state, now - decode_s - host_s)
        self._ticks.append(record)
        live, took_s = self._live, decode_s + host_s
        if status == DecodeStatus.OK:
            for item in plan.items:
                request = live[item.key].record
                phase = request.decode if item.phase == "decode" else request.prefill
                phase.tokens += item.n_tokens
                phase.ticks += 1
                phase.computing_s += took_s
            for drafted in record.drafted:
                phase = live[drafted.key].record.decode
                phase.drafted += drafted.n
                phase.accepted += drafted.right
                phase.tokens -= drafted.n - drafted.right
            for key in record.late:
                live[key].wait_for_mask(now)
            self._late |= record.late
        else:
            reason = ABORTED if status == DecodeStatus.ABORTED else DECODE_FAILED
            for item in plan.items:
                live[item.key].skip(reason, took_s)
        for skip in plan.skipped:
            left_out = live.get(skip.key)
            # Parked time is counted from event to event.
            if left_out is not None and left_out.parked_at is None:
                left_out.skip(skip.reason, took_s)
        return record

    def _aside(self, state: SchedulerState, until: float) -> None:
        """Count the time between the previous tick and this one: background work, or ticks of other models.

        A request of this tick that waited for a mask has it now.
        """
        before = self._ticks[-1].at if self._ticks else -math.inf
        if self._late:
            for key in self._late.intersection([view.key for view in state.sequences]):
                self._live[key].end_of_wait_for_mask(until)
                self._late.remove(key)
            self._late &= self._live.keys()
        if until - before < LEAST_ASIDE_S:
            return
        for view in state.sequences:
            live = self._live.get(view.key)
            if live is not None and live.parked_at is None:
                since = max(before, live.since, live.sequence.blocked_until)
                live.record.aside_s += max(0.0, until - since)

    def recovered(self, how: str) -> None:
        """Record what was done about the failure of the latest tick."""
        self._ticks[-1] = evolve(self._ticks[-1], recovery=how)

    # --- reading ---

    @property
    def latest(self) -> int:
        """The number of the latest tick, -1 before the first."""
        return self._ticks[-1].tick if self._ticks else -1

    def after(self, tick: int, most: int) -> tuple[TickRecord, ...]:
        """Return the latest ticks with higher numbers, at most `most`, oldest first."""
        n = min(self.latest - tick, most)
        return tuple(reversed([*itertools.islice(reversed(self._ticks), max(0, n))]))

    def waits(self, handle: int) -> str:
        """Return why the latest ticks left out a running request; "" if they did not."""
        live = self._live.get(handle)
        if live is None:
            return ""
        ((reason, _),) = live.missed.most_common(1) or (("", 0),)
        return reason

    def instead_of(self, handle: int) -> tuple[Counter[int], bool]:
        """Return the tokens, by handle, of the latest ticks that left out a running request.

        With them comes whether the latest of these ticks had a limit.
        """
        tokens: Counter[int] = Counter()
        limited = False
        for record in itertools.islice(reversed(self._ticks), LOOKED_AT):
            if not any(skip.key == handle for skip in record.skipped):
                continue
            limited = limited if tokens else math.isfinite(record.limit.seconds)
            tokens.update({item.key: item.n_tokens for item in record.items})
        return tokens, limited

    def explain(
        self,
        now: float,
        handle: int | None,
        ticks: int,
        wait_of: Callable[[Sequence], Wait | None] = nothing_known,
    ) -> Recorded:
        """Return one request, or the latest that ended and the oldest that run, as :func:`explained` does."""
        if handle is None:
            running = [*itertools.islice(self._live.values(), SHOWN)]
            records = tuple(self._ended)[-SHOWN:]
        else:
            running = [self._live[handle]] if handle in self._live else []
            records = tuple([one for one in self._ended if one.handle == handle][:1])
        for live in running:
            record = live.at(now)
            record.wait = wait_of(live.sequence)
            records += (record,)
        return explained(
            now,
            records[-1:] if handle is not None else records,
            tuple(self._ticks),
            ticks,
            one=handle is not None,
        )


def _drafted(outcome: Outcome) -> Drafted:
    chunk = outcome.chunk
    return Drafted(chunk.key, len(chunk.drafts), outcome.right, *chunk.origin)
