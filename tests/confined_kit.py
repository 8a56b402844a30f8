"""A program for workers of tests: it does what a frame says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from uma_trio.confined.link import WorkerLink
from uma_trio.confined.workers import Workers


def host_of(workers: Workers) -> int | None:
    """Return the process that workers are forked from; None if it does not run."""
    return None if workers._process is None else workers._process.pid


def prepare(setup: bytes) -> Callable[[WorkerLink], None]:
    """Return what answers `setup`, or does harm."""

    def work(link: WorkerLink) -> None:
        while True:
            asked = link.receive()
            if asked == b"say and spin":
                link.send(b"spins")
            if asked in (b"spin", b"say and spin"):
                while True:
                    pass
            elif asked == b"sleep":
                time.sleep(3600)
            elif asked == b"fill":
                link.send(b"filled" if bytearray(1 << 28) else b"")
            elif asked == b"write":
                try:
                    with open("/tmp/written-by-a-worker", "wb") as file:  # noqa: S108
                        file.write(b"x")
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            elif asked == b"pid":
                link.send(str(os.getpid()).encode())
            else:
                link.send(setup + asked)

    return work
