"""Compare policies in virtual time, over applications that behave like people and programs.

    python -m benches.simulate --seconds 120 --seeds 3
    python -m benches.simulate --policies contract --caps 1.2 1.5 2 3 5

No model, no thread, no waiting: the machine is a staircase (``benches/simulation.py``). Figures
say what a policy does on such a machine, not what ours does; for that see ``benches/storm.py``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from benches.simulation import HOST_S, Q4_0, Simulation, Stream, staircase
from uma_trio.policy.pipeline import find_policy
from uma_trio.policy.state import Contract, Lane


@frozen
class Application:
    """One program on the machine; times in seconds, lengths in tokens.

    Between answers it thinks for a log-normal time of this median. A conversation grows by its
    own answers up to `most_prompt`; prompts and answers are log-normal around their medians.
    """

    name: str
    lane: Lane
    think_s: float
    prompt: int
    answer: int
    conversation: bool = False
    most_prompt: int = 3000
    burst: int = 1


# Medians as in published chat and coding traces (docs/BENCHMARKS.md names them), shortened to
# what a small machine answers within a minute.
APPLICATIONS = (
    Application("chat", "interactive", 4.0, 60, 120, conversation=True),
    Application("editor", "interactive", 1.5, 400, 12),
    Application("agent", "interactive", 0.5, 200, 40, conversation=True),
    Application("documents", "background", 0.2, 900, 60, burst=3),
    Application("nightly", "background", 0.0, 500, 150, burst=4),
)


class Actor:
    """Plays an application in one simulation."""

    def __init__(self, app: Application, client: int, simulation: Simulation, seed: int) -> None:
        self._app, self._client, self._simulation = app, client, simulation
        self._random = random.Random(f"{seed} {app.name}")
        self._history = 0
        self.streams: list[Stream] = []
        for _ in range(app.burst):
            simulation.at(self._random.uniform(0, 1), self._ask)

    def _around(self, median: float) -> float:
        return median * self._random.lognormvariate(0, 0.6)

    def _ask(self) -> None:
        app = self._app
        prompt = min(app.most_prompt, self._history + max(1, int(self._around(app.prompt))))
        answer = max(2, min(400, int(self._around(app.answer))))
        if app.conversation:
            self._history = 0 if prompt == app.most_prompt else prompt + answer
        self.streams.append(
            self._simulation.submit(
                prompt, answer, client=self._client, lane=app.lane, on_end=self._think
            )
        )

    def _think(self) -> None:
        now = self._simulation.clock.now
        self._simulation.at(now + self._around(self._app.think_s), self._ask)


def simulate(policy: str, cap: float, seconds: float, seed: int) -> tuple[Simulation, list[Actor]]:
    """Run all applications together for `seconds`."""
    simulation = Simulation(find_policy(policy), Contract(latency_cap=cap), seed=seed)
    actors = [Actor(app, i + 1, simulation, seed) for i, app in enumerate(APPLICATIONS)]
    simulation.run(seconds)
    return simulation, actors


def row(policy: str, cap: float, seconds: float, seeds: Sequence[int]) -> str:
    """Return one line of the table, over all seeds."""
    gaps: list[float] = []
    young: list[float] = []
    ttft: list[float] = []
    background = ticks = 0
    began = time.perf_counter()
    for seed in seeds:
        simulation, actors = simulate(policy, cap, seconds, seed)
        ticks += simulation.ticks
        for app, actor in zip(APPLICATIONS, actors, strict=True):
            started = [s for s in actor.streams if s.token_times]
            if app.lane == "background":
                background += sum(map(simulation.computed, actor.streams))
                continue
            ttft += [s.ttft_s for s in started]
            gaps += [gap for s in started for gap in s.gaps]
            young += [max(s.young_gaps) for s in started if s.young_gaps]
    solo = staircase(Q4_0)(1) + HOST_S
    took = time.perf_counter() - began
    return (
        f"{policy:>10} {cap:5.2f} {np.percentile(gaps, 50) / solo:7.2f}"
        f" {np.percentile(gaps, 95) / solo:7.2f} {np.percentile(gaps, 99) / solo:7.2f}"
        f" {np.percentile(young, 95) / solo:8.2f} {np.percentile(ttft, 50) * 1e3:9.0f}"
        f" {np.percentile(ttft, 95) * 1e3:9.0f} {background / seconds / len(seeds):10.0f}"
        f" {len(gaps):8d} {ticks / took:8.0f}"
    )


def main() -> None:
    """Print a line for each policy and cap."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["baseline", "contract"])
    parser.add_argument("--caps", nargs="+", type=float, default=[1.2, 1.5, 2.0, 3.0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    seeds = range(args.seeds)
    print(f"{len(APPLICATIONS)} applications, {args.seconds:g} s, seeds 0 to {args.seeds - 1};")
    print("gaps of interactive streams over one stream's alone; background in tokens/s, all kinds")
    print(
        f"{'policy':>10} {'cap':>5} {'p50':>7} {'p95':>7} {'p99':>7} {'worst 3s':>8}"
        f" {'TTFT p50':>9} {'TTFT p95':>9} {'background':>10} {'n':>8} {'ticks/s':>8}"
    )
    for policy in args.policies:
        for cap in args.caps if policy != "baseline" else args.caps[:1]:
            print(row(policy, cap, args.seconds, seeds))


if __name__ == "__main__":
    main()
