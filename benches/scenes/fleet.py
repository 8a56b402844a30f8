"""Three daemons behind HAProxy: requests lost at a kill, turns on their node, cancels, readers, scrapes. Two minutes.

    python -m benches fleet                       all of it
    python -m benches fleet --only kills scrape   some parts

The daemons have the fake model of the tests, whose ticks take 10 ms for up to 32 tokens; HAProxy has the file of
`uma-trio cluster`. Everything is on one machine, so that times are upper bounds. The client sends nothing again.
A line for each target says whether it is met. No other model and no peer is used, whatever the options say.
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
from attrs import frozen

from benches import servers
from benches.clients import NotServed
from benches.contest import OURS, Medians, Row, System, verdict
from benches.driver import Comparison, Here, Table, scene

_OPTIONS: Final = ("cost=0.01", "rows=32", "n_ctx=65536", "parallel=8", "http_max_connections=1024")
_LONG: Final = "long " * 200


@frozen
class _Size:
    """How much is asked. `settle_s` is waited for: HAProxy gives a new server few requests at first."""

    killed: int = 200
    load: int = 60
    chats: int = 24
    cancels: int = 20
    readers: int = 80
    scrape_s: float = 5.0
    settle_s: float = 10.0


_DRY: Final = _Size(killed=1, load=9, chats=3, cancels=2, readers=3, scrape_s=0.2, settle_s=0.0)


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


def kills(size: _Size, seed: str) -> Row:
    """Kill one node of three under load, several times, until enough requests were on one."""
    kit = _kit()
    lost = caught = streams = 0
    with _fleet() as fleet:
        time.sleep(size.settle_s)
        for turn in range(40):
            fleet.heal()
            bodies = [
                kit.chat(f"{seed} {turn} {i} {_LONG}", tokens=12, stream=i % 3 > 0)
                for i in range(size.load)
            ]

            async def load(bodies: list[dict[str, Any]] = bodies) -> list[Any]:
                found: list[Any] = []
                async with trio.open_nursery() as nursery:

                    async def go() -> None:
                        found.extend(await _all(fleet.port, bodies))

                    nursery.start_soon(go)
                    await trio.to_thread.run_sync(
                        kit.eventually, lambda: 3 * _held(fleet) >= 2 * size.load
                    )
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
            if caught >= size.killed:
                break
    # A stream that is cut off has begun, unless it has no byte of text.
    return {"killed": caught, "lost": lost, "cut": streams}


def _held(fleet: Any) -> int:
    return sum(state.active for state in fleet.states().values())


def turns(size: _Size, seed: str) -> list[Row]:
    """Chats of four turns, then the same with one node killed before the third turn."""
    kit = _kit()
    rows: list[Row] = []
    with _fleet() as fleet:
        time.sleep(size.settle_s)
        for killed in (False, True):
            fleet.heal()
            said = [[f"{seed} {killed} chat {i} " + "word " * 80] for i in range(size.chats)]
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
            case = "one node killed" if killed else ""
            rows.append(
                {
                    "case": case,
                    "stayed_pct": 100 * stayed / later,
                    "cached_pct": 100 * reused / reusable,
                }
            )
    return rows


def cancel(size: _Size, seed: str) -> Row:
    """Leave streams through the proxy, and ask the daemon until no slot is taken."""
    kit = _kit()
    with _fleet() as fleet:
        took: list[float] = []
        for i in range(size.cancels):
            body = kit.chat(
                f"{seed} cancel {i} " + (_LONG * 20 if i % 2 else ""), tokens=5000, stream=True
            )

            async def leave(body: dict[str, Any] = body) -> None:
                with trio.move_on_after(0.3):
                    await kit.ask(fleet.port, body)

            trio.run(leave)
            began = time.monotonic()
            while any(_running(node.port) for node in fleet.nodes):
                pass
            took.append((time.monotonic() - began) * 1e3)
    return {"free_ms": statistics.median(took), "free_max_ms": max(took)}


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


def readers(size: _Size, seed: str) -> Row:
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
            time.sleep(size.settle_s)
            p95[way] = trio.run(_mixed, fleet, size.readers, seed)
    fewest, headroom = p95["fewest connections"], p95["headroom"]
    return {"readers_s": headroom, "fewest_s": fewest, "share": headroom / fewest}


def _reload(fleet: Any) -> None:
    from uma_trio.cluster import process
    from uma_trio.cluster.haproxy import Files

    before = fleet.runtime.worker()
    process.start(Files(folder=fleet.folder / "cluster.d"))
    _kit().eventually(lambda: fleet.states() and fleet.runtime.worker() != before)
    _kit().eventually(lambda: all(state.status == "UP" for state in fleet.states().values()))


async def _mixed(fleet: Any, n: int, seed: str) -> float:
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
        await kit.ask(fleet.port, kit.chat(f"{seed} reader {index}", tokens=30, stream=True))
        times.append(time.monotonic() - began)

    async with trio.open_nursery() as nursery:
        for index in range(6):
            nursery.start_soon(load, index)
        await trio.sleep(2.0)
        async with trio.open_nursery() as inner:
            for index in range(n):
                inner.start_soon(reader, index)
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    return statistics.quantiles(times, n=20)[-1]


def scrape(size: _Size, _seed: str) -> Row:
    """Ask /metrics/router each 50 ms on one connection, and count the daemon's processor time."""
    import http.client

    with _fleet() as fleet:
        node = fleet.nodes[0]
        idle = _cpu_s(node.process.pid, size.scrape_s, lambda: time.sleep(0.05))
        connection = http.client.HTTPConnection("127.0.0.1", node.port)

        def ask() -> None:
            connection.request("GET", "/metrics/router")
            connection.getresponse().read()
            time.sleep(0.05)

        busy = _cpu_s(node.process.pid, size.scrape_s, ask)
    return {"scrape_pct": 100 * (busy - idle), "idle_pct": 100 * idle}


