"""One daemon in place of another: no connect refused, no stream cut, whatever dies on the way."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from uma_trio.client import ConnectionFailed, ServerError, generate_sync
from uma_trio.sockets.accepting import accept_one
from uma_trio.sockets.handover import (
    Asked,
    Giver,
    Handed,
    HandoverFailed,
    TakenSockets,
    handover_path,
    offers_handover,
    take_over,
)
from uma_trio.sockets.listener import SocketTaken, claim, handed_claim
from uma_trio.sockets.path import holder_of

HERE = Path(__file__).parent
PATIENCE_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="uma") as name:
        yield Path(name)


# --- both ends ---


class Old:
    """A daemon's end, in this process: it gives what it serves on `path` to the first who asks."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = claim(path)
        self.listener = self.name.listen()
        self.giver = Giver.at(path)
        self.given: list[bool] = []

    async def give(self) -> None:
        """Wait until somebody asks, and give."""
        sent = [Handed("framed", self.path, self.listener.sock, self.listener.lock_fd)]
        self.given.append(await (await self.giver.asked()).give(sent))

    def leave(self) -> None:
        """End, as who has been replaced."""
        self.giver.disown()
        self.listener.disown()
        self.close()

    def close(self) -> None:
        """End."""
        self.giver.close()
        self.listener.close()
        self.name.release()


@pytest.fixture
def old(folder: Path) -> Iterator[Old]:
    """A daemon that serves."""
    daemon = Old(str(folder / "s"))
    yield daemon
    daemon.close()


async def taken_from(old: Old) -> TakenSockets:
    """Take over what must be there."""
    taken = await take_over(old.path)
    assert taken is not None
    return taken


def drop(taken: TakenSockets) -> None:
    """Close what was taken, as the end of a process does."""
    taken.close()
    for each in taken.handed:
        each.close()


async def test_sockets_and_locks_change_hands_without_an_instant_between(
    old: Old, folder: Path
) -> None:
    """The name is taken before, during and after; who connects in between is accepted by the new one."""
    assert os.stat(handover_path(old.path)).st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(old.give)
            taken = await taken_from(old)
            client.connect(old.path)
            await taken.serving()
        (each,) = taken.handed
        old.leave()
        with pytest.raises(SocketTaken):
            claim(old.path)
        with handed_claim(each.name, each.sock, each.lock_fd) as new, new.listen() as ours:
            ours.own()
            ours.sock.accept()[0].close()
            assert holder_of(old.path) == os.getpid()
    assert old.given == [True]
    assert sorted(os.listdir(folder)) == ["s.handover", "s.lock"]


