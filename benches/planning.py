"""What planning costs: microseconds of the policy for each tick, and how many ticks it does a second.

    python -m benches.planning              both policies and crowds, 1 to 16 sequences (a minute)
    python -m benches.planning --quick      a short look (a few seconds)
    python -m benches.planning --n 16 --policies contract --crowds readers --rounds 9

The simulated engine (:mod:`uma_trio.sim`): no model, no threads, no clients, and no time that passes
but its own. Of the *mixed* crowd half of the sequences are read, a quarter decode in the background,
and a quarter are prompts of 506 tokens, one after another; of *readers* all are read. *median us* is
what one plan takes, of all ticks of a round and of the best round, since everything that disturbs
only adds; *p95 us* is of the same round.
*ticks/s* is the whole loop around it, admission and bookkeeping included.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from attrs import evolve

from benches import chart, contest, host, report
from benches.setting import noise
from uma_trio.policy.find import find_policy
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import Lane, SchedulerState
from uma_trio.policy.traffic import Traffic
from uma_trio.sim.latency import percentile
from uma_trio.sim.machine import TABLES, built_in
from uma_trio.sim.simulation import Simulation, settings_for

TARGETS_US, TARGET_N = {"mixed": 150.0, "readers": 100.0}, 16
_COLUMNS = ("policy", "crowd", "sequences", "ticks", "median_us", "p95_us", "ticks_per_s")

TRAFFIC = Traffic(weight_bytes=3e8, cell_bytes=12_288)  # the 0.5B shape

Row = dict[str, object]


def crowd_of(policy: Policy, machine: str, n: int, *, mixed: bool) -> Simulation:
    """Return a world of `n` sequences that do not end; without `mixed` all of them are read."""
    profile = built_in(machine)
    settings = evolve(settings_for(profile), traffic=TRAFFIC)
    world = Simulation(policy, profile=profile, settings=settings)
    for client in range(n):
        if mixed and client % 4 == 3:
            world.storm(client, 506)
        else:
            lane: Lane = "background" if mixed and client % 4 == 1 else "interactive"
            world.submit(20, 4000, client=client, lane=lane)
    world.run(2.0)  # the prompts are done
    return world


class Watched:
    """A policy, and how many microseconds each of its plans took."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.took_us: list[float] = []

    def __call__(self, state: SchedulerState) -> Plan:
        """Plan."""
        began = time.perf_counter_ns()
        plan = self._policy(state)
        self.took_us.append((time.perf_counter_ns() - began) / 1e3)
        return plan


def measure(policy: str, crowd: str, n: int, ticks: int, machine: str) -> Row:
    """Plan `ticks` ticks of a crowd of `n` sequences and return what that took."""
    watched = Watched(find_policy(policy))
    world = crowd_of(watched, machine, n, mixed=crowd == "mixed")
    watched.took_us.clear()
    gc.collect()
    before, began = world.ticks, time.perf_counter()
    while world.ticks - before < ticks:
        world.run(0.05)
    seconds = time.perf_counter() - began
    return {
        "policy": policy,
        "crowd": crowd,
        "sequences": n,
        "ticks": world.ticks - before,
        "median_us": percentile(watched.took_us, 50),
        "p95_us": percentile(watched.took_us, 95),
        "ticks_per_s": (world.ticks - before) / seconds,
    }


def best(rounds: int, once: Callable[[], Row]) -> Row:
    """Return the round with the least median."""
    return min((once() for _ in range(rounds)), key=lambda row: float(str(row["median_us"])))


def verdict(rows: Sequence[Row], crowd: str) -> str:
    """Say whether the target of a crowd is met."""
    found = [
        row["median_us"] for row in rows
        if (row["policy"], row["crowd"], row["sequences"]) == ("contract", crowd, TARGET_N)
    ]  # fmt: skip
    value = float(str(found[0])) if found else None
    text = f"contract, {crowd}, {TARGET_N} sequences: us for one plan"
    return contest.verdict(text, value, TARGETS_US[crowd])


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``--quick`` only changes defaults."""
    parser = report.parser("planning", __doc__)
    add = parser.add_argument
    add("--policies", nargs="+", default=["contract", "baseline"], metavar="NAME")
    add("--crowds", nargs="+", default=[*TARGETS_US], choices=[*TARGETS_US], help="who is there")
    add("--n", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="sequences")
    add("--machine", choices=list(TABLES), default="q4_0", help="whose ticks are planned")
    add("--ticks", type=int, metavar="N", help="of each round (2000)")
    add("--rounds", type=int, metavar="N", help="of which the best counts (5)")
    add("--quick", action="store_true", help="a short look, not a measurement")
    given = parser.parse_args(argv)
    given.ticks = given.ticks or (300 if given.quick else 2000)
    given.rounds = given.rounds or (2 if given.quick else 5)
    if min(given.n) < 1 or max(given.n) > TARGET_N:
        parser.error(f"--n must be 1 to {TARGET_N}: the simulated daemon has so many slots")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and the verdict, write the CSV and the chart."""
    given = arguments(argv)
    facts = host.facts() | {"noise": noise(), "model": f"{given.machine}, modelled",
                            "rounds": f"best of {given.rounds}, {given.ticks} ticks each"}  # fmt: skip
    report.print_facts(facts)
    rows = [
        best(given.rounds, partial(measure, policy, crowd, n, given.ticks, given.machine))
        for policy in given.policies
        for crowd in given.crowds
        for n in given.n
    ]
    lines = [[r["policy"], r["crowd"], r["sequences"], r["ticks"],
              *(report.cell(r[name], 0) for name in _COLUMNS[4:])] for r in rows]  # fmt: skip
    series = {
        f"{policy}, {crowd}": [(float(str(r["sequences"])), float(str(r["median_us"]))) for r in rows
                               if (r["policy"], r["crowd"]) == (policy, crowd)]
        for policy in given.policies for crowd in given.crowds
    }  # fmt: skip
    labels = ("sequences", "us for one plan, median (less is better)")
    draw = partial(chart.lines, "planning", {"planning one tick": series}, labels, chart.caption(facts),
                        doubling=True)  # fmt: skip
    said = (report.table(_COLUMNS, lines), *(verdict(rows, crowd) for crowd in given.crowds))
    return contest.conclude("planning", said, rows, facts, draw)


if __name__ == "__main__":
    sys.exit(main())
