"""Verbs wait for a daemon that has its socket's name and does not serve yet."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from cli_kit import PATIENCE_S, command, environment, run

from uma_trio.cli.attempt import (
    run_when_served,
    start_if_wanted,
    wait_for_daemon,
    wait_until_served,
)
from uma_trio.cli.output import Trouble
from uma_trio.client import ConnectionFailed
from uma_trio.client.errors import ConnectionLost
from uma_trio.sockets.listener import claim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a lock")


@pytest.fixture
def path() -> Iterator[Path]:
    """Return the path of a socket, short enough for one."""
    with tempfile.TemporaryDirectory(prefix="uma-") as made:
        yield Path(made, "uma.sock")


def test_waiting_ends_when_the_daemon_serves(path: Path) -> None:
    """Though it keeps the lock."""
    looks: list[float] = []
    with claim(path), socket.socket(socket.AF_UNIX) as served:

        def serve_at_the_third_look(pause: float) -> None:
            looks.append(pause)
            if len(looks) == 3:
                served.bind(str(path))
                served.listen()

        wait_for_daemon(path, serve_at_the_third_look)
    assert len(looks) == 3


def test_waiting_ends_when_the_daemon_ends(path: Path) -> None:
    """Without having served: nobody holds the name any more."""
    claimed = claim(path)
    looks: list[float] = []

    def end(pause: float) -> None:
        looks.append(pause)
        claimed.release()

    wait_for_daemon(path, end)
    assert len(looks) == 1


@pytest.mark.parametrize("verb", [["ps"], ["run", "hi"]])
async def test_no_wait_fails_at_once(path: Path, verb: list[str]) -> None:
    """For scripts that have something better to do."""
    with claim(path):
        status, out, errors = await run("uma-trio", *verb, "--no-wait", "--socket", str(path))
    assert (status, out) == (3, "")
    assert f"pid {os.getpid()} is starting or stopping there" in errors


@pytest.mark.parametrize("verb", [["ps"], ["run", "hi"]])
async def test_verbs_wait_and_say_so(path: Path, verb: list[str]) -> None:
    """A daemon that ends while it is waited for is one that is not there."""
    with claim(path) as claimed, trio.fail_after(PATIENCE_S):
        process = await trio.lowlevel.open_process(
            command("uma-trio", *verb, "--socket", str(path)),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        said = b""
        async for some in process.stderr:  # type: ignore[union-attr]  # it is a pipe
            said += some
            if b"waiting until it serves" in said:
                claimed.release()
        assert await process.wait() == 3
    assert f"The daemon (pid {os.getpid()}) is starting".encode() in said
    assert b"start it with `uma-trio serve" in said


async def test_what_was_waited_for_is_run_again(path: Path) -> None:
    """With the arguments of the first attempt."""
    asked: list[int] = []

    async def verb(number: int) -> int:
        asked.append(number)
        if len(asked) == 1:
            raise ConnectionFailed("not yet", holder=1)
        return number

    def waits() -> int:
        found: int = run_when_served(verb, 7, socket=path)
        return found

    assert await trio.to_thread.run_sync(waits) == 7
    assert asked == [7, 7]


async def test_no_daemon_is_started_for_an_answer_that_broke_off() -> None:
    """What was printed of it would be printed again."""

    async def verb() -> int:
        raise ConnectionLost("the daemon closed the connection")

    def start() -> bool:
        raise AssertionError

    with pytest.raises(ConnectionLost):
        await trio.to_thread.run_sync(lambda: run_when_served(verb, socket=None, start=start))


async def test_a_daemon_is_started_once_and_the_verb_run_again() -> None:
    """If there is none; a second failure is told."""
    started: list[bool] = []

    async def verb() -> int:
        raise ConnectionFailed("nobody is there")

    def start() -> bool:
        started.append(True)
        return True

    with pytest.raises(ConnectionFailed):
        await trio.to_thread.run_sync(lambda: run_when_served(verb, socket=None, start=start))
    assert started == [True]


def test_without_a_terminal_nothing_is_started_unasked(path: Path) -> None:
    """A script that finds no daemon fails as before; nor is one started beside another, or on a port."""
    assert not start_if_wanted(path, None)
    assert not start_if_wanted(path, False)
    assert not start_if_wanted(Path("tcp:127.0.0.1:1"), True)
    with claim(path) as name, name.listen():
        assert not start_if_wanted(path, True)


@pytest.mark.parametrize(
    ("typed", "agreed"), [("\n", True), ("y\n", True), ("n\n", False), ("", False)]
)
def test_a_person_is_asked(
    path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, agreed: bool
) -> None:
    """Enter is yes; the end of the input is no."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    asked = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    monkeypatch.setattr("sys.stderr", asked)
    monkeypatch.setattr("uma_trio.cli.attempt._by_service", lambda _: True)
    assert start_if_wanted(path, None) == agreed
    assert f"No daemon serves on {path}. Start one now?" in asked.getvalue()


def test_a_daemon_that_ends_at_once_is_told_in_its_own_words(path: Path) -> None:
    """The last line of its log is why."""
    log = path.parent / "log"
    log.write_text("Loading.\numa-trio: there is no model\n")
    with pytest.raises(Trouble, match="ended: uma-trio: there is no model"):
        wait_until_served(path, lambda: 1, log)


@pytest.mark.daemon
async def test_run_starts_a_daemon_where_there_is_none(path: Path) -> None:
    """It answers, and the daemon serves on until it is stopped."""
    env = {**environment(), "XDG_STATE_HOME": str(path.parent)}
    words = ["run", "--raw", "hi", "--max-tokens", "3", "--start", "--socket", str(path)]
    with trio.fail_after(PATIENCE_S):
        process = await trio.run_process(
            command("uma-trio", *words),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env=env,
        )
        assert (process.returncode, b"Starting a daemon" in process.stderr) == (0, True)
        assert process.stdout
        status, out, _ = await run("uma-trio", "stop", "--socket", str(path))
    assert status == 0
    assert out.startswith("Stopped process")
