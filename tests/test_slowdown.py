"""A machine whose pace changes in the middle: another program takes a core, and leaves it again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from uma_trio.policy.contract import contract
from uma_trio.policy.cost import CostModel, Work
from uma_trio.sim.machine import HOST_S, TABLES, Profile, gaussian, modelled, staircase
from uma_trio.sim.simulation import Simulation
from uma_trio.sim.world import Request

STAIRS = staircase(TABLES["q4_0"])
AFTER_S = 6.0  # of a storm the machine changes


def changing(factor: float) -> Profile:
    """Return a machine whose decodes take `factor` times as long from then on."""
    noise = gaussian(0.02)

    def paced(draw: random.Random, n_tokens: int, now: float) -> float:
        return noise(draw, n_tokens, now) * (factor if now >= AFTER_S else 1.0)

    return modelled("changing", CostModel(STAIRS, host_s=HOST_S), paced)


def storm(factor: float) -> tuple[Simulation, Request]:
    """Run a stream amid endless prompts until the machine changes."""
    simulation = Simulation(contract, profile=changing(factor))
    for client in range(3):
        simulation.storm(100 + client)
    stream = simulation.submit(20, 20_000, client=1)
    simulation.run(AFTER_S)
    return simulation, stream


def solo_s(factor: float) -> float:
    """Return what a token of a lone stream takes at that pace."""
    return factor * STAIRS(1) + HOST_S


def cost_of(simulation: Simulation) -> CostModel:
    """Return what the engine believes now."""
    cost = simulation.engine.memory.cost
    assert cost is not None
    return cost


@pytest.mark.parametrize("factor", [4.0, 3.0, 2.0, 0.5, 1.0 / 3.0])
def test_a_machine_that_changes_its_pace_is_believed_within_some_ticks(factor: float) -> None:
    """Thirty ticks later what is predicted is near what is, and the model trusts itself again."""
    simulation, stream = storm(factor)
    before = len(stream.token_times)
    while len(stream.token_times) < before + 30:
        simulation.run(0.05)
    assert cost_of(simulation).seconds(Work(1)) == pytest.approx(solo_s(factor), rel=0.15)
    simulation.run(5.0)
    assert cost_of(simulation).trusted
    assert cost_of(simulation).seconds(Work(1)) == pytest.approx(solo_s(factor), rel=0.1)


@pytest.mark.parametrize("factor", [3.0, 1.0 / 3.0])
def test_the_promise_is_kept_at_the_new_pace(factor: float) -> None:
    """Five seconds later the stream has its 1.2 times solo again, by the machine as it is now."""
    simulation, stream = storm(factor)
    simulation.run(5.0)
    before = len(stream.token_times)
    simulation.run(20.0)
    gaps = np.diff(stream.token_times[before:])
    assert np.percentile(gaps, 95) <= 1.2 * solo_s(factor)
    assert simulation.engine.memory.guard.share >= 0.04  # the others have their floor
