"""Where a token is, from the call that computes it to the read of its client: a trace with both ends.

    python -m benches token_path               k = 1, 4, 8, 16 streams (5 minutes)
    python -m benches token_path --k 1 16 --gen-tokens 320

The daemon runs with time stamps (``benches/stamped.py``); the client's reads have the same clock. *cycle* is
the time from one call of llama_decode to the next, p50 and mean, in microseconds: a mean far above the
median is a cycle in which something else was done. Its parts, p50: *call*, inside of llama_decode; *aside*,
the engine's work until it waits (none of it costs time while a GPU computes); *wait*, for the
GPU's end; *choose*, from there until all tokens are chosen; *rest*, until the next call. *hand over* is from
the tokens' choice to the wake of trio's thread, which is inside the next cycle; *write* from there to the
socket; *read* from there to the client. *bare loop* is the same without a daemon: decode, read all logits,
take the largest. *of the ceiling* is the rate at the client by ``llama-batched-bench`` of the same repetition.

The second table says what makes the mean longer than the median: for each part its mean less its p50, and of all
cycles the *slow* ones (above 1.15 times the p50), those whose graph llama.cpp built *anew*, their mean, and those with
a *collection* of garbage. `--keep FOLDER` keeps the stamps.
"""

from __future__ import annotations

import argparse
import bisect
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benches import clients, contest, servers
from benches.contest import OURS, Row, System
from benches.driver import Comparison, Here, Table, scene
from benches.host import ROOT
from benches.live import drive
from benches.report import cell
from benches.scenes.throughput import CEILING, ceiling, ceiling_command, summarise
from uma_trio_sim.latency import median, percentile

BARE = "bare loop"
_TABLE = Table("", (
    ("t/s", "decode", 1), ("of the ceiling", "share", 3), ("cycle p50 us", "cycle_us", 0),
    ("mean", "cycle_mean_us", 0), ("p95", "cycle_p95_us", 0), ("call", "call_us", 0),
    ("aside", "aside_us", 0), ("wait", "wait_us", 0), ("choose", "choose_us", 0), ("rest", "rest_us", 0),
    ("hand over", "hand_us", 0), ("write", "write_us", 0), ("read", "read_us", 0),
))  # fmt: skip
_PARTS = ("call", "aside", "wait", "choose", "rest")
_MORE = Table("What the mean of a cycle has beyond its median, us", (
    ("mean - p50", "cycle_more_us", 0), *((part, f"{part}_more_us", 0) for part in _PARTS),
    ("slow %", "slow_pct", 1), ("anew %", "anew_pct", 1), ("their mean us", "anew_us", 0),
    ("collection %", "collected_pct", 1),
))  # fmt: skip
SLOW = 1.15

Times = dict[str, list[float]]


def parts(stamps: Times, begin: float, end: float) -> Row:
    """Return what the cycles between `begin` and `end` consist of, in microseconds."""
    starts = [at for at in stamps["decode"] if begin <= at <= end]
    cycles = [1e6 * (b - a) for a, b in pairwise(starts)]
    if not cycles:
        return {}
    row: Row = {
        "cycle_us": median(cycles),
        "cycle_mean_us": fmean(cycles),
        "cycle_p95_us": percentile(cycles, 95),
    }
    way = ["decode", "decoded", "waited", "computed", "sampled"]
    # On a CPU nothing is waited for after the call.
    present = [step for step in way if stamps[step]]
    names = {"decoded": "call", "waited": "aside", "sampled": "choose"}
    for before, after in [*pairwise(present), ("sampled", "decode")]:
        name = names.get(after) or {"waited": "wait", "sampled": "rest"}.get(before, "close")
        found = _gaps(starts, stamps[before], stamps[after])
        row[f"{name}_us"] = median(found)
        row[f"{name}_more_us"] = fmean(found) - median(found)
    row |= beyond(stamps, starts, cycles)
    if stamps["handed"]:
        row["hand_us"] = median(_gaps(starts, stamps["sampled"], stamps["handed"]))
        row["write_us"] = median(_gaps(starts, stamps["handed"], stamps["sent"]))
    return row


def beyond(stamps: Times, starts: Sequence[float], cycles: Sequence[float]) -> Row:
    """Return what the slow of the `cycles` that begin at `starts` have in common."""
    p50, n = median(cycles), len(cycles)
    reused, first = stamps["reused"], bisect.bisect_left(stamps["decode"], starts[0])
    calls = range(max(1, first), min(first + n, len(reused)))
    anew = [cycles[nth - first] for nth in calls if reused[nth] == reused[nth - 1]]
    hit = sum(
        bisect.bisect_left(stamps["collected"], a) < bisect.bisect_left(stamps["collected"], b)
        for a, b in pairwise(starts)
    )
    return {
        "cycle_more_us": fmean(cycles) - p50,
        "slow_pct": 100 * sum(cycle > SLOW * p50 for cycle in cycles) / n,
        "anew_pct": 100 * len(anew) / n,
        "anew_us": fmean(anew) if anew else None,
        "collected_pct": 100 * hit / n,
    }


