"""The flight recorder: the latest ticks, and a timeline of each request.

It is written on the engine's thread in every tick, so each write is cheap: a tick is one record
that refers to the values of the plan, and a request is a few counters. Memory is bounded: ticks and
ended requests are kept in rings, and the reasons of one request are counted separately only while
they are few.
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
from uma_trio.engine.records import (
    Beginning,
    Drafted,
    Gap,
    Recorded,
    RequestRecord,
    Spent,
    TickRecord,
    Wait,
)
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

TICKS, REQUESTS = 4096, 256
SHOWN = 64  # of the requests that live, and of those that ended, when all are asked for
# A policy of somebody else may write numbers into its reasons; those would never end.
MOST_REASONS = 12
#: Requests that are named as a cause; there are never more slots to be waited for than matter to a person.
MOST_NAMED = 8
LEAST_ASIDE_S = 1e-4  # shorter is not noted
LOOKED_AT = 16  # of the latest ticks, for who was computed in place of somebody
OTHER_REASONS = "other reasons"
DECODE_FAILED, ABORTED = "the decode failed", "its tick was given up for a newcomer"
NO_ROOM = "preempted: the KV cache had no room"
NEEDED = "preempted: an interactive request had no slot or no room"
AWAY = "preempted: its reader was away, and its room was needed"
LATE = "the mask of what it is held to was late"

Trace = Callable[[SchedulerState, Plan, TickRecord], None]
"""Takes every tick, in order and on the engine's thread: it must neither wait nor raise."""


def nothing_known(_sequence: Sequence) -> None:
    """Know nothing of what keeps a request."""


@define(eq=False)
class _Spent:
    """Counters of one phase; :class:`Spent` is what becomes of them."""

    tokens: int = 0
    ticks: int = 0
    computing_s: float = 0.0
    waiting_s: float = 0.0
    skipped: dict[str, int] = field(factory=dict)
    drafted: int = 0
    accepted: int = 0

    def drafts(self, n: int, right: int) -> None:
        """Note `n` guesses of which the first were `right`: the others are no tokens."""
        self.drafted += n
        self.accepted += right
        self.tokens -= n - right

    def without(self, reason: str, seconds: float) -> None:
        """Note a tick that left it out."""
        self.waiting_s += seconds
        if reason not in self.skipped and len(self.skipped) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def frozen(self) -> Spent:
        """Return what was counted so far."""
        return Spent(
            self.tokens,
            self.ticks,
            self.computing_s,
            self.waiting_s,
            dict(self.skipped),
            self.drafted,
            self.accepted,
        )


@define(eq=False)
class _Timeline:
    """What is counted of one request while it lives; the rest is in its sequence."""

    sequence: Sequence
    prefill: _Spent = field(factory=_Spent)
    decode: _Spent = field(factory=_Spent)
    queue_reason: str = ""
    queue_by: tuple[int, ...] = ()
    beginning: Beginning | None = None
    preemptions: int = 0
    preempted_at: float | None = None
    preempted_why: Wait | None = None
    preempted_s: float = 0.0
    parked_at: float | None = None
    parked_s: float = 0.0
    since: float = 0.0  # when it was admitted, or its reader came back
    aside_s: float = 0.0
    late_at: float | None = None  # when its mask was not there in time, while it is not
    mask_s: float = 0.0
    held_s: float = 0.0
    missed: Counter[str] = field(factory=Counter)  # ticks without it since its token, by reason
    worst: Gap | None = None

    def waits_for_mask(self, now: float) -> None:
        """Note a tick that had a part for it and gave no last token: that is computed again."""
        self.late_at = now
        phase = self.decode if self.sequence.view.decoding else self.prefill
        phase.tokens -= 1
        self.skip(LATE, 0.0)

    def has_mask(self, now: float) -> None:
        """Its mask is there, or waited for no longer."""
        if self.late_at is not None:
            self.mask_s += now - self.late_at
            self.late_at, self.since = None, now

    def skip(self, reason: str, seconds: float) -> None:
        """Note a tick that left it out for another reason than its reader."""
        sequence = self.sequence
        (self.decode if sequence.view.decoding else self.prefill).without(reason, seconds)
        self.missed[reason] += 1


