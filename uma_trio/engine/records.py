"""Records of ticks and requests: frozen values, in seconds on the engine's clock.

They contain how many tokens each request computed, when and why. They contain no text, and no
tokens except the two where a prompt and the nearest cached one differ, which only the user of the
request can see.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from uma_trio.policy.plan import Limit, PlanItem, Skip
from uma_trio.words import Awaits, Lane


@frozen
class Drafted:
    """Guesses at the answer of the request `key` in a tick: how many, and how many were `right`.

    They were found in `source` behind `match` tokens that were the same.
    """

    key: int
    n: int
    right: int
    source: str
    match: int


@frozen
class TickRecord:
    """One tick. `items`, `skipped` and `limit` are the plan's own, not copies.

    `at` is the end of its decode. From the decode before it to there it took `host_s` and
    `decode_s`, which is what `predicted_s` (0 if unknown) foretold. `status` is what the backend
    returned; if that was a failure, `recovery` says what was done about it. Of the requests `late` the
    next token waits for a mask: of guesses behind the right ones nobody knows whether they were right.
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
        """The time that `predicted_s` foretold."""
        return self.decode_s + self.host_s


@frozen
class Spent:
    """What a request got in one phase: tokens in so many ticks, and the ticks without it.

    `computing_s` is the time of the ticks that it had a part in, `waiting_s` of those that left
    it out, and `skipped` how many those were, by reason. Of `drafted` guesses at its answer `accepted`
    were right; the others are no tokens.
    """

    tokens: int = 0
    ticks: int = 0
    computing_s: float = 0.0
    waiting_s: float = 0.0
    skipped: Mapping[str, int] = field(factory=dict)
    drafted: int = 0
    accepted: int = 0


@frozen
class Gap:
    """The longest time between two tokens of a request. `tick` ended it.

    `reason` is why it was left out of most of the `skipped` ticks in between, or else what that
    tick's limit was.
    """

    seconds: float
    tick: TickRecord
    reason: str
    skipped: int = 0


@frozen
class Wait:
    """What keeps a request at one moment, in words, and `by` which other requests, by their handles.

    Where it waits until another has computed what both begin with, that is `shared` tokens, of which `done` are
    computed.
    """

    reason: str
    by: tuple[int, ...] = ()
    shared: int = 0
    done: int = 0


@frozen
class Beginning:
    """What a request had not to compute: `tokens` from a `source`, which would have taken `saved_s`.

    The nearest beginning that its namespace knew was the same for `apart` tokens. Behind them
    the request has the token `mine` and that one `other`, -1 where it ends.
    """

    tokens: int
    source: str
    saved_s: float
    apart: int = 0
    mine: int = -1
    other: int = -1


@frozen(kw_only=True)
class RequestRecord:
    """How the time of one request was spent, so far or in all.

    A token was shown `held_s` after it was computed at most, so that tokens came evenly.
    `admitted`, `first_token` and `ended` are None until they happen. Up to the precision of a
    tick, its time is the sum of what it waited in the queue, `preempted_s`, `parked_s` (its
    reader was behind), `prefix_s` (its beginning was restored, or another request computed it), `aside_s` (between
    two ticks the engine did side work, or computed another model), `mask_s` (what a schema or grammar allows next was
    not known yet) and what it spent computing and waiting in the two phases. `queue_by` had the slots and the cells when it came. `wait` is
    what keeps it while it lives.
    """

    handle: int
    lane: Lane
    state: str
    prompt_tokens: int
    completion_tokens: int
    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
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
    wait: Wait | None = None
    prefill: Spent = field(factory=Spent)
    decode: Spent = field(factory=Spent)
    worst_gap: Gap | None = None
    reason: str = ""
    code: str | None = None
    beginning: Beginning | None = None
    awaits: Awaits = "tokens"
    namespace: str | None = None


@frozen
class CellReport:
    """The KV cache in cells: how many there are, how many hold a request's tokens, how many are reserved."""

    total: int
    used: int
    reserved: int


@frozen
class NamespaceReport:
    """What the prefix cache has in one namespace: saved pages, leaves, and sessions by their keys.

    Of `asked` tokens of prompts so many were `there`; twice the budget would have had `missed` more.
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
    """What the prefix cache may take and takes, whosever it is, and some namespaces in particular.

    On disk it may take `disk_budget` and takes `disk_bytes`, of which `own_disk_bytes` are of whoever asks. `dropped` tokens went with the request that this answers.
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
    """An answer to :class:`uma_trio.engine.messages.Explain`, oldest first.

    `now` is when it was given. No request is in it when the one that was named is unknown.
    """

    now: float
    requests: tuple[RequestRecord, ...]
    ticks: tuple[TickRecord, ...]
