"""Reading while others work: what each server's load does to a stream, and what the load gets.

    python -m benches.storm                 everything, medians of 3 (under 12 minutes)
    python -m benches.storm --quick         a short look at everything (under 4 minutes)
    python -m benches.storm --interactive 3 --paste
    python -m benches.storm --caps 2 --batch 16 --repetitions 5

Four loads, each against the same reader alone, seconds earlier on the same server: a *storm*
(3 background clients, unique prompts of 506 tokens one after another, 1 token each), *decoders*
(3 background streams), *newcomers* (short questions in the storm), with ``--paste`` one big
unlabelled prompt. Systems: the daemon under its contract at several caps, its baseline, and
llama-server at several batch sizes, which is the knob it has for this. What the figures mean is in
docs/BENCHMARKS.md. One client for all, prompts from a printed seed, greedy, fixed lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benches import chart, host, report, servers
from benches.pace import Point, judge
from benches.rates import median
from benches.scenes import SAYS, SceneFailed, Scenes, Script
from benches.setting import model_or_exit, setting
from benches.throughput import order

CONTRACT, BASELINE, PEER = "uma-trio", "uma-trio baseline", "llama-server -kvu"
CAPS, BATCHES = (1.2, 1.5, 2.0, 3.0, 5.0), (0, 64, 16, 8, 4)
# At the default cap (issue 4); checked on the medians and printed, never asserted.
TARGETS = (
    ("storm_p95_x", 1.2, "storm: p95 gap / solo"),
    ("decoders_p95_x", 1.2, "background decoders: p95 gap / solo"),
    ("storm_worst_young_x", 2.0, "storm: worst pause in the first 3 s / solo's"),
    ("storm_ttf5_x", 1.3, "storm: time to the fifth token / solo"),
    ("newcomer_x", 1.5, "newcomer's TTFT in the storm / solo"),
)

Row = dict[str, object]
Start = Callable[[Path], contextlib.AbstractContextManager[servers.Running]]


@dataclass(frozen=True)
class System:
    """One server at one setting of its knob. `start` gets a cache folder of its own."""

    family: str
    knob: str
    start: Start

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{self.family} {self.knob}".strip()


def systems(setup: servers.Setup, folder: Path | None, given: argparse.Namespace) -> list[System]:
    """Return everything that is compared."""

    def ours(*flags: str) -> Start:
        return lambda cache: servers.daemon(setup, extra=flags, cache=cache)

    found = [
        System(CONTRACT, f"cap {cap:g}", ours("--policy", "contract", "--latency-cap", f"{cap:g}"))
        for cap in given.caps
    ]
    if not given.no_baseline:
        found.append(System(BASELINE, "", ours("--policy", "baseline")))
    for size in given.batch if folder is not None else ():
        flags = ["--parallel", str(setup.slots), "--kv-unified"]
        flags += ["-b", str(size)] if size else []
        start = partial(servers.llama_server, folder, setup, flags)
        found.append(System(PEER, f"-b {size or 2048}", lambda _cache, start=start: start()))  # type: ignore[misc]
    return found


def measure(system: System, script: Script, seed: str, cache: Path) -> Row:
    """Play all scenes on one fresh server; what goes wrong is in ``error``."""
    spin_ms = host.spin_ms()
    found: Row
    try:
        with system.start(cache) as running:
            foreign = host.Foreign(running.pid)
            found = Scenes(running.wire, script, seed).play()
            found["others_pct"] = foreign.percent()
    except (SceneFailed, servers.DidNotStart, OSError, subprocess.SubprocessError) as failure:
        found = {"error": str(failure)}
    return {"family": system.family, "knob": system.knob, "spin_ms": spin_ms, **found}


def run(
    compared: Sequence[System], script: Script, repetitions: int, seed: int, minutes: float
) -> list[Row]:
    """Measure every system in every repetition, in an order that favours nobody.

    On a machine that is so busy that it takes longer than `minutes`, the rest is left out.
    """
    by_name = {system.name: system for system in compared}
    rows: list[Row] = []
    total = repetitions * len(compared)
    deadline = time.monotonic() + 60 * minutes
    for repetition in range(repetitions):
        # The first daemon of a repetition measures the machine, the others of it recall that.
        with tempfile.TemporaryDirectory(prefix="storm-") as cache:
            for name in order(list(by_name), repetition, seed):
                if time.monotonic() + script.seconds > deadline:
                    left = f"{total - len(rows)} of {total} measurements were left out"
                    report.note(f"{minutes:g} minutes are over: {left} (--minutes gives more)")
                    return rows
                # The same prompts for every system of a repetition, and no two repetitions alike.
                row = measure(by_name[name], script, f"{seed}/{repetition}", Path(cache))
                rows.append({"repetition": repetition, **row})
                report.note(f"  {len(rows)}/{total} {name:<24} {_progress(row)}")
    return rows


def _progress(row: Row) -> str:
    if row.get("error"):
        return f"ERROR {row['error']}"
    shown = (
        ("solo p50", "solo_p50", "ms"), ("storm p95", "storm_p95_x", "x"),
        ("prefill", "storm_tokens_s", "t/s"), ("decoders p95", "decoders_p95_x", "x"),
        ("newcomer", "newcomer_x", "x"), ("others", "others_pct", "%"),
    )  # fmt: skip
    return ", ".join(f"{text} {report.cell(row.get(key), 1)} {unit}" for text, key, unit in shown)


class Medians:
    """The repetitions of each system, seen as one."""

    def __init__(self, compared: Sequence[System], rows: Sequence[Row]) -> None:
        self.systems = compared
        self._rows = rows

    def __call__(self, system: System, figure: str) -> float | None:
        """Return the median of a figure over the repetitions that have it."""
        found = self.values(system, figure)
        return median(found) if found else None

    def values(self, system: System, figure: str) -> list[float]:
        """Return a figure of every repetition that has it."""
        mine = [r for r in self._rows if (r["family"], r["knob"]) == (system.family, system.knob)]
        return [v for r in mine if isinstance(v := r.get(figure), int | float)]

    def points(self, cost: str, gain: str) -> list[Point]:
        """Return each system as a point of a chart; those without the figures are left out."""
        return [
            Point(system.family, system.knob, x, y)
            for system in self.systems
            if (x := self(system, cost)) is not None and (y := self(system, gain)) is not None
        ]


Column = tuple[str, str, int]
TABLES: tuple[tuple[str, str, tuple[Column, ...]], ...] = (
    (
        "Storm: unique prompts one after another, for one token each",
        "storm_n",
        (
            ("solo p50 ms", "solo_p50", 2), ("p50 x", "storm_p50_x", 2),
            ("p95 x", "storm_p95_x", 2), ("p95/p50 solo", "storm_p95_of_p50", 2),
            ("p99 x", "storm_p99_x", 2), ("worst 3 s x", "storm_worst_young_x", 2),
            ("TTF5 x", "storm_ttf5_x", 2), ("prompts/s", "storm_prompts_s", 2),
            ("prefill t/s", "storm_tokens_s", 0), ("whole prompts", "storm_prompts", 0),
        ),
    ),
    (
        "Newcomers in the storm: short questions, nobody else reading",
        "newcomers",
        (
            ("TTFT alone ms", "newcomer_solo_ms", 0), ("in the storm ms", "newcomer_ms", 0),
            ("x", "newcomer_x", 2), ("worst x", "newcomer_worst_x", 2),
            ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1), ("drift", "drift", 2),
        ),
    ),
    (
        "Background decoders: streams that nobody waits for",
        "decoders_n",
        (
            ("p50 x", "decoders_p50_x", 2), ("p95 x", "decoders_p95_x", 2),
            ("p95/p50 solo", "decoders_p95_of_p50", 2), ("p99 x", "decoders_p99_x", 2),
            ("worst 3 s x", "decoders_worst_young_x", 2), ("TTF5 x", "decoders_ttf5_x", 2),
            ("background t/s", "decoders_tokens_s", 1),
        ),
    ),
    (
        "Paste: somebody sends a long document and does not say so",
        "paste_n",
        (
            ("p50 x", "paste_p50_x", 2), ("p95 x", "paste_p95_x", 2),
            ("p99 x", "paste_p99_x", 2), ("worst ms", "paste_worst", 0),
            ("prefill t/s", "paste_tokens_s", 0), ("paste's TTFT s", "paste_ttft_s", 1),
        ),
    ),
    (
        "What the daemon says of itself at the end of the storm",
        "says_batch_calls_total",
        tuple((name, f"says_{name}", 3) for name in SAYS[:-1]),
    ),
)  # fmt: skip


def tables(medians: Medians) -> Iterator[str]:
    """Yield each table that has something to say, with its title."""
    for title, count, columns in TABLES:
        lines: list[list[object]] = []
        for system in medians.systems:
            n = medians.values(system, count)
            if not n:
                continue
            cells = [report.cell(medians(system, figure), digits) for _, figure, digits in columns]
            lines.append([system.name, f"{sum(n):.0f}", *cells])
        if lines:
            yield f"{title}\n\n{report.table(['system', 'n', *(c[0] for c in columns)], lines)}"


def verdicts(medians: Medians, default_cap: str = "cap 1.2") -> Iterator[str]:
    """Yield what came of the targets, and how each cap stands beside the peers."""
    for system in medians.systems:
        if (system.family, system.knob) != (CONTRACT, default_cap):
            continue
        for figure, target, text in TARGETS:
            value = medians(system, figure)
            if value is None:
                yield f"{text}: not measured"
            else:
                met = "met" if value <= target else "MISSED"
                yield f"{text}: {value:.2f} (target {target:g}: {met})"
    for load, gain, unit in (
        ("storm", "storm_prompts_s", "prompts/s"),
        ("decoders", "decoders_tokens_s", "tokens/s"),
    ):
        points = medians.points(f"{load}_p95_x", gain)
        others = [p for p in points if p.family == PEER]
        for point in points:
            if point.family == CONTRACT:
                yield f"{load}: {judge(point, others, unit)}"


def arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Script]:
    """Parse the command line; ``--quick`` only changes defaults."""
    parser = argparse.ArgumentParser(prog="python -m benches.storm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    report.common_arguments(parser)
    add = parser.add_argument
    add("--caps", type=float, nargs="*", default=list(CAPS), metavar="X", help="latency caps")
    add("--batch", type=int, nargs="*", default=list(BATCHES), metavar="N",
        help="llama-server's -b; 0 is its default")  # fmt: skip
    add("--no-baseline", action="store_true", help="leave out the daemon's baseline policy")
    add("--interactive", type=int, default=1, metavar="N", help="streams that are read")
    add("--background", type=int, default=3, metavar="N", help="clients that send prompts")
    add("--prompt-tokens", type=int, default=506, metavar="N", help="of each prompt of the storm")
    add("--paste", action="store_true", help="also chat beside one big paste")
    add("--repetitions", type=int, metavar="N")
    add("--seconds", type=float, metavar="S", help="how long the stream in the storm is read")
    add("--minutes", type=float, metavar="M", help="when to give up what is left")
    given = parser.parse_args(argv)
    given.minutes = given.minutes or (3.9 if given.quick else 11.9)
    given.repetitions = given.repetitions or (1 if given.quick else 3)
    script = Script(
        interactive=given.interactive,
        background=given.background,
        prompt_tokens=given.prompt_tokens,
        paste_s=(4.0 if given.quick else 8.0) if given.paste else 0.0,
    )
    if given.quick:
        script = replace(script, storm_s=4.5, newcomers_s=1.0, decoders_s=2.0)
    if given.seconds:
        script = replace(script, storm_s=given.seconds, stream_tokens=int(250 * given.seconds))
    return given, script


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables and verdicts, write the CSV and the chart."""
    given, script = arguments(argv)
    here, model = setting(given), model_or_exit(given)
    setup = servers.Setup(model, here.threads, script.cells, script.slots)
    compared = systems(setup, here.peers, given)
    facts = host.facts(here.peers / "llama-server" if here.peers else None)
    facts |= {
        "model": model.name,
        "threads": str(here.threads),
        "seed": str(here.seed),
        "script": f"{script}, context {script.cells}, {script.slots} slots",
        "repetitions": str(given.repetitions),
        "noise": _noise(),
    }
    report.print_facts(facts)
    minutes = script.seconds * len(compared) * given.repetitions / 60
    report.note(f"{len(compared)} systems, {given.repetitions} times: about {minutes:.0f} minutes")
    rows = run(compared, script, given.repetitions, here.seed, given.minutes)
    medians = Medians(compared, rows)
    for text in tables(medians):
        print(f"{text}\n")
    for line in verdicts(medians):
        print(line)
    print(f"\n{report.write_csv('storm', rows, facts)}")
    for file in draw(medians, facts):
        print(file)
    return 1 if any(row.get("error") for row in rows) else 0


def draw(medians: Medians, facts: dict[str, str]) -> list[Path]:
    """Draw the chart: a panel for the storm, one for the background decoders."""
    caption = f"{facts['machine']}; {facts['model']}; {facts['date']}; {facts['uma-trio']}"
    panels = {
        "storm of prompts": medians.points("storm_p95_x", "storm_tokens_s"),
        "background decoders": medians.points("decoders_p95_x", "decoders_tokens_s"),
    }
    units = dict(zip(panels, ("prompt tokens/s", "generated tokens/s"), strict=True))
    return chart.pareto("storm", panels, units, caption)


def _noise() -> str:
    """Return how steady the machine is before anything runs: a fixed piece of work, 20 times."""
    spins = sorted(host.spin_ms() for _ in range(20))
    return f"a fixed piece of work takes {spins[10]:.1f} ms, {spins[-1] / spins[10]:.2f}x at worst"


if __name__ == "__main__":
    sys.exit(main())
