"""Tokens per second at k concurrent greedy streams: the daemon, llama-server, and the ceiling.

    python -m benches.throughput            everything, medians of 3 (about 25 minutes, idle machine)
    python -m benches.throughput --quick    a short look: 1 repetition, 32 tokens (about 4 minutes)
    python -m benches.throughput --k 16 --lane background    many streams, see below
    python -m benches.throughput --k 3 7    where rows that are thrown away make a tick quicker
    python -m benches.throughput --dry-run  the whole path without a model or peers, in seconds

The ceiling is ``llama-batched-bench --kv-unified``: llama.cpp alone, no sampling, no clients. Two
rates are given. *decode*: tokens/s while all k streams decode, prompts excluded, which is that
program's S_TG. *end to end*: all tokens by the time from the first request sent to the last token
read, prompts included. `ratio` is a median decode rate by the ceiling's of the same run; `+us` is
what a token takes longer than there, in microseconds of wall clock. Where the first stream has ended
before the last one begins, as under the contract when many prompts come at once, there is no decode
rate: longer answers (``--gen-tokens``) or ``--lane background``, which protects nobody, give one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benches import chart, clients, host, report, servers
from benches.contest import order
from benches.rates import end_to_end, steady
from benches.setting import model_or_exit, setting
from uma_trio.sim.latency import median

CEILING = "llama-batched-bench"
OURS = "uma-trio"  # and its policy
# Of the ceiling. At 3 and 7 a Q4_0 CPU build is quicker with a row more, which the policy knows.
TARGET, TARGETS, SAMPLED = 0.92, {3: 1.35, 7: 1.15}, 0.85
DISTURBED_PCT = 5.0  # of all cores, taken by others: from here on a verdict says so
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """One cell of the comparison: `k` streams of so many tokens."""

    k: int
    prompt_tokens: int
    gen_tokens: int
    seed: str
    lane: str | None = None  # the daemon's own if None
    sampled: bool = False

    def jobs(self, gen_tokens: int, seed: str) -> list[clients.Job]:
        """Return the requests of all streams."""
        plain = clients.jobs(self.k, self.prompt_tokens, gen_tokens, seed)
        return [replace(job, priority=self.lane, sampled=self.sampled) for job in plain]


@dataclass
class Result:
    """What one system did with one load."""

    decode: float | None = None
    whole: float | None = None
    ttft_ms: float | None = None
    steady_tokens: int | None = None
    prompt_tokens: int | None = None
    foreign_pct: float | None = None
    spin_ms: float | None = None
    client_us: float | None = None
    error: str | None = None


Measure = Callable[[Load], Result]
Cells = dict[tuple[int, str], "Cell"]


@dataclass
class Cell:
    """The repetitions of one system at one k."""

    results: list[Result] = field(default_factory=list)

    def middle(self, name: str) -> float | None:
        """Return the median of one figure over the repetitions that have it."""
        values = [v for r in self.results if (v := getattr(r, name)) is not None]
        return median(values) if values else None


def measure_server(
    start: Callable[[Load], contextlib.AbstractContextManager[servers.Running]], load: Load
) -> Result:
    """Start a server, warm it up, and stream one load from it."""
    with start(load) as running:
        warm = load.jobs(_WARM_UP_TOKENS, f"{load.seed}/warm")
        error = clients.first_error(clients.drive(running.wire, warm))
        if error:
            return Result(error=f"warming up: {error}")
        work = load.jobs(load.gen_tokens, load.seed)
        foreign = host.Foreign(running.pid)
        before = os.times()
        answers = clients.drive(running.wire, work)
        after = os.times()
        result = summarise(answers)
        result.foreign_pct = foreign.percent()
        own = after.user + after.system - before.user - before.system
        result.client_us = own * 1e6 / (load.k * load.gen_tokens)
        return result


def summarise(answers: Sequence[clients.Answer]) -> Result:
    """Return the figures of one load."""
    streams = [answer.times for answer in answers]
    window = steady(streams)
    firsts = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    return Result(
        decode=window.rate if window else None,
        whole=end_to_end([answer.sent for answer in answers], streams),
        ttft_ms=1e3 * median(firsts) if firsts else None,
        steady_tokens=window.fewest_tokens if window else None,
        prompt_tokens=answers[0].prompt_tokens,
        error=clients.first_error(answers),
    )


def parse_batched_bench(output: str) -> Result:
    """Return the figures of the one line of JSON that ``llama-batched-bench`` prints."""
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        generated = found["pl"] * found["tg"]
        return Result(
            decode=found["speed_tg"],
            whole=generated / found["t"],
            steady_tokens=found["tg"],
            prompt_tokens=found["pp"],
        )
    return Result(error=f"no result from {CEILING}: {output.strip()[-300:]}")


def measure_ceiling(folder: Path, setup: servers.Setup, load: Load) -> Result:
    """Run ``llama-batched-bench`` once."""
    command = servers.batched_bench_command(
        folder, setup, load.k, load.prompt_tokens, load.gen_tokens
    )
    foreign = host.Foreign()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False,
        env=servers.environment(),
    )  # fmt: skip
    result = parse_batched_bench(done.stdout)
    result.foreign_pct = foreign.percent()
    if result.error:
        result.error += done.stderr[-300:]
    return result


def systems(
    setup: servers.Setup, folder: Path | None, policies: Sequence[str], quick: bool
) -> dict[str, Measure]:
    """Return everything that is compared, by name."""

    def ours(policy: str) -> Measure:
        return partial(measure_server, lambda _load: servers.ours(setup, "--policy", policy))

    found = {f"{OURS} {policy}": ours(policy) for policy in policies}
    if folder is None:
        return found
    found[CEILING] = partial(measure_ceiling, folder, setup)
    variants = {"llama-server": "stock", "llama-server -np k -kvu": "np-kvu"}
    if not quick:
        variants["llama-server -np k"] = "np"
    for name, variant in variants.items():

        def start(
            load: Load, variant: str = variant
        ) -> contextlib.AbstractContextManager[servers.Running]:
            return servers.llama_server(folder, setup, servers.server_flags(variant, load.k))

        found[name] = partial(measure_server, start)
    return found


def run(
    compared: dict[str, Measure], given: argparse.Namespace, seed: int
) -> tuple[Cells, list[dict[str, object]]]:
    """Measure every cell; return them, and a row for each single measurement."""
    cells: Cells = {}
    rows: list[dict[str, object]] = []
    for repetition in range(given.repetitions):
        for k in given.k:
            load = Load(
                k, given.prompt_tokens, given.gen_tokens, f"{seed}/{repetition}/{k}", given.lane,
                given.sampled,
            )  # fmt: skip
            for name in order(list(compared), repetition, seed):
                spin_ms = host.spin_ms()
                try:
                    result = compared[name](load)
                except (servers.DidNotStart, OSError, subprocess.SubprocessError) as failure:
                    result = Result(error=str(failure))
                result.spin_ms = spin_ms
                cells.setdefault((k, name), Cell()).results.append(result)
                rows.append({"repetition": repetition, "k": k, "system": name, **vars(result)})
                report.note(
                    f"  {repetition + 1}/{given.repetitions} k={k:<2} {name:<24} "
                    f"decode {report.cell(result.decode, 1)} t/s, "
                    f"others took {report.cell(result.foreign_pct, 0)} % of the machine, "
                    f"spin {spin_ms:.1f} ms" + (f"  ERROR {result.error}" if result.error else "")
                )
    return cells, rows


HEADERS = (
    "system", "k", "n", "decode t/s", "ratio", "+us", "end to end t/s", "TTFT ms", "steady n",
    "others %", "spin ms",
)  # fmt: skip


def table_rows(cells: Cells, ks: Sequence[int], names: Sequence[str]) -> Iterator[list[object]]:
    """Yield the table's lines: for each k, the ceiling first."""
    names = sorted(names, key=lambda name: (name != CEILING, not name.startswith(OURS), name))
    for k in ks:
        top = cells.get((k, CEILING), Cell()).middle("decode")
        for name in names:
            cell = cells[k, name]
            rate = cell.middle("decode")
            slower = 1e6 / rate - 1e6 / top if rate and top else None
            steady_n = [r.steady_tokens for r in cell.results if r.steady_tokens is not None]
            yield [
                name,
                k,
                len(cell.results),
                report.cell(rate, 1),
                rate / top if rate and top else None,
                report.cell(slower, 0),
                report.cell(cell.middle("whole"), 1),
                report.cell(cell.middle("ttft_ms"), 0),
                min(steady_n) if steady_n else None,
                report.cell(cell.middle("foreign_pct"), 0),
                report.cell(cell.middle("spin_ms"), 1),
            ]


