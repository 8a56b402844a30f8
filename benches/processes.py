"""Clients that are processes: connections that others open and that are used from here.

The daemon takes each process that connects for a client (uma_trio/sockets/peers.py). So there is one for
each client, which does nothing but connect and hand the connection over; requests are sent, read and
timed by this process, as they are without.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

from benches.clients import FramedWire, Wire

Connect = Callable[[], socket.socket]

# One connection is always ready: nobody who reads has to wait until another process wakes up.
_OPEN = """
import socket, sys
link = socket.socket(fileno=0)
while True:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(sys.argv[1])
        socket.send_fds(link, [b"c"], [sock.fileno()])
    if not link.recv(1):
        break
"""


@contextlib.contextmanager
def processes(wire: Wire, n: int) -> Iterator[list[Connect]]:
    """Start `n` clients of the server behind `wire`, and end them with the block.

    A server that does not ask who connects gets them all from this process.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(wire, FramedWire):
            yield [stack.enter_context(_process(wire.path)) for _ in range(n)]
        else:
            yield [wire.connect] * n


@contextlib.contextmanager
def _process(path: str) -> Iterator[Connect]:
    ours, theirs = socket.socketpair()
    with ours:  # also if nothing can be started
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _OPEN, path],
                stdin=theirs.fileno(),
                stderr=subprocess.DEVNULL,
            )

        def connect() -> socket.socket:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
            if not descriptors:
                raise ConnectionError(f"a client cannot connect to {path}")
            ours.send(b"n")
            return socket.socket(fileno=descriptors[0])

        try:
            yield connect
        finally:
            ours.close()  # which ends it
            process.wait()
