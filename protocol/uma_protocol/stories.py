"""How requests spent their time and what ticks computed, as `explain` reports it. Frozen values."""

from __future__ import annotations

import msgspec


class PhaseInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The time of a request in one phase: while its prompt was computed, or while it was decoding.

    `ticks` ticks computed a part of it and took `computing_ms`. Other ticks left it out and took
    `waiting_ms`; `skipped` counts these by reason. `drafted` tokens were guessed, of which
    `accepted` were right and count in `tokens`.
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

    `reason` is why `skipped` ticks before that left the request out, or else the reason for the
    limit of the tick.
    """

    gap_ms: float
    tick: int
    reason: str
    skipped: int = 0


class BeginningInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cached part of a prompt: `tokens` from `source`, which saved about `saved_ms`.

    The nearest cached prompt has the same first `apart` tokens. After these, this prompt has the
    text `mine` and the cached one `other`. Both are shown only to the user of the request.
    """

    tokens: int
    source: str
    saved_ms: float
    apart: int
    mine: str | None = None
    other: str | None = None


class StoryInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request spent its time, as the request `explain` reports it.

    `age_ms` is the time since its arrival, `total_ms` its duration, so far or in all. `held_ms` is
    the longest time that a token was held for pacing, `prefix_ms` how long it waited until its beginning was
    restored or computed by another request, `aside_ms` what passed between ticks for side work or another model,
    `mask_ms` how long it waited for what its schema or grammar allows next, and `waits` what it waits for at the moment. `reason` and `code` describe its end and are
    absent while it runs. Each choice of a request has a record of its own. `model` is the name of the model that has it.
    """

    request: int
    id: str | None = None
    app: str | None = None
    model: str | None = None
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
    prefix_ms: float = 0.0
    aside_ms: float = 0.0
    mask_ms: float = 0.0
    waits: str = ""
    preemptions: int = 0
    preempted_ms: float = 0.0
    prefill: PhaseInfo = PhaseInfo()
    decode: PhaseInfo = PhaseInfo()
    worst_gap: GapInfo | None = None
    reason: str | None = None
    code: str | None = None
    beginning: BeginningInfo | None = None
    choice: int = 0
    awaits: str = "tokens"


class ItemInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of one request in a tick, and the reason.

    The last `drafted` of its `tokens` were guesses, of which the first `accepted` were right. They
    were found in `source`, after `match` equal tokens. With `late` the mask for the next token was not
    ready in time: the last right token is computed again, and the other guesses are not judged yet.
    """

    request: int
    phase: str
    tokens: int
    reason: str
    drafted: int = 0
    accepted: int = 0
    source: str | None = None
    match: int = 0
    late: bool = False


class SkipInfo(msgspec.Struct, frozen=True):
    """A request that a tick left out, and why."""

    request: int
    reason: str


class TickInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tick: the items and skips of its plan, its predicted and its measured time.

    `limit_ms` is absent without a limit, `predicted_ms` without a prediction. `measured_ms` is the
    time from the end of the decode before it to the end of its own decode; `host_ms` is the part
    between the two decodes. Where `others` is true, parts of other users' requests are left out. `status` is the return value of the backend, 0 for success; otherwise
    `recovery` says what the engine did. `age_ms` is the time since its end. `model` is the one whose tick it was, in answers that
    have ticks of several.
    """

    tick: int
    model: str | None = None
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
    others: bool = False
