"""One daemon for four programs against a server for each of them: tokens per second, and memory.

    python -m benches.apart                 medians of 3 (about 10 minutes)
    python -m benches.apart --quick         once, short answers (about 2 minutes)
    python -m benches.apart --k 8           for eight programs
    python -m benches.apart --dry-run       the whole path without a model or peers, in seconds

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
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benches import chart, clients, contest, host, report, servers
from benches.clients import SseWire, Wire
from benches.contest import OURS, Column, Medians, Row, System
from benches.rates import end_to_end, steady
from benches.setting import model_or_exit, setting

APART = "apart: llama-server each"
TARGET_RATE, TARGET_PSS = 1.6, 0.4
_COLUMNS: tuple[Column, ...] = (
    ("decode t/s", "decode", 1), ("all t/s", "whole", 1), ("PSS MiB", "pss", 0),
    ("private MiB", "anonymous", 0), ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
)  # fmt: skip


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
    clients.checked(clients.drive(wire, warm))
    work = clients.jobs(given.k, given.prompt_tokens, given.gen_tokens, seed)
    foreign = host.Foreign(*(each.pid for each in running))
    answers = clients.checked(clients.drive(wire, work))
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


def measure_together(
    setup: servers.Setup, policy: str, given: argparse.Namespace, seed: str
) -> Row:
    """Start one daemon, and have all streams from it."""
    with servers.ours(setup, "--policy", policy) as running:
        return measure([running], running.wire, given, seed)


def measure_apart(folder: Path, setup: servers.Setup, given: argparse.Namespace, seed: str) -> Row:
    """Start a server for each stream, and stream from all of them at once."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(servers.llama_server(folder, setup)) for _ in range(given.k)]
        return measure(running, Several([each.wire for each in running]), given, seed)


def systems(setup: servers.Setup, folder: Path | None, given: argparse.Namespace) -> list[System]:
    """Return everything that is compared."""
    found = [
        System(OURS, policy, partial(measure_together, setup, policy, given))
        for policy in given.policies
    ]
    if folder is None:
        return found
    for threads in dict.fromkeys((setup.threads, max(1, setup.threads // given.k))):
        each = replace(setup, threads=threads, n_ctx=setup.n_ctx // given.k)
        apart = partial(measure_apart, folder, each, given)
        found.append(System(APART, f"-t {threads}", apart))
    return found


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield how each of our policies stands beside the best of the separate processes."""
    for system in medians.systems:
        if system.family != OURS:
            continue
        for figure, text in (("decode", "decode t/s"), ("whole", "t/s, prompts included")):
            ratio = _by(medians(system, figure), max(_apart(medians, figure), default=None))
            yield contest.verdict(
                f"{system.name}: {text} / the best apart", ratio, TARGET_RATE, at_most=False
            )
        ratio = _by(medians(system, "pss"), min(_apart(medians, "pss"), default=None))
        yield contest.verdict(f"{system.name}: PSS / the least apart", ratio, TARGET_PSS)


def _apart(medians: Medians, figure: str) -> list[float]:
    found = [medians(system, figure) for system in medians.systems if system.family == APART]
    return [value for value in found if value is not None]


def _by(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``--quick`` only changes defaults."""
    parser = contest.parser("apart", __doc__, policies=["contract"])
    add = parser.add_argument
    add("--k", type=int, default=4, metavar="K", help="programs, and so processes apart")
    add("--prompt-tokens", type=int, default=64, metavar="N")
    add("--gen-tokens", type=int, metavar="N", help="of each stream (128)")
    given = parser.parse_args(argv)
    given.gen_tokens = given.gen_tokens or (64 if given.quick or given.dry_run else 128)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and the verdicts, write the CSV and the chart."""
    given = arguments(argv)
    here, model = setting(given), model_or_exit(given)
    cells = given.k * -(-(given.prompt_tokens + given.gen_tokens + 16) // 256) * 256
    setup = servers.Setup(model, here.threads, cells, given.k)
    compared = systems(setup, here.peers, given)
    facts = here.facts(model=model.name, k=given.k, context=f"{cells}, apart {cells // given.k}")
    report.print_facts(facts)
    effort = contest.effort(given, seconds=60, minutes=60)
    rows = contest.run(
        compared, effort, here.seed, lambda row: f"{row['whole']:.1f} t/s, {row['pss']:.0f} MiB"
    )
    medians = Medians(compared, rows)
    panels = {
        title: {s.name: v for s in compared if (v := medians(s, figure)) is not None}
        for title, figure in (
            ("tokens/s while all decode", "decode"), ("MiB of memory (PSS)", "pss"),
        )
    }  # fmt: skip
    draw = partial(chart.bars, "apart", panels, {}, chart.caption(facts))
    said = (medians.table(_COLUMNS), "\n".join(verdicts(medians)))
    return contest.conclude("apart", said, rows, facts, draw)


if __name__ == "__main__":
    sys.exit(main())
