"""One daemon in place of another: no connect refused, no stream cut, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from uma_trio.client import ConnectionFailed, ServerError, generate_sync
from uma_trio.sockets.handover import Giver, Handed, HandoverFailed, handover_path, take_over
from uma_trio.sockets.holder import holder_of
from uma_trio.sockets.listener import SocketTaken, claim, handed_claim

HERE = Path(__file__).parent
PATIENCE_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="uma") as name:
        yield Path(name)


# --- both ends ---


async def test_sockets_and_locks_change_hands_without_an_instant_between(folder: Path) -> None:
    """The name is taken before, during and after; who connects in between is accepted by the new one."""
    path = str(folder / "s")
    with claim(path) as name, name.listen() as listener:
        giver = Giver.at(path)
        assert giver is not None
        assert os.stat(handover_path(path)).st_mode & 0o777 == 0o600
        given: list[bool] = []

        async def give() -> None:
            asked = await giver.asked()
            given.append(
                await asked.give([Handed("framed", path, listener.sock, listener.lock_fd)])
            )

        with socket.socket(socket.AF_UNIX) as client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(give)
                taken = await take_over(path)
                assert taken is not None
                client.connect(path)
                taken.serving()
            (each,) = taken.handed
            listener.disown()
            listener.close()
            giver.close()
            name.release()
            with pytest.raises(SocketTaken):
                claim(path)
            with handed_claim(each.name, each.sock, each.lock_fd) as new, new.listen() as ours:
                ours.sock.accept()[0].close()
                assert holder_of(path) == os.getpid()
        assert given == [True]
    assert os.listdir(folder) == ["s.lock"]


async def test_a_new_daemon_that_ends_before_it_serves_changes_nothing(folder: Path) -> None:
    """The old one hears of it and goes on."""
    path = str(folder / "s")
    with claim(path) as name, name.listen() as listener:
        giver = Giver.at(path)
        assert giver is not None
        given: list[bool] = []

        async def give() -> None:
            asked = await giver.asked()
            given.append(
                await asked.give([Handed("framed", path, listener.sock, listener.lock_fd)])
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give)
            taken = await take_over(path)
            assert taken is not None
            taken.close()
            for each in taken.handed:
                each.sock.close()
                os.close(each.lock_fd)
        assert given == [False]
        assert listener.still_ours()
        giver.close()


async def test_the_next_daemon_can_be_asked_when_the_old_one_has_closed(folder: Path) -> None:
    """It has made the name anew by then, and the old one leaves it alone."""
    path = str(folder / "s")
    old = Giver.at(path)
    assert old is not None
    new = Giver.at(path)
    assert new is not None
    old.disown()
    old.close()
    assert os.listdir(folder) == ["s.handover"]
    new.close()
    assert os.listdir(folder) == []


async def test_without_a_daemon_nothing_is_taken(folder: Path) -> None:
    """`serve --replace` then serves as `serve` does."""
    assert await take_over(str(folder / "s")) is None


async def test_a_daemon_that_says_nothing_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says that it serves on."""
    path = str(folder / "s")
    monkeypatch.setattr("uma_trio.sockets.handover._PATIENCE_S", 0.0)
    giver = Giver.at(path)
    assert giver is not None
    with pytest.raises(HandoverFailed, match="serves on"):
        await take_over(path)
    giver.close()


# --- whole daemons ---


class Running:
    """A daemon process on the fake model."""

    def __init__(self, path: Path, *options: str) -> None:
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

    def __init__(self, path: Path, threads: int = 4) -> None:
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
def under_load(path: Path) -> Iterator[tuple[Load, list[Running]]]:
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
    with under_load(path) as (load, _):
        load.until(5)
        for _ in range(3):
            taken = trio.run(take_over, str(path))
            assert taken is not None
            for each in taken.handed:
                each.sock.close()
                os.close(each.lock_fd)
            taken.close()
            load.until(5)
        new = Running(path, "replace=1")
        new.process.kill()
        new.ended()
        load.until(5)
    assert load.whole >= 25
