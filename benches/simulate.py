"""Compare policies in virtual time, over applications that behave like people and programs.

    python -m benches.simulate                                  every mix, every policy
    python -m benches.simulate --mixes storm --policies contract --caps 1.2 1.5 2 3 5
    python -m benches.simulate --machine h200                   another staircase
    python -m benches.simulate --trace FILE --noise trace       what a daemon recorded of this one
    python -m benches.simulate --speed                          how quickly ticks are simulated

No model, no thread, no waiting: the machine is a staircase (benches/machine.py), the applications
are drawn from a seed (benches/workload.py). Figures say what a policy does on such a machine, not
what ours does; for that see benches/storm.py. docs/SIMULATION.md says what the columns are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import evolve, frozen

from benches import chart, recording, report, speed
from benches.machine import (
    TABLES,
    Machine,
    NoCost,
    Noise,
    Profile,
    built_in,
    from_cost_file,
    gaussian,
    steady,
)
from benches.outcome import Outcome, outcome, together
from benches.pace import Point
from benches.quick import Quick
from benches.rates import median
from benches.simulation import LIMITS, Simulation, settings_for
from benches.workload import MIXES, Application, play, sessions
from uma_trio import __version__
from uma_trio.policy.find import find_policy
from uma_trio.policy.pipeline import PolicyError
from uma_trio.policy.portable import TraceError
from uma_trio.policy.state import Contract

COLUMNS = (
    ("p50_x", "p50"), ("p95_x", "p95"), ("p99_x", "p99"), ("worst_young_x", "worst 3 s"),
    ("ttft_p50_ms", "TTFT ms"), ("ttft_p95_ms", "p95"), ("load_tokens_s", "load t/s"),
    ("jain", "Jain"), ("floor_grants", "grants"), ("infeasible", "infeasible"), ("gaps", "n"),
)  # fmt: skip


@frozen
class Case:
    """A policy at a cap, and whether the load is there at all."""

    policy: str
    cap: float
    loaded: bool = True

    @property
    def name(self) -> str:
        """How tables call it."""
        if not self.loaded:
            return "no load"
        return self.policy if self.policy == "baseline" else f"{self.policy} {self.cap:g}"


def simulate(
    case: Case,
    applications: Sequence[Application],
    profile: Profile,
    seconds: float,
    seed: int,
    *,
    whole_engine: bool = False,
) -> Outcome:
    """Run the applications for `seconds`; `whole_engine` instead of the policy alone."""
    policy, contract = find_policy(case.policy), Contract(latency_cap=case.cap)
    machine = Machine.of(profile, seed)
    world: Quick | Simulation
    if whole_engine:
        world = Simulation(policy, contract, profile=profile, seed=seed)
        machine = world.books
    else:
        world = Quick(policy, machine, settings_for(profile, contract), LIMITS)
    numbered = list(enumerate(applications, start=1))
    watched = [client for client, app in numbered if app.watched]
    load = [client for client, app in numbered if not app.watched]
    work = sessions(applications, seed, seconds)
    play(world, [session for session in work if case.loaded or session.client in watched])
    world.run(seconds)
    memory = world.memory if isinstance(world, Quick) else world.engine.memory
    return outcome(
        world.streams,
        watched,
        load,
        machine,
        seconds=seconds,
        ticks=world.ticks,
        floor_grants=memory.guard.floor_grants,
        infeasible=memory.guard.infeasible,
    )


def lone_gap_s(profile: Profile) -> float:
    """Return the median gap of one stream that is alone on the machine."""
    world = Quick(find_policy("baseline"), Machine.of(profile), settings_for(profile), LIMITS)
    stream = world.submit(8, 100, client=1)
    world.run(1000.0)
    return median(stream.gaps)


def profile_of(given: argparse.Namespace) -> Profile:
    """Return the machine that was asked for. Exits when a file is no use."""
    noise, from_trace = _noise(given)
    try:
        if given.trace is not None:
            seen = recording.profile(recording.read(given.trace).ticks)
            return seen if from_trace else evolve(seen, noise=noise)
        if given.cost is not None:
            return from_cost_file(given.cost, noise)
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from None
    except (NoCost, TraceError) as error:
        raise SystemExit(str(error)) from None
    return built_in(given.machine, noise)


def _noise(given: argparse.Namespace) -> tuple[Noise, bool]:
    kind = given.noise or ("trace" if given.trace is not None else "0.02")
    if kind == "trace":
        if given.trace is None:
            raise SystemExit("--noise trace draws from a trace: name it with --trace FILE")
        return steady, True
    if kind == "none":
        return steady, False
    try:
        sigma = float(kind)
    except ValueError:
        sigma = -1.0
    if not 0 <= sigma < 1:
        raise SystemExit(f"--noise is none, trace, or a sigma from 0 to 1 such as 0.02, not {kind}")
    return gaussian(sigma), False


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """Yield what is compared; a policy without a cap is run once."""
    yield Case("contract", given.caps[0], loaded=False)
    for policy in given.policies:
        for cap in given.caps if policy != "baseline" else given.caps[:1]:
            yield Case(policy, cap)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each mix; write all of them to a CSV, and a chart."""
    given = _arguments(argv)
    if given.speed:
        print(speed.table(profile_of(given)))
        return 0
    profile = profile_of(given)
    lone_s = lone_gap_s(profile)
    facts = {
        "machine": f"modelled: {profile.name}; a stream alone has a gap of {1e3 * lone_s:.2f} ms",
        "noise": given.noise or ("from the trace" if given.trace else "0.02"),
        "simulated": "the whole engine" if given.engine else "the policy alone",
        "runs": f"{given.seeds} of {given.seconds:g} s, seeds from {given.seed}",
        "uma-trio": __version__,
    }
    report.print_facts(facts)
    rows: list[dict[str, object]] = []
    began = time.perf_counter()
    try:
        for mix in given.mixes:
            rows += _compare(mix, given, profile, lone_s)
    except PolicyError as error:
        raise SystemExit(str(error)) from None
    took_s = time.perf_counter() - began
    ticks = sum(int(str(row["ticks"])) for row in rows)
    print(f"{ticks} ticks in {took_s:.1f} s, {ticks / took_s:.0f} a second")
    print(report.write_csv("simulate", rows, facts))
    for file in () if given.no_chart else draw(rows, "; ".join(facts.values())):
        print(file)
    return 0


