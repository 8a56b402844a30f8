"""Frames: the length of a payload as four bytes, little-endian, then the payload.

The reader keeps at most one incomplete frame and the data of the last `feed`. A length of zero or
above the limit is refused when its four bytes have arrived, before any byte of the payload is kept.
"""

from __future__ import annotations

from .errors import Code, RemoteProtocolError

HEADER_BYTES = 4
MAX_LENGTH = 2**32 - 1
DEFAULT_MAX_FRAME_BYTES = 1 << 20


def frame(payload: bytes) -> bytes:
    """Put the header before a payload.

    Raises:
        ValueError: the payload is empty, or longer than four bytes can say.
    """
    if not 0 < len(payload) <= MAX_LENGTH:
        raise ValueError(f"a frame holds 1 to {MAX_LENGTH} bytes, not {len(payload)}")
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class FrameReader:
    """Splits a stream of bytes into payloads, in whatever pieces the bytes arrive.

    Args:
        max_frame_bytes: the longest payload that is accepted.

    Raises:
        ValueError: `max_frame_bytes` is not between 1 and 2**32 - 1.
    """

    __slots__ = ("_buffer", "_length", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        if not 0 < max_frame_bytes <= MAX_LENGTH:
            raise ValueError(f"max_frame_bytes must be 1 to {MAX_LENGTH}, not {max_frame_bytes}")
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        # The length of the frame at the head of the buffer, once its header was read and dropped.
        self._length: int | None = None

    @property
    def buffered(self) -> int:
        """The number of received bytes that have not been returned yet."""
        return len(self._buffer)

    @property
    def mid_frame(self) -> bool:
        """Whether a frame is incomplete."""
        if self._length is not None:
            return len(self._buffer) < self._length
        if len(self._buffer) < HEADER_BYTES:
            return len(self._buffer) > 0
        length = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
        return len(self._buffer) < HEADER_BYTES + length

    def feed(self, data: bytes) -> None:
        """Take received bytes. Nothing is looked at until `next_payload` is called."""
        self._buffer += data

    def clear(self) -> None:
        """Forget everything that was received and give its memory back."""
        self._buffer = bytearray()
        self._length = None

    def next_payload(self) -> bytes | None:
        """Return the next complete payload, or None until more bytes are fed.

        Raises:
            RemoteProtocolError: a length is zero or above the limit. The position of the next frame is
                unknown, so the buffer is cleared and the reader must not be used again.
        """
        buffer = self._buffer
        if self._length is None:
            if len(buffer) < HEADER_BYTES:
                return None
            header = bytes(buffer[:HEADER_BYTES])
            length = int.from_bytes(header, "little")
            if not 0 < length <= self.max_frame_bytes:
                self.clear()
                raise _refusal(header, length, self.max_frame_bytes)
            # Deleting from the front of a bytearray moves its start and copies nothing.
            del buffer[:HEADER_BYTES]
            self._length = length
        if len(buffer) < self._length:
            return None
        payload = bytes(buffer[: self._length])
        del buffer[: self._length]
        self._length = None
        return payload


def _refusal(header: bytes, length: int, limit: int) -> RemoteProtocolError:
    """Say what is wrong with a length, and what it most likely is instead."""
    message = f"a frame must be 1 to {limit} bytes long, but its header says {length}"
    if all(0x20 <= byte < 0x7F for byte in header):
        message += (
            "; the header is text, but this socket speaks length-prefixed JSON: send the length as "
            "four bytes, little-endian, before the JSON"
        )
    elif 0 < int.from_bytes(header, "big") <= limit:
        message += "; it looks big-endian: send the lowest byte first"
    return RemoteProtocolError(Code.E_PROTO_002, message, fatal=True)
