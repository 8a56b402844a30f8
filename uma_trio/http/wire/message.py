"""What comes in and what goes out over HTTP, as values, and how a handler answers piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from attrs import field, frozen

from uma_trio.sockets.principal import Principal

Headers = tuple[tuple[str, str], ...]


@frozen
class Head:
    """A request as far as its empty line. Header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    version: str = "1.1"


@frozen
class Caller:
    """Who sent a request; `app` is what the program calls itself."""

    principal: Principal
    app: str | None = None


@frozen
class Request:
    """A request that passed the guard, without its body. `number` is unique for the daemon's life."""

    head: Head
    caller: Caller
    number: int


@frozen
class Reply:
    """A whole answer."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Headers = field(default=())


class Exchange(Protocol):
    """One request and the way back. A handler either returns a reply or streams, not both."""

    request: Request
    opened: bool
    """Whether the head of a stream is out, so that there is no other status to answer."""
    is_late: bool
    """Whether the request asked for a head that waits for the first part of the answer."""

    def body(self) -> AbstractContextManager[bytes]:
        """Return the body, once. Behind the block its place among all bodies is given back.

        Whoever enters the block must not keep the body: an answer may take hours.
        """

    def open(self, headers: Headers, keep_alive: Callable[[], bytes], data: bytes = b"") -> None:
        """Send the head of a stream, of which `headers` name the type, and its first part.

        From here on there is no other status to answer, unless the request asked for a late head
        (``X-UMA-Head: first-token``): see :attr:`opened`. What `keep_alive` returns breaks every long
        silence.
        """

    def send(self, data: bytes) -> bool:
        """Send a part of the stream; False if the client reads slower than we write."""

    async def sent(self) -> None:
        """Wait until the kernel has all that was sent."""

    async def close(self, data: bytes) -> None:
        """Send the last part of the stream and its end, in one piece."""
