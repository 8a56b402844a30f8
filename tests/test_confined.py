"""Confined workers: what the kernel ends, what goes on, and that nothing outlives the daemon."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from confined_kit import host_of

from uma_trio.confined import host as host_module
from uma_trio.confined import workers as workers_module
from uma_trio.confined.link import Ended, Start, WorkerLimits, WorkerLink
from uma_trio.confined.post import WorkerGone
from uma_trio.confined.workers import Unavailable, Worker, Workers

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60.0
ROOMY = WorkerLimits(30.0, 60.0, 1 << 30)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Return workers that run the program of the kit."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    found = Workers("confined_kit:prepare", lambda: b"set up, ")
    yield found
    found.close()


def answer(worker: Worker, asked: bytes) -> bytes:
    """Return what a worker says."""
    return worker.ask(asked).result(PATIENCE_S)


def wait_until_gone(pid: int) -> None:
    """Wait for the end of a process that is not ours."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], PATIENCE_S)[0], f"{pid} still runs"
    finally:
        os.close(fd)


def test_nothing_is_started_before_it_is_needed(workers: Workers) -> None:
    """Neither a process nor a thread; the first worker starts the host."""
    assert not workers.is_warm
    workers.start(ROOMY)
    assert workers.is_warm


def test_a_worker_answers_each_frame_in_order(workers: Workers) -> None:
    """Also a frame that is longer than what a socket takes at once."""
    worker = workers.start(ROOMY)
    long = b"x" * (1 << 20)
    answers = [worker.ask(asked) for asked in (b"one", long, b"three")]
    found = [each.result(PATIENCE_S) for each in answers]
    assert found == [b"set up, one", b"set up, " + long, b"set up, three"]


@pytest.mark.parametrize(
    ("asked", "limits", "why"),
    [
        (b"spin", WorkerLimits(0.05, 60.0, 1 << 30), "out of CPU time"),
        (b"sleep", WorkerLimits(30.0, 0.05, 1 << 30), "out of time"),
        (b"fill", WorkerLimits(30.0, 60.0, 1 << 26), "out of memory"),
    ],
)
def test_a_worker_that_takes_too_much_is_ended_alone(
    workers: Workers, asked: bytes, limits: WorkerLimits, why: str
) -> None:
    """Whoever waits is told by what; another worker, and a new one, go on."""
    other, guilty = workers.start(ROOMY), workers.start(limits)
    with pytest.raises(WorkerGone, match=why):
        answer(guilty, asked)
    with pytest.raises(WorkerGone):
        answer(guilty, b"again")
    assert answer(other, b"still") == b"set up, still"
    assert answer(workers.start(ROOMY), b"new") == b"set up, new"


def test_a_worker_that_somebody_kills_is_out_of_nothing(workers: Workers) -> None:
    """Whoever waits is told the signal."""
    worker = workers.start(ROOMY)
    os.kill(int(answer(worker, b"pid")), signal.SIGKILL)
    with pytest.raises(WorkerGone, match=f"signal {signal.SIGKILL:d}"):
        answer(worker, b"again")


def test_a_worker_that_cannot_be_forked_is_out_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has no room for a process: that says nothing about what it was to do."""

    def full() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", full)
    ours, theirs = socket.socketpair()
    given, kept = socket.socketpair()
    with ours, theirs, kept:
        host_module._Host(theirs, lambda link: None)._fork(Start(7, ROOMY), given.detach())
        ended = msgspec.msgpack.decode(WorkerLink(ours).receive(), type=Ended)
        assert kept.recv(1) == b""
    assert (ended.worker, ended.signal) == (7, 0)


def test_a_thread_that_must_not_wait_starts_no_host(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no worker then, also while another thread starts the host; with a host it has one."""
    began, go_on = threading.Event(), threading.Event()

    def setup() -> bytes:
        began.set()
        assert go_on.wait(PATIENCE_S)
        return b"set up, "

    monkeypatch.setattr(workers, "_setup", setup)
    with pytest.raises(Unavailable, match="does not run"):
        workers.start(ROOMY, revive=False)
    assert not began.is_set()
    with ThreadPoolExecutor(1) as pool:
        warmed = pool.submit(workers.warm)
        assert began.wait(PATIENCE_S)
        with pytest.raises(Unavailable, match="does not run"):
            workers.start(ROOMY, revive=False)
        go_on.set()
        warmed.result(PATIENCE_S)
    assert answer(workers.start(ROOMY, revive=False), b"one") == b"set up, one"


