"""Mixed load: three people who read answers, and one long context, on one machine.

    python -m benches mixed                             prompts of 64 tokens beside 2,000 (10 minutes)
    python -m benches mixed --long 30000                for a GPU

Three clients ask short questions one after another and read each answer; a fourth sends a prompt of `--long` tokens,
reads a long answer and sends the next. *alone* is one of the three without the others on the same server: *p95 alone* is
its 95th percentile of the time between tokens, and *p95*, *p99*, those of the worst of the three meanwhile. *t/s* counts the
tokens of all four clients, and *prompt t/s* the prompt tokens that were computed for them. Compared are this daemon, at its
default pace and at `--reading-pace 0`, one llama-server with a slot for each client, and *separate*: each client with a
llama-server of its own, as where each application loads the model, with as many threads each. *PSS* is the memory of all
processes together, *GPU MiB* what is in use of that of the GPU. *bytes a token* and *efficiency* are the daemon's own metrics `sum_bmt_mb_per_token` and
`scheduler_efficiency`; *GPU idle* is what the driver reports, where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Self

from benches import clients, contest, host, servers
from benches.clients import Answer, Job
from benches.contest import OURS, PEER, Medians, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.live import Endless, Live, drive
from benches.report import cell
from uma_trio_sim.latency import percentile

READERS = 3
SEPARATE = "separate"
PATIENCE_S = 600.0
_TABLE = Table("", (
    ("t/s", "tokens_s", 1), ("prompt t/s", "prompt_s", 0), ("p95 alone ms", "alone_ms", 1), ("p95 ms", "p95_ms", 1),
    ("p99 ms", "p99_ms", 1), ("p95 by alone", "p95_x", 2), ("TTFT p50 ms", "ttft_ms", 0),
    ("PSS MiB", "pss_mib", 0), ("GPU MiB", "gpu_mib", 0), ("MB a token", "mb_per_token", 0), ("efficiency", "efficiency", 2),
    ("GPU idle %", "gpu_idle_pct", 0), ("others %", "others_pct", 0),
))  # fmt: skip


@dataclass(frozen=True)
class Load:
    """What the clients ask, in tokens, and for how many seconds."""

    question: int
    answer: int
    long: int
    long_answer: int
    seconds: float


class _Idle:
    """Samples how busy the GPU is and what is in use of its memory, each half second; None where no driver tells."""

    def __init__(self) -> None:
        self._busy: list[float] = []
        self.mib: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._known = shutil.which("nvidia-smi") is not None

    def __enter__(self) -> Self:
        if self._known:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._known:
            self._thread.join()

    def _run(self) -> None:
        query = "--query-gpu=utilization.gpu,memory.used"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        while not self._over.wait(0.5):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            with contextlib.suppress(ValueError):
                busy, mib = map(float, done.stdout.splitlines()[0].split(","))
                self._busy.append(busy)
                self.mib = max(mib, self.mib or 0.0)

    @property
    def percent(self) -> float | None:
        """Return the mean share of time in which no kernel ran."""
        return 100 - sum(self._busy) / len(self._busy) if self._busy else None


def gaps_ms(answers: Sequence[Answer], since: float) -> list[float]:
    """Return the times between tokens that were read after `since`."""
    return [1e3 * (b - a) for answer in answers for a, b in pairwise(answer.times) if a >= since]


def play(load: Load, running: Sequence[servers.Running], seed: str) -> Row:
    """Read one answer alone, then all four clients for a while. Each client has a server, or all have one."""
    homes = [running[at % len(running)] for at in range(READERS + 1)]
    for home in running:
        clients.checked(drive(home.wire, clients.jobs(1, 16, 2, f"{seed}/warm")))
    numbers = count()

    def question(tokens: int, answer: int) -> Job:
        (job,) = clients.jobs(1, tokens, answer, f"{seed}/{next(numbers)}")
        return replace(job, priority="interactive")

    alone = clients.checked(
        drive(homes[0].wire, [question(load.question, 2 * load.answer)], timeout_s=PATIENCE_S)
    )
    with Live(homes[0].wire) as live, _Idle() as idle:
        short = partial(question, load.question, load.answer)
        long = partial(question, load.long, load.long_answer)
        every = [Endless(live, short) for _ in range(READERS)] + [Endless(live, long)]
        live.watch()
        began = live.now
        for client, home in zip(every, homes, strict=True):
            client.send(home.wire.connect)
        live.run(load.seconds)
        ended = live.now
        memory = sum(host.memory(home.pid).pss for home in running)
        metrics = dict(live.counters()[-1][1]) if live.counters() else {}
        answers = [live.answers(client.streams) for client in every]
    worst = [gaps_ms(found, began) for found in answers[:READERS]]
    waits = [1e3 * t for found in answers[:READERS] for a in found if (t := a.ttft_s) is not None]
    tokens = sum(began <= at <= ended for found in answers for a in found for at in a.times)
    prompts = sum(load.question for f in answers[:READERS] for a in f if a.times)
    prompts += sum(load.long for a in answers[READERS] if a.times)
    row: Row = {
        "tokens_s": tokens / (ended - began),
        "prompt_s": prompts / (ended - began),
        "alone_ms": percentile(gaps_ms(alone, 0.0), 95),
        "p95_ms": max(percentile(gaps, 95) for gaps in worst if gaps),
        "p99_ms": max(percentile(gaps, 99) for gaps in worst if gaps),
        "ttft_ms": percentile(waits, 50),
        "pss_mib": memory,
        "gpu_mib": idle.mib,
        "memory_mib": memory + (idle.mib or 0.0),
        "gpu_idle_pct": idle.percent,
        "mb_per_token": metrics.get("sum_bmt_mb_per_token"),
        "efficiency": metrics.get("scheduler_efficiency"),
    }
    return row | {"p95_x": float(str(row["p95_ms"])) / float(str(row["alone_ms"]))}


def system(family: str, knob: str, start: contest.Start, load: Load, n: int = 1) -> System:
    """Return a system of `n` servers that are started together."""

    def measure(seed: str) -> Row:
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(start()) for _ in range(n)]
            return play(load, running, seed)

    return System(family, knob, measure)


def systems(
    given: argparse.Namespace, here: Here, setup: servers.Setup, load: Load
) -> list[System]:
    """Return the daemon at two paces, one llama-server, and one for each client."""
    found = [
        system(
            OURS,
            knob.replace("--", ""),
            partial(servers.ours, setup, "--speculation", "off", *knob.split()),
            load,
        )
        for knob in ("", "--reading-pace 0")
    ]
    if here.peers is not None:
        folder: Path = here.peers
        for text in given.peer_flags:
            flags = ("-np", str(READERS + 1), *text.split())
            start = partial(servers.llama_server, folder, setup, flags)
            found.append(system(PEER, contest.short(flags), start, load))
        own = replace(setup, n_ctx=setup.n_ctx // (READERS + 1), slots=1)
        start = partial(servers.llama_server, folder, own, ("-np", "1", "-cram", "0"))
        found.append(system(PEER, SEPARATE, start, load, READERS + 1))
    return found


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield how each of our settings stands beside separate servers, with the goals."""
    apart = next((s for s in medians.systems if s.knob == SEPARATE), None)
    for mine in medians.systems:
        if mine.family != OURS:
            continue
        yield contest.verdict(f"{mine.name}: p95 by alone", medians(mine, "p95_x"), 1.2)
        for figure, text, goal, at_most in (
            ("tokens_s", "tokens/s by separate servers", 1.3, False),
            ("memory_mib", "memory by separate servers", 0.35, True),
        ):
            value = medians(mine, figure)
            other = None if apart is None else medians(apart, figure)
            if value is not None and other:
                yield contest.verdict(f"{mine.name}: {text}", value / other, goal, at_most=at_most)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--long", type=int, default=2000, metavar="N", help="tokens of the long context (2,000)")
    add("--question", type=int, default=64, metavar="N", help="tokens of a short question (64)")
    add("--answer", type=int, default=100, metavar="N", help="tokens of its answer (100)")
    add(
        "--long-answer",
        type=int,
        default=200,
        metavar="N",
        help="tokens behind the long context (200)",
    )
    add("--seconds", type=float, default=60.0, help="how long all four ask (60)")
    add("--peer-flags", nargs="*", default=["-cram 0", "-cram 0 -kvu"], metavar="FLAGS",
        help="one llama-server with each of these, beside -np 4")  # fmt: skip


@scene(arguments)
def mixed(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with one llama-server and with one for each client."""
    if given.dry_run or given.quick:
        given.seconds = min(given.seconds, 3.0 if given.dry_run else 20.0)
    load = Load(given.question, given.answer, given.long, given.long_answer, given.seconds)
    slot = -(-(load.long + load.long_answer + 512) // 256) * 256
    setup = servers.Setup(here.model, here.threads, slot * (READERS + 1), READERS + 1)
    return Comparison(
        systems(given, here, setup, load),
        seconds=load.seconds + 30,
        repetitions=2,
        tables=[_TABLE],
        facts={"load": f"{load}, context {setup.n_ctx}"},
        progress=lambda row: (
            f"{cell(row.get('tokens_s'), 1)} t/s, p95 {cell(row.get('p95_x'), 2)} times alone"
        ),
        verdicts=verdicts,
    )
