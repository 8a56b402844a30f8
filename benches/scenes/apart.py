"""One daemon for four programs against a server for each of them: tokens per second, and memory.

    python -m benches apart                 medians of 3 (about 10 minutes)
    python -m benches apart --quick         once, short answers (about 2 minutes)
    python -m benches apart --k 8           for eight programs

Four streams at once, unique prompts of 64 tokens, 128 tokens each. *Together*: all from one daemon.
*Apart*: each from a llama-server of its own, as it comes, so each has a copy of the weights in the
form that the processor wants them in; the file itself is mapped, and shared: it counts once for all
of them, and in the daemon only as far as it is read (*private* leaves files out). They run with as
many threads as there are cores, and with their part of the cores; the better of the two is what the
daemon is held against. *decode t/s* is while all streams decode, *all t/s* from the first request
to the last token. PSS is of all processes together, after the last token.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benches import clients, contest, host, servers
from benches.clients import SseWire, Wire
from benches.contest import OURS, Medians, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive
from benches.rates import end_to_end, steady

APART = "apart: llama-server each"
TARGET_RATE, TARGET_PSS = 1.6, 0.4
_TABLE = Table("", (
    ("decode t/s", "decode", 1), ("all t/s", "whole", 1), ("PSS MiB", "pss", 0),
    ("private MiB", "anonymous", 0), ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
))  # fmt: skip


class Several(SseWire):
    """A wire to several servers of one kind: each connection goes to the next of them."""

    def __init__(self, wires: Sequence[Wire]) -> None:
        super().__init__(port=0)
        self._turns = itertools.cycle(wires)

    def connect(self) -> socket.socket:
        """Connect to the server whose turn it is."""
        return next(self._turns).connect()


def measure(
    running: Sequence[servers.Running], wire: Wire, given: argparse.Namespace, seed: str
) -> Row:
    """Stream from one or several servers and return rates and memory."""
    warm = clients.jobs(given.k, given.prompt_tokens, 8, f"{seed}/warm")
    clients.checked(drive(wire, warm))
    work = clients.jobs(given.k, given.prompt_tokens, given.gen_tokens, seed)
    foreign = host.Foreign(*(each.pid for each in running))
    answers = clients.checked(drive(wire, work))
    others = foreign.percent()
    streams = [answer.times for answer in answers]
    window = steady(streams)
    taken = [host.memory(each.pid) for each in running]
    return {
        "decode": window.rate if window else None,
        "whole": end_to_end([answer.sent for answer in answers], streams),
        "pss": sum(memory.pss for memory in taken),
        "anonymous": sum(memory.anonymous for memory in taken),
        "others_pct": others,
    }


def measure_apart(folder: Path, setup: servers.Setup, given: argparse.Namespace, seed: str) -> Row:
    """Start a server for each stream, and stream from all of them at once."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(servers.llama_server(folder, setup)) for _ in range(given.k)]
        return measure(running, Several([each.wire for each in running]), given, seed)


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield how each of our policies stands beside the best of the separate processes."""
    for system in medians.systems:
        if system.family != OURS:
            continue
        for figure, text in (("decode", "decode t/s"), ("whole", "t/s, prompts included")):
            of_best = _by_best(medians, system, figure, max)
            yield contest.verdict(
                f"{system.name}: {text} / the best apart", of_best, TARGET_RATE, at_most=False
            )
        of_least = _by_best(medians, system, "pss", min)
        yield contest.verdict(f"{system.name}: PSS / the least apart", of_least, TARGET_PSS)


def _by_best(
    medians: Medians, ours: System, figure: str, best: Callable[[list[float]], float]
) -> float | None:
    apart = [v for s in medians.systems if s.family == APART for v in [medians(s, figure)] if v]
    value = medians(ours, figure)
    return value / best(apart) if value is not None and apart else None


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--k", type=int, default=4, metavar="K", help="programs, and so processes apart")
    add("--prompt-tokens", type=int, default=64, metavar="N")
    add("--gen-tokens", type=int, metavar="N", help="of each stream (128)")


@scene(arguments, policies=["deadline"])
def apart(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare one daemon with a llama-server for each stream."""
    given.gen_tokens = given.gen_tokens or (64 if given.quick or given.dry_run else 128)
    cells = given.k * -(-(given.prompt_tokens + given.gen_tokens + 16) // 256) * 256
    setup = servers.Setup(here.model, here.threads, cells, given.k)

    def together(running: servers.Running, seed: str) -> Row:
        return measure([running], running.wire, given, seed)

    compared = contest.daemons(setup, given.policies, together)
    if here.peers is not None:
        for threads in dict.fromkeys((setup.threads, max(1, setup.threads // given.k))):
            each = replace(setup, threads=threads, n_ctx=setup.n_ctx // given.k)
            once = partial(measure_apart, here.peers, each, given)
            compared.append(System(APART, f"-t {threads}", once))
    return Comparison(
        compared,
        seconds=60,
        tables=[_TABLE],
        facts={"k": given.k, "context": f"{cells}, apart {cells // given.k}"},
        progress=lambda row: f"{row['whole']:.1f} t/s, {row['pss']:.0f} MiB",
        verdicts=verdicts,
        bars={"tokens/s while all decode": "decode", "MiB of memory (PSS)": "pss"},
    )
