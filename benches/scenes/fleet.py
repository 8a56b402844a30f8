"""Three daemons behind HAProxy: requests lost at a kill, turns on their node, cancels, readers, scrapes. Two minutes.

    python -m benches fleet                       all of it
    python -m benches fleet --only kills scrape   some parts

The daemons have the fake model of the tests, whose ticks take 10 ms for up to 32 tokens; HAProxy has the file of
`uma-trio cluster`. Everything is on one machine, so that times are upper bounds. The client sends nothing again and
compares every stream with the text that one daemon gives. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import trio

from benches.driver import tool

_OPTIONS: Final = ("cost=0.01", "rows=32", "n_ctx=65536", "parallel=8", "http_max_connections=1024")
_LONG: Final = "long " * 200
_SLOW_START_S: Final = 10.0  # HAProxy gives a new server few requests at first
_PARTS: Final = ("kills", "turns", "cancel", "readers", "scrape")


def _kit() -> Any:
    """Return the tests' own fleet; the benches have no other."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    return importlib.import_module("fleet_kit")


@contextmanager
def _fleet(*options: str, **document: Any) -> Iterator[Any]:
    with (
        tempfile.TemporaryDirectory(prefix="uma") as folder,
        _kit().fleet(Path(folder), *(options or _OPTIONS), **document) as found,
    ):
        yield found


async def _all(port: int, bodies: list[dict[str, Any]]) -> list[Any]:
    kit, found = _kit(), [None] * len(bodies)

    async def one(index: int) -> None:
        found[index] = await kit.ask(port, bodies[index])

    async with trio.open_nursery() as nursery:
        for index in range(len(bodies)):
            nursery.start_soon(one, index)
    return found


def kills() -> bool:
    """Kill one node of three under load, several times, until 200 requests were on one without a token."""
    kit = _kit()
    lost = caught = streams = 0
    with _fleet() as fleet:
        time.sleep(_SLOW_START_S)
        for turn in range(40):
            fleet.heal()
            bodies = [
                kit.chat(f"{turn} {i} {_LONG}", tokens=12, stream=i % 3 > 0) for i in range(60)
            ]

            async def load(bodies: list[dict[str, Any]] = bodies) -> list[Any]:
                found: list[Any] = []
                async with trio.open_nursery() as nursery:

                    async def go() -> None:
                        found.extend(await _all(fleet.port, bodies))

                    nursery.start_soon(go)
                    await trio.to_thread.run_sync(kit.eventually, lambda: _held(fleet) >= 40)
                    most = max(fleet.states().values(), key=lambda state: state.active)
                    held = most.active
                    fleet.nodes[most.id - 1].signal()
                    found.append(held)
                return found

            *answers, held = sorted(trio.run(load), key=lambda one: isinstance(one, int))
            caught += held
            streams += sum(1 for one in answers if one.status == 200 and not one.whole)
            wrong = [one for one in answers if one.status != 200]
            lost += len(wrong)
            for one in wrong:
                print(f"  lost: status {one.status}, node {one.node or '-'}, {one.body[:80]!r}")
            if caught >= 200:
                break
    # A stream that is cut off has begun, unless it has no byte of text.
    print(f"kills: {caught} requests on killed nodes, {lost} lost, {streams} streams cut off")
    return lost == 0


def _held(fleet: Any) -> int:
    return sum(state.active for state in fleet.states().values())


def turns() -> bool:
    """Chats of four turns, then the same with one node killed before the third turn."""
    kit = _kit()
    good = True
    with _fleet() as fleet:
        time.sleep(_SLOW_START_S)
        for killed in (False, True):
            fleet.heal()
            said = [[f"{killed} chat {i} " + "word " * 80] for i in range(24)]
            homes: dict[int, str] = {}
            stayed = later = reused = reusable = 0
            before = [0] * len(said)
            for turn in range(4):
                if killed and turn == 2:
                    fleet.nodes[0].signal()
                answers = trio.run(_all, fleet.port, [kit.chat(*one) for one in said])
                for i, answer in enumerate(answers):
                    if turn:
                        later += 1
                        stayed += answer.node == homes[i]
                        reused += min(answer.cached, before[i])
                        reusable += before[i]
                    homes[i] = answer.node
                    before[i] = len("".join(said[i])) + len(answer.text)
                    said[i] += [answer.text, "and then?"]
            print(
                f"turns{' with one node killed' if killed else ''}: {stayed} of {later} on their node, "
                f"{reused / reusable:.1%} of the reusable tokens cached"
            )
            good &= killed or stayed >= 0.99 * later
    return good


