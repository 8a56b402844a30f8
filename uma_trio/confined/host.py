"""The process that forks workers: ``python -m uma_trio.confined.host FD MODULE:FUNCTION``.

FD is a socket to the daemon. The first frame on it is handed to the function, which prepares what
all workers share and returns what each of them runs with its own :class:`.link.WorkerLink`. This process
has one thread, so a fork is safe. It answers :class:`.link.Start` and :class:`.link.Kill`, reports when a worker has
ended and by which signal, and ends with all workers when the daemon closes the socket or dies.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from uma_trio.confined.link import Ended, Kill, LinkClosed, Start, WorkerLimits, WorkerLink, framed

Work = Callable[[WorkerLink], None]

_PDEATHSIG: Final = 1  # PR_SET_PDEATHSIG of prctl(2)
_COMMANDS: Final = msgspec.msgpack.Decoder(Start | Kill)
_FD_BYTES: Final = 1 << 16


class _Host:
    def __init__(self, control: socket.socket, work: Work) -> None:
        self._control = control
        self._work = work
        self._workers: dict[int, int] = {}  # pid -> worker
        self._left = b""

    def run(self) -> None:
        """Serve until the daemon closes the socket."""
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready, _, _ = select.select([self._control, woken], [], [])
            if woken in ready:
                with suppress(BlockingIOError):
                    woken.recv(4096)
                self._reap()
            if self._control in ready and not self._obey():
                break
        signal.set_wakeup_fd(-1)  # what wakes is closed on return
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)

    def _obey(self) -> bool:
        """Execute one command; False once the daemon has closed the socket."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _FD_BYTES, 64)
        except OSError:  # it was killed before it read everything
            return False
        if not data:
            return False
        self._left += data
        while len(self._left) >= 4:
            end = 4 + int.from_bytes(self._left[:4], "little")
            if len(self._left) < end:
                break
            command = _COMMANDS.decode(self._left[4:end])
            self._left = self._left[end:]
            if isinstance(command, Start):
                self._fork(command, fds.pop(0))
            else:
                for pid, worker in self._workers.items():
                    if worker == command.worker:
                        os.kill(pid, signal.SIGKILL)
        return True

    def _fork(self, command: Start, fd: int) -> None:
        sock = socket.socket(fileno=fd)
        try:
            pid = os.fork()
        except OSError:
            sock.close()
            self._report(Ended(command.worker, 0, 0.0))
            return
        if pid == 0:
            status = 1
            try:
                self._control.close()
                confine(command.limits)
                self._work(_Timed(sock, command.limits))
                status = 0
            except LinkClosed:
                status = 0
            except MemoryError:
                os.kill(os.getpid(), signal.SIGABRT)  # as where a library runs out of it
            finally:
                os._exit(status)
        self._workers[pid] = command.worker
        sock.close()

    def _reap(self) -> None:
        while self._workers:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            self._report(Ended(self._workers.pop(pid), ended, used.ru_utime + used.ru_stime))

    def _report(self, ended: Ended) -> None:
        with suppress(OSError):  # the daemon has ended, which the next read reports
            self._control.sendall(framed(msgspec.msgpack.encode(ended)))


class _Timed(WorkerLink):
    """A link whose frames have to be answered in time; otherwise the kernel kills the worker."""

    def __init__(self, sock: socket.socket, limits: WorkerLimits) -> None:
        super().__init__(sock)
        self._limits = limits

    def receive(self) -> bytes:
        """Return the next frame, and start its time limit."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        frame = super().receive()
        self.allow(self._limits.cpu_s, self._limits.wall_s)
        return frame

    def allow(self, cpu_s: float, wall_s: float) -> None:
        """Give the frame that was received last this time from now on."""
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)


def confine(limits: WorkerLimits) -> None:
    """Bound this process: its memory, no files, no core dump; the first to go where memory is short."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("900", encoding="ascii")
    silence = os.open(os.devnull, os.O_WRONLY)  # messages of failing libraries would fill the log
    for fd in (1, 2):
        os.dup2(silence, fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with suppress(OSError, ValueError):  # macOS has no such limit
        most = address_space() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with suppress(OSError):
        os.nice(limits.niceness)


def address_space() -> int:
    """Return the mapped bytes; 0 where unknown."""
    return _status_bytes("VmSize:")


def anonymous() -> int:
    """Return the anonymous bytes in memory, shared with the host or not; 0 where unknown."""
    return _status_bytes("RssAnon:")


def _status_bytes(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)


def main(arguments: list[str]) -> int:
    """Serve the daemon at the other end of a socket."""
    fd, target = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the daemon drains, and closes the socket then
    control = socket.socket(fileno=int(fd))
    module, _, name = target.partition(":")
    try:
        prepare: Callable[[bytes], Work] = getattr(importlib.import_module(module), name)
        work = prepare(WorkerLink(control).receive())
    except LinkClosed:
        return 0
    gc.collect()
    gc.freeze()  # what is shared stays shared when a worker collects
    gc.disable()
    _Host(control, work).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
