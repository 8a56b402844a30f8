"""The daemon's side: a host that is started with the first worker, and answers as futures."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from signal import Signals
from typing import Final

import msgspec

from uma_trio.confined.link import Ended, Kill, Start, WorkerLimits
from uma_trio.confined.post import FrameSocket, Post, WorkerGone

_ENDED: Final = msgspec.msgpack.Decoder(Ended)
# A host that ends at once is not started again by every request.
_RESTART_S: Final = 1.0
_END_S: Final = 1.0
OUT_OF_CPU: Final = "out of CPU time"
OUT_OF_TIME: Final = "out of time"
OUT_OF_MEMORY: Final = "out of memory"
_REASONS: Final = {
    Signals.SIGPROF: OUT_OF_CPU,
    Signals.SIGALRM: OUT_OF_TIME,
    Signals.SIGABRT: OUT_OF_MEMORY,
    Signals.SIGSEGV: OUT_OF_MEMORY,
}


class Unavailable(Exception):
    """No worker can be started; the message is the reason."""


class Worker:
    """One process. `ask` never waits, from any thread."""

    def __init__(self, number: int, kill: Callable[[int], None]) -> None:
        self._number = number
        self._kill = kill
        self._lock = threading.RLock()  # a worker may be closed by the collector, anywhere
        self._waiting: deque[Future[bytes]] = deque()
        self._line: FrameSocket | None = None
        self._over = False
        self._why: str | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it runs and has answered every request."""
        return not self._over and not self._waiting

    def begin(self, line: FrameSocket) -> None:
        """Use `line`. Called once, by :class:`Workers`."""
        self._line = line

    def ask(self, payload: bytes) -> Future[bytes]:
        """Send a frame; return the future of its answer, which may raise :class:`.post.WorkerGone`."""
        answer: Future[bytes] = Future()
        with self._lock:
            over = self._over
            if not over:
                self._waiting.append(answer)
        if over or self._line is None:
            answer.set_exception(WorkerGone(self._why or "it has ended"))
        else:
            self._line.send(payload)
        return answer

    def send(self, payload: bytes) -> None:
        """Send a frame that has no answer."""
        if self._line is not None:
            self._line.send(payload)

    def close(self) -> None:
        """End it, in the middle of whatever it does."""
        if self._line is not None and not self._over:
            self._line.close()
            self._kill(self._number)

    def got(self, frame: bytes | None) -> None:
        """Take an answer; None if the line is closed. On the thread of the post."""
        if frame is not None:
            self._settle(frame)
        elif self._why is not None:
            self.over(self._why)
        else:
            self._over = True  # `over` follows, with the reason

    def over(self, why: str) -> None:
        """Note that the process has ended, and fail the pending answers."""
        with self._lock:
            self._over, self._why = True, why
            waiting = list(self._waiting)
            self._waiting.clear()
        for answer in waiting:
            with suppress(InvalidStateError):
                answer.set_exception(WorkerGone(why))

    def _settle(self, frame: bytes) -> None:
        with self._lock:
            answer = self._waiting.popleft() if self._waiting else None
        if answer is not None:
            with suppress(InvalidStateError):  # its waiter was cancelled
                answer.set_result(frame)


class Workers:
    """Processes that run one program: ``module:function`` as :mod:`.host` describes it.

    `setup` is called once for each start of the host, in the thread that starts the first worker.
    Any thread may use it.
    """

    def __init__(self, program: str, setup: Callable[[], bytes]) -> None:
        self._program = program
        self._setup = setup
        self._lock = threading.RLock()  # a worker may be closed by the collector, anywhere
        self._host_start = threading.Lock()  # held while a host is started, which takes long
        self._numbers = itertools.count(1)
        self._post = Post()
        self._process: subprocess.Popen[bytes] | None = None
        self._host: FrameSocket | None = None
        self._started_at = -_RESTART_S
        self._running: dict[int, Worker] = {}
        self._closed = False
        self.started = 0

    @property
    def running(self) -> int:
        """How many there are."""
        return len(self._running)

    @property
    def is_warm(self) -> bool:
        """Whether the host runs."""
        return self._host is not None

    def warm(self) -> None:
        """Start the host if it does not run. Blocks for as long as `setup` takes.

        Raises:
            Unavailable: the host cannot be started, or ended at once.
        """
        with self._host_start:
            if self._host is None:
                self._start_host()

    def start(self, limits: WorkerLimits, *, revive: bool = True) -> Worker:
        """Start a worker, and the host before it if it does not run, as :meth:`warm` does.

        Without `revive` the host is not started and nothing blocks, for a thread that must not wait.

        Raises:
            Unavailable: the host does not run, cannot be started, or ended at once.
        """
        if revive:
            self.warm()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise Unavailable(error.strerror or str(error)) from None
        with self._lock:
            host = self._host
            if host is None:
                ours.close()
                theirs.close()
                raise Unavailable("the process that starts others does not run; try again")
            number = next(self._numbers)
            worker = Worker(number, self._end)
            self._running[number] = worker
            worker.begin(self._post.line(ours, worker.got))
            host.send(msgspec.msgpack.encode(Start(number, limits)), theirs.detach())
            self.started += 1
        return worker

    def close(self) -> None:
        """Have the host and every worker end. Waits for none of them."""
        with self._lock:
            self._closed = True
            self._host = None
            self._setup = bytes  # drop the references of the callback
        self._post.close()

    def _end(self, number: int) -> None:
        with self._lock:
            if self._host is not None and number in self._running:
                self._host.send(msgspec.msgpack.encode(Kill(number)))

    def _start_host(self) -> None:
        """Start the host. Other threads may start and end workers of the previous one meanwhile."""
        if self._closed:
            raise Unavailable("the daemon is stopping")
        if time.monotonic() - self._started_at < _RESTART_S:
            raise Unavailable(
                "the process that starts others has just ended; try again in a second"
            )
        setup = self._setup()
        self._started_at = time.monotonic()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise Unavailable(error.strerror or str(error)) from None
        command = [
            *(sys.executable, "-P", "-m", "uma_trio.confined.host"),
            *(str(theirs.fileno()), self._program),
        ]
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        except OSError as error:
            ours.close()
            raise Unavailable(f"{command[0]} cannot be started: {error.strerror}") from None
        finally:
            theirs.close()
        if not self._adopted(process, ours, setup):
            ours.close()  # which ends the host
            process.wait()
            raise Unavailable("the daemon is stopping")

    def _adopted(self, process: subprocess.Popen[bytes], sock: socket.socket, setup: bytes) -> bool:
        """Use a new host; False if :meth:`close` was called while it was started."""
        with self._lock:
            if self._closed:
                return False
            self._process = process
            self._host = self._post.line(sock, self._on_host_frame)
            self._host.send(setup)
        return True

    def _on_host_frame(self, frame: bytes | None) -> None:
        """Handle a frame of the host. On the thread of the post."""
        if frame is not None:
            ended = _ENDED.decode(frame)
            with self._lock:
                worker = self._running.pop(ended.worker, None)
            if worker is not None:
                worker.over(_reason(ended.signal))
            return
        with self._lock:
            process, self._process, self._host = self._process, None, None
            workers = list(self._running.values())
            self._running.clear()
        for worker in workers:
            worker.over("its host has ended")
        if process is None:
            return
        try:
            process.wait(_END_S)  # closing its socket ends it
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _reason(number: int) -> str:
    if number == 0:
        return "it has ended"
    return _REASONS[Signals(number)] if number in _REASONS else f"signal {number}"
