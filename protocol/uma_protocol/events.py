"""All events of the protocol, as frozen values: what a server sends.

Both sides use the same classes: the value that one side passes to `Connection.send` is the value that the other side
gets from `next_event`. The classes check nothing; types are checked in `codec`, where bytes are read.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .infos import MemoryInfo as MemoryInfo
from .infos import ModelInfo as ModelInfo
from .infos import PrefixInfo as PrefixInfo
from .infos import SessionInfo as SessionInfo
from .requests import ToolCall
from .stories import BeginningInfo as BeginningInfo
from .stories import GapInfo as GapInfo
from .stories import ItemInfo as ItemInfo
from .stories import PhaseInfo as PhaseInfo
from .stories import SkipInfo as SkipInfo
from .stories import StoryInfo as StoryInfo
from .stories import TickInfo as TickInfo

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a stream ended."""


class CallPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of tool call number `index`. The first piece has id and name; join the arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Usage(msgspec.Struct, frozen=True):
    """The tokens of a request. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The times of a request. `ttft_ms` is absent if no token was produced."""

    queue_ms: float
    ttft_ms: float | None = None
    total_ms: float
    tokens_per_s: float


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    """The common shape of events, which the field `event` tells apart.

    Fields that are not known are skipped, so that a client survives a newer daemon.
    """


class Alternative(msgspec.Struct, frozen=True, array_like=True):
    """A token that might have been sampled: its id, its text, and its log probability.

    It is sent as a list of these three. In `text`, bytes that are not a whole character are U+FFFD.
    """

    token_id: int
    text: str
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    """The log probability of a token, and the most likely tokens with theirs.

    All values are natural logarithms in the model's own distribution, before bias, penalties,
    masks, filters and temperature. `top` may contain the sampled token.
    """

    logprob: float
    top: tuple[Alternative, ...] = ()


class Token(_Event, frozen=True, tag="token"):
    """One sampled token. `text` may be empty while bytes of an incomplete character are held back.

    `text` is the answer, `reasoning` is the model's reasoning, and `calls` are pieces of tool
    calls. `logprobs` is present if the request asked for it. `choice` is the number of the choice,
    from 0.
    """

    id: str
    text: str
    token_id: int
    logprobs: Logprobs | None = None
    reasoning: str | None = None
    calls: tuple[CallPiece, ...] = ()
    choice: int = 0


class End(_Event, frozen=True, tag="end"):
    """One of several choices has ended; the others continue. Never sent with `n` 1.

    `request` is the handle of this choice. The other fields have the same meaning as in `Eos`.
    """

    id: str
    reason: Reason
    completion_tokens: int
    request: int
    text: str | None = None
    code: str | None = None
    message: str | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    choice: int = 0


class Eos(_Event, frozen=True, tag="eos"):
    """The one terminal event of every accepted request; no event with its id follows.

    `text` and `reasoning` are the parts that were held back, or everything if the request does not
    stream. `calls` are all tool calls, each complete. With several choices these fields are in the
    `End` of each choice; then `usage` counts the prompt once and the tokens of all choices, and
    `request` is the handle of the first choice.
    """

    id: str
    reason: Reason
    usage: Usage
    timings: Timings
    request: int
    text: str | None = None
    code: str | None = None
    message: str | None = None
    metadata: dict[str, Any] | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()


class Loading(_Event, frozen=True, tag="loading"):
    """For requests with `progress`: what they wait for while their model is loaded, and how much of it is, 0 to 1."""

    id: str
    model: str
    state: str
    progress: float


class Vectors(_Event, frozen=True, tag="vectors"):
    """Vectors of some texts of an `embed` request, those from number `first` on.

    Each is the float32 of one vector, little-endian, sent in base64. All vectors of a request come in the
    order of its texts.
    """

    id: str
    first: int
    vectors: tuple[bytes, ...]


class Score(msgspec.Struct, frozen=True, array_like=True):
    """The number of a document, from 0, and how well it fits. It is sent as a list of these two."""

    index: int
    score: float


class Scores(_Event, frozen=True, tag="scores"):
    """Documents of a `rerank` request, the best first. What a score means depends on the model."""

    id: str
    scores: tuple[Score, ...]


class Error(_Event, frozen=True, tag="error"):
    """A refusal or a fault. If `fatal`, the connection closes after it."""

    code: str
    message: str
    fatal: bool
    retryable: bool
    id: str | None = None
    retry_after_ms: int | None = None


class Ok(_Event, frozen=True, tag="ok"):
    """An admin request was carried out. `id` is the id of the request, if it named one."""

    id: str | None = None


class Sessions(_Event, frozen=True, omit_defaults=True, tag="sessions"):
    """The answer to `ListSessions`. `waiting` requests have no slot; of many of them only some are listed.

    `settings` are those that the daemon was given, by the names of their flags; only an operator is told them.
    """

    sessions: tuple[SessionInfo, ...]
    waiting: int = 0
    memory: MemoryInfo | None = None
    models: tuple[ModelInfo, ...] = ()
    ticks: tuple[TickInfo, ...] = ()
    settings: dict[str, str] | None = None


class Explanation(_Event, frozen=True, tag="explain"):
    """The answer to `Explain`, oldest first.

    `ticks_left_out` counts requested ticks that did not fit into the frame.
    """

    requests: tuple[StoryInfo, ...]
    ticks: tuple[TickInfo, ...] = ()
    ticks_left_out: int = 0


class Prefixes(_Event, frozen=True, omit_defaults=True, tag="prefix"):
    """The answer to `Prefix`. All users together use `used_bytes` of `budget_bytes`.

    On disk they use `disk_used_bytes` of `disk_budget_bytes`, and this user `disk_bytes` of these. `dropped` is the
    number of tokens that were cleared.
    """

    budget_bytes: int
    used_bytes: int
    prefixes: tuple[PrefixInfo, ...] = ()
    dropped: int = 0
    disk_budget_bytes: int = 0
    disk_used_bytes: int = 0
    disk_bytes: int = 0


class Metrics(_Event, frozen=True, tag="metrics"):
    """The answer to `GetMetrics`: names and values, which the daemon declares."""

    metrics: dict[str, Any]


class ConnectionClosed(msgspec.Struct, frozen=True):
    """The peer sends nothing more. It is not on the wire; it stands for the end of file."""


Event = (
    Token
    | End
    | Loading
    | Vectors
    | Scores
    | Eos
    | Error
    | Ok
    | Sessions
    | Explanation
    | Prefixes
    | Metrics
)
"""What a server sends."""
