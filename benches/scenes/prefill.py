"""How fast prompts are computed while nobody reads: the daemon, llama-server, and llama.cpp alone.

    python -m benches prefill               medians of 3 (about 6 minutes)
    python -m benches prefill --quick       once (about 1 minute)

Eight unique prompts of 512 tokens come at once, in the lane `background`, for one token each. The
rate is all their tokens by the time from the first request sent to the last token read, so
tokenizing, planning and sampling are in it. The ceiling is ``llama-bench -p 512``: llama.cpp alone,
random tokens, nothing else. A server that was given a small ``-b``, to be gentle to readers, shows
here what that costs while there are none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benches import clients, contest, servers
from benches.contest import OURS, Medians, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive

CEILING = "llama-bench"
TARGET = 0.95
_TABLE = Table("", (
    ("prefill t/s", "prefill", 0), ("of the ceiling", "share", 2),
    ("tokens each", "each", 0), ("last answer s", "seconds", 1),
    ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
))  # fmt: skip


def play(given: argparse.Namespace, running: servers.Running, seed: str) -> Row:
    """Send all prompts at once and return how fast they were computed."""
    warm = clients.jobs(1, given.prompt_tokens, 1, f"{seed}/warm")
    clients.checked(drive(running.wire, warm))
    work = clients.jobs(given.prompts, given.prompt_tokens, 1, seed)
    work = [replace(job, priority="background") for job in work]
    answers = clients.checked(drive(running.wire, work))
    seconds = max(a.times[-1] for a in answers) - min(a.sent for a in answers)
    tokens = sum(a.prompt_tokens or 0 for a in answers)
    return {"prefill": tokens / seconds, "each": tokens / len(answers), "seconds": seconds}


def measure_ceiling(folder: Path, setup: servers.Setup, prompt_tokens: int, _seed: str) -> Row:
    """Run ``llama-bench`` once; it warms up by itself."""
    command = [
        str(folder / CEILING), "-m", str(setup.model), "-t", str(setup.threads),
        "-p", str(prompt_tokens), "-n", "0", "-o", "jsonl",
    ]  # fmt: skip
    return contest.program(
        command, lambda found: {"prefill": found["avg_ts"], "each": found["n_prompt"]}
    )


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield for each of our policies whether the target is met."""
    for system in medians.systems:
        if system.family == OURS:
            text = f"{system.name}: prefill rate / {CEILING}'s"
            yield contest.verdict(text, medians(system, "share"), TARGET, at_most=False)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--batch", type=int, nargs="*", default=[0, 16, 4], metavar="N",
        help="llama-server's -b; 0 is its default")  # fmt: skip
    add("--prompts", type=int, metavar="N", help="how many come at once (8)")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="length of each")


@scene(arguments, policies=["deadline", "baseline"])
def prefill(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server and ``llama-bench``."""
    given.prompts = given.prompts or (3 if given.quick or given.dry_run else 8)
    cells = -(-given.prompts * (given.prompt_tokens + 16) // 1024) * 1024
    setup = servers.Setup(here.model, here.threads, cells, given.prompts)
    once = partial(play, given)
    flags = [servers.batch_flags(setup.slots, size) for size in given.batch]
    compared = contest.daemons(setup, given.policies, once)
    compared += contest.llama_servers(here.peers, setup, flags, once)
    if here.peers is not None:
        ceiling = partial(measure_ceiling, here.peers, setup, given.prompt_tokens)
        compared.insert(0, System(CEILING, "", ceiling))
    return Comparison(
        compared,
        seconds=20,
        tables=[_TABLE],
        facts={"load": f"{given.prompts} prompts of {given.prompt_tokens}"},
        progress=lambda row: f"{row['prefill']:.0f} t/s",
        complete=lambda rows: contest.with_share(rows, "prefill", CEILING),
        verdicts=verdicts,
        bars={"prompt tokens/s": "prefill"},
    )
