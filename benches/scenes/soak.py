"""Memory of the daemon over many requests, on a real model with its prefix cache on. Some minutes.

    python -m benches soak                     10,000 requests of 12 clients
    python -m benches soak --requests 2000     fewer

Each client leads conversations behind one of four beginnings that all share: every turn sends its whole past
again. One request in ten asks for two answers, one in twenty is left after its first token, one in fifteen has a
namespace of its own, conversations are pinned by their session. `--prefix-ram` is small, so that it is full, and
pages are evicted, long before the end. The exit status is 1 if a request fails, or if the daemon holds more
descriptors at the end, or 16 MiB more private memory than after the first quarter.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import trio

from benches import host, servers
from benches.clients import WORDS
from benches.driver import tool
from uma_trio.client import Client, ServerError, connect
from uma_trio.models import bundled_model

_SLOTS, _CONTEXT = 8, 8192
_ANSWER, _TURNS = 8, 5
_MOST_MIB = 16.0
_PARTS = 20
_STILL_S = 2.0


@dataclass
class _Soak:
    """All clients together: how many requests there are to be, and what came of those that were."""

    path: Path
    pid: int
    requests: int
    begun: int = 0
    done: int = 0
    left: int = 0
    wrong: int = 0
    found: list[tuple[float, int]] = field(default_factory=list)

    async def converse(self, seed: int) -> None:
        """Lead one conversation after the other, until enough was asked."""
        dice = random.Random(seed)
        beginnings = [" ".join(random.Random(n).choices(WORDS, k=100)) for n in range(4)]
        async with connect(self.path) as client:
            while self.begun < self.requests:
                past = dice.choice(beginnings)
                session = f"s{seed}-{self.begun}" if dice.random() < 0.3 else None
                cache = f"c{dice.randrange(40)}" if dice.random() < 1 / 15 else None
                for _ in range(dice.randint(1, _TURNS)):
                    if self.begun >= self.requests:
                        return
                    self.begun += 1
                    past += " " + " ".join(dice.choices(WORDS, k=dice.randint(5, 30)))
                    past += await self._ask(client, dice, past, session, cache)

    async def _ask(
        self, client: Client, dice: random.Random, past: str, session: str | None, cache: str | None
    ) -> str:
        """Ask once; return the answer that the conversation goes on with."""
        asked = client.generate(
            past, max_tokens=_ANSWER, temperature=0.8, n=2 if dice.random() < 0.1 else 1,
            session=session, cache=cache, ignore_eos=True,
            priority="background" if dice.random() < 0.3 else "interactive",
        )  # fmt: skip
        leaves, said = dice.random() < 1 / 20, ""
        try:
            async with asked:
                async for token in asked:
                    if leaves:
                        break
                    said += token.text if token.choice == 0 else ""
        except ServerError as error:
            print(f"  wrong: {error}")
            self.wrong += 1
        else:
            self.left += leaves
        self.done += 1
        if self.done * _PARTS >= self.requests * (len(self.found) + 1):
            self.found.append(self.state())
            mib, files = self.found[-1]
            print(f"{self.done:7,} requests  {mib:7.1f} MiB private  {files:3} files", flush=True)
        return said

    def state(self) -> tuple[float, int]:
        """Return how much private memory the daemon holds, in MiB, and how many descriptors."""
        files = len(os.listdir(f"/proc/{self.pid}/fd"))
        return host.memory(self.pid).anonymous, files

    async def run(self, clients: int) -> None:
        """Let all clients ask until enough was asked."""
        async with trio.open_nursery() as nursery:
            for seed in range(clients):
                nursery.start_soon(self.converse, seed)


async def _cleared(path: Path) -> str:
    client = Client(path)
    found = await client.prefix("clear")
    figures = await client.metrics()
    names = ("kv_cells_used", "prefix_pages", "prefix_leaves", "prefix_evicted_total")
    return ", ".join([f"prefix_bytes {found.used_bytes}", *(f"{n} {figures[n]}" for n in names)])


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=10_000, metavar="N")
    parser.add_argument("--clients", type=int, default=12, metavar="N")
    parser.add_argument("--prefix-ram", default="32MiB", metavar="BYTES")
    parser.add_argument("--threads", type=int, default=1, metavar="N")


@tool(_arguments)
def soak(given: argparse.Namespace) -> int:
    """Ask, and say what came of it."""
    setup = servers.Setup(bundled_model(), given.threads, n_ctx=_CONTEXT, slots=_SLOTS)
    extra = ("--prefix-ram", given.prefix_ram, "--max-queue", str(2 * given.clients))
    with servers.daemon(setup, extra=extra) as running:
        path = running.wire.path  # type: ignore[attr-defined]
        play = _Soak(path, running.pid, given.requests)
        idle = play.state()
        began = time.monotonic()
        trio.run(play.run, given.clients)
        seconds = time.monotonic() - began
        print(f"cleared: {trio.run(_cleared, path)}")
        time.sleep(_STILL_S)
        after = play.state()
    grown = play.found[-1][0] - play.found[_PARTS // 4 - 1][0]
    print(f"{play.done} answered, {play.left} of them left early, {play.wrong} wrong; "
          f"{play.done / seconds:.1f} requests/s")  # fmt: skip
    print(f"{grown:+.1f} MiB since the first quarter")
    for name, (mib, files) in {"idle": idle, "cleared": after}.items():
        print(f"{name:<8} {mib:6.1f} MiB private  {files:3} files")
    return 0 if grown <= _MOST_MIB and after[1] <= idle[1] and not play.wrong else 1