def _compare(
    mix: str, given: argparse.Namespace, profile: Profile, lone_s: float
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    seeds = range(given.seed, given.seed + given.seeds)
    for case in cases(given):
        found = together(
            [
                simulate(case, MIXES[mix], profile, given.seconds, seed, whole_engine=given.engine)
                for seed in seeds
            ]
        )
        rows.append(
            {"mix": mix, "case": case.name, "policy": case.policy, "cap": case.cap}
            | found.row(lone_s)
        )
    headers = (f"{mix}: gap / alone", *(title for _, title in COLUMNS))
    print(report.table(headers, [(r["case"], *(r[key] for key, _ in COLUMNS)) for r in rows]))
    print()
    return rows


def draw(rows: Sequence[dict[str, object]], caption: str) -> list[Path]:
    """Draw for each mix what the load got against what it cost those who read."""
    panels: dict[str, list[Point]] = {}
    for row in rows:
        p95, load = row["p95_x"], row["load_tokens_s"]
        if row["case"] == "no load" or not isinstance(p95, float) or not isinstance(load, float):
            continue
        knob = "" if row["policy"] == "baseline" else f"{row['cap']:g}"
        panels.setdefault(str(row["mix"]), []).append(Point(str(row["policy"]), knob, p95, load))
    return chart.pareto("simulate", panels, dict.fromkeys(panels, "tokens/s of the load"), caption)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benches.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--policies", nargs="+", default=["baseline", "contract"])
    parser.add_argument("--caps", nargs="+", type=float, default=[1.2, 1.5, 2.0, 3.0])
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual, of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, one seed each")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument("--machine", choices=TABLES, default="q4_0", help="a measured table")
    machine.add_argument("--cost", type=Path, help="a daemon's cost file")
    machine.add_argument("--trace", type=Path, help="what `uma-trio serve --trace` wrote")
    parser.add_argument("--noise", help="none, a sigma (0.02), or trace: as the trace's ticks vary")
    parser.add_argument(
        "--engine", action="store_true", help="the whole engine, not the policy alone"
    )
    parser.add_argument("--speed", action="store_true", help="only measure ticks a second")
    parser.add_argument("--no-chart", action="store_true", help="table and CSV only")
    given = parser.parse_args(argv)
    for name, least in (("seconds", 1), ("seeds", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name} is at least {least}, not {getattr(given, name):g}")
    if min(given.caps) <= 1:
        parser.error(
            f"--caps are above 1, times the gap of a stream alone, not {min(given.caps):g}"
        )
    return given


if __name__ == "__main__":
    sys.exit(main())
