"""Content codings of request bodies (RFC 9110, 8.4), decoded in bounded steps. Pure."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from attrs import frozen

from uma_trio.http.errors import Fault
from uma_trio.http.message import Head

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ACCEPTED: Final = "gzip, deflate, zstd"
MOST_CODINGS: Final = 3
#: Of gzip, or frames of zstd, in one body. To begin one takes 10 µs, and an empty one has 9 bytes.
MOST_MEMBERS: Final = 1024
_ALIASES: Final = {"x-gzip": "gzip"}  # RFC 9110, 8.4.1.3
_INPUT: Final = 16_384
_OUTPUT: Final = 65_536
#: What :meth:`BodyDecoder.advance` decodes at once, and the most parts that takes: they can be empty.
_STEP_BYTES: Final = 4 * _OUTPUT
_STEP_PARTS: Final = 128
#: The window that every decoder of the coding has to support, and no sender may exceed (RFC 9659).
_ZSTD_WINDOW_LOG: Final = 23
_ZSTD_OPTIONS: Final[dict[int, int]] = {
    zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG
}
_ZLIB_WINDOW: Final = 32_768
_SURPLUS: Final = "there is something behind its end"


class _Decompressor(Protocol):
    """Decompresses one member, as :class:`zstd.ZstdDecompressor` does."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Zlib:
    """zlib's decompressor with the interface of zstd's."""

    def __init__(self, wbits: int) -> None:
        self._inner = zlib.decompressobj(wbits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        found = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        self.needs_input = not self._inner.unconsumed_tail and len(found) < max_length
        return found


@frozen
class _Coding:
    """`open` returns what decompresses a member, given its first two bytes; `window` is the memory that takes at most.

    `is_known` is whether a body that begins with these bytes is of the format at all.
    """

    open: Callable[[bytes], _Decompressor]
    window: int
    has_members: bool
    is_known: Callable[[bytes], bool] = lambda _start: True


def _open_deflate(start: bytes) -> _Decompressor:
    # A zlib header, as RFC 9110 says, or none, as some clients send: a first block of deflate never looks like one.
    is_wrapped = start[0] & 0x0F == zlib.DEFLATED and int.from_bytes(start) % 31 == 0
    return _Zlib(zlib.MAX_WBITS if is_wrapped else -zlib.MAX_WBITS)


def _is_zstd(start: bytes) -> bool:
    # A frame, or one to skip (RFC 8878, 3.1); the formats before version 0.8 begin otherwise.
    return start == b"\x28\xb5" or (start[0] & 0xF0 == 0x50 and start[1] == 0x2A)


def _open_zstd(_start: bytes) -> _Decompressor:
    return zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)


_CODINGS: Final = {
    "gzip": _Coding(lambda _start: _Zlib(16 + zlib.MAX_WBITS), _ZLIB_WINDOW, has_members=True),
    "deflate": _Coding(_open_deflate, _ZLIB_WINDOW, has_members=False),
    "zstd": _Coding(_open_zstd, 1 << _ZSTD_WINDOW_LOG, has_members=True, is_known=_is_zstd),
}


def codings_of(head: Head) -> tuple[str, ...]:
    """Return the content codings of a body in the order in which they were applied.

    Raises:
        Fault: one is unknown, or there are too many.
    """
    listed = head.headers.get("content-encoding", "").lower().split(",")
    named = [name.strip() for name in listed]
    found = tuple(_ALIASES.get(name, name) for name in named if name not in ("", "identity"))
    unknown = next((name for name in found if name not in _CODINGS), None)
    if unknown is not None:
        shown = "".join(letter for letter in unknown[:32] if letter.isprintable())
        raise _unsupported(f"the Content-Encoding {shown} is unknown")
    if len(found) > MOST_CODINGS:
        raise _unsupported(f"the body has {len(found)} content codings, more than {MOST_CODINGS}")
    return found


