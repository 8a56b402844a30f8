"""Tokens per second at k concurrent streams: the daemon, llama-server, and the ceiling.

    python -m benches throughput            everything, medians of 3 (about 25 minutes, idle machine)
    python -m benches throughput --quick    a short look: 1 repetition, 32 tokens (about 4 minutes)
    python -m benches throughput --k 16 --lane background    many streams, see below
    python -m benches throughput --k 3 7    where rows that are thrown away make a tick quicker

The ceiling is ``llama-batched-bench --kv-unified``: llama.cpp alone, no sampling, no clients. Two
rates are given. *decode*: tokens/s while all k streams decode, prompts excluded, which is that
program's S_TG. *end to end*: all tokens by the time from the first request sent to the last token
read, prompts included. *of the ceiling* is of the same repetition; *+us* is what a token takes
longer than there, in microseconds of wall clock. Where the first stream has ended before the last
one begins, as under the contract when many prompts come at once, there is no decode rate: longer
answers (``--gen-tokens``) or ``--lane background``, which protects nobody, give one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benches import clients, contest, report, servers
from benches.clients import Job
from benches.contest import OURS, Medians, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.live import drive
from benches.rates import end_to_end, steady
from uma_trio_sim.latency import median

CEILING = "llama-batched-bench"
# Of the ceiling. At 3 and 7 a Q4_0 CPU build is quicker with a row more, which the policy knows.
TARGET, TARGETS, SAMPLED = 0.92, {3: 1.35, 7: 1.15}, 0.85
DISTURBED_PCT = 5.0  # of all cores, taken by others: from here on a verdict says so
_WARM_UP_TOKENS = 8
_TABLE = Table("", (
    ("decode t/s", "decode", 1), ("of the ceiling", "share", 2), ("+us", "above_us", 0),
    ("end to end t/s", "whole", 1), ("TTFT ms", "ttft_ms", 0), ("steady n", "steady_n", 0),
    ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
))  # fmt: skip


def jobs(given: argparse.Namespace, k: int, gen_tokens: int, seed: str) -> list[Job]:
    """Return the requests of `k` streams."""
    plain = clients.jobs(k, given.prompt_tokens, gen_tokens, f"{seed}/{k}")
    return [replace(job, priority=given.lane, sampled=given.sampled) for job in plain]


def play(given: argparse.Namespace, k: int, running: servers.Running, seed: str) -> Row:
    """Warm a server up and stream one load from it."""
    warm = jobs(given, k, _WARM_UP_TOKENS, f"{seed}/warm")
    clients.checked(drive(running.wire, warm))
    work, before = jobs(given, k, given.gen_tokens, seed), os.times()
    answers = clients.checked(drive(running.wire, work))
    after = os.times()
    own_s = after.user + after.system - before.user - before.system
    return summarise(answers) | {"client_us": own_s * 1e6 / (k * given.gen_tokens)}


def summarise(answers: list[clients.Answer]) -> Row:
    """Return the figures of one load."""
    streams = [answer.times for answer in answers]
    window = steady(streams)
    firsts = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    return {
        "decode": window.rate if window else None,
        "whole": end_to_end([answer.sent for answer in answers], streams),
        "ttft_ms": 1e3 * median(firsts) if firsts else None,
        "steady_n": window.fewest_tokens if window else None,
        "prompt_tokens": answers[0].prompt_tokens,
    }


def ceiling_command(
    folder: Path, setup: servers.Setup, given: argparse.Namespace, k: int
) -> list[str]:
    """Return the call that measures the ceiling at `k` sequences."""
    return [
        str(folder / CEILING), "-m", str(setup.model), "-c", str(setup.n_ctx),
        "-t", str(setup.threads), "-npp", str(given.prompt_tokens), "-ntg", str(given.gen_tokens),
        "-npl", str(k), "--kv-unified", "--output-format", "jsonl",
    ]  # fmt: skip


def ceiling(found: dict[str, Any]) -> Row:
    """Return the figures of what ``llama-batched-bench`` prints; end to end has the prompts in it."""
    return {
        "decode": found["speed_tg"],
        "whole": found["pl"] * found["tg"] / found["t"],
        "steady_n": found["tg"],
        "prompt_tokens": found["pp"],
    }


def complete(rows: list[Row]) -> list[Row]:
    """Return `rows` with their share of the ceiling, and what a token takes longer than there."""
    rows = contest.with_share(rows, "decode", CEILING)

    def above_us(row: Row) -> float | None:
        rate, share = row.get("decode"), row["share"]
        if not isinstance(rate, float) or not isinstance(share, float):
            return None
        return 1e6 / rate - 1e6 * share / rate

    return [{**row, "above_us": above_us(row)} for row in rows]


def verdicts(medians: Medians, *, sampled: bool = False) -> Iterator[str]:
    """Yield for each k and policy whether both targets are met, with the figures."""
    for system in medians.systems:
        if system.family != OURS:
            continue
        same = [s for s in medians.systems if s.case == system.case]
        rivals = {
            s: rate for s in same if s.family == contest.PEER and (rate := medians(s, "decode"))
        }
        ours, of_top = medians(system, "decode"), medians(system, "share")
        if ours is None or of_top is None or not rivals:
            yield f"{system.case}: not decided, something was not measured"
            continue
        best = max(rivals, key=lambda rival: rivals[rival])
        k = int(system.case.removeprefix("k="))
        target = SAMPLED if sampled else TARGETS.get(k, TARGET)
        line = contest.verdict(
            f"{system.case}, {system.name}: share of {CEILING}", of_top, target, at_most=False
        )
        above = ours / rivals[best]
        others = max(medians(s, "others_pct") or 0.0 for s in same)
        yield (
            f"{line}, {above:.3f} of the best {best.name} "
            f"(target above 1: {'met' if above > 1 else 'MISSED'})"
            + (f"; DISTURBED, others took {others:.0f} %" if others >= DISTURBED_PCT else "")
        )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--k", type=int, nargs="+", default=[1, 3, 4, 7, 8, 16], metavar="K")
    add("--lane", choices=["interactive", "background"], help="of all streams, at the daemon")
    add("--sampled", action="store_true", help="tokens are drawn, but for the ceiling's")
    add("--prompt-tokens", type=int, default=64, metavar="N")
    add("--gen-tokens", type=int, metavar="N")
    add("--n-ctx", type=int, default=4096, metavar="N")


@scene(arguments, policies=["deadline"])
def throughput(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon with three settings of llama-server and the ceiling, at each k."""
    given.gen_tokens = given.gen_tokens or (32 if given.quick or given.dry_run else 160)
    need = max(given.k) * (given.prompt_tokens + given.gen_tokens)
    if need > given.n_ctx:
        raise SystemExit(f"{max(given.k)} streams need a context of {need}; raise --n-ctx")
    setup = servers.Setup(here.model, here.threads, given.n_ctx, max(given.k))
    variants = ["stock", "np-kvu", *([] if given.quick else ["np"])]
    compared: list[System] = []
    for k in given.k:
        case, once = f"k={k}", partial(play, given, k)
        if here.peers is not None:
            command = ceiling_command(here.peers, setup, given, k)
            top = partial(contest.program, command, ceiling)
            compared.append(System(CEILING, "", lambda _seed, top=top: top(), case))  # type: ignore[misc]
        compared += contest.daemons(setup, given.policies, once, case)
        flags = [servers.server_flags(variant, k) for variant in variants]
        knobs = [contest.short(each).replace(f"-np {k}", "-np k") for each in flags]
        found = contest.llama_servers(here.peers, setup, flags, once, case)
        compared += [replace(s, knob=knob) for s, knob in zip(found, knobs, strict=False)]
    load = f"{given.prompt_tokens} prompt tokens, {given.gen_tokens} generated, context "
    return Comparison(
        compared,
        seconds=4 + 0.06 * given.gen_tokens,
        minutes=120,
        tables=[_TABLE],
        facts={
            "load": f"{load}{given.n_ctx}, lane {given.lane or 'as it comes'}, "
            + ("sampled" if given.sampled else "greedy")
        },
        progress=lambda row: (
            f"decode {report.cell(row['decode'], 1)} t/s, "
            f"others took {report.cell(row['others_pct'], 0)} % of the machine"
        ),
        complete=complete,
        verdicts=lambda medians: verdicts(medians, sampled=given.sampled),
        curves=("decode rate", "decode", ("streams", "tokens/s while all decode")),
    )
