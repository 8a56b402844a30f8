"""An agent that works through eight steps while four programs generate: how much longer it takes.

    python -m benches agent_chain               medians of 3 (20 to 75 minutes)
    python -m benches agent_chain --quick       once, 3 steps of 32 tokens (about 3 minutes)

A chain is eight requests, one after another: each has the prompt of the one before and more (what
the model said and what a tool found: words that are drawn, so that all servers get the same), asks
for 128 tokens, and is followed by a pause in which the tool runs. First the chain runs alone, then,
on the same server, beside four background clients that have an answer of 256 tokens generated, and
the next as soon as it ends. *slowdown* is the time of the chain under load by its time alone; the
pauses are the same in both and are left out of it (*with pauses* has them in). A chain that is not
done after ten times its time alone is given up; its slowdown is then at least what is printed,
and *steps* says how far it came. A server with a prompt cache may use it: steps share a beginning.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from benches import clients, contest, servers
from benches.clients import Answer, Job
from benches.contest import OURS, Medians, Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import Endless, Live, Stream, drive
from uma_trio_sim.latency import median

TARGET, _TITLE = 1.5, "slowdown of the chain (less is better)"
_PATIENCE = 10.0
_TABLE = Table("", (
    ("slowdown", "slowdown", 2), ("with pauses", "slowdown_all", 2), ("steps", "steps", 0),
    ("alone s", "alone_s", 1), ("loaded s", "loaded_s", 1),
    ("step's TTFT alone ms", "alone_ttft_ms", 0), ("loaded ms", "loaded_ttft_ms", 0),
    ("background t/s", "background", 1), ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
))  # fmt: skip


@dataclass(frozen=True)
class Script:
    """One chain and its load. Tokens and seconds."""

    steps: int = 8
    prompt_tokens: int = 64
    found_tokens: int = 64  # what a tool adds in each step, besides the answer
    answer_tokens: int = 128
    pause_s: float = 0.3  # mean; exponential
    background: int = 4
    stream_tokens: int = 256

    @property
    def cells(self) -> int:
        """A context that holds the last step and everybody else."""
        step = self.found_tokens + self.answer_tokens
        chain = self.prompt_tokens + self.steps * step
        others = self.background * (self.prompt_tokens + self.stream_tokens)
        return -(-(chain + others + 256) // 1024) * 1024


@dataclass(frozen=True)
class Chain:
    """What became of a chain: the answers to its steps, seconds of waiting for them, of pauses."""

    answers: Sequence[Answer]
    work_s: float
    pauses_s: float

    @property
    def done(self) -> int:
        """How many steps were answered whole."""
        return sum(a.completion_tokens is not None for a in self.answers)

    @property
    def ttft_ms(self) -> float | None:
        """Median of the steps' times to their first token."""
        found = [1e3 * t for a in self.answers if (t := a.ttft_s) is not None]
        return median(found) if found else None


def play(script: Script, running: servers.Running, seed: str) -> Row:
    """Run a chain alone and one beside the background; return the figures."""
    warm = clients.jobs(1, script.prompt_tokens, 2, f"{seed}/warm")
    clients.checked(drive(running.wire, warm))
    numbers = count()

    def generate() -> Job:
        n, size = next(numbers), script.prompt_tokens
        (job,) = clients.jobs(1, size, script.stream_tokens, f"{seed}/other/{n}")
        return replace(job, priority="background")

    with Live(running.wire) as live:
        alone = play_chain(live, script, f"{seed}/alone", float("inf"))
    with Live(running.wire) as live:
        others = Endless(live, generate)
        for _ in range(script.background):
            others.send()
        live.run(20.0, lambda: all(len(s.reads) > 2 or s.over for s in others.streams))
        began = live.now
        loaded = play_chain(live, script, f"{seed}/loaded", _PATIENCE * alone.work_s)
        seconds = live.now - began
    answers = clients.checked(live.answers(others.streams))
    got = [at for answer in answers for at in answer.times if at >= began]
    return compare(alone, loaded) | {"background": len(got) / seconds}


def play_chain(live: Live, script: Script, seed: str, patience_s: float) -> Chain:
    """Take step after step; give up when the chain has waited for longer than `patience_s`."""
    draw = random.Random(seed)
    words = draw.choices(clients.WORDS, k=script.prompt_tokens)
    steps: list[Stream] = []
    work_s = pauses_s = 0.0
    while len(steps) < script.steps:
        began, n = live.now, script.answer_tokens
        step = live.start(Job(f"{seed}-{len(steps)}", " ".join(words), n, "interactive"))
        steps.append(step)
        live.run(patience_s - work_s, lambda step=step: step.over)  # type: ignore[misc]
        work_s += live.now - began
        if not step.over:
            break
        words += draw.choices(clients.WORDS, k=n + script.found_tokens)
        pause_s = draw.expovariate(1 / script.pause_s)
        live.run(pause_s)
        pauses_s += pause_s
    return Chain(clients.checked(live.answers(steps)), work_s, pauses_s)


def compare(alone: Chain, loaded: Chain) -> Row:
    """Return what the load did to a chain; one that was given up was slowed down by more."""
    return {
        "slowdown": loaded.work_s / alone.work_s,
        "slowdown_all": (loaded.work_s + loaded.pauses_s) / (alone.work_s + alone.pauses_s),
        "steps": loaded.done,
        "alone_s": alone.work_s,
        "loaded_s": loaded.work_s,
        "alone_ttft_ms": alone.ttft_ms,
        "loaded_ttft_ms": loaded.ttft_ms,
    }


def verdicts(medians: Medians, steps: int) -> Iterator[str]:
    """Yield for each of our policies whether the target is met, and what the others do."""
    for system in medians.systems:
        slowdown = medians(system, "slowdown")
        if system.family == OURS:
            yield contest.verdict(f"{system.name}: slowdown of the chain", slowdown, TARGET)
        elif slowdown is not None:
            least = "" if medians(system, "steps") == steps else "at least "
            yield f"{system.name}: {least}{slowdown:.2f}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--batch", type=int, nargs="*", default=[16], metavar="N", help="llama-server's -b")
    add("--steps", type=int, metavar="N", help="of the chain (8)")
    add("--answer-tokens", type=int, metavar="N", help="of each step (128)")
    add("--background", type=int, default=4, metavar="N", help="clients that generate meanwhile")


@scene(arguments, policies=["deadline", "baseline"])
def agent_chain(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with llama-server at several batch sizes."""
    short = given.quick or given.dry_run
    script = Script(
        steps=given.steps or (3 if short else 8),
        answer_tokens=given.answer_tokens or (32 if short else 128),
        pause_s=0.02 if given.dry_run else 0.3,
        background=given.background,
    )
    setup = servers.Setup(here.model, here.threads, script.cells, script.background + 1)
    once, shared = partial(play, script), servers.server_flags("np-kvu", setup.slots)
    flags = [(), shared, *((*shared, "-b", str(size)) for size in given.batch)]
    compared = contest.daemons(setup, given.policies, once)
    compared += contest.llama_servers(here.peers, setup, flags, once)
    return Comparison(
        compared,
        # By a machine that gives 50 tokens/s to one stream, and thrice the time under load.
        seconds=5 + 4 * script.steps * (script.answer_tokens / 50 + script.pause_s),
        minutes=90,
        tables=[_TABLE],
        facts={"script": f"{script}, context {script.cells}"},
        progress=lambda row: f"slowdown {row['slowdown']:.2f}, {row['steps']} steps",
        verdicts=lambda medians: verdicts(medians, script.steps),
        bars={_TITLE: "slowdown"},
        targets={_TITLE: TARGET},
    )
