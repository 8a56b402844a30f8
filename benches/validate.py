"""Does the simulation foretell what a real run measured?

    uma-trio serve --policy contract --trace run.trace     and use it for a while, then stop it
    python -m benches.validate run.trace

Takes the arrivals, the machine and its scatter from the trace, simulates the same arrivals under
the same policy, and compares: p95 gap and TTFT within 10 %, throughput within 5 %. Exit code 0 if
all three are, 1 if not. docs/SIMULATION.md says what this shows and what not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from attrs import fields, frozen

from benches import report
from benches.machine import Machine, Profile
from benches.quick import Quick
from benches.recording import Figures, Recording, asked, figures, profile, read, sessions
from benches.workload import play
from uma_trio.backend.base import Limits
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.find import find_policy
from uma_trio.policy.pipeline import PolicyError
from uma_trio.policy.portable import TracedTick, TraceError

# What is judged, by how much it may be off, and how it is shown.
BOUNDS = {"gap_p95": 0.10, "ttft_p50": 0.10, "tokens_s": 0.05}
SHOWN = (
    ("gap_p50", "gap p50, ms", 1e3), ("gap_p95", "gap p95, ms", 1e3),
    ("gap_p99", "gap p99, ms", 1e3), ("ttft_p50", "TTFT p50, ms", 1e3),
    ("tokens_s", "tokens/s computed", 1.0),
)  # fmt: skip
PLENTY = 1 << 40  # cells: a trace does not say what requests had reserved


@frozen
class Compared:
    """One figure. `within` is None where no bound was set."""

    name: str
    measured: float
    predicted: float
    bound: float | None

    @property
    def off(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted / self.measured - 1.0

    @property
    def within(self) -> bool | None:
        """Whether that is within the bound."""
        return None if self.bound is None else abs(self.off) <= self.bound


def predict(recording: Recording, known: Profile, *, seed: int = 0, closed: bool = True) -> Figures:
    """Simulate the work that was recorded, under its policy, on the machine that is `known`."""
    first = recording.ticks[0].state
    scratch = max(tick.state.spare_rows for tick in recording.ticks) > 0
    settings = EngineSettings(
        tick_budget_s=first.tick_budget_s,
        contract=first.contract,
        scratch_slots=int(scratch),
        cost=first.memory.cost,
        traffic=first.traffic,
    )
    n_batch = max(tick.state.n_batch for tick in recording.ticks)
    limits = Limits(PLENTY, PLENTY, _slots(recording.ticks), n_batch)
    ticks: list[TracedTick] = []
    policy, machine = find_policy(recording.header.policy), Machine.of(known, seed)
    world = Quick(policy, machine, settings, limits, ticks.append)
    requests = asked(recording.ticks)
    play(world, sessions(requests, closed=closed))
    last = recording.ticks[-1]
    world.run(last.state.now + last.decode_s - requests[0].arrived)
    return figures(ticks, began=0.0)


def _slots(ticks: Sequence[TracedTick]) -> int:
    """Return how many slots there were: with one for ballast the state tells, or else as many as were used."""
    return max(tick.state.spare_rows + len(tick.state.sequences) for tick in ticks)


def compare(recording: Recording, seeds: Sequence[int], *, closed: bool = True) -> list[Compared]:
    """Return each figure as it was, and as simulations with these seeds foretell it (medians)."""
    measured, known = figures(recording.ticks), profile(recording.ticks)
    predicted = [predict(recording, known, seed=seed, closed=closed) for seed in seeds]
    return [
        Compared(
            name.name,
            float(getattr(measured, name.name)),
            float(median(getattr(one, name.name) for one in predicted)),
            BOUNDS.get(name.name),
        )
        for name in fields(Figures)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print measured beside predicted."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.validate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="what `uma-trio serve --trace` wrote")
    parser.add_argument("--seeds", type=int, default=5, help="simulations; their median counts")
    parser.add_argument("--seed", type=int, default=0, help="the first of their seeds")
    parser.add_argument(
        "--open", action="store_true", help="every request at its own time, whatever it waited for"
    )
    given = parser.parse_args(argv)
    if given.seeds < 1:
        parser.error(f"--seeds is at least 1, not {given.seeds}")
    try:
        recording = read(given.trace)
        seeds = range(given.seed, given.seed + given.seeds)
        found = {one.name: one for one in compare(recording, seeds, closed=not given.open)}
    except OSError as error:
        raise SystemExit(f"{given.trace}: {error.strerror}") from None
    except (TraceError, PolicyError) as error:
        raise SystemExit(str(error)) from None
    return _print(recording, found, given)


def _print(recording: Recording, found: dict[str, Compared], given: argparse.Namespace) -> int:
    requests = asked(recording.ticks)
    chains = sessions(requests, closed=not given.open)
    last = recording.ticks[-1]
    report.print_facts(
        {
            "trace": f"{recording.header.model}, policy {recording.header.policy}",
            "ticks": f"{len(recording.ticks)} in {last.state.now - requests[0].arrived:.1f} s, "
            + (
                "its end is missing"
                if recording.dropped is None
                else f"{recording.dropped} were not written"
            ),
            "requests": f"{len(requests)} in {len(chains)} sessions",
            "gaps": f"{found['gaps'].measured:.0f} measured, {found['gaps'].predicted:.0f} predicted",
            "simulations": f"{given.seeds}, seeds from {given.seed}",
        }
    )
    words = {True: "yes", False: "NO", None: "-"}
    rows = [
        (title, factor * one.measured, factor * one.predicted, f"{100 * one.off:+.1f} %",
         "-" if one.bound is None else f"{100 * one.bound:.0f} %", words[one.within])
        for key, title, factor in SHOWN
        for one in (found[key],)
    ]  # fmt: skip
    print(report.table(("", "measured", "predicted", "off by", "may be", "within"), rows))
    return 0 if all(one.within is not False for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
