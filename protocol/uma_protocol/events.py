"""All requests and events of the protocol, as frozen values.

A client sends requests and receives events; a server does the reverse. Both sides use the same
classes: the value that one side passes to `Connection.send` is the value that the other side gets
from `next_event`.

The classes check nothing. Bounds are declared in `fields` and enforced in `codec`, where bytes are
made or read. The fields of a request are sent in the order of their declaration.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .chats import CallPiece as CallPiece
from .chats import LoraScale as LoraScale
from .chats import Message as Message
from .chats import Speaker as Speaker
from .chats import Tool as Tool
from .chats import ToolCall as ToolCall
from .chats import ToolMode as ToolMode
from .infos import MemoryInfo as MemoryInfo
from .infos import ModelInfo as ModelInfo
from .infos import PrefixInfo as PrefixInfo
from .infos import SessionInfo as SessionInfo
from .stories import BeginningInfo as BeginningInfo
from .stories import GapInfo as GapInfo
from .stories import ItemInfo as ItemInfo
from .stories import PhaseInfo as PhaseInfo
from .stories import SkipInfo as SkipInfo
from .stories import StoryInfo as StoryInfo
from .stories import TickInfo as TickInfo

PrefixAction = Literal["list", "clear", "pin"]
Priority = Literal["interactive", "background"]
"""Who waits for the answer: a person, or nobody in particular."""

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a stream ended."""

Pace = Literal["smooth", "asap"]
Awaits = Literal["tokens", "answer", "nothing"]
"""Whether tokens may wait so that they come evenly, or are each sent when they are there."""

Speculation = Literal["off", "free", "auto"]
"""Which guesses at an answer are computed ahead: none, those that cost nothing, or those that pay."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much a model should think before it answers, where its template knows."""


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The latencies that a client asks for: time to first token, and time between tokens."""

    target_ttft_ms: float | None = None
    target_tbt_ms: float | None = None


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


class _Request(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """The common shape of requests: `type` comes first, and what is at its default is left out."""


class Generate(_Request, frozen=True, tag="generate"):
    """Request text. Exactly one of `prompt` and `messages` is given.

    With `progress` it is told of the loading of its model by :class:`Loading` events. `lora` are the adapters that are
    used, none of them if it is empty; None where `model` says it. What says how tokens are chosen is None where the model's own value holds, or else the protocol's.
    """

    id: str
    session: str | None = None
    cache: str | None = None
    model: str | None = None
    app: str | None = None
    priority: Priority = "interactive"
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    schema: dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    stream: bool = True
    ignore_eos: bool = False
    speculation: Speculation | None = None
    pace: Pace = "smooth"
    awaits: Awaits | None = None
    progress: bool = False
    lora: tuple[LoraScale, ...] | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Effort | None = None
    reasoning_budget: int | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolMode = "auto"
    allowed_tools: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    slo: Slo | None = None
    metadata: dict[str, Any] | None = None
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None


class Embed(_Request, frozen=True, kw_only=True, tag="embed"):
    """Request a vector of each text, of length 1. The answer is :class:`Vectors`, then :class:`Eos`."""

    id: str
    model: str | None = None
    progress: bool = False
    dimensions: int | None = None
    truncate: bool = False
    input: tuple[str, ...]


class Rerank(_Request, frozen=True, kw_only=True, tag="rerank"):
    """Request how well each document fits a query. The answer is :class:`Scores`, then :class:`Eos`."""

    id: str
    model: str | None = None
    progress: bool = False
    top_n: int | None = None
    truncate: bool = False
    query: str
    documents: tuple[str, ...]


class Hello(_Request, frozen=True, tag="hello"):
    """Show the daemon's token: the first frame where the daemon asks for one, of use nowhere else."""

    token: str

    def __repr__(self) -> str:
        """A secret has no place in a log."""
        return "Hello(token=...)"


class Cancel(_Request, frozen=True, tag="cancel"):
    """End a request, by its id on this connection or by the server's handle."""

    id: str | None = None
    request: int | None = None


class SetPriority(_Request, frozen=True, kw_only=True, tag="priority"):
    """Move a request to another lane, by the server's handle or by its id on this connection."""

    request: int | None = None
    id: str | None = None
    priority: Priority


class ListSessions(_Request, frozen=True, tag="sessions"):
    """Request the list of live requests of the whole daemon, with so many of the latest ticks."""

    ticks: int | None = None


class Explain(_Request, frozen=True, tag="explain"):
    """Request an explanation of how one request, or the latest ones, spent their time.

    `request` is the server's handle. `ticks` is the number of ticks to return: around the worst gap
    of that request, or else the latest.
    """

    request: int | None = None
    ticks: int | None = None


class Prefix(_Request, frozen=True, kw_only=True, tag="prefix"):
    """List or clear this user's part of the prefix cache, or pin one of its sessions."""

    action: PrefixAction = "list"
    session: str | None = None
    seconds: int | None = None


class LoadModel(_Request, frozen=True, tag="load"):
    """Load a configured model. The answer, an `ok`, comes when it is loaded. For operators."""

    model: str


class UnloadModel(_Request, frozen=True, tag="unload"):
    """Unload a configured model that no request uses. The answer comes when its memory is free. For operators."""

    model: str


class GetMetrics(_Request, frozen=True, tag="metrics"):
    """Request the metrics: once, or every `interval_ms` until the client disconnects."""

    interval_ms: int | None = None


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


Work = Generate | Embed | Rerank
"""Requests that are computed: one at a time on a connection, and each ends with :class:`Eos`."""

Request = (
    Hello
    | Generate
    | Embed
    | Rerank
    | Cancel
    | SetPriority
    | ListSessions
    | Explain
    | Prefix
    | LoadModel
    | UnloadModel
    | GetMetrics
)
"""What a client sends."""

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
