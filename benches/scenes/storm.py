"""Reading while others work: what each server's load does to a stream, and what the load gets.

    python -m benches storm                 everything, medians of 3 (under 12 minutes)
    python -m benches storm --quick         a short look at everything (under 4 minutes)
    python -m benches storm --interactive 3
    python -m benches storm --caps 2 --batch 16 --repetitions 5

Three loads, each against the same reader alone, seconds earlier on the same server: a *storm*
(3 background clients, unique prompts of 506 tokens one after another, 1 token each), *decoders*
(3 background streams), and *newcomers* (short questions in the storm). Systems: the daemon
as it is by default and with each of ``--serve``, at several caps without a reading pace (or under another package's
``--policies``), its baseline, and llama-server at several batch sizes, which is the knob it has for this. *by step* is
by the step of the default contract: 40 ms or 1.2 times alone.
What the figures mean is in benches/results/README.md. One client for all, prompts from a printed seed, greedy, fixed lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benches import contest, report, servers
from benches.contest import Medians, Row, Start, System, serving
from benches.driver import Comparison, Here, Table, scene
from benches.pace import Point, judge
from benches.reading import SAYS, Scenes, Script

OURS, BASELINE, PEER = "uma-trio", "uma-trio baseline", "llama-server -kvu"
OURS_POLICY = "deadline"
NO_FLASH = f"{PEER} -fa off"  # as the daemon has it on a CPU
PEERS = (PEER, NO_FLASH)
DEFAULT_CAP = 1.2
READING_PACE_MS = 40.0  # the daemon's default
CAPS, BATCHES = (DEFAULT_CAP, 1.5, 2.0, 3.0, 5.0), (0, 64, 16, 8, 4)
# At the default cap without a reading pace; checked on the medians and printed, never asserted. What is shown is by what is shown to
# the reader alone.
STEP_TARGET = 1.1
TARGETS = (
    ("storm_p95_later_x", 1.2, "storm, after the first 3 s: p95 / solo"),
    ("storm_p99_later_x", 1.2, "storm, after the first 3 s: p99 / solo"),
    ("storm_worst_later_x", 1.5, "storm, after the first 3 s: longest / solo"),
    ("storm_worst_startup_x", 1.5, "storm: longest in the first 3 s / solo's"),
    ("decoders_p95_x", 1.2, "background decoders: p95 / solo"),
    ("newcomer_x", 1.3, "newcomer's TTFT in the storm / solo"),
)


def systems(
    setup: servers.Setup, folder: Path | None, given: argparse.Namespace, script: Script
) -> list[System]:
    """Return everything that is compared."""

    def play(running: servers.Running, seed: str) -> Row:
        found = Scenes(running.wire, script, seed).play()
        return found | by_step(found)

    def ours(*flags: str) -> Start:
        return lambda: servers.ours(setup, *flags)

    # With drafts several tokens come at once, and half of all gaps may be none.
    undrafted = ("--speculation", "off")

    def capped(family: str, policy: str, cap: float) -> System:
        flags = ("--policy", policy, "--latency-cap", f"{cap:g}", "--reading-pace", "0")
        return serving(family, f"cap {cap:g}", ours(*flags, *undrafted), play)

    # Each set of flags is a family of its own: verdicts are about the caps only.
    found = [
        serving(f"{OURS} {text}".strip(), "", ours(*undrafted, *text.split()), play)
        for text in ("", *given.serve)
    ]
    found += [
        capped(OURS if policy == OURS_POLICY else f"{OURS} {policy}", policy, cap)
        for cap in given.caps
        for policy in given.policies
    ]
    if not given.no_baseline:
        found.append(serving(BASELINE, "", ours("--policy", "baseline"), play))
    if folder is None:
        return found
    knobs = [(PEER, size) for size in given.batch] + [(NO_FLASH, n) for n in given.no_flash]
    for family, size in knobs:
        flags = servers.batch_flags(setup.slots, size)
        flags += ("-fa", "off") if family == NO_FLASH else ()
        start = partial(servers.llama_server, folder, setup, flags)
        found.append(serving(family, f"-b {size or 2048}", start, play))
    return found


def by_step(found: Row) -> Row:
    """Return the storm's p99 by the step of the default contract, if there is a p99."""
    solo, p99 = found.get("solo_p50"), found.get("storm_p99")
    if not isinstance(solo, float) or not isinstance(p99, float):
        return {}
    return {"storm_p99_by_step": p99 / max(DEFAULT_CAP * solo, READING_PACE_MS)}


def _progress(row: Row) -> str:
    shown = (
        ("solo p50", "solo_p50", "ms"), ("storm p95", "storm_p95_x", "x"),
        ("prefill", "storm_tokens_s", "t/s"), ("decoders p95", "decoders_p95_x", "x"),
        ("newcomer", "newcomer_x", "x"), ("others", "others_pct", "%"),
    )  # fmt: skip
    return ", ".join(f"{text} {report.cell(row.get(key), 1)} {unit}" for text, key, unit in shown)


def points(medians: Medians, cost: str, gain: str) -> list[Point]:
    """Return each system as a point; those without the figures are left out."""
    return [
        Point(system.family, system.knob, x, y)
        for system in medians.systems
        if (x := medians(system, cost)) is not None and (y := medians(system, gain)) is not None
    ]