def verdicts(cells: Cells, ks: Sequence[int], *, sampled: bool = False) -> Iterator[str]:
    """Yield one line for each k and policy: whether both targets are met, with the figures."""
    for k in ks:
        rates = {
            name: rate
            for (at, name), cell in cells.items()
            if at == k and (rate := cell.middle("decode"))
        }
        top = rates.pop(CEILING, None)
        rivals = {name: rate for name, rate in rates.items() if not name.startswith(OURS)}
        ours = rates.keys() - rivals.keys()
        if not ours or top is None or not rivals:
            yield f"k={k}: not decided, something was not measured"
            continue
        best = max(rivals, key=lambda name: rivals[name])
        target = SAMPLED if sampled else TARGETS.get(k, TARGET)
        for name in sorted(ours):
            of_top, of_best = rates[name] / top, rates[name] / rivals[best]
            taken = (cells[k, each].middle("foreign_pct") or 0.0 for each in (name, CEILING, best))
            others = max(taken)
            yield (
                f"k={k}, {name}: {of_top:.3f} of {CEILING} (target {target}: "
                f"{'met' if of_top >= target else 'MISSED'}), {of_best:.3f} of the best {best} "
                f"(target above 1: {'met' if of_best > 1 else 'MISSED'})"
                + (f"; DISTURBED, others took {others:.0f} %" if others >= DISTURBED_PCT else "")
            )


