"""What is listed of requests, memory, models and cached prefixes."""

from __future__ import annotations

import msgspec


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live request, as the request `sessions` lists it. `request` is the server's handle.

    It is computed `ahead_ms` ahead of the tokens shown to its reader. Each choice of a request is
    listed separately, with its own handle. `awaits` is what somebody waits for: tokens, answer, nothing.
    `cached_tokens` of its prompt were not computed. `waits` is what it waits for at the moment, if for anything. `model` is
    the name of the model that has it.
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
    awaits: str = "tokens"
    cached_tokens: int = 0
    waits: str = ""
    model: str | None = None


class MemoryInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The KV cache in cells, and the prefixes that are kept: leaves in these cells, and saved pages."""

    cells_used: int
    cells_reserved: int
    cells_total: int
    leaves: int = 0
    leaf_tokens: int = 0
    pages: int = 0
    page_bytes: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model of the daemon. It `gives` text, vectors or scores; `n_ctx` is the most tokens of one request.

    `progress` is the part of it that is loaded, where its `state` is loading. Of one that never was, `size_bytes` is 0.
    """

    name: str
    state: str = "loaded"
    progress: float = 0.0
    gives: str = "text"
    size_bytes: int
    n_ctx: int


class PrefixInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cached prefixes of this user: shared by all its processes, or of one `cache`.

    `tokens` are saved in `pages`, and `leaf_tokens` are in the KV cache. Of the `asked_tokens` of
    prompts so far, `cached_tokens` were cached; twice the `--prefix-ram` would have cached
    `missed_tokens` more.
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
