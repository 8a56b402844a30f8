"""Everything that crosses the wire, as frozen values.

A client sends requests and receives events; a server the reverse. The same classes serve both, so
what one side passes to `Connection.send` is what the other side gets from `next_event`.

The classes hold values and check nothing: bounds are declared in `fields` and enforced where
bytes are made or read, in `codec`. The order of the fields of a request is their order on the wire.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Priority = Literal["interactive", "background"]
"""Who waits for the answer: a person, or nobody in particular."""

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a stream ended."""

Speaker = Literal["system", "user", "assistant", "tool"]
"""Who speaks in a chat message."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat."""

    role: Speaker
    content: str


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
    """A live request as the admin request `sessions` lists it. `request` is the server's handle."""

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


class _Request(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """The common shape of requests: `type` comes first, and what is at its default is left out."""


class Generate(_Request, frozen=True, tag="generate"):
    """Ask for text. Exactly one of `prompt` and `messages` is given."""

    id: str
    session: str | None = None
    model: str | None = None
    app: str | None = None
    priority: Priority = "interactive"
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = True
    ignore_eos: bool = False
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


class GetMetrics(_Request, frozen=True, tag="metrics"):
    """Ask for the metrics: once, or every `interval_ms` until the client leaves."""

    interval_ms: int | None = None


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    """The common shape of events, which the field `event` tells apart.

    Fields that are not known are skipped, so that a client survives a newer daemon.
    """


class Token(_Event, frozen=True, tag="token"):
    """One sampled token. `text` may be empty: bytes of half a character wait for the other half."""

    id: str
    text: str
    token_id: int


class Eos(_Event, frozen=True, tag="eos"):
    """The one terminal event of every accepted request; nothing follows it for that id.

    `text` is what was held back, or everything when the request asked not to stream.
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


class Metrics(_Event, frozen=True, tag="metrics"):
    """The answer to `GetMetrics`: names and values, which the daemon declares, not the protocol."""

    metrics: dict[str, Any]


class ConnectionClosed(msgspec.Struct, frozen=True):
    """The peer has sent all it ever will. Not on the wire: it is what end of file means."""


Request = Generate | Cancel | SetPriority | ListSessions | GetMetrics
"""What a client sends."""

Admin = Cancel | SetPriority | ListSessions | GetMetrics
"""Requests that ask for no text; they are answered also while a request runs."""

Event = Token | Eos | Error | Ok | Sessions | Metrics
"""What a server sends."""
