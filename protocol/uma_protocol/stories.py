"""How requests spent their time and what ticks computed, as `explain` tells it. Frozen values."""

from __future__ import annotations

import msgspec


class PhaseInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request got while its prompt was computed, or while it was decoding.

    It had its part in `ticks` ticks, which took `computing_ms`. Others left it out and took
    `waiting_ms`; `skipped` counts those by their reason. Of `drafted` guesses at its answer `accepted`
    were right, which are among its `tokens`.
    """

    tokens: int = 0
    ticks: int = 0
    computing_ms: float = 0.0
    waiting_ms: float = 0.0
    skipped: dict[str, int] = {}
    drafted: int = 0
    accepted: int = 0


class GapInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The longest time between two tokens. It ended with the tick `tick`.

    `reason` is why the request was left out of `skipped` ticks before that, or what allowed the
    tick to take so long.
    """

    gap_ms: float
    tick: int
    reason: str
    skipped: int = 0


class BeginningInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of a prompt lay in the cache: `tokens` from a `source`, which saved about `saved_ms`.

    The nearest prompt that was there is the same for `apart` tokens. Behind them this one has the
    text `mine` and that one `other`; both are shown to the user whose request it is, and to nobody
    else.
    """

    tokens: int
    source: str
    saved_ms: float
    apart: int
    mine: str | None = None
    other: str | None = None


class StoryInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the time of one request was spent, as the admin request `explain` tells it.

    `age_ms` is how long ago it came, `total_ms` how long it lasted, so far or in all. A token waited
    for `held_ms` at most so that tokens came evenly. `reason` and `code` are those of its end, absent
    while it runs. Of a request with several choices each has a story.
    """

    request: int
    id: str | None = None
    app: str | None = None
    state: str
    lane: str
    age_ms: float
    total_ms: float
    prompt_tokens: int
    completion_tokens: int
    queue_ms: float
    queue_reason: str | None = None
    passed_over: int = 0
    ttft_ms: float | None = None
    parked_ms: float = 0.0
    held_ms: float = 0.0
    preemptions: int = 0
    preempted_ms: float = 0.0
    prefill: PhaseInfo = PhaseInfo()
    decode: PhaseInfo = PhaseInfo()
    worst_gap: GapInfo | None = None
    reason: str | None = None
    code: str | None = None
    beginning: BeginningInfo | None = None
    choice: int = 0


class ItemInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one request got in a tick, and why.

    Of its `tokens` the last `drafted` were guesses at its answer, of which the first `accepted` were
    right. They were found in `source` behind `match` tokens that were the same.
    """

    request: int
    phase: str
    tokens: int
    reason: str
    drafted: int = 0
    accepted: int = 0
    source: str | None = None
    match: int = 0


class SkipInfo(msgspec.Struct, frozen=True):
    """A request that a tick left out, and why."""

    request: int
    reason: str


class TickInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tick: who computed what, what it was expected to take and what it took.

    `limit_ms` is absent when nothing limited it, `predicted_ms` when nothing was predicted.
    `measured_ms` is the time from the decode before it to the end of its own, `host_ms` the part
    that passed between the two. `status` is what the backend returned, 0 for success; after any
    other, `recovery` says what was done. `age_ms` is how long ago it ended.
    """

    tick: int
    age_ms: float
    items: tuple[ItemInfo, ...] = ()
    skipped: tuple[SkipInfo, ...] = ()
    ballast: int = 0
    limit_ms: float | None = None
    limit_reason: str = ""
    predicted_ms: float | None = None
    measured_ms: float
    host_ms: float = 0.0
    moved_bytes: float = 0.0
    status: int = 0
    recovery: str | None = None