def cancel() -> bool:
    """Leave streams through the proxy, and ask the daemon until no slot is taken."""
    kit = _kit()
    with _fleet() as fleet:
        took: list[float] = []
        for i in range(20):
            body = kit.chat(
                f"cancel {i} " + (_LONG * 20 if i % 2 else ""), tokens=5000, stream=True
            )

            async def leave(body: dict[str, Any] = body) -> None:
                with trio.move_on_after(0.3):
                    await kit.ask(fleet.port, body)

            trio.run(leave)
            began = time.monotonic()
            while any(_running(node.port) for node in fleet.nodes):
                pass
            took.append((time.monotonic() - began) * 1e3)
    p50, most = statistics.median(took), max(took)
    print(f"cancel: slots free after {p50:.0f} ms, {most:.0f} ms at most")
    return p50 <= 100


def _running(port: int) -> bool:
    text = _get(port, "/slots")
    return b'"is_processing":true' in text


def _get(port: int, path: str) -> bytes:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def readers() -> bool:
    """Streams on three nodes of which one is loaded directly: gaps by the file, and by fewest connections."""
    p95 = {}
    for way in ("fewest connections", "headroom"):
        with _fleet("cost=0.004", "each=0.0005", "rows=64", "n_ctx=65536", "parallel=16") as fleet:
            if way == "fewest connections":
                text = fleet.folder / "cluster.d" / "haproxy.cfg"
                text.write_text(
                    text.read_text().replace("agent-check", "").replace("agent-inter 250ms", "")
                )
                _reload(fleet)
            time.sleep(_SLOW_START_S)
            p95[way] = trio.run(_mixed, fleet)
        print(f"readers by {way}: p95 of a stream of 30 tokens {p95[way]:.3f} s")
    share = p95["headroom"] / p95["fewest connections"]
    print(f"readers: {share:.2f} by headroom of fewest connections")
    return share <= 0.8


def _reload(fleet: Any) -> None:
    from uma_trio.cluster import process
    from uma_trio.cluster.haproxy import Files

    before = fleet.runtime.worker()
    process.start(Files(folder=fleet.folder / "cluster.d"))
    _kit().eventually(lambda: fleet.states() and fleet.runtime.worker() != before)
    _kit().eventually(lambda: all(state.status == "UP" for state in fleet.states().values()))


async def _mixed(fleet: Any) -> float:
    """Return the readers' p95 in seconds, while prompts come to node 1 past the proxy."""
    kit = _kit()
    times: list[float] = []

    async def load(index: int) -> None:
        while True:
            await kit.ask(
                fleet.nodes[0].port,
                kit.chat(f"load {index} {time.monotonic()} " + _LONG * 2, tokens=2),
            )

    async def reader(index: int) -> None:
        began = time.monotonic()
        await kit.ask(fleet.port, kit.chat(f"reader {index}", tokens=30, stream=True))
        times.append(time.monotonic() - began)

    async with trio.open_nursery() as nursery:
        for index in range(6):
            nursery.start_soon(load, index)
        await trio.sleep(2.0)
        async with trio.open_nursery() as inner:
            for index in range(80):
                inner.start_soon(reader, index)
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    return statistics.quantiles(times, n=20)[-1]


def scrape() -> bool:
    """Ask /metrics/router each 50 ms on one connection, and count the daemon's processor time."""
    import http.client

    with _fleet() as fleet:
        node = fleet.nodes[0]
        idle = _cpu_s(node.process.pid, 5.0, lambda: time.sleep(0.05))
        connection = http.client.HTTPConnection("127.0.0.1", node.port)

        def ask() -> None:
            connection.request("GET", "/metrics/router")
            connection.getresponse().read()
            time.sleep(0.05)

        busy = _cpu_s(node.process.pid, 5.0, ask)
    print(
        f"scrape: {busy - idle:.1%} of a core for a scrape each 50 ms ({idle:.1%} without, agent checks included)"
    )
    return busy - idle <= 0.02


def _cpu_s(pid: int, seconds: float, step: Callable[[], object]) -> float:
    """Return the part of a core that a process takes while `step` is repeated."""

    def used() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, began = used(), time.monotonic()
    while time.monotonic() < began + seconds:
        step()
    return (used() - before) / (time.monotonic() - began)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=_PARTS, metavar="PART")


@tool(_arguments)
def fleet(given: argparse.Namespace) -> int:
    """Run the parts, and say what came of them."""
    parts = {"kills": kills, "turns": turns, "cancel": cancel, "readers": readers, "scrape": scrape}
    missed = [name for name in given.only if not parts[name]()]
    print(f"missed: {', '.join(missed)}" if missed else "all targets met")
    return 1 if missed else 0