class Recorder:
    """See the module. Every method is called on the engine's thread.

    `trace`, if there is one, is to be given every tick; the publisher does that.
    """

    def __init__(
        self, trace: Trace | None = None, *, ticks: int = TICKS, requests: int = REQUESTS
    ) -> None:
        self.trace = trace
        self._ticks: deque[TickRecord] = deque(maxlen=ticks)
        self._ended: deque[RequestRecord] = deque(maxlen=requests)
        self._live: dict[int, _Timeline] = {}
        self._new: list[_Timeline] = []
        self._late: set[int] = set()  # requests that wait for a mask

    # --- a request ---

    def submitted(self, sequence: Sequence) -> None:
        """A request has come into the queue."""
        timeline = self._live[sequence.handle] = _Timeline(sequence)
        self._new.append(timeline)

    def queued(self, cells: Cells, running: Iterable[int]) -> None:
        """Who came has had a chance of being admitted: note why the others were not, and who is `running`."""
        if not self._new:
            return
        for timeline in self._new:
            if timeline.sequence.admitted is not None:
                continue
            needs, n_slots = timeline.sequence.cells, cells.n_slots
            timeline.queue_by = tuple(itertools.islice(running, MOST_NAMED))
            if cells.free_slots <= 0:
                timeline.queue_reason = (
                    "the slot was busy" if n_slots == 1 else f"all {n_slots} slots were busy"
                )
            elif needs > cells.free_cells:
                timeline.queue_reason = (
                    f"it reserves {needs} KV cells, {max(0, cells.free_cells)} were free"
                )
            else:
                timeline.queue_reason = "room was kept for requests before it"
                timeline.queue_by = ()
        self._new.clear()

    def admitted(self, handle: int, now: float) -> None:
        """It has a slot, for the first time or again."""
        timeline = self._live[handle]
        timeline.since = now
        if timeline.preempted_at is not None:
            timeline.preempted_s += now - timeline.preempted_at
            timeline.preempted_at = None
        if timeline.sequence.credit <= 0:
            timeline.parked_at = now

    def began(self, handle: int, beginning: Beginning) -> None:
        """It goes on from what lay in the cache; the first time counts, not what it had itself."""
        timeline = self._live[handle]
        if timeline.beginning is None:
            timeline.beginning = beginning

    def preempted(self, handle: int, now: float, reason: str) -> None:
        """It has lost its slot and will be computed again."""
        self.resumed(handle, now)  # what its reader does is of no consequence until then
        timeline = self._live[handle]
        timeline.has_mask(now)
        timeline.preemptions += 1
        timeline.preempted_at = now
        timeline.preempted_why = Wait(reason)
        timeline.missed = Counter({reason: timeline.missed.total() + 1})  # which outweighs the rest

    def made_way(self, handles: Collection[int], chosen: Collection[int]) -> None:
        """Those that were just preempted gave way to the `chosen` ones."""
        for handle in handles:
            timeline = self._live.get(handle)
            if timeline is not None and timeline.preempted_why is not None:
                timeline.preempted_why = evolve(timeline.preempted_why, by=tuple(chosen))

    def preemption(self, handle: int) -> Wait | None:
        """Return why a live request lost its slot, and to whom; None if it has not."""
        timeline = self._live.get(handle)
        return None if timeline is None or timeline.preempted_at is None else timeline.preempted_why

    def parked(self, handle: int, now: float) -> None:
        """Its reader is behind, from now on."""
        self._live[handle].parked_at = now

    def resumed(self, handle: int, now: float) -> None:
        """Its reader has caught up."""
        timeline = self._live[handle]
        if timeline.parked_at is not None:
            timeline.parked_s += now - timeline.parked_at
            timeline.parked_at, timeline.since = None, now

    def sampled(self, handle: int, gap_s: float | None, held_s: float = 0.0) -> None:
        """The latest tick gave it a token, shown in `held_s`, `gap_s` after the one before."""
        timeline = self._live[handle]
        timeline.held_s = max(timeline.held_s, held_s)
        if gap_s is not None and (timeline.worst is None or gap_s > timeline.worst.seconds):
            tick = self._ticks[-1]
            ((reason, _),) = timeline.missed.most_common(1) or ((tick.limit.reason, 0),)
            timeline.worst = Gap(gap_s, tick, reason, timeline.missed.total())
        if timeline.missed:
            timeline.missed = Counter()

    def drafts(self, handle: int) -> tuple[int, int]:
        """Return how many guesses were computed for a live request, and how many were right."""
        timeline = self._live.get(handle)
        return (timeline.decode.drafted, timeline.decode.accepted) if timeline else (0, 0)

    def ended(self, sequence: Sequence, reason: str, now: float, code: str | None) -> None:
        """It got its terminal item."""
        timeline = self._live.pop(sequence.handle, None)
        if timeline is not None:
            timeline.has_mask(now)
            self._ended.append(_record(timeline, now, reason, code))

    # --- a tick ---

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
        """A decode has ended at `now`; return its record. To be called before its commit.

        `outcomes` are what came of it, if it did not fail.
        """
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
                timeline = live[item.key]
                spent = timeline.decode if item.phase == "decode" else timeline.prefill
                spent.tokens += item.n_tokens
                spent.ticks += 1
                spent.computing_s += took_s
            for drafted in record.drafted:
                live[drafted.key].decode.drafts(drafted.n, drafted.right)
            for key in record.late:
                live[key].waits_for_mask(now)
            self._late |= record.late
        else:
            reason = ABORTED if status == DecodeStatus.ABORTED else DECODE_FAILED
            for item in plan.items:
                live[item.key].skip(reason, took_s)
        for skip in plan.skipped:
            left_out = live.get(skip.key)
            # Parked time is counted whole, from event to event.
            if left_out is not None and left_out.parked_at is None:
                left_out.skip(skip.reason, took_s)
        return record

    def _aside(self, state: SchedulerState, until: float) -> None:
        """Note what passed from the tick before to the beginning of this one: side work, or another model's ticks.

        Whoever waited for a mask and has a part again has waited so long.
        """
        before = self._ticks[-1].at if self._ticks else -math.inf
        if self._late:
            for key in self._late.intersection([view.key for view in state.sequences]):
                self._live[key].has_mask(until)
                self._late.remove(key)
            self._late &= self._live.keys()
        if until - before < LEAST_ASIDE_S:
            return
        for view in state.sequences:
            timeline = self._live.get(view.key)
            if timeline is not None and timeline.parked_at is None:
                since = max(before, timeline.since, timeline.sequence.blocked_until)
                timeline.aside_s += max(0.0, until - since)

    def recovered(self, how: str) -> None:
        """The latest tick failed, and this was done about it."""
        self._ticks[-1] = evolve(self._ticks[-1], recovery=how)

    # --- who asks ---

    @property
    def latest(self) -> int:
        """The number of the latest tick, -1 before the first."""
        return self._ticks[-1].tick if self._ticks else -1

    def after(self, tick: int, most: int) -> tuple[TickRecord, ...]:
        """Return the latest ticks with higher numbers, at most so many, oldest first."""
        n = min(self.latest - tick, most)
        return tuple(reversed([*itertools.islice(reversed(self._ticks), max(0, n))]))

    def waits(self, handle: int) -> str:
        """Return why the latest ticks had no part for a live request; "" if they had."""
        timeline = self._live.get(handle)
        if timeline is None:
            return ""
        ((reason, _),) = timeline.missed.most_common(1) or (("", 0),)
        return reason

    def instead_of(self, handle: int) -> tuple[Counter[int], bool]:
        """Return who had the latest ticks that left a live request out: their tokens, by their handles.

        And whether the latest of those ticks had a limit, so that readers decided on it.
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
        """Return one request, or the latest that ended and the oldest that did not.

        With them come `ticks` ticks: the latest or, for one request, those around its worst gap;
        if it had none, the latest until its end.
        """
        if handle is None:
            live = itertools.islice(self._live.values(), SHOWN)
            ended = tuple(self._ended)[-SHOWN:]
            requests = (*ended, *(_living(timeline, now, wait_of) for timeline in live))
            return Recorded(now, requests, self._latest(ticks))
        timeline = self._live.get(handle)
        found = (
            _living(timeline, now, wait_of)
            if timeline is not None
            else next((record for record in self._ended if record.handle == handle), None)
        )
        if found is None:
            return Recorded(now, (), ())
        if found.worst_gap is not None:
            return Recorded(now, (found,), self._around(found.worst_gap.tick, ticks))
        return Recorded(now, (found,), self._latest(ticks, found.ended))

    def _latest(self, n: int, until: float | None = None) -> tuple[TickRecord, ...]:
        kept = [tick for tick in self._ticks if until is None or tick.at <= until]
        return tuple(kept[-n:]) if n > 0 else ()

    def _around(self, tick: TickRecord, n: int) -> tuple[TickRecord, ...]:
        if n <= 0:
            return ()
        kept = list(self._ticks)
        at = tick.tick - kept[0].tick  # they are numbered without a gap
        if at < 0:
            return (tick,)
        first = max(0, min(at - n // 2, len(kept) - n))
        return tuple(kept[first : first + n])


def _drafted(outcome: Outcome) -> Drafted:
    chunk = outcome.chunk
    return Drafted(chunk.key, len(chunk.drafts), outcome.right, *chunk.origin)


def _living(
    timeline: _Timeline, now: float, wait_of: Callable[[Sequence], Wait | None]
) -> RequestRecord:
    return evolve(_record(timeline, now), wait=wait_of(timeline.sequence))


def _record(
    timeline: _Timeline, now: float, reason: str = "", code: str | None = None
) -> RequestRecord:
    sequence = timeline.sequence
    preempted_s, parked_s = timeline.preempted_s, timeline.parked_s
    if timeline.preempted_at is not None:
        preempted_s += now - timeline.preempted_at
    if timeline.parked_at is not None:
        parked_s += now - timeline.parked_at
    return RequestRecord(
        handle=sequence.handle,
        lane=sequence.lane,
        awaits=sequence.awaits,
        state=reason or sequence.report(now).state,
        prompt_tokens=sequence.n_prompt,
        completion_tokens=sequence.n_generated,
        submitted=sequence.submit.submitted,
        admitted=sequence.admitted,
        first_token=sequence.first_token,
        ended=now if reason else None,
        queue_reason=timeline.queue_reason,
        queue_by=timeline.queue_by,
        passed_over=sequence.passed_over,
        preemptions=timeline.preemptions,
        preempted_s=preempted_s,
        parked_s=parked_s,
        held_s=timeline.held_s,
        aside_s=timeline.aside_s,
        mask_s=timeline.mask_s + (0.0 if timeline.late_at is None else now - timeline.late_at),
        prefix_s=sequence.prefix_s
        + (0.0 if sequence.blocked_since is None else now - sequence.blocked_since),
        prefill=timeline.prefill.frozen(),
        decode=timeline.decode.frozen(),
        worst_gap=timeline.worst,
        reason=reason,
        code=code,
        beginning=timeline.beginning,
        namespace=sequence.submit.namespace,
    )
