"""The tables and charts of docs/POLICY.md, in virtual time on a modelled machine.

    python -m benches figures                       tables; charts to benches/out
    python -m benches figures --into docs/images    the charts of the documents, a minute
    python -m benches figures --settings            the table of docs/SETTINGS.md, a minute

One stream is read. Beside it three clients send background prompts without end, or one more person
asks a question now and then. The engine is simulated (:mod:`uma_trio_sim`) on the cost table of
`--machine`, with a noise of 2 % and no cost for attention: figures say what the policy does on such
a machine. The same command gives the same figures and the same files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attrs import evolve, frozen

from benches import chart, report
from benches.driver import tool
from benches.pace import Point
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.state import Contract
from uma_trio_sim.latency import median, percentile
from uma_trio_sim.machine import TABLES, Profile, built_in, gaussian
from uma_trio_sim.simulation import Simulation, settings_for
from uma_trio_sim.world import SimulatedRequest

CAPPED = ("deadline",)  # policies with a latency cap
CAPS = (1.2, 1.5, 3.0, 5.0)
TICKS_MS = (20, 30, 40, 60)  # the baseline's knob, --tick-budget-ms; 30 is its default
EVERY_S = (1.0, 2.0, 5.0, 10.0, 20.0)
ONCE_S = (1.0, 6.0)  # in the stream's start-up window, and later
QUESTION, PROMPT = 500, 506  # tokens
SHOWN = ("q4_0", "q8_0", "q4_k_m")
# What docs/SETTINGS.md names. The first is that of the daemon's defaults.
DEFAULTS = Contract(reading_pace_s=0.040)
SETTINGS = {
    "the defaults": DEFAULTS,
    "--reading-pace 0": evolve(DEFAULTS, reading_pace_s=0.0),
    "--reading-pace 0 --latency-cap 2": evolve(DEFAULTS, reading_pace_s=0.0, latency_cap=2.0),
    "--reading-pace 80": evolve(DEFAULTS, reading_pace_s=0.080),
    "--playout-ms 0": evolve(DEFAULTS, playout_s=0.0),
}
SETTING_S = 30.0  # virtual, of each of these
ANSWER, MOST_S = 31_000, 120  # as many tokens as cells are left; on a GPU they last two minutes
WIDEST = 20  # tokens; the staircase's stairs are in its first few steps


@frozen
class Reading:
    """How one stream was read. Latencies over the stream's median ITL alone; rates per second."""

    p95_x: float
    startup_x: float
    worst_x: float
    late: int  # latencies beyond the default cap
    prompts_s: float = 0.0
    share: float | None = None  # of the machine's time, where the policy keeps count
    ttft_s: float | None = None  # of those who came, the median


def storm(
    profile: Profile, policy: str, seconds: float, *, cap: float = 1.2, tick_ms: float = 30.0
) -> Reading:
    """Return how a stream is read beside three clients that send background prompts without end."""
    world = _world(profile, policy, cap, tick_ms)
    for client in (101, 102, 103):
        world.storm(client, PROMPT)
    stream = _reader(world)
    world.run(seconds)
    answered = sum(r.end is not None and r.lane == "background" for r in world.requests)
    reading = _reading(stream, profile)
    share = float(str(world.metrics.snapshot()["background_share"])) if policy in CAPPED else None
    return evolve(reading, prompts_s=answered / seconds, share=share)


def setting(profile: Profile, contract: Contract, seconds: float) -> tuple[SimulatedRequest, float]:
    """Return how a stream is read in the same storm, and the storm's prompt tokens per second."""
    settings = settings_for(profile, contract)
    world = Simulation(find_policy("deadline"), profile=profile, settings=settings)
    for client in (101, 102, 103):
        world.storm(client, PROMPT)
    stream = _reader(world)
    world.run(seconds)
    answered = sum(r.end is not None and r.lane == "background" for r in world.requests)
    return stream, answered * PROMPT / seconds


def visits(profile: Profile, moments: Iterable[float], seconds: float) -> Reading:
    """Return how a stream is read beside a person who asks a question at these `moments`."""
    world = _world(profile)
    stream = _reader(world)
    asked: list[SimulatedRequest] = []
    for moment in moments:
        world.at(moment, lambda: asked.append(world.submit(QUESTION, 1, client=2)))
    world.run(seconds)
    waited = [question.ttft_s for question in asked if question.token_times]
    return evolve(_reading(stream, profile), ttft_s=median(waited) if waited else None)


def alone(profile: Profile, prompt: int, answer: int) -> SimulatedRequest:
    """Return a request that had the machine to itself."""
    world = _world(profile)
    request = world.submit(prompt, answer, client=1)
    world.run(1000.0)
    return request


def _world(
    profile: Profile, policy: str = "deadline", cap: float = 1.2, tick_ms: float = 30.0
) -> Simulation:
    settings = settings_for(profile, Contract(latency_cap=cap))
    settings = evolve(settings, tick_budget_s=tick_ms / 1e3)
    return Simulation(find_policy(policy), profile=profile, settings=settings)


