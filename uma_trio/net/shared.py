"""What every connection is handed: the settings, the doors, and who else is there."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import trio
from attrs import define, field, frozen
from numpy.typing import NDArray

from uma_trio.net.directory import Directory

if TYPE_CHECKING:
    from uma_protocol import Generate
    from uma_trio.engine.inbox import Inbox
Prompt = NDArray[np.int32]
MIB = 1 << 20


@frozen(kw_only=True)
class Settings:
    """Every bound of the socket side, in one place. Times in seconds."""

    model: str
    n_ctx_seq: int
    max_tokens: int = 512
    max_tokens_cap: int | None = None
    max_prompt_bytes: int = 65_536
    max_sessions: int = 32
    idle_timeout_s: float = 300.0
    frame_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    linger_s: float = 1.0
    linger_bytes: int = MIB
    # A reader that stops gets this many more tokens, plus what the kernel's buffer holds: an
    # 80-byte frame takes about 768 bytes of it, so that is some twenty more.
    credit: int = 16
    send_buffer_bytes: int = 8192
    # Answers to admin requests that may wait for a client that does not read them.
    backlog_bytes: int = 65_536


class Recorder(Protocol):
    """Where the socket side counts what happens."""

    def session_opened(self) -> None:
        """A client was let in."""

    def session_closed(self) -> None:
        """Its connection is over."""

    def error_sent(self, code: str) -> None:
        """An `error` event went out."""

    def first_chunk(self, seconds: float) -> None:
        """A first token went out, this long after its logits were there."""

    def accept_failed(self) -> None:
        """A client could not be accepted for want of descriptors or memory."""

    def snapshot(self) -> Mapping[str, Any]:
        """Return what the `metrics` request answers."""


class Log(Protocol):
    """Where the socket side says what an operator should know."""

    def warning(self, event: str, *args: Any, **values: Any) -> Any:
        """Something is wrong outside of us."""

    def exception(self, event: str, *args: Any, **values: Any) -> Any:
        """Something is wrong in us; called while the exception is handled."""


class Prepare(Protocol):
    """Turns a request's prompt or messages into tokens; it is called in a helper thread."""

    def __call__(self, generate: Generate, /) -> Prompt:
        """Return the tokens.

        Raises:
            Refusal: the request cannot be served as it is.
        """


class RunBlocking(Protocol):
    """Runs a slow function without holding up the event loop."""

    def __call__(self, prepare: Prepare, generate: Generate, /) -> Awaitable[Prompt]:
        """Return what the function returns or raises. Cancelled, it abandons the call."""


def in_thread(limit: int) -> RunBlocking:
    """Return a :class:`RunBlocking` over helper threads, at most `limit` at a time."""
    limiter = trio.CapacityLimiter(limit)

    def run(prepare: Prepare, generate: Generate, /) -> Awaitable[Prompt]:
        # Abandoned threads keep their place in the limiter until they end, so a client that
        # sends and cancels for ever gets no more of them than one that waits.
        return trio.to_thread.run_sync(prepare, generate, abandon_on_cancel=True, limiter=limiter)

    return run


@define(kw_only=True, eq=False)
class Shared:
    """The daemon as one connection sees it. `clock` is the engine's."""

    settings: Settings
    inbox: Inbox
    prepare: Prepare
    recorder: Recorder
    clock: Callable[[], float]
    run_blocking: RunBlocking
    log: Log
    directory: Directory = field(factory=Directory)
    draining: bool = False
    _handles: itertools.count[int] = field(factory=lambda: itertools.count(1))

    def next_handle(self) -> int:
        """Return a handle that no other request of this daemon's life has."""
        return next(self._handles)
