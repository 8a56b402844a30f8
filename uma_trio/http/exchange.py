"""One request and the way back: its body, once, and a stream, a piece at a time, over h11 and the writer.

h11 writes the head and the end of the answer. The chunks between them are written here: h11 takes
2.5 µs for one, which is more than all else that a token costs in Python, and keeps no account of
them. What is sent as a chunk leaves h11 in its state SEND_BODY.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Final

import h11
import trio

from uma_trio.http.message import Head, Headers
from uma_trio.http.settings import Settings
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.writer import Writer

_STREAM: Headers = (
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
    ("X-Content-Type-Options", "nosniff"),
)
LONG_BODY: Final = 65_536
"""A longer body is written apart from its head, so that it is not copied."""


class Exchange:
    """One request and the way back. A handler either returns a reply or streams, not both.

    A reply is one JSON document where the handler has called :meth:`expect_document`.

    It is a request of `principal` that passed the guard; `number` is unique for the daemon's life. `opened` is whether the head of a stream is out, so that there is no other status to answer. `is_late` is
    whether the request asked for a head that waits for the first part of the answer.
    """

    def __init__(
        self,
        head: Head,
        principal: Principal,
        number: int,
        body: bytes,
        give_back: Callable[[], None],
        http: h11.Connection,
        writer: Writer,
        headers: Headers,
        settings: Settings,
        *,
        late: bool = False,
    ) -> None:
        self.head = head
        self.principal = principal
        self.number = number
        self.opened = False
        self.is_late = late
        self._delayed: tuple[Headers, bytes] | None = (
            None  # a head that waits for the first part behind it
        )
        self._body = body
        self._give_back = give_back
        self._http = http
        self._writer = writer
        self._headers = headers
        self._keep_alive_s = self._patience_s = settings.keep_alive_s
        self._silence_s = settings.silence_s
        self._opening = trio.Event()
        self._said = trio.current_time()
        self._sign_of_life: Callable[[], bytes] = bytes
        # A client of HTTP/1.0 reads to the end of the connection instead.
        self._chunked = head.version == "1.1"

    @contextmanager
    def body(self) -> Iterator[bytes]:
        """Return the body, once. Behind the block its memory and its place among all bodies are given back.

        Whoever enters the block must not keep the body: an answer may take hours.
        """
        data, self._body = self._body, b""
        try:
            yield data
        finally:
            del data
            self._give_back()

    def expect_document(self, headers: Headers = ()) -> None:
        """Note that the request is valid, and that its answer, one JSON document, takes time.

        After a long silence the head is sent, with these `headers`, and white space, which JSON allows before a
        document. From then on a failure can only cut the answer. May be called again when more headers are known.
        """
        if self.opened:
            return
        self._delayed = (("Content-Type", "application/json"), *headers), b""
        self._sign_of_life, self._patience_s = _blank, self._silence_s
        self._opening.set()

    def open(self, headers: Headers, keep_alive: Callable[[], bytes], data: bytes = b"") -> None:
        """Send the head of a stream, of which `headers` name the type, and its first part.

        From here on there is no other status to answer, unless the request asked for a late head: then both wait
        for the next part, or for the first sign of life. Of a stream that is open already only the first part is sent.
        What `keep_alive` returns breaks every long silence.
        """
        self._sign_of_life, self._patience_s = keep_alive, self._keep_alive_s
        if self.opened:  # while its model was loaded
            self._put(self._chunk(data))
            return
        self._delayed = (headers, data)
        self._said = trio.current_time()
        if not self.is_late:
            self._put(b"")
        self._opening.set()

    def send(self, data: bytes) -> bool:
        """Send a part of the stream; False if the client reads slower than we write."""
        return self._put(self._chunk(data))

    def _head(self) -> bytes:
        """Return the head and the first part of the stream if they have not been sent; b"" if they have."""
        if self._delayed is None:
            return b""
        (headers, data), self._delayed = self._delayed, None
        self._patience_s = self._keep_alive_s
        every = [("Date", formatdate(usegmt=True)), *_STREAM, *headers, *self._headers]
        self.opened = True
        head = self._http.send(h11.Response(status_code=200, headers=every)) or b""
        return head + self._chunk(data)

    async def sent(self) -> None:
        """Wait until the kernel has all that was sent."""
        await self._writer.flushed()

    async def close(self, data: bytes) -> None:
        """Send the last part of the stream and its end, in one piece."""
        before, behind = self._head(), b""
        if self._chunked and data:
            before, behind = b"%b%x\r\n" % (before, len(data)), b"\r\n"
        behind += self._http.send(h11.EndOfMessage()) or b""
        if len(data) > LONG_BODY:
            self._put(before)
            self._put(data)
            self._put(behind)
        else:
            self._put(before + data + behind)
        await self._writer.flushed()

    async def keep_alive(self) -> None:
        """Break every long silence of the answer, so that no client takes the daemon for dead."""
        await self._opening.wait()
        while self._delayed is not None or self._http.our_state is h11.SEND_BODY:
            await trio.sleep_until(self._said + self._patience_s)
            if trio.current_time() < self._said + self._patience_s:
                continue
            if self._writer.waiting_bytes:
                self._said = trio.current_time()  # the silence is the reader's
            else:
                self._put(self._chunk(self._sign_of_life()))

    def _chunk(self, data: bytes) -> bytes:
        """Return `data` as the body has it; a chunk of nothing would be its end (RFC 9112, 7.1)."""
        if not self._chunked or not data:
            return data
        return b"%x\r\n%b\r\n" % (len(data), data)

    def _put(self, data: bytes) -> bool:
        """Write; True if the kernel has it all."""
        self._said = trio.current_time()
        return self._writer.write(self._head() + data if self._delayed is not None else data)


def _blank() -> bytes:
    return b" "