async def test_a_new_daemon_that_ends_before_it_serves_changes_nothing(
    old: Old, folder: Path
) -> None:
    """The old one hears of it and goes on; the name and the lock file are as they were."""
    os.pwrite(old.listener.lock_fd, b"4711 \n", 0)
    before = os.pread(old.listener.lock_fd, 32, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(old.give)
        taken = await taken_from(old)
        (each,) = taken.handed
        with handed_claim(each.name, each.sock, each.lock_fd) as new, new.listen():
            taken.close()
    assert old.given == [False]
    assert old.listener.is_linked()
    assert os.pread(old.listener.lock_fd, 32, 0) == before
    with pytest.raises(SocketTaken):
        claim(old.path)


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell unread bytes from an end")
async def test_a_new_daemon_that_dies_before_it_hears_that_it_may_begin_is_not_believed(
    old: Old,
) -> None:
    """It said that it serves; the confirmation is never read, and the old one goes on."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(old.give)
        taken = await taken_from(old)
        await taken._channel.send(b"S")
        await trio.lowlevel.wait_readable(taken._channel.fileno())
        drop(taken)
    assert old.given == [False]


async def test_a_new_daemon_that_takes_too_long_is_given_up(
    old: Old, autojump_clock: MockClock
) -> None:
    """It hears so, and does not accept: nobody is accepted by both."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(old.give)
        taken = await taken_from(old)
        await trio.sleep(16)
        with pytest.raises(HandoverFailed, match="serves on"):
            await taken.serving()
        drop(taken)
    assert old.given == [False]


async def test_a_daemon_that_dies_when_it_has_given_leaves_the_sockets_to_the_new_one(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can neither confirm nor take back: the new one is the only one that has them."""
    monkeypatch.setattr(
        Asked, "_take_back", lambda _: None
    )  # a process that is killed says nothing
    async with trio.open_nursery() as nursery:
        nursery.start_soon(old.give)
        taken = await taken_from(old)
        nursery.cancel_scope.cancel()
    await taken.serving()
    drop(taken)


async def test_a_daemon_that_is_cancelled_while_it_gives_says_that_it_goes_on(old: Old) -> None:
    """The new one must not serve beside it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(old.give)
        taken = await taken_from(old)
        nursery.cancel_scope.cancel()
    with pytest.raises(HandoverFailed, match="serves on"):
        await taken.serving()
    drop(taken)


async def test_a_daemon_that_is_only_looked_for_gives_nothing(old: Old) -> None:
    """Before the model is loaded; the next one who asks is served."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(old.give)
        assert await offers_handover(old.path)
        taken = await taken_from(old)
        await taken.serving()
    drop(taken)
    assert old.given == [True]


async def test_who_connects_and_says_nothing_keeps_nobody_waiting(
    old: Old, autojump_clock: MockClock
) -> None:
    """After two seconds the next one has its turn."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(handover_path(old.path))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(old.give)
            taken = await taken_from(old)
            await taken.serving()
    drop(taken)
    assert trio.current_time() == pytest.approx(2.0, abs=0.5)


async def test_the_second_who_asks_learns_that_the_first_has_it(old: Old) -> None:
    """It takes nothing, and then finds the name held by another daemon."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(old.give)
        taken = await taken_from(old)
        second: list[TakenSockets | None] = []

        async def ask() -> None:
            second.append(await take_over(old.path))

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        await taken.serving()
        old.leave()
    assert second == [None]
    drop(taken)


async def test_the_next_daemon_can_be_asked_when_the_old_one_has_closed(folder: Path) -> None:
    """It has made the name anew by then, and the old one leaves it alone."""
    path = str(folder / "s")
    old = Giver.at(path)
    new = Giver.at(path)
    old.disown()
    old.close()
    assert os.listdir(folder) == ["s.handover"]
    new.close()
    assert os.listdir(folder) == []


@pytest.mark.parametrize(("name", "why"), [("none/s", "No such file"), ("n" * 90, "too long")])
def test_a_name_that_cannot_be_made_is_told(folder: Path, name: str, why: str) -> None:
    """The daemon serves all the same, and says that it cannot be replaced."""
    with pytest.raises(OSError, match=why) as caught:
        Giver.at(str(folder / name))
    assert caught.value.filename.endswith(".handover")


async def test_without_a_daemon_nothing_is_taken(folder: Path) -> None:
    """`serve --replace` then serves as `serve` does."""
    assert not await offers_handover(str(folder / "s"))
    assert await take_over(str(folder / "s")) is None


async def test_a_daemon_that_says_nothing_is_given_up(old: Old, autojump_clock: MockClock) -> None:
    """The message says that it serves on."""
    with pytest.raises(HandoverFailed, match=r"it said nothing.*serves on"):
        await take_over(old.path)


async def test_a_daemon_without_free_descriptors_waits_before_it_accepts_again(
    autojump_clock: MockClock,
) -> None:
    """It does not spin: a tenth of a second passes between two attempts."""

    class Poor(socket.socket):
        """Has no descriptor left for the first five attempts."""

        failures = 5

        def accept(self) -> tuple[socket.socket, Any]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with Poor() as listening, socket.socket() as client:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        client.connect(listening.getsockname())
        (await accept_one(listening)).close()
    assert trio.current_time() == pytest.approx(0.5)


# --- whole daemons ---


class Running:
    """A daemon process on the fake model."""

    def __init__(self, path: Path | str, *options: str) -> None:
        command = [sys.executable, str(HERE / "fake_daemon.py"), str(path), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def ready(self) -> None:
        """Wait until it serves."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == "ready"

    def ended(self) -> int:
        """Wait for its end."""
        if self.process.stdout is not None:
            self.process.stdout.close()
        return self.process.wait(PATIENCE_S)


class Load:
    """Clients that come one after another, on threads, until they are told to stop."""

    def __init__(self, path: Path | str, threads: int = 4) -> None:
        self.whole = 0
        self.lost: list[str] = []
        self._path = str(path)
        self._over = threading.Event()
        self._counted = threading.Condition()
        self._threads = [threading.Thread(target=self._work) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while not self._over.is_set():
            try:
                tokens = len(list(generate_sync("hello", self._path, max_tokens=20)))
                came = "" if tokens == 20 else f"{tokens} tokens"
            except (ConnectionFailed, ServerError) as error:
                came = str(error)
            with self._counted:
                if came:
                    self.lost.append(came)
                else:
                    self.whole += 1
                self._counted.notify_all()

    def until(self, more: int) -> None:
        """Wait for so many more answers."""
        with self._counted:
            wanted = self.whole + more
            self._counted.wait_for(lambda: self.whole >= wanted or self.lost, PATIENCE_S)

    def stop(self) -> None:
        """End them all."""
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@contextmanager
def under_load(path: Path | str) -> Iterator[tuple[Load, list[Running]]]:
    """A daemon with clients; the last of the list is stopped at the end, when nobody may be lost."""
    first = Running(path, "cost=0.002")
    daemons = [first]
    try:
        first.ready()
        load = Load(path)
        try:
            yield load, daemons
        finally:
            load.stop()
        daemons[-1].process.send_signal(signal.SIGTERM)
        assert daemons[-1].ended() == 0
        assert load.lost == []
    finally:
        for daemon in daemons:
            daemon.process.kill()
            daemon.ended()


@pytest.mark.daemon
def test_daemons_that_replace_each_other_lose_nobody(folder: Path) -> None:
    """Three times under load: every connect is served, every answer whole, one daemon is left."""
    path = folder / "s"
    with under_load(path) as (load, daemons):
        for _ in range(3):
            load.until(10)
            daemons.append(Running(path, "cost=0.002", "replace=1"))
            daemons[-1].ready()
            assert daemons[-2].ended() == 0
        load.until(10)
    assert load.whole >= 40
    assert not path.exists()


@pytest.mark.daemon
def test_a_new_daemon_that_dies_with_the_sockets_in_its_hands_costs_nobody(folder: Path) -> None:
    """The old one accepts again, and whoever connected meanwhile is served."""
    path = folder / "s"

    async def take_and_die() -> None:
        taken = await take_over(str(path))
        assert taken is not None
        drop(taken)

    with under_load(path) as (load, _):
        load.until(5)
        for _ in range(3):
            trio.run(take_and_die)
            load.until(5)
        new = Running(path, "replace=1")
        new.process.kill()
        new.ended()
        load.until(5)
    assert load.whole >= 25


@pytest.mark.daemon
def test_a_daemon_that_is_stopped_while_it_hands_over_waits_for_that(folder: Path) -> None:
    """The new one gets the name; the old one, told to end, has not removed it."""
    path = folder / "s"
    old = Running(path)
    old.ready()

    async def take() -> TakenSockets:
        taken = await take_over(str(path))
        assert taken is not None
        old.process.send_signal(signal.SIGTERM)
        await taken.serving()
        return taken

    taken = trio.run(take)
    try:
        assert old.ended() == 0
        assert path.exists()
        with pytest.raises(SocketTaken):
            claim(path)
    finally:
        for each in taken.handed:
            each.close()


@pytest.mark.daemon
def test_a_daemon_that_is_stopped_after_it_was_replaced_finishes_its_requests(folder: Path) -> None:
    """The signal is its first: it does not end who is still being answered."""
    path = folder / "s"
    old = Running(path, "cost=0.01")
    old.ready()
    begun = threading.Event()
    tokens: list[str] = []

    def read() -> None:
        for token in generate_sync("hello", str(path), max_tokens=100):
            tokens.append(token.text)
            begun.set()

    async def take() -> TakenSockets:
        taken = await take_over(str(path))
        assert taken is not None
        await taken.serving()
        assert await take_over(str(path)) is None  # when it has let go of the sockets
        return taken

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(PATIENCE_S)
    taken = trio.run(take)
    try:
        old.process.send_signal(signal.SIGTERM)
        reader.join(PATIENCE_S)
        assert old.ended() == 0
        assert len(tokens) == 100
    finally:
        for each in taken.handed:
            each.close()


@pytest.mark.daemon
def test_a_daemon_that_gives_nothing_is_told_of_before_the_model_is_loaded(folder: Path) -> None:
    """Who has the name without the way to hand it over is named."""
    path = folder / "s"
    with claim(path):
        new = Running(path, "replace=1")
        assert new.process.stdout is not None
        assert f"pid {os.getpid()}" in new.process.stdout.readline()
        assert new.ended() == 75


@pytest.mark.daemon
def test_a_daemon_on_a_port_is_replaced_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name for the hand-over is in the user's runtime folder; the port is never free."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("UMA_TOKEN_FILE", str(folder / "token"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        path = f"tcp:127.0.0.1:{free.getsockname()[1]}"
    with under_load(path) as (load, daemons):
        load.until(5)
        daemons.append(Running(path, "cost=0.002", "replace=1"))
        daemons[-1].ready()
        assert daemons[-2].ended() == 0
        load.until(5)
    assert load.whole >= 10


@pytest.mark.daemon
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_http_is_handed_over_at_both_loopback_addresses(folder: Path) -> None:
    """A client that keeps asking at either is never refused."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lost: list[str] = []
    answered = Counter[str]()
    over, counted = threading.Event(), threading.Condition()

    def ask(host: str) -> None:
        while not over.wait(0.01):
            try:
                with socket.create_connection((host, port), PATIENCE_S) as sock:
                    sock.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
                    said = sock.makefile("rb").read()
                came = "" if said.startswith(b"HTTP/1.1 200 ") else repr(said)
            except OSError as error:
                came = str(error)
            with counted:
                answered[host] += 1
                lost.extend([f"{host}: {came}"] if came else [])
                counted.notify_all()

    old = Running(folder / "s", f"http={port}")
    running = [old]
    threads = [threading.Thread(target=ask, args=(host,)) for host in ("127.0.0.1", "::1")]
    try:
        old.ready()
        for thread in threads:
            thread.start()
        for _ in range(2):
            running.append(Running(folder / "s", f"http={port}", "replace=1"))
            running[-1].ready()
            assert running[-2].ended() == 0
        with counted:
            before = answered.copy()
            counted.wait_for(lambda: len(answered - before) == 2 or lost, PATIENCE_S)
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        for daemon in running:
            daemon.process.kill()
            daemon.ended()
    assert not lost
    assert answered.keys() == {"127.0.0.1", "::1"}
