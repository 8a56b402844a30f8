"""Records of requests, ticks and the cache that an engine writes, in seconds on its clock.

They contain how many tokens each request computed, when and why: no text, and no tokens except the two where a prompt
and the most similar cached one differ, which only the user of the request can see.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from uma_trio.observe.figures import PrefixFigures
from uma_trio.policy.plan import Limit, PlanItem, Skip
from uma_trio.words import Awaits, Lane

# A custom policy may write numbers into its reasons, which would make them endless.
MOST_REASONS = 12
OTHER_REASONS = "other reasons"


@frozen
class Drafted:
    """Guessed tokens of the request `key` in a tick; the first `right` of the `n` were right.

    They were found in `source` after `match` equal tokens.
    """

    key: int
    n: int
    right: int
    source: str
    match: int


@frozen
class TickRecord:
    """One tick. `items`, `skipped` and `limit` are the plan's own, not copies.

    `at` is the end of its decode. Since the previous decode it took `host_s` and `decode_s`, predicted as
    `predicted_s` (0: unknown). `status` is the backend's; after a failure `recovery` says what was done. The next
    token of the requests `late` waits for a mask, so that it is unknown whether their other guesses were right.
    """

    tick: int
    at: float
    items: tuple[PlanItem, ...]
    skipped: tuple[Skip, ...]
    ballast: int
    limit: Limit
    predicted_s: float
    moved_bytes: float
    decode_s: float
    host_s: float
    status: int
    recovery: str = ""
    drafted: tuple[Drafted, ...] = ()
    late: frozenset[int] = frozenset()

    @property
    def measured_s(self) -> float:
        """The time that was predicted as `predicted_s`."""
        return self.decode_s + self.host_s


@define
class Phase:
    """The prompt or the answer of a request: its tokens and ticks, and the ticks that left it out.

    `computing_s` is the time of its ticks, `waiting_s` that of the others, which `skipped` counts by reason. Of
    `drafted` guessed tokens `accepted` were right; the others are not among `tokens`.
    """

    tokens: int = 0
    ticks: int = 0
    computing_s: float = 0.0
    waiting_s: float = 0.0
    skipped: dict[str, int] = field(factory=dict)
    drafted: int = 0
    accepted: int = 0

    def copy(self) -> Phase:
        """Return a copy that later changes leave alone."""
        return evolve(self, skipped=dict(self.skipped))

    def skip(self, reason: str, seconds: float) -> None:
        """Count a tick that left the request out."""
        self.waiting_s += seconds
        if reason not in self.skipped and len(self.skipped) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


@frozen
class Gap:
    """The longest time between two tokens of a request, ended by `tick`.

    `reason` is why most of the `skipped` ticks in between left it out, or else the reason of that tick's limit.
    """

    seconds: float
    tick: TickRecord
    reason: str
    skipped: int = 0


@frozen
class Wait:
    """Why a request waits at one moment, and `by` which other requests, by handle.

    A request that waits until another one has computed their common prefix waits for `shared` tokens, of which
    `done` are computed.
    """

    reason: str
    by: tuple[int, ...] = ()
    shared: int = 0
    done: int = 0


@frozen
class Beginning:
    """The part of a prompt that was cached: `tokens` from a `source`, whose computation would have taken `saved_s`.

    The most similar cached prefix of the namespace has the same first `apart` tokens. Then the request has the token
    `mine` and that prefix `other`, -1 where it ends.
    """

    tokens: int
    source: str
    saved_s: float
    apart: int = 0
    mine: int = -1
    other: int = -1


@define(kw_only=True)
class RequestRecord:
    """One request: what it is, how far it is, and how its time was spent. Snapshots leave out how time was spent.

    The engine that computes the request changes its record, and hands out copies. `admitted`, `first_token` and
    `ended` are None until they happen. Up to a tick, the time of a request is the sum of the time in the queue,
    `preempted_s`, `parked_s` (its reader was behind), `prefix_s` (its prefix was restored, or computed by another
    request), `aside_s` (background work or other models between two ticks), `mask_s` (for masks of a schema or
    grammar), and the time in the two phases. `queue_by` had the slots when it arrived. Its tokens are computed
    `ahead_s` before they are shown at the moment, at most `held_s` so far. `wait` is why it waits now.
    """

    handle: int
    lane: Lane
    state: str
    submitted: float
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens_per_s: float = 0.0
    awaits: Awaits = "tokens"
    ahead_s: float = 0.0
    wait: Wait | None = None
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    reason: str = ""
    code: str | None = None
    queue_reason: str = ""
    queue_by: tuple[int, ...] = ()
    passed_over: int = 0
    preemptions: int = 0
    preempted_s: float = 0.0
    parked_s: float = 0.0
    held_s: float = 0.0
    prefix_s: float = 0.0
    aside_s: float = 0.0
    mask_s: float = 0.0
    prefill: Phase = field(factory=Phase)
    decode: Phase = field(factory=Phase)
    worst_gap: Gap | None = None
    beginning: Beginning | None = None
    namespace: str | None = None

    def copy(self) -> RequestRecord:
        """Return a copy that later changes leave alone."""
        return evolve(self, prefill=self.prefill.copy(), decode=self.decode.copy())


@frozen
class CellReport:
    """The KV cache in cells: all, those with a token of a request, and those reserved for requests."""

    total: int
    used: int
    reserved: int


@frozen(kw_only=True)
class Snapshot:
    """The state of an engine at one moment.

    `at` is a time on the engine's clock, `tick` the number of the latest tick (-1: none yet). `running` requests have
    a slot; `queue` are the described ones of the `waiting` requests, in order of arrival. `ticks` are the latest,
    oldest first. `prefixes` is None where nothing is cached.
    """

    at: float
    tick: int
    running: tuple[RequestRecord, ...] = ()
    queue: tuple[RequestRecord, ...] = ()
    waiting: int = 0
    ticks: tuple[TickRecord, ...] = ()
    cells: CellReport = CellReport(0, 0, 0)
    prefixes: PrefixFigures | None = None

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """Every described request, those with a slot first."""
        return (*self.running, *self.queue)


@frozen
class NamespaceReport:
    """The prefix cache of one namespace: saved pages, leaves, and sessions by key.

    Of `asked` prompt tokens `there` were cached; twice the budget would have had `missed` more.
    """

    namespace: str
    pages: int
    tokens: int
    n_bytes: int
    leaf_tokens: int
    sessions: tuple[str, ...] = ()
    asked: int = 0
    there: int = 0
    missed: int = 0


@frozen
class PrefixReport:
    """The budget and size of the prefix cache, and some of its namespaces.

    `own_disk_bytes` of the `disk_bytes` belong to the user who asked. `dropped` tokens were removed by the request
    that this answers.
    """

    budget: int
    n_bytes: int
    namespaces: tuple[NamespaceReport, ...]
    dropped: int = 0
    disk_budget: int = 0
    disk_bytes: int = 0
    own_disk_bytes: int = 0


@frozen
class Recorded:
    """Records of requests, oldest first, with ticks; made at the time `now`."""

    now: float
    requests: tuple[RequestRecord, ...]
    ticks: tuple[TickRecord, ...]


def explained(
    now: float,
    records: Sequence[RequestRecord],
    ticks: Sequence[TickRecord],
    n: int,
    *,
    one: bool,
) -> Recorded:
    """Return `records` with the latest `n` of the kept `ticks`.

    For `one` request they are the ticks around its worst gap, or the latest until its end.
    """
    if not one:
        return Recorded(now, tuple(records), tuple(ticks[-n:]) if n > 0 else ())
    if not records:
        return Recorded(now, (), ())
    (record,) = records
    if record.worst_gap is not None:
        return Recorded(now, (record,), _around(record.worst_gap.tick, ticks, n))
    kept = [tick for tick in ticks if record.ended is None or tick.at <= record.ended]
    return Recorded(now, (record,), tuple(kept[-n:]) if n > 0 else ())


def _around(tick: TickRecord, ticks: Sequence[TickRecord], n: int) -> tuple[TickRecord, ...]:
    """Return `tick` and its neighbours, as far as they are kept; they are numbered without gaps."""
    if n <= 0:
        return ()
    at = tick.tick - ticks[0].tick if ticks else -1
    if not 0 <= at < len(ticks):
        return (tick,)
    first = max(0, min(at - n // 2, len(ticks) - n))
    return tuple(ticks[first : first + n])