TABLES = (
    Table("Storm: unique prompts one after another, for one token each", (
        ("solo p50 ms", "solo_p50", 2), ("reader first", "reader_first", 0),
        ("p50 x", "storm_p50_x", 2), ("p95 x", "storm_p95_x", 2),
        ("p95/p50 solo", "storm_p95_of_p50", 2), ("p99 x", "storm_p99_x", 2),
        ("worst x", "storm_worst_x", 2),
        ("p95 later x", "storm_p95_later_x", 2), ("p99 later x", "storm_p99_later_x", 2),
        ("worst later x", "storm_worst_later_x", 2),
        ("worst 3 s x", "storm_worst_startup_x", 2), ("TTF5 x", "storm_ttf5_x", 2),
        ("p95 ms", "storm_p95", 1), ("p99 ms", "storm_p99", 1), ("worst ms", "storm_worst", 0),
        ("p99 by step", "storm_p99_by_step", 2), ("TTFT ms", "storm_ttft", 0),
        ("prompts/s", "storm_prompts_s", 2), ("prefill t/s", "storm_tokens_s", 0),
        ("whole prompts", "storm_prompts", 0),
    ), "storm_n"),
    Table("Newcomers in the storm: short questions, nobody else reading", (
        ("TTFT alone ms", "newcomer_solo_ms", 0), ("in the storm ms", "newcomer_ms", 0),
        ("x", "newcomer_x", 2), ("worst x", "newcomer_worst_x", 2),
        ("others %", "others_pct", 0), ("spin ms", "spin_ms", 1), ("drift", "drift", 2),
    ), "newcomers"),
    Table("Background decoders: streams that nobody waits for", (
        ("p50 x", "decoders_p50_x", 2), ("p95 x", "decoders_p95_x", 2),
        ("p95/p50 solo", "decoders_p95_of_p50", 2), ("p99 x", "decoders_p99_x", 2), ("worst x", "decoders_worst_x", 2),
        ("worst 3 s x", "decoders_worst_startup_x", 2), ("TTF5 x", "decoders_ttf5_x", 2),
        ("background t/s", "decoders_tokens_s", 1),
    ), "decoders_n"),
    Table(
        "What the daemon says of itself at the end of the storm",
        tuple((name, f"says_{name}", 3) for name in SAYS[:-1]),
        "says_batch_calls_total",
    ),
)  # fmt: skip


def verdicts(medians: Medians) -> Iterator[str]:
    """Yield what came of the targets, and how each cap stands beside the peers."""
    at_default = {s.family: s for s in medians.systems if s.knob == f"cap {DEFAULT_CAP:g}"}
    if OURS in at_default:
        for figure, target, text in TARGETS:
            yield contest.verdict(f"{OURS}: {text}", medians(at_default[OURS], figure), target)
    for system in medians.systems:
        if (system.family, system.knob) == (OURS, ""):
            text = f"{OURS} at its defaults: storm, p99 / step"
            yield contest.verdict(text, medians(system, "storm_p99_by_step"), STEP_TARGET)
    for load, gain, unit in (
        ("storm", "storm_prompts_s", "prompts/s"),
        ("decoders", "decoders_tokens_s", "tokens/s"),
    ):
        found = points(medians, f"{load}_p95_x", gain)
        others = [p for p in found if p.family in PEERS]
        peers = [s for s in medians.systems if s.family in PEERS]
        if not any(medians.values(s, f"{load}_n") for s in peers):
            yield f"{load}: no other server was measured"
            continue
        for point in found:
            if point.family == OURS:
                yield f"{load}: {judge(point, others, unit)}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--caps", type=float, nargs="*", default=list(CAPS), metavar="X",
        help="latency caps, each without a reading pace")  # fmt: skip
    add("--serve", nargs="*", default=[], metavar="FLAGS",
        help="the daemon also with each of these sets of flags")  # fmt: skip
    add("--batch", type=int, nargs="*", default=list(BATCHES), metavar="N",
        help="llama-server's -b; 0 is its default")  # fmt: skip
    add("--no-flash", type=int, nargs="*", default=[], metavar="N",
        help="llama-server's -b once more, each with -fa off")  # fmt: skip
    add(
        "--policies",
        nargs="+",
        default=[OURS_POLICY],
        metavar="NAME",
        help="policies of the daemon that have a latency cap, each at every cap",
    )
    add("--no-baseline", action="store_true", help="leave out the daemon's baseline policy")
    add("--interactive", type=int, default=1, metavar="N", help="streams that are read")
    add("--background", type=int, default=3, metavar="N", help="clients that send prompts")
    add("--prompt-tokens", type=int, default=506, metavar="N", help="of each prompt of the storm")
    add("--seconds", type=float, metavar="S", help="how long the stream in the storm is read")


def script_of(given: argparse.Namespace) -> Script:
    """Return the script that the options ask for."""
    script = Script(
        interactive=given.interactive,
        background=given.background,
        prompt_tokens=given.prompt_tokens,
    )
    if given.quick:
        script = replace(script, storm_s=4.5, newcomers_s=1.0, decoders_s=2.0)
    if given.seconds:
        script = replace(script, storm_s=given.seconds, stream_tokens=int(250 * given.seconds))
    if given.dry_run:
        script = replace(script, solo_s=0.3, storm_s=0.3, newcomers_s=0.2, decoders_s=0.3,
                         prompt_tokens=40, stream_tokens=6000)  # fmt: skip
    return script


@scene(arguments)
def storm(given: argparse.Namespace, here: Here) -> Comparison:
    """Compare the daemon at several caps with llama-server at several batch sizes."""
    script = script_of(given)
    setup = servers.Setup(here.model, here.threads, script.cells, script.slots)
    return Comparison(
        systems(setup, here.peers, given, script),
        seconds=script.seconds,
        minutes=3.9 if given.quick else 11.9,
        tables=TABLES,
        facts={"script": f"{script}, context {script.cells}, {script.slots} slots"},
        progress=_progress,
        verdicts=verdicts,
    )
