"""The frames between the daemon, the host and the workers, and the limits of a worker."""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

HEAD: Final = struct.Struct("<I")
# The longest shape has 4 MiB and the vocabulary of a large model some 4 MB.
MOST_BYTES: Final = 64 << 20


class WorkerLimits(msgspec.Struct, frozen=True, array_like=True):
    """What one worker may take: CPU and wall time for each frame it answers, and memory of its own.

    `niceness` is added to that of the daemon.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int
    niceness: int = 5


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """Fork a worker; its socket is passed with this frame."""

    worker: int
    limits: WorkerLimits


class Kill(msgspec.Struct, frozen=True, tag="kill", array_like=True):
    """End a worker, if it still runs."""

    worker: int


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A worker has ended. `signal` is 0 if no signal ended it, or if it could not be forked.

    `cpu_s` is what it took altogether.
    """

    worker: int
    signal: int
    cpu_s: float


class LinkClosed(Exception):
    """The other side has closed the socket."""


def framed(payload: bytes) -> bytes:
    """Return a frame."""
    return HEAD.pack(len(payload)) + payload


class WorkerLink:
    """A worker's end: blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self) -> bytes:
        """Return the next frame. Raises :class:`LinkClosed`."""
        (n_bytes,) = HEAD.unpack(self._exactly(HEAD.size))
        if n_bytes > MOST_BYTES:
            raise LinkClosed
        return self._exactly(n_bytes)

    def allow(self, cpu_s: float, wall_s: float) -> None:
        """Extend the time of the latest frame beyond the limits, from now on."""

    def send(self, payload: bytes) -> None:
        """Send a frame. Raises :class:`LinkClosed`."""
        try:
            self._sock.sendall(framed(payload))
        except OSError:
            raise LinkClosed from None

    def _exactly(self, n_bytes: int) -> bytes:
        found = bytearray(n_bytes)
        view = memoryview(found)
        at = 0
        while at < n_bytes:
            try:
                got = self._sock.recv_into(view[at:])
            except OSError:
                raise LinkClosed from None
            if not got:
                raise LinkClosed
            at += got
        return bytes(found)
