"""Whether a time to first token tells what somebody else has asked. Two minutes.

    python -m benches foreign --model uma_trio/models/storyteller.gguf

Two hundred times: an owner asks a prompt, and then a stranger, in a namespace of its own, asks that prompt
and one that nobody has asked, in a drawn order. *known* and *unknown* are the stranger's median times to
first token. *p* is that of the two-sided test of Mann and Whitney: how often times that are alike differ by so
much; *AUC* is how often the known prompt was the quicker one, 0.5 for a coin. *own AUC* is the same for
the owner, who asks again, beside the stranger's unknown one: 1.0 says that the test would see a hit. The
namespaces are two values of the field `cache` of one user; another user's have another user id in front.
llama-server has no namespaces: its stranger is anybody.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence

from benches import clients, contest, servers
from benches.clients import Job
from benches.contest import OURS, Column, Medians, Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive
from uma_trio_sim.latency import median

LEAST_P = 0.01  # below which times are called different
_COLUMNS: tuple[Column, ...] = (
    ("known ms", "known_ms", 2), ("unknown ms", "unknown_ms", 2), ("own ms", "own_ms", 2),
    ("p", "p", 3), ("AUC", "auc", 3), ("own AUC", "own_auc", 3), ("n", "times", 0),
    ("others %", "others_pct", 0),
)  # fmt: skip


def auc(quicker: Sequence[float], slower: Sequence[float]) -> float:
    """Return how often a value of `quicker` is below one of `slower`; ties count half."""
    below = sum((a < b) + 0.5 * (a == b) for a in quicker for b in slower)
    return below / (len(quicker) * len(slower))


def mann_whitney(one: Sequence[float], two: Sequence[float]) -> float:
    """Return the two-sided p of the rank-sum test, by its normal approximation.

    Right for twenty values and more of each (Mann and Whitney, 1947).
    """
    n, m = len(one), len(two)
    u = auc(one, two) * n * m
    z = (abs(u - n * m / 2) - 0.5) / math.sqrt(n * m * (n + m + 1) / 12)
    return min(1.0, math.erfc(max(0.0, z) / math.sqrt(2)))


def play(running: servers.Running, seed: str, times: int, n_words: int) -> Row:
    """Ask again and again as owner and as stranger; return what the times tell."""
    draw = random.Random(seed)
    known, unknown, own = [], [], []

    def ttft_s(prompt: str, cache: str) -> float:
        job = Job("a", prompt, 2, cache=cache)
        (answer,) = clients.checked(drive(running.wire, [job]))
        return answer.ttft_s or 0.0

    for n in range(times + 1):
        asked, other = (" ".join(draw.choices(clients.WORDS, k=n_words)) for _ in range(2))
        ttft_s(asked, "owner")
        pair = [(known, asked), (unknown, other)]
        draw.shuffle(pair)
        for found, prompt in pair:
            found.append(ttft_s(prompt, "stranger"))
        own.append(ttft_s(asked, "owner"))
        if not n:  # the first ones find a server that has just started
            for found in (known, unknown, own):
                found.clear()
    return {
        "known_ms": 1e3 * median(known),
        "unknown_ms": 1e3 * median(unknown),
        "own_ms": 1e3 * median(own),
        "p": mann_whitney(known, unknown),
        "auc": auc(known, unknown),
        "own_auc": auc(own, unknown),
        "times": len(known),
    }


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield whether a stranger learns anything, and whether the test could have seen it."""
    for system in medians.systems:
        if system.family == OURS:
            p, own = medians(system, "p"), medians(system, "own_auc")
            yield contest.verdict("p, known beside unknown", p, LEAST_P, at_most=False)
            yield contest.verdict("AUC of one's own hits", own, 0.95, at_most=False)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--times", type=int, metavar="N", help="of each kind (200)")
    parser.add_argument("--prompt-words", type=int, default=200, metavar="N")


@scene(arguments)
def foreign(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare times to first token of what is cached for somebody else, and for nobody."""
    times = given.times or (3 if given.dry_run else 40 if given.quick else 200)
    setup = servers.Setup(here.model, here.threads, n_ctx=4096, slots=4)

    def ask(running: servers.Running, seed: str) -> Row:
        return play(running, seed, times, given.prompt_words)

    compared = [contest.serving(OURS, "", lambda: servers.ours(setup), ask)]
    compared += contest.llama_servers(here.peers, setup, [()], ask)
    return Comparison(
        compared,
        seconds=0.6 * times,
        repetitions=1,
        tables=[Table("", _COLUMNS)],
        facts={"times": times, "words a prompt": given.prompt_words},
        progress=lambda row: f"p {row['p']:.3f}, own AUC {row['own_auc']:.2f}",
        verdicts=verdicts,
    )
