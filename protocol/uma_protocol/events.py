"""Everything that crosses the wire, as frozen values.

A client sends requests and receives events; a server the reverse. The same classes serve both, so
what one side passes to `Connection.send` is what the other side gets from `next_event`.

The classes hold values and check nothing: bounds are declared in `fields` and enforced where
bytes are made or read, in `codec`. The order of the fields of a request is their order on the wire.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .chats import CallPiece as CallPiece
from .chats import Message as Message
from .chats import Speaker as Speaker
from .chats import Tool as Tool
from .chats import ToolCall as ToolCall
from .chats import ToolMode as ToolMode
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
"""Whether tokens may wait so that they come evenly, or are each sent when they are there."""

Speculation = Literal["off", "free", "auto"]
"""Which guesses at an answer are computed ahead: none, those that cost nothing, or those that pay."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much a model should think before it answers, where its template knows."""


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client would like: time to the first token, and time between tokens."""

    target_ttft_ms: float | None = None
    target_tbt_ms: float | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request took. `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the time of a request went. `ttft_ms` is absent when no token was produced."""

    queue_ms: float
    ttft_ms: float | None = None
    total_ms: float
    tokens_per_s: float


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live request as the admin request `sessions` lists it. `request` is the server's handle.

    It is computed `ahead_ms` of what its reader is shown. Of a request with several choices each is
    listed, with a handle of its own.
    """

    request: int
    id: str
    app: str | None = None
    pid: int | None = None
    uid: int | None = None
    state: str
    lane: str
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    tokens_per_s: float
    age_ms: float
    ahead_ms: float = 0.0
    choice: int = 0


class PrefixInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of this user's prompts is there: for everybody of the user, or for one `cache`.

    `tokens` are saved in `pages`, `leaf_tokens` are in the KV cache. Of `asked_tokens` of prompts
    `cached_tokens` were there, and twice the `--prefix-ram` would have had `missed_tokens` more.
    """

    cache: str | None = None
    pages: int
    tokens: int
    bytes: int
    leaf_tokens: int
    sessions: tuple[str, ...] = ()
    asked_tokens: int = 0
    cached_tokens: int = 0
    missed_tokens: int = 0


class _Request(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """The common shape of requests: `type` comes first, and what is at its default is left out."""


class Generate(_Request, frozen=True, tag="generate"):
    """Ask for text. Exactly one of `prompt` and `messages` is given."""

    id: str
    session: str | None = None
    cache: str | None = None
    model: str | None = None
    app: str | None = None
    priority: Priority = "interactive"
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
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
    speculation: Speculation = "auto"
    pace: Pace = "smooth"
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


class Cancel(_Request, frozen=True, tag="cancel"):
    """End the running request that has this id."""

    id: str


class SetPriority(_Request, frozen=True, kw_only=True, tag="priority"):
    """Move a request to another lane: by the server's handle, or by its id on this connection."""

    request: int | None = None
    id: str | None = None
    priority: Priority


class ListSessions(_Request, frozen=True, tag="sessions"):
    """Ask for the live requests of the whole daemon."""


class Explain(_Request, frozen=True, tag="explain"):
    """Ask why a request waited, or how the latest ones spent their time.

    `request` is the server's handle. `ticks` is how many ticks to show: around the worst gap of
    that request, or the latest.
    """

    request: int | None = None
    ticks: int | None = None


class Prefix(_Request, frozen=True, kw_only=True, tag="prefix"):
    """Look at this user's part of the prefix cache, clear it, or pin one of its sessions."""

    action: PrefixAction = "list"
    session: str | None = None
    seconds: int | None = None


class GetMetrics(_Request, frozen=True, tag="metrics"):
    """Ask for the metrics: once, or every `interval_ms` until the client leaves."""

    interval_ms: int | None = None


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    """The common shape of events, which the field `event` tells apart.

    Fields that are not known are skipped, so that a client survives a newer daemon.
    """


class Alternative(msgspec.Struct, frozen=True, array_like=True):
    """A token that might have been sampled: its id, its own text, the logarithm of its probability.

    On the wire it is a list of these three. Bytes that are no whole character are U+FFFD in `text`.
    """

    token_id: int
    text: str
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    """The natural logarithm of a token's probability, and the likeliest tokens with theirs.

    They are of the model's own distribution, before anything the request changed. The sampled
    token may be among `top` or not.
    """

    logprob: float
    top: tuple[Alternative, ...] = ()


class Token(_Event, frozen=True, tag="token"):
    """One sampled token. `text` may be empty: bytes of half a character wait for the other half.

    `logprobs` is there if the request asked for it. `text` is the answer's own; what the model
    writes for itself is `reasoning`, and what it calls comes in pieces, `calls`. `choice` says which
    of several answers it is of, from 0.
    """

    id: str
    text: str
    token_id: int
    logprobs: Logprobs | None = None
    reasoning: str | None = None
    calls: tuple[CallPiece, ...] = ()
    choice: int = 0


class End(_Event, frozen=True, tag="end"):
    """One of several choices is at its end; the others go on. With `n` 1 there is none.

    `request` is the handle of this choice. The other fields say of it what those of an `Eos` say of a
    request with one answer.
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
    """The one terminal event of every accepted request; nothing follows it for that id.

    `text` is what was held back, or everything when the request asked not to stream; so is
    `reasoning`. `calls` are all calls of tools, each whole, either way. Behind several choices these
    are in the `End` of each, `usage` counts the prompt once and the tokens of all, and `request` is
    the handle of the first.
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


class Error(_Event, frozen=True, tag="error"):
    """A refusal or a fault. When `fatal`, the connection closes after it."""

    code: str
    message: str
    fatal: bool
    retryable: bool
    id: str | None = None
    retry_after_ms: int | None = None


class Ok(_Event, frozen=True, tag="ok"):
    """An admin request was carried out. `id` is that of the request, when it named one."""

    id: str | None = None


class Sessions(_Event, frozen=True, tag="sessions"):
    """The answer to `ListSessions`."""

    sessions: tuple[SessionInfo, ...]


class Explanation(_Event, frozen=True, tag="explain"):
    """The answer to `Explain`, oldest first.

    `ticks_left_out` counts ticks that were asked for and did not fit into a frame.
    """

    requests: tuple[StoryInfo, ...]
    ticks: tuple[TickInfo, ...] = ()
    ticks_left_out: int = 0


class Prefixes(_Event, frozen=True, omit_defaults=True, tag="prefix"):
    """The answer to `Prefix`: `used_bytes` of `budget_bytes` are taken, whosever they are.

    `dropped` tokens were cleared.
    """

    budget_bytes: int
    used_bytes: int
    prefixes: tuple[PrefixInfo, ...] = ()
    dropped: int = 0


class Metrics(_Event, frozen=True, tag="metrics"):
    """The answer to `GetMetrics`: names and values, which the daemon declares, not the protocol."""

    metrics: dict[str, Any]


class ConnectionClosed(msgspec.Struct, frozen=True):
    """The peer has sent all it ever will. Not on the wire: it is what end of file means."""


Request = Generate | Cancel | SetPriority | ListSessions | Explain | Prefix | GetMetrics
"""What a client sends."""

Admin = Cancel | SetPriority | ListSessions | Explain | Prefix | GetMetrics
"""Requests that ask for no text; they are answered also while a request runs."""

Event = Token | End | Eos | Error | Ok | Sessions | Explanation | Prefixes | Metrics
"""What a server sends."""