def _cpu_s(pid: int, seconds: float, step: Callable[[], object]) -> float:
    """Return the part of a core that a process takes while `step` is repeated."""

    def used() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, began = used(), time.monotonic()
    while time.monotonic() < began + seconds:
        step()
    return (used() - before) / (time.monotonic() - began)


_PARTS: Final[dict[str, Callable[[_Size, str], Row | list[Row]]]] = {
    "kills": kills,
    "turns": turns,
    "cancel": cancel,
    "readers": readers,
    "scrape": scrape,
}
_TABLES: Final = {
    "kills": (("killed", "killed", 0), ("lost", "lost", 0), ("streams cut off", "cut", 0)),
    "turns": (("on their node %", "stayed_pct", 1), ("cached %", "cached_pct", 1)),
    "cancel": (("slot free ms", "free_ms", 0), ("most ms", "free_max_ms", 0)),
    "readers": (
        ("p95 by headroom s", "readers_s", 3),
        ("by fewest connections s", "fewest_s", 3),
        ("share", "share", 2),
    ),
    "scrape": (("of a core %", "scrape_pct", 1), ("without %", "idle_pct", 1)),
}
#: The figure of each part that has a target, the target, and whether it is the most.
_TARGETS: Final = {
    "kills": ("lost", 0.0, True),
    "turns": ("stayed_pct", 99.0, False),
    "cancel": ("free_ms", 100.0, True),
    "readers": ("share", 0.8, True),
    "scrape": ("scrape_pct", 2.0, True),
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=[*_PARTS], default=[*_PARTS], metavar="PART")
    parser.set_defaults(model=servers.FAKE, no_peers=True)


def _verdicts(medians: Medians) -> Iterator[str]:
    for system in medians.systems:
        if not system.case:
            figure, target, at_most = _TARGETS[system.knob]
            text = f"{system.knob}: {figure}"
            yield verdict(text, medians(system, figure), target, at_most=at_most)


@scene(_arguments)
def fleet(given: argparse.Namespace, _here: Here) -> Comparison:
    """Return the parts, each measured on a fleet of its own."""
    if _kit().PROGRAM is None:
        raise SystemExit("HAProxy is not installed here; on Debian: apt install haproxy")
    size = _DRY if given.dry_run else _Size()

    def measured(name: str) -> Callable[[str], Row | list[Row]]:
        def measure(seed: str) -> Row | list[Row]:
            try:
                return _PARTS[name](size, seed)
            except AssertionError as never:  # what the kit waits for did not happen
                raise NotServed(str(never)) from never

        return measure

    return Comparison(
        [System(OURS, name, measured(name)) for name in given.only],
        seconds=1.0 if given.dry_run else 30.0,
        tables=[Table(name, _TABLES[name], _TABLES[name][0][1]) for name in given.only],
        repetitions=1,
        verdicts=_verdicts,
    )