class BodyDecoder:
    """Decodes a body that has come whole. It and what each coding decodes has at most `most_bytes`."""

    def __init__(self, body: bytes, codings: tuple[str, ...], most_bytes: int) -> None:
        self._stages: list[_Stage] = []
        parts: Iterator[bytes] = (body[at : at + _INPUT] for at in range(0, len(body), _INPUT))
        for name in reversed(codings):
            self._stages.append(_Stage(name, parts, most_bytes))
            parts = self._stages[-1].decoded()
        self._wire_bytes = len(body)
        self._output = parts
        self._found: list[bytes] = []
        self.body: bytes | None = None

    @property
    def held_bytes(self) -> int:
        """The memory that it has: the encoded body, what is decoded, and the window of each coding."""
        windows = sum(min(stage.n_bytes, stage.coding.window) for stage in self._stages)
        return self._wire_bytes + self._stages[-1].n_bytes + windows

    def advance(self, most_bytes: int = _STEP_BYTES) -> None:
        """Decode `most_bytes` more, or a little above; :attr:`body` is there once it is whole. Runs in any thread.

        Raises:
            Fault: it is too long, damaged or cut.
        """
        done = 0
        for _ in range(_STEP_PARTS):
            part = next(self._output, None)
            if part is None:
                self.body = b"".join(self._found)
                return
            if part:
                self._found.append(part)
                done += len(part)
                if done >= most_bytes:
                    return


class _Stage:
    """One coding, between the parts that it reads and those that it decodes."""

    def __init__(self, name: str, parts: Iterator[bytes], most_bytes: int) -> None:
        self.coding = _CODINGS[name]
        self.n_bytes = 0
        self._name = name
        self._parts = parts
        self._most_bytes = most_bytes

    def decoded(self) -> Iterator[bytes]:
        """Return the decoded parts; b"" where a part of the input has decoded to nothing yet."""
        member: _Decompressor | None = None
        n_members = 0
        data = b""
        for part in self._parts:
            data += part
            while len(data) > 1 or (member is not None and (data or not member.needs_input)):
                if member is None:
                    if n_members and not self.coding.has_members:
                        raise self._damaged(_SURPLUS)
                    if n_members >= MOST_MEMBERS:
                        raise self._too_many_members()
                    if not n_members and not self.coding.is_known(data[:2]):
                        raise _unsupported(f"the body is not {self._name} as RFC 8878 has it")
                    member, n_members = self.coding.open(data[:2]), n_members + 1
                found, data = self._decompressed(member, data), b""
                if member.eof:
                    data, member = member.unused_data, None
                yield found
            yield b""
        if member is not None or not n_members:
            raise self._damaged("its end is missing")
        if data:
            raise self._damaged(_SURPLUS)

    def _decompressed(self, member: _Decompressor, data: bytes) -> bytes:
        try:
            found = member.decompress(data, _OUTPUT)
        except (zlib.error, zstd.ZstdError) as error:
            raise self._damaged(str(error)) from None
        self.n_bytes += len(found)
        if self.n_bytes > self._most_bytes:
            raise body_too_large(self._most_bytes, "the decoded body")
        return found

    def _too_many_members(self) -> Fault:
        return Fault(
            413,
            f"the body has more than {MOST_MEMBERS} members of {self._name}; compress it as one",
            code="body_too_large",
        )

    def _damaged(self, why: str) -> Fault:
        return Fault(
            400,
            f"the body is not {self._name}, as Content-Encoding says: {why}; send it again, or without a coding",
            code="invalid_encoding",
        )


def body_too_large(most_bytes: int, what: str = "the body") -> Fault:
    """Return the answer to a body of more than `most_bytes`."""
    return Fault(
        413,
        f"{what} may have {most_bytes} bytes; shorten it, or raise --http-max-prompt-bytes",
        code="body_too_large",
        closes=True,
    )


def _unsupported(why: str) -> Fault:
    return Fault(
        415,
        f"{why}; send the body as it is, or with one or more of {ACCEPTED}",
        code="unsupported_encoding",
        headers=(("Accept-Encoding", ACCEPTED),),
        closes=True,
    )
