"""Types of the KV cache behind long contexts: tokens/s, against the bytes that a token moves.

    python -m benches kv_types --depths 1000 4000        for two cores (10 minutes)
    python -m benches kv_types                           16k and 32k, for a GPU

`--streams` clients generate at once, each behind `--depths` tokens of its own, with each type of the KV cache
(llama.cpp has no six-bit type; q5_1 is the nearest). *MB a token* is what the daemon's cost model says a token
moves: its share of the weights, and the cells that it attends to. *by f16* is t/s by that of f16, and *bytes say* what it
would be if the time were that of the bytes alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benches import clients, contest, servers
from benches.contest import OURS, Medians, Row
from benches.driver import Comparison, Here, Table, scene
from benches.live import Live, drive
from benches.report import cell

PATIENCE_S = 900.0
_TABLE = Table("", (
    ("t/s", "tokens_s", 1), ("MB a token", "mb_per_token", 1), ("prompt t/s", "prompt_s", 0),
    ("others %", "others_pct", 0),
))  # fmt: skip


def play(given: argparse.Namespace, depth: int, running: servers.Running, seed: str) -> Row:
    """Let all prompts be computed, then measure the tokens of the answers."""
    clients.checked(drive(running.wire, clients.jobs(1, 16, 2, f"{seed}/warm")))
    work = clients.jobs(given.streams, depth, given.gen_tokens, f"{seed}/work")
    with Live(running.wire) as live:
        began = live.now
        # Once without answers: the prefixes stay in the KV cache, so that all answers are generated at the same time.
        prompts = [live.start(replace(job, max_tokens=2)) for job in work]
        live.run(PATIENCE_S, lambda: all(stream.over for stream in prompts))
        ended = live.now
        clients.checked(live.answers(prompts))
    with Live(running.wire) as live:
        live.watch()
        streams = [live.start(replace(job, priority="background")) for job in work]
        live.run(PATIENCE_S, lambda: all(stream.over for stream in streams))
        live.run(0.3)  # for the last counters
        counters = live.counters()
        answers = clients.checked(live.answers(streams))
    first = max(answer.times[0] for answer in answers)
    last = min(answer.times[-1] for answer in answers)
    tokens = sum(first <= at <= last for answer in answers for at in answer.times)
    decoding = [c for at, c in counters if first <= at <= last]
    row: Row = {
        "tokens_s": tokens / (last - first),
        "prompt_s": given.streams * depth / (ended - began),
    }
    if len(decoding) > 1:
        row["mb_per_token"] = decoding[-1].get("sum_bmt_mb_last", 0.0) / given.streams
    return row


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield for each depth what a type gains over f16, and what its bytes say."""
    for case in dict.fromkeys(system.case for system in medians.systems):
        here = {s.knob: s for s in medians.systems if s.case == case and s.family == OURS}
        base = next((s for knob, s in here.items() if knob.endswith("f16")), None)
        if base is None:
            continue
        rate, moved = medians(base, "tokens_s"), medians(base, "mb_per_token")
        for system in here.values():
            value, bytes_ = medians(system, "tokens_s"), medians(system, "mb_per_token")
            if value and rate:
                told = f", bytes say {moved / bytes_:.2f}" if moved and bytes_ else ""
                yield f"{case} {system.knob}: {value / rate:.2f} of f16{told}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--depths",
        type=int,
        nargs="+",
        default=[16384, 32768],
        metavar="N",
        help="tokens before the answers",
    )
    add(
        "--types",
        nargs="+",
        default=["f16", "q8_0", "q5_1", "q4_0"],
        metavar="TYPE",
        help="of K and V",
    )
    add("--streams", type=int, default=4, metavar="N", help="that generate at once (4)")
    add("--gen-tokens", type=int, default=120, metavar="N", help="tokens of each answer (120)")


@scene(arguments)
def kv_types(given: argparse.Namespace, here: Here) -> Comparison:
    """Measure the daemon with each type at each depth."""
    if given.dry_run:
        given.depths, given.gen_tokens = [64], 20
    found = []
    for depth in given.depths:
        slot = -(-(depth + given.gen_tokens + 256) // 256) * 256
        setup = servers.Setup(here.model, here.threads, slot * given.streams, given.streams)
        for kind in given.types:
            flags = ("--speculation", "off", "--kv-type", kind, "--flash-attention", "on")
            start = partial(servers.ours, setup, *flags)
            once = partial(play, given, depth)
            found.append(contest.serving(OURS, kind, start, once, f"{depth} tokens"))
    return Comparison(
        found,
        seconds=60,
        repetitions=1,
        tables=[_TABLE],
        facts={"streams": f"{given.streams} of {given.gen_tokens} tokens"},
        progress=lambda row: f"{cell(row.get('tokens_s'), 1)} t/s",
        verdicts=verdicts,
    )
