"""How fast prompts are computed while nobody reads: the daemon, llama-server, and llama.cpp alone.

    python -m benches.prefill               medians of 3 (about 6 minutes)
    python -m benches.prefill --quick       once (about 1 minute)
    python -m benches.prefill --dry-run     the whole path without a model or peers, in seconds

Eight unique prompts of 512 tokens come at once, in the lane `background`, for one token each. The
rate is all their tokens by the time from the first request sent to the last token read, so
tokenising, planning and sampling are in it. The ceiling is ``llama-bench -p 512``: llama.cpp alone,
random tokens, nothing else. A server that was given a small ``-b``, to be gentle to readers, shows
here what that costs while there are none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benches import chart, clients, contest, host, report, servers
from benches.clients import Job, NotServed
from benches.contest import OURS, Column, Medians, Row, System
from benches.setting import model_or_exit, setting

CEILING = "llama-bench"
TARGET = 0.95
_COLUMNS: tuple[Column, ...] = (
    ("prefill t/s", "prefill", 0), ("of the ceiling", "share", 2),
    ("tokens each", "each", 0), ("last answer s", "seconds", 1),
    ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1),
)  # fmt: skip


def play(given: argparse.Namespace, running: servers.Running, seed: str) -> Row:
    """Send all prompts at once and return how fast they were computed."""
    warm = clients.jobs(1, given.prompt_tokens, 1, f"{seed}/warm")
    clients.checked(clients.drive(running.wire, warm))
    work = [
        Job(job.id, job.prompt, 1, "background")
        for job in clients.jobs(given.prompts, given.prompt_tokens, 1, seed)
    ]
    answers = clients.checked(clients.drive(running.wire, work))
    seconds = max(a.times[-1] for a in answers) - min(a.sent for a in answers)
    tokens = sum(a.prompt_tokens or 0 for a in answers)
    return {"prefill": tokens / seconds, "each": tokens / len(answers), "seconds": seconds}


def measure_ceiling(folder: Path, setup: servers.Setup, prompt_tokens: int, _seed: str) -> Row:
    """Run ``llama-bench`` once; it warms up by itself.

    Raises:
        NotServed: it printed no result.
    """
    command = servers.llama_bench_command(folder, setup, prompt_tokens)
    foreign = host.Foreign()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False,
        env=servers.environment(),
    )  # fmt: skip
    return parse_llama_bench(done.stdout, done.stderr) | {"others_pct": foreign.percent()}


def parse_llama_bench(output: str, error: str = "") -> Row:
    """Return the figures of the one line of JSON that ``llama-bench -o jsonl`` prints."""
    for line in output.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            return {"prefill": found["avg_ts"], "each": found["n_prompt"]}
    raise NotServed(f"no result from {CEILING}: {output.strip()[-300:]}{error[-300:]}")


def systems(setup: servers.Setup, folder: Path | None, given: argparse.Namespace) -> list[System]:
    """Return everything that is compared."""
    once = partial(play, given)
    flags = [servers.batch_flags(setup.slots, size) for size in given.batch]
    found = contest.daemons(setup, given.policies, once)
    found += contest.llama_servers(folder, setup, flags, once)
    if folder is not None:
        ceiling = partial(measure_ceiling, folder, setup, given.prompt_tokens)
        found.insert(0, System(CEILING, "", ceiling))
    return found


def with_shares(rows: Sequence[Row]) -> list[Row]:
    """Return `rows`, each with its rate by the ceiling's of the same repetition."""
    top = {r["repetition"]: r.get("prefill") for r in rows if r["family"] == CEILING}
    return [{**r, "share": _by(r.get("prefill"), top.get(r["repetition"]))} for r in rows]


def _by(rate: object, top: object) -> float | None:
    return rate / top if isinstance(rate, float) and isinstance(top, float) else None


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield for each of our policies whether the target is met."""
    for system in medians.systems:
        if system.family == OURS:
            text = f"{system.name}: prefill rate / {CEILING}'s"
            yield contest.verdict(text, medians(system, "share"), TARGET, at_most=False)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``--quick`` only changes defaults."""
    parser = contest.parser("prefill", __doc__, policies=["contract", "baseline"])
    add = parser.add_argument
    add("--batch", type=int, nargs="*", default=[0, 16, 4], metavar="N",
        help="llama-server's -b; 0 is its default")  # fmt: skip
    add("--prompts", type=int, metavar="N", help="how many come at once (8)")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="length of each")
    given = parser.parse_args(argv)
    given.prompts = given.prompts or (3 if given.quick or given.dry_run else 8)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and the verdicts, write the CSV and the chart."""
    given = arguments(argv)
    here, model = setting(given), model_or_exit(given)
    cells = -(-given.prompts * (given.prompt_tokens + 16) // 1024) * 1024
    setup = servers.Setup(model, here.threads, cells, given.prompts)
    compared = systems(setup, here.peers, given)
    facts = here.facts(model=model.name, load=f"{given.prompts} prompts of {given.prompt_tokens}")
    report.print_facts(facts)
    effort = contest.effort(given, seconds=20, minutes=60)
    rows = with_shares(
        contest.run(compared, effort, here.seed, lambda row: f"{row['prefill']:.0f} t/s")
    )
    medians = Medians(compared, rows)
    rates = {s.name: r for s in compared if (r := medians(s, "prefill")) is not None}
    draw = partial(chart.bars, "prefill", {"prompt tokens/s": rates}, {}, chart.caption(facts))
    said = (medians.table(_COLUMNS), "\n".join(verdicts(medians)))
    return contest.conclude("prefill", said, rows, facts, draw)


if __name__ == "__main__":
    sys.exit(main())
