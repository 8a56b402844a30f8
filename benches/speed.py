"""How quickly ticks are simulated, and how much of that is the policy."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable

from attrs import evolve

from benches import report
from benches.machine import Machine, Profile
from benches.quick import Quick
from benches.simulation import LIMITS, settings_for
from uma_trio.policy.find import BUILT_IN
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState
from uma_trio.policy.traffic import Traffic

TICKS, ROUNDS, TOP = 1500, 3, 12
GOAL = 5000
TRAFFIC = Traffic(weight_bytes=3e8, cell_bytes=12_288)  # the 0.5B shape


class Timed:
    """A policy whose time is added up."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.took_s = 0.0

    def __call__(self, state: SchedulerState) -> Plan:
        """Plan."""
        began = time.perf_counter()
        plan = self._policy(state)
        self.took_s += time.perf_counter() - began
        return plan


def crowd(policy: Policy, profile: Profile, n: int) -> Quick:
    """Return a world of `n` sequences that never end: half read, and half of the rest decode."""
    world = _world(policy, profile)
    for client in range(n):
        if client % 4 == 3:
            world.storm(client, 506)
        else:
            lane = "interactive" if client % 2 == 0 else "background"
            world.submit(20, 4000, client=client, lane=lane)  # type: ignore[arg-type]
    world.run(2.0)  # the prompts are done
    return world


def readers(policy: Policy, profile: Profile, n: int) -> Quick:
    """Return a world of `n` answers that somebody reads, and nobody else."""
    world = _world(policy, profile)
    for client in range(n):
        world.submit(20, 4000, client=client)
    world.run(2.0)
    return world


CROWDS: dict[str, Callable[[Policy, Profile, int], Quick]] = {"mixed": crowd, "readers": readers}


def _world(policy: Policy, profile: Profile) -> Quick:
    settings = evolve(settings_for(profile), traffic=TRAFFIC)
    return Quick(policy, Machine.of(profile), settings, LIMITS)


def rate(policy: Policy, profile: Profile, n: int) -> tuple[float, float]:
    """Return ticks a second and microseconds of planning a tick, the best of some rounds."""
    found = []
    for _ in range(ROUNDS):
        timed = Timed(policy)
        world = crowd(timed, profile, n)
        timed.took_s, before, began = 0.0, world.ticks, time.perf_counter()
        while world.ticks - before < TICKS:
            world.run(0.05)
        took_s, ticks = time.perf_counter() - began, world.ticks - before
        found.append((ticks / took_s, 1e6 * timed.took_s / ticks))
    return max(found)


def table(profile: Profile) -> str:
    """Return ticks a second by policy and sequences, and where the contract's time goes."""
    rows = [
        (name, n, round(per_s), f"{planning_us:.0f}", "yes" if per_s >= GOAL else "no")
        for name, policy in BUILT_IN.items()
        for n in (4, 16)
        for per_s, planning_us in (rate(policy, profile, n),)
    ]
    headers = ("policy", "sequences", "ticks/s", "planning us", f">= {GOAL}")
    return f"{report.table(headers, rows)}\n\n{costs(BUILT_IN['contract'], profile)}"


def costs(policy: Policy, profile: Profile, n: int = 16) -> str:
    """Return the functions that a tick spends most time in, by their own time."""
    world = crowd(policy, profile, n)
    before, profiler = world.ticks, cProfile.Profile()
    profiler.enable()
    world.run(5.0)
    profiler.disable()
    ticks = max(1, world.ticks - before)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own = sorted(stats.items(), key=lambda entry: -entry[1][2])[:TOP]
    rows = [
        (f"{file.rpartition('/')[2]}:{name}", f"{1e6 * took / ticks:.1f}", f"{calls / ticks:.1f}")
        for (file, _, name), (_, calls, took, _, _) in own
    ]
    title = f"contract, {n} sequences (a profiler slows all, small functions most)"
    return report.table((title, "own us/tick", "calls/tick"), rows)