def _reader(world: Simulation) -> SimulatedRequest:
    return world.submit(20, ANSWER, client=1)


def _reading(stream: SimulatedRequest, profile: Profile) -> Reading:
    solo_s = median(alone(profile, 8, 100).itl)
    return Reading(
        p95_x=percentile(stream.itl, 95) / solo_s,
        startup_x=max(stream.startup_itl) / solo_s,
        worst_x=max(stream.itl) / solo_s,
        late=sum(x > Contract().latency_cap * solo_s for x in stream.itl),
    )


def loads(profile: Profile, seconds: float) -> Iterator[tuple[str, str, Reading]]:
    """Yield policy, knob and outcome of the storm, at each setting of each policy."""
    for policy in CAPPED:
        for cap in CAPS:
            yield policy, f"{cap:g}", storm(profile, policy, seconds, cap=cap)
    for tick_ms in TICKS_MS:
        yield "baseline", f"{tick_ms} ms", storm(profile, "baseline", seconds, tick_ms=tick_ms)


def staircases(into: Path | None) -> list[Path]:
    """Draw the modelled tables, each over its own first step."""
    tables = {name: TABLES[name] for name in SHOWN}
    series = {
        name: [(n, ms / table[1]) for n, ms in table.items() if n <= WIDEST]
        for name, table in tables.items()
    }
    times = ", ".join(f"{name} {table[1]:g} ms" for name, table in tables.items())
    return chart.lines(
        "staircase",
        {"Time of one llama_decode": series},
        ("tokens in the batch", "times as long as one token"),
        f"0.5B shape, two cores with AVX-512; T(1): {times}. Dashed: the caps 1.2, 2 and 4",
        marks=True,
        levels=(Contract().latency_cap, Contract().startup_cap, Contract().pause_cap),
        into=into,
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--machine", choices=TABLES, default="q4_0", help="a measured table")
    add("--seconds", type=float, default=MOST_S, help="virtual, of each run")
    add("--settings", action="store_true", help="only the table of settings, on two machines")
    add("--into", type=Path, help="folder for the charts, under their plain names")
    add("--dry-run", action="store_true", help="the whole way in seconds")


@tool(arguments)
def figures(given: argparse.Namespace) -> int:
    """Print the tables and draw the charts."""
    if not 1 <= given.seconds <= MOST_S:
        raise SystemExit(f"--seconds is from 1 to {MOST_S}, not {given.seconds:g}")
    if given.settings:
        for name in ("q4_0-slow", "h200"):
            machine = built_in(name, gaussian(0.02))
            print(_settings_table(machine, 0.3 if given.dry_run else SETTING_S))
        return 0
    seconds = 5.0 if given.dry_run else given.seconds
    profile = built_in(given.machine, gaussian(0.02))
    facts = {"machine": f"modelled: {profile.name}, noise 2 %", "runs": f"{seconds:g} s each"}
    report.print_facts(facts)
    found = list(loads(profile, seconds))
    print(_loads_table(found))
    print(_visits_table(profile, seconds))
    points = [Point(who, knob, r.p95_x, r.prompts_s) for who, knob, r in found]
    title, caption = "One reader beside three endless prompts", "; ".join(facts.values())
    files = staircases(given.into)
    files += chart.pareto(
        "pareto", {title: points}, {title: "background prompts/s"}, caption, into=given.into
    )
    for file in files:
        print(file)
    return 0


def _loads_table(found: Sequence[tuple[str, str, Reading]]) -> str:
    headers = ("policy", "knob", "p95 / solo", "worst 3 s", "worst", "prompts/s", "share")
    rows = [
        (who, knob, r.p95_x, r.startup_x, r.worst_x, r.prompts_s, r.share) for who, knob, r in found
    ]
    return f"{report.table(headers, rows)}\n"


def _settings_table(profile: Profile, seconds: float) -> str:
    headers = (
        profile.name,
        "p50 ms",
        "p95 ms",
        "worst ms",
        "tokens/s read",
        "prompt tokens/s beside",
    )
    rows: list[tuple[object, ...]] = []
    for name, contract in SETTINGS.items():
        stream, others = setting(profile, contract, seconds)
        itl = [1e3 * each for each in stream.itl]
        read = 1e3 * len(itl) / sum(itl)
        rows.append((name, median(itl), percentile(itl, 95), max(itl), read, others))
    return f"{report.table(headers, rows)}\n"


def _visits_table(profile: Profile, seconds: float) -> str:
    asked: dict[str, list[float]] = {f"once, at {at:g} s": [at] for at in ONCE_S}
    for every_s in EVERY_S:
        asked[f"every {every_s:g} s"] = [n * every_s for n in range(1, int(seconds / every_s))]
    least_s = alone(profile, QUESTION, 1).ttft_s
    headers = ("a question", "p95 / solo", "worst", "late", "TTFT / alone, median")
    rows = [
        (when, r.p95_x, r.worst_x, r.late, r.ttft_s / least_s if r.ttft_s else None)
        for when, moments in asked.items()
        for r in [visits(profile, moments, seconds)]
    ]
    return f"{report.table(headers, rows)}\n"