def test_a_host_that_was_being_started_ends_with_the_others(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon stops while a helper thread prepares the first shape."""

    def setup() -> bytes:
        workers.close()
        return b""

    monkeypatch.setattr(workers, "_setup", setup)
    with pytest.raises(Unavailable, match="is stopping"):
        workers.warm()
    assert not workers.is_warm


def test_time_between_frames_counts_for_nothing(workers: Workers) -> None:
    """A worker that waits for its next frame has all its time for it."""
    worker = workers.start(WorkerLimits(0.2, 60.0, 1 << 30))
    for number in range(2000):
        assert answer(worker, b"%d" % number) == b"set up, %d" % number


def test_a_worker_writes_no_files(workers: Workers) -> None:
    """What comes from a client cannot fill a disk."""
    with pytest.raises(WorkerGone):
        answer(workers.start(ROOMY), b"write")
    written = Path("/tmp/written-by-a-worker")  # noqa: S108
    assert not written.exists() or not written.stat().st_size


def test_a_worker_that_is_closed_ends_in_the_middle_of_its_work(workers: Workers) -> None:
    """It need not come to look at its socket."""
    worker = workers.start(ROOMY)
    pid = int(answer(worker, b"pid"))
    waiting = worker.ask(b"spin")
    worker.close()
    wait_until_gone(pid)
    with pytest.raises(WorkerGone):
        waiting.result(PATIENCE_S)


def test_a_host_that_dies_is_started_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers end with it, and those who wait for them are told."""
    monkeypatch.setattr(workers_module, "_RESTART_S", 0.0)
    worker = workers.start(ROOMY)
    pid, host = int(answer(worker, b"pid")), host_of(workers)
    assert host is not None
    waiting = worker.ask(b"spin")
    os.kill(host, signal.SIGKILL)
    with pytest.raises(WorkerGone):
        waiting.result(PATIENCE_S)
    wait_until_gone(pid)
    wait_until_gone(host)
    assert answer(workers.start(ROOMY), b"new") == b"set up, new"


def test_a_host_that_ends_at_once_is_not_started_by_every_request(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is told so."""
    monkeypatch.setattr(workers, "_program", "confined_kit:nothing")
    worker = workers.start(ROOMY)
    with pytest.raises(WorkerGone):
        answer(worker, b"one")
    with pytest.raises(Unavailable, match="has just ended"):
        workers.start(ROOMY)


def test_an_interpreter_that_cannot_be_started_is_said(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name."""
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(Unavailable, match="/nonexistent/python cannot be started"):
        workers.start(ROOMY)


def test_all_end_when_they_are_closed(workers: Workers) -> None:
    """Those who wait are told."""
    worker = workers.start(ROOMY)
    pid, host = int(answer(worker, b"pid")), host_of(workers)
    assert host is not None
    waiting = worker.ask(b"spin")
    workers.close()
    wait_until_gone(pid)
    wait_until_gone(host)
    with pytest.raises(WorkerGone):
        waiting.result(PATIENCE_S)
    with pytest.raises(Unavailable):
        workers.start(ROOMY)


def test_all_end_with_the_process_that_started_them() -> None:
    """Even if that is killed, and a worker is busy."""
    code = (
        "from uma_trio.confined.link import WorkerLimits\n"
        "from uma_trio.confined.workers import Workers\n"
        "import os, signal\n"
        "w = Workers('confined_kit:prepare', lambda: b'')\n"
        "a = w.start(WorkerLimits(30.0, 60.0, 1 << 30))\n"
        "print(int(a.ask(b'pid').result(60)), w._process.pid, flush=True)\n"
        "a.ask(b'say and spin').result(60)\n"
        "a.ask(b'spin')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in map(int, done.stdout.split()):
        wait_until_gone(pid)
