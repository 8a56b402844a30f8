"""Whether every wait of more than a second is named while it lasts, and who causes it. Some minutes.

    python -m benches waits                 five minutes of a mix of programs on the bundled model
    python -m benches waits --minutes 60    an hour

A person chats, three agents send one long beginning at the same time, a batch job keeps six requests waiting for three
slots, two documents need more of the KV cache than is free, and in the last third another program spins. Each
program notes when its tokens come. A *wait* is a second or more without one, from the sending on. Beside them
somebody looks four times a second as `ps` does. A wait is *named* if a look in its time said what the request waits
for, and *explained* if that names the requests or the thing that causes it; a prompt that is being computed is
its own cause. The exit status is 1 if a wait was not named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from benches import beside, servers
from benches.clients import WORDS
from benches.driver import tool
from benches.report import note
from uma_protocol import Awaits, Priority, SessionInfo
from uma_trio.client import Client, ServerError, connect
from uma_trio.models import bundled_model

_SLOTS, _CONTEXT = 3, 4096
_LOOK_S, _LONG_S = 0.25, 1.0
_OWN = "its own prompt is computed"
_KINDS = {
    "slot": r"slots? (is|are) taken|room is kept|needed again",
    "cell": r"KV cells",
    "prefix": r"computes the same|is restored",
    "preempted": r"preempted",
    "readers": r"readers|is due in|alone: to measure",
    "ticks": r"does not fit|batch is full|used up|moves as much",
    "machine": r"the machine takes",
    "mask": r"mask",
    "model": r"model is",
    "own prompt": _OWN,
    "own reader": r"reader is behind",
}
_CAUSED = re.compile(r": by |waits for |restored|the machine takes|its reader|mask|" + _OWN)


@dataclass(frozen=True)
class _Wait:
    """A time without a token of the request `name`."""

    name: str
    app: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended - self.began


@dataclass
class _Hour:
    """All programs together: what they waited, and what was said of it."""

    path: Path
    until: float
    waits: list[_Wait] = field(default_factory=list)
    said: defaultdict[str, list[tuple[float, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    asked: int = 0
    refused: int = 0

    async def ask(
        self,
        client: Client,
        app: str,
        prompt: str,
        n: int,
        *,
        priority: Priority = "interactive",
        awaits: Awaits = "tokens",
    ) -> None:
        """Have one answer, and note what was waited for its tokens."""
        self.asked += 1
        name, last = f"{app}-{self.asked}", time.monotonic()
        try:
            async with client.generate(
                prompt, id=name, app=app, max_tokens=n, ignore_eos=True,
                priority=priority, awaits="nothing" if priority == "background" else awaits,
            ) as answer:  # fmt: skip
                async for _ in answer:
                    last = self._note(name, app, last)
                self._note(name, app, last)
        except ServerError as error:
            self.refused += 1
            note(f"{name}: {error}")

    def _note(self, name: str, app: str, since: float) -> float:
        now = time.monotonic()
        if now - since >= _LONG_S:
            self.waits.append(_Wait(name, app, since, now))
        return now

    async def look(self) -> None:
        """Look as a person does with `ps`, until the programs have ended."""
        client = Client(self.path)
        while True:
            found, now = await client.overview(), time.monotonic()
            for info in found.sessions:
                self.said[info.id].append((now, _said(info)))
            await trio.sleep(_LOOK_S)

    async def repeat(
        self,
        app: str,
        *,
        prompt: int,
        n: int,
        pause_s: float,
        seed: int = 0,
        priority: Priority = "interactive",
    ) -> None:
        """Ask again and again, with a prompt of so many words of its own."""
        dice = random.Random(f"{app} {seed}")
        async with connect(self.path, reconnect=True) as client:
            while time.monotonic() < self.until:
                await self.ask(client, app, _words(dice, prompt), n, priority=priority)
                await trio.sleep(pause_s * dice.uniform(0.5, 1.5))

    async def agents(self) -> None:
        """Ask three times at the same moment, with one long beginning."""
        round_ = 0
        while time.monotonic() < self.until:
            round_ += 1
            shared = _words(random.Random(f"agents {round_}"), 600)
            async with trio.open_nursery() as nursery:
                for n in range(3):
                    nursery.start_soon(self._agent, f"{shared} agent {n}", f"agent{n}")
            await trio.sleep(8.0)

    async def _agent(self, prompt: str, app: str) -> None:
        async with connect(self.path, reconnect=True) as client:
            await self.ask(client, app, prompt, 20, awaits="answer")

    async def run(self) -> None:
        """Let all programs work, and look beside them."""
        async with trio.open_nursery() as looking:
            looking.start_soon(self.look)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(self.repeat, "chat", prompt=60, n=100, pause_s=2.0))
                nursery.start_soon(self.agents)
                batch = partial(self.repeat, "batch", prompt=150, n=200, pause_s=0.1)
                document = partial(self.repeat, "document", prompt=700, n=60, pause_s=5.0)
                for program, many in ((batch, 6), (document, 2)):
                    for n in range(many):
                        nursery.start_soon(partial(program, seed=n, priority="background"))
            looking.cancel_scope.cancel()


def _words(dice: random.Random, n: int) -> str:
    return " ".join(dice.choices(WORDS, k=n))


def _said(info: SessionInfo) -> str:
    if info.waits:
        return info.waits
    return _OWN if info.state == "prefill" and info.computed_tokens < info.prompt_tokens else ""


def _kind(texts: list[str]) -> str:
    """Return what was said most often of a wait; "" if nothing was."""
    found = Counter(
        next((kind for kind, words in _KINDS.items() if re.search(words, text)), "other")
        for text in texts if text
    )  # fmt: skip
    return found.most_common(1)[0][0] if found else ""


def _judge(hour: _Hour) -> tuple[list[dict[str, object]], list[str]]:
    """Return a row for each kind of wait, and a line for each wait that nobody named."""
    kinds: defaultdict[str, list[tuple[_Wait, list[str]]]] = defaultdict(list)
    for wait in hour.waits:
        texts = [text for at, text in hour.said[wait.name] if wait.began <= at <= wait.ended]
        kinds[_kind(texts)].append((wait, texts))
    rows: list[dict[str, object]] = [
        {
            "kind": kind or "not named",
            "waits": len(found),
            "explained": sum(any(map(_CAUSED.search, texts)) for _, texts in found),
            "longest_s": round(max(wait.seconds for wait, _ in found), 1),
        }
        for kind, found in sorted(kinds.items(), key=lambda pair: -len(pair[1]))
    ]
    unnamed = [f"{w.name}: {w.seconds:.2f} s, {len(texts)} looks" for w, texts in kinds[""]]
    return rows, unnamed


async def _record(hour: _Hour, seconds: float) -> None:
    """Let the programs work for so long, in the last third beside one that spins."""
    with contextlib.ExitStack() as held:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_spin_later, held, 2 * seconds / 3)
            await hour.run()
            nursery.cancel_scope.cancel()


async def _spin_later(held: contextlib.ExitStack, after_s: float) -> None:
    await trio.sleep(after_s)
    held.enter_context(beside.spinning())


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")


@tool(_arguments)
def waits(given: argparse.Namespace) -> int:
    """Record a mix of programs, and say which of their waits were named."""
    setup = servers.Setup(bundled_model(), given.threads, n_ctx=_CONTEXT, slots=_SLOTS)
    seconds = 60.0 * given.minutes
    with servers.daemon(setup, extra=("--max-queue", "64")) as running:
        hour = _Hour(running.wire.path, time.monotonic() + seconds)  # type: ignore[attr-defined]
        trio.run(_record, hour, seconds)
    rows, unnamed = _judge(hour)
    print(f"{hour.asked} requests in {given.minutes:g} minutes, {hour.refused} refused")
    for row in rows:
        print(json.dumps(row))
    total, named = len(hour.waits), len(hour.waits) - len(unnamed)
    print(f"{named} of {total} waits over {_LONG_S:g} s were named while they lasted")
    for line in unnamed[:20]:
        print(f"  not named: {line}")
    return 1 if unnamed else 0