def draw(cells: Cells, ks: Sequence[int], facts: dict[str, str]) -> list[Path]:
    """Draw the decode rate of each system over k."""
    names = dict.fromkeys(name for _, name in cells)
    series = {
        name: [(k, r) for k in ks if (r := cells.get((k, name), Cell()).middle("decode"))]
        for name in names
    }
    labels = ("streams", "tokens/s while all decode (more is better)")
    panels = {"decode rate": series}
    return chart.lines("throughput", panels, labels, chart.caption(facts), doubling=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``--quick`` only changes defaults."""
    parser = report.parser("throughput", __doc__)
    report.common_arguments(parser)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 4, 7, 8, 16], metavar="K")
    parser.add_argument("--policies", nargs="+", default=["contract"], metavar="NAME")
    parser.add_argument(
        "--lane", choices=["interactive", "background"], help="of all streams, at the daemon"
    )
    parser.add_argument(
        "--sampled", action="store_true", help="tokens are drawn, but for the ceiling's"
    )
    parser.add_argument("--repetitions", type=int, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--gen-tokens", type=int, metavar="N")
    parser.add_argument("--n-ctx", type=int, default=4096, metavar="N")
    given = parser.parse_args(argv)
    short = given.quick or given.dry_run
    given.repetitions = given.repetitions or (1 if short else 3)
    given.gen_tokens = given.gen_tokens or (32 if short else 160)
    need = max(given.k) * (given.prompt_tokens + given.gen_tokens)
    if need > given.n_ctx:
        parser.error(f"{max(given.k)} streams need a context of {need}; raise --n-ctx")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and the verdicts, write the CSV."""
    given = arguments(argv)
    here, model = setting(given), model_or_exit(given)
    setup = servers.Setup(model, here.threads, given.n_ctx, max(given.k))
    compared = systems(setup, here.peers, given.policies, given.quick)
    facts = here.facts(
        model=model.name,
        load=f"{given.prompt_tokens} prompt tokens, {given.gen_tokens} generated, "
        f"context {given.n_ctx}, {given.repetitions} repetitions, lane {given.lane or 'as it comes'}, "
        + ("sampled" if given.sampled else "greedy"),
    )
    report.print_facts(facts)
    cells, rows = run(compared, given, here.seed)
    print(report.table(HEADERS, table_rows(cells, given.k, list(compared))))
    print()
    for line in verdicts(cells, given.k, sampled=given.sampled):
        print(line)
    print(f"\n{report.write_csv('throughput', rows, facts)}")
    for file in draw(cells, given.k, facts):
        print(file)
    return 1 if any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
