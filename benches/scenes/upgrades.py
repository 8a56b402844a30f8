"""Restarts and replacements of a daemon under new connections: who is refused, whose answer is lost. Five minutes.

    python -m benches upgrades                                  20 of each, 50 new connections a second
    python -m benches upgrades --times 3 --rate 20              fewer

Each connection asks for one short answer of the bundled model and leaves. The daemons take 1,024 clients (`--max-sessions`). Three things happen to the daemon meanwhile,
so many times each:

- restart: it gets SIGTERM and ends, and the next one is started on the same listening socket, which this process
  holds open as a service manager does (LISTEN_FDS).
- replacement: a daemon is started with `serve --replace`, and takes the socket of the running one.
- killed: what wants to replace it ends at one of four steps, in turns: while its model loads (a real daemon,
  SIGKILL), when it has asked for the sockets, when it has them, when it has said that it serves (the same
  conversation, held by this process). The old daemon has to serve on.

The exit status is 1 if a connect was refused or an answer was not whole.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import trio

from benches.driver import tool
from benches.report import note, table
from uma_trio.client import ConnectionFailed, ServerError, connect
from uma_trio.sockets.handover import handover_path, take_over

_TOKENS = 8
_START_S = 120.0
_SETTLE_S = 0.5
_BACKLOG = 512  # of the socket units
_SERVE = ("-m", "uma_trio.cli.main", "serve", "--log-level", "error")
# All who wait while no daemon accepts are connected at the same moment afterwards.
_SERVE += ("--max-sessions", "1024", "--max-queue", "4096")
# Takes standard input for the first descriptor that a supervisor passes (sd_listen_fds(3)).
_SUPERVISED = """\
import os, sys
os.dup2(0, 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
_STEPS = ("loading", "asked", "has the sockets", "said that it serves")


@dataclass
class _Load:
    """Connections at a steady rate, and what became of them."""

    path: str
    rate: float
    whole: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def coming(self) -> AsyncIterator[None]:
        """Let them come while the block runs, then wait for the last answer."""
        arriving = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._arrive, arriving)
            yield
            arriving.cancel()

    async def _arrive(self, arriving: trio.CancelScope) -> None:
        async with trio.open_nursery() as visitors:
            with arriving:
                begins = trio.current_time()
                while True:
                    visitors.start_soon(self._visit)
                    begins += 1 / self.rate
                    await trio.sleep_until(begins)

    async def _visit(self) -> None:
        began, failed = trio.current_time(), self.refused
        waited: float | None = None
        try:
            async with connect(self.path) as client:
                failed = self.lost
                async with client.generate("A fox", max_tokens=_TOKENS) as answer:
                    async for _ in answer:
                        waited = waited or trio.current_time() - began
        except (ConnectionFailed, ServerError) as error:
            failed[str(error)] += 1
        else:
            self.whole += 1
            self.first_token_s.append(waited or 0.0)

    @property
    def failures(self) -> int:
        """How many connects were refused and answers lost."""
        return self.refused.total() + self.lost.total()

    def row(self, what: str, times: int) -> list[object]:
        """Return a row of the table."""
        waits = self.first_token_s or [0.0]
        failed = self.refused.total(), self.lost.total()
        return [what, times, self.whole + self.failures, *failed, median(waits), max(waits)]


class _Daemon:
    """A process of `uma-trio serve` on `path`, or on a socket that is `held` for it."""

    def __init__(self, path: str, *flags: str, held: socket.socket | None = None) -> None:
        if held is None:
            command = [*_SERVE, "--socket", path, *flags]
        else:
            command = ["-c", _SUPERVISED, *_SERVE, *flags]
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "XDG_CACHE_HOME": os.path.dirname(path)},
            stdin=subprocess.DEVNULL if held is None else held.fileno(),
            stdout=subprocess.PIPE,
            text=True,
        )

    async def ready(self) -> None:
        """Wait until it accepts."""
        said = await trio.to_thread.run_sync(self.process.stdout.readline)  # type: ignore[union-attr]
        if "ready" not in said:
            raise SystemExit("a daemon did not start; its error is above")

    async def ended(self) -> None:
        """Wait until it has ended by itself."""
        await trio.to_thread.run_sync(self.process.wait, _START_S)
        self.close()

    def close(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.communicate()


async def _restarts(path: str, load: _Load, times: int) -> None:
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(path)
        held.listen(_BACKLOG)
        daemon = _Daemon(path, held=held)
        await daemon.ready()
        async with load.coming():
            for _ in range(times):
                await trio.sleep(_SETTLE_S)
                daemon.process.send_signal(signal.SIGTERM)
                await daemon.ended()
                daemon = _Daemon(path, held=held)
                await daemon.ready()
        daemon.close()


async def _replacements(path: str, load: _Load, times: int) -> None:
    daemon = _Daemon(path)
    await daemon.ready()
    async with load.coming():
        for _ in range(times):
            await trio.sleep(_SETTLE_S)
            new = _Daemon(path, "--replace")
            await new.ready()
            await daemon.ended()
            daemon = new
    daemon.close()


async def _killed(path: str, load: _Load, times: int) -> None:
    daemon = _Daemon(path)
    await daemon.ready()
    async with load.coming():
        for n in range(times):
            await trio.sleep(_SETTLE_S)
            await _die(path, _STEPS[n % len(_STEPS)])
    daemon.close()


async def _die(path: str, step: str) -> None:
    """Begin to replace the daemon on `path`, and end at `step`, as a process that is killed."""
    if step == "loading":
        new = _Daemon(path, "--replace")
        await trio.sleep(_SETTLE_S)
        new.close()
    elif step == "asked":
        with trio.socket.socket(socket.AF_UNIX) as channel:
            await channel.connect(handover_path(path))
            await channel.send(b"T")
    else:
        taken = await take_over(path)
        if taken is None:
            raise SystemExit("the daemon did not hand over")
        if step == "said that it serves":
            await taken._channel.send(b"S")  # noqa: SLF001 - a daemon that dies in the middle of serving()
        taken.close()
        for each in taken.handed:
            each.close()


_SCENES = {"restart": _restarts, "replacement": _replacements, "killed": _killed}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--rate", type=float, default=50.0, help="new connections a second")
    parser.add_argument("--what", nargs="+", choices=list(_SCENES), default=list(_SCENES))


@tool(_arguments)
def upgrades(given: argparse.Namespace) -> int:
    """Change daemons under load and print who noticed."""
    rows, failures = [], 0
    for what in given.what:
        with tempfile.TemporaryDirectory(prefix="uma-") as folder:
            load = _Load(str(Path(folder) / "s"), given.rate)
            trio.run(_SCENES[what], load.path, load, given.times)
        rows.append(load.row(what, given.times))
        failures += load.failures
        for why, n in (load.refused + load.lost).items():
            note(f"{n} x {why}")
    head = ["what", "times", "connections", "refused", "lost", "first token s", "longest s"]
    print(f"load {os.getloadavg()[0]:.1f}\n")
    print(table(head, rows))
    return 1 if failures else 0