def _gaps(starts: Sequence[float], before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Return for each cycle the microseconds from its `before` to the next `after`."""
    found = []
    for start in starts[:-1]:
        one = bisect.bisect_left(before, start)
        other = bisect.bisect_left(after, before[one]) if one < len(before) else len(after)
        if other < len(after):
            found.append(1e6 * (after[other] - before[one]))
    return found


def play(setup: servers.Setup, given: argparse.Namespace, k: int, seed: str) -> Row:
    """Stream from a daemon with stamps; return what its cycles were made of."""
    with tempfile.TemporaryDirectory(prefix="path-") as folder:
        file = Path(folder) / "stamps"
        launcher = ("-m", "benches.stamped", str(file))
        with servers.daemon(setup, launcher, ("--speculation", "off", *given.flags.split())) as run:
            plain = clients.jobs(k, given.prompt_tokens, given.gen_tokens, f"{seed}/{k}")
            warm = [replace(job, id=f"w{job.id}", max_tokens=16) for job in plain]
            clients.checked(drive(run.wire, warm))
            answers = clients.checked(drive(run.wire, plain))
        stamps = kept(file, given, f"{OURS}-k{k}")
    begin = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    inside = [at for at in answers[0].times if begin <= at <= end]
    if not inside:
        raise clients.NotServed("the first stream ended before the last began: --gen-tokens 320")
    sent = stamps["sent"]
    reads = [1e6 * (at - sent[bisect.bisect_right(sent, at) - 1]) for at in inside]
    return summarise(answers) | parts(stamps, begin, end) | {"read_us": median(reads)}


def kept(file: Path, given: argparse.Namespace, name: str) -> Times:
    """Return the stamps in `file`, which is copied where it was asked for."""
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, given.keep / f"{name}.json")
    return dict(json.loads(file.read_text()))


def bare(setup: servers.Setup, given: argparse.Namespace, k: int, _seed: str) -> Row:
    """Run the loop without a daemon."""
    with tempfile.TemporaryDirectory(prefix="path-") as folder:
        file = Path(folder) / "stamps"
        command = [
            sys.executable, "-m", "benches.stamped", str(file), "--bare", str(setup.model),
            "--streams", str(k), "--tokens", str(given.gen_tokens), "--n-ctx", str(setup.n_ctx),
            "--prompt-tokens", str(given.prompt_tokens), "--threads", str(setup.threads),
        ]  # fmt: skip
        subprocess.run(
            command, check=True, timeout=300, env=servers.environment(), cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stamps = kept(file, given, f"bare-k{k}")
    times = stamps["sampled"]
    row = parts(stamps, times[len(times) // 8], times[-1])
    mean = row.get("cycle_mean_us")
    return row | ({"decode": k * 1e6 / mean} if isinstance(mean, float) else {})


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--k", type=int, nargs="+", default=[1, 4, 8, 16], metavar="K", help="streams")
    add("--prompt-tokens", type=int, default=64, metavar="N")
    add("--gen-tokens", type=int, default=160, metavar="N")
    add("--flags", default="", help="further flags of the daemon")
    add("--keep", type=Path, metavar="FOLDER", help="where all time stamps are left")
    add("--no-bare", action="store_true", help="without the loop that needs no daemon")


@scene(arguments)
def token_path(given: argparse.Namespace, here: Here) -> Comparison:
    """Take a token's way apart, at each k."""
    if given.dry_run:
        raise SystemExit("there is no dry run: a fake model has no calls to stamp")
    cells = max(given.k) * (given.prompt_tokens + given.gen_tokens + 64)
    setup = servers.Setup(here.model, here.threads, -(-cells // 1024) * 1024, max(given.k))
    compared: list[System] = []
    for k in given.k:
        case = f"k={k}"
        if here.peers is not None:
            command = ceiling_command(here.peers, setup, given, k)
            top = partial(contest.program, command, ceiling)
            compared.append(System(CEILING, "", lambda _seed, top=top: top(), case))  # type: ignore[misc]
        compared.append(System(OURS, "", partial(play, setup, given, k), case))
        if not given.no_bare:
            compared.append(System(BARE, "", partial(bare, setup, given, k), case))
    return Comparison(
        compared,
        seconds=15,
        tables=[_TABLE, _MORE],
        facts={"load": f"{given.prompt_tokens} prompt tokens, {given.gen_tokens} generated"},
        progress=lambda row: f"{cell(row.get('decode'), 1)} t/s",
        complete=lambda rows: contest.with_share(rows, "decode", CEILING),
    )
