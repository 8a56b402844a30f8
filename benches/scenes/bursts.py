"""Prompts that come at the same moment, and one long prompt alone: who waits how long.

    python -m benches bursts                            4, 8, 16 prompts of 1,950 tokens at once
    python -m benches bursts --tokens 500 --sizes 4 8   shorter ones, for a CPU (6 minutes)
    python -m benches bursts --sizes 1 --tokens 9700 --answer 8 --ceiling    one long prompt alone

All prompts are different, interactive and greedy, and each asks for `--answer` tokens. *TTFT* is from
sending to the first token. `--ceiling` also runs llama-bench with as many tokens and `-ub 512`: the
time that llama.cpp needs for the prompt without a server. llama-server has a slot for each
client, one KV cache, and runs once with each set of `--peer-flags`: compare with its best setting.
The daemon drafts nothing unless `--speculation` says so, as in the scene agents.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from benches import clients, contest, servers
from benches.contest import Medians, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive
from benches.report import cell
from benches.scenes.agents import daemon_arguments, peer_arguments, systems
from uma_trio_sim.latency import median

CEILING = "llama-bench"
_TABLE = Table("", (
    ("TTFT p50 ms", "ttft_ms", 0), ("worst ms", "worst_ms", 0), ("all done s", "all_s", 2),
    ("tokens/s", "tokens_s", 1), ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
))  # fmt: skip


def play(size: int, tokens: int, answer: int, running: servers.Running, seed: str) -> Row:
    """Send all prompts at once; return the figures."""
    clients.checked(drive(running.wire, clients.jobs(size, 16, 2, f"{seed}/warm")))
    work = [replace(j, priority="interactive") for j in clients.jobs(size, tokens, answer, seed)]
    answers = clients.checked(drive(running.wire, work))
    waits = [1e3 * t for a in answers if (t := a.ttft_s) is not None]
    seconds = max(a.times[-1] for a in answers) - min(a.sent for a in answers)
    return {
        "ttft_ms": median(waits),
        "worst_ms": max(waits),
        "all_s": seconds,
        "tokens_s": sum(len(a.times) for a in answers) / seconds,
    }


def ceiling(here: Here, tokens: int, _seed: str) -> Row:
    """Compute one prompt without a server."""
    if here.peers is None:
        raise clients.NotServed("llama-bench is not here")
    command = [
        str(here.peers / "llama-bench"), "-m", str(here.model), "-p", str(tokens), "-n", "0",
        "-ub", "512", "-r", "3", "-t", str(here.threads), "-o", "jsonl",
    ]  # fmt: skip
    return contest.program(command, lambda found: {"ttft_ms": found["avg_ns"] / 1e6})


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield the daemon's median TTFT by the best of the others, case by case."""
    for case in dict.fromkeys(system.case for system in medians.systems):
        here = [system for system in medians.systems if system.case == case]
        for family in (contest.PEER, CEILING):
            others = [v for s in here if s.family == family and (v := medians(s, "ttft_ms"))]
            for system in here:
                value = medians(system, "ttft_ms")
                if system.family == contest.OURS and value is not None and others:
                    best = min(others)
                    share = f"{value / best:.2f}"
                    yield f"{case} {system.name}: TTFT by {family}'s {cell(best, 0)} ms: {share}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[4, 8, 16], metavar="N", help="prompts at once")
    add("--tokens", type=int, default=1950, metavar="N", help="of each prompt")
    add("--answer", type=int, default=40, metavar="N", help="tokens that each generates")
    add("--ceiling", action="store_true", help="also the prompt in llama-bench")
    daemon_arguments(parser)
    peer_arguments(parser)


@scene(arguments)
def bursts(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server, at each size."""
    tokens = 40 if given.dry_run else given.tokens
    compared: list[System] = []
    sizes: Sequence[int] = given.sizes[:2] if given.quick or given.dry_run else given.sizes
    for size in sizes:
        cells = -(-(size * (tokens + given.answer + 64)) // 1024) * 1024
        setup = servers.Setup(here.model, here.threads, cells, size)
        once = partial(play, size, tokens, given.answer)
        compared += systems(given, here, setup, once, f"n={size}")
        if given.ceiling and not given.dry_run:
            compared.append(System(CEILING, "", partial(ceiling, here, tokens), f"n={size}"))
    return Comparison(
        compared,
        seconds=25,
        minutes=60,
        tables=[_TABLE],
        facts={"prompts": f"{tokens} tokens, answers of {given.answer}"},
        progress=lambda row: f"TTFT {cell(row.get('ttft_ms'), 0)} ms",
        verdicts=verdicts,
    )
