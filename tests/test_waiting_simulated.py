"""Many clients, prompts of very different lengths: no first token waits much longer than it has to.

Slowdown is the time to a first token by what its prompt takes alone and a moment. What is least possible is
computed offline, for a machine that knows all arrivals and computes prompts only. `UMA_WAITED_REQUESTS=100000`
plays so many requests.
"""

from __future__ import annotations

import heapq
import math
import os
import random

import pytest
from attrs import evolve

from uma_trio.policy.deadline import deadline
from uma_trio.policy.state import MOMENT_S, Contract
from uma_trio.policy.stretch import prefill_s
from uma_trio_sim.machine import built_in, gaussian
from uma_trio_sim.simulation import LIMITS, Simulation, settings_for
from uma_trio_sim.world import SimulatedRequest

REQUESTS = int(os.environ.get("UMA_WAITED_REQUESTS", "250"))
MEDIAN, SIGMA, LONGEST, ANSWER = 400, 1.0, 6000, 6
CLIENTS, SLOTS, CELLS = 20, 8, 131_072
H200 = built_in("h200", gaussian(0.02))
Job = tuple[float, int, float]
"""When it comes, its tokens, and its seconds alone."""


def jobs(load: float, seed: int) -> list[Job]:
    """Return requests that together need `load` times what the machine can compute of prompts."""
    draw = random.Random(seed)
    lengths = [
        max(1, min(LONGEST, round(MEDIAN * draw.lognormvariate(0.0, SIGMA))))
        for _ in range(REQUESTS)
    ]
    own_s = [prefill_s(H200.believed, 512, n, 0) for n in lengths]
    every_s, at = math.fsum(own_s) / REQUESTS / load, 0.0
    found = []
    for n, seconds in zip(lengths, own_s, strict=True):
        at += draw.expovariate(1.0 / every_s)
        found.append((at, n, seconds))
    return found


def largest_slowdown(work: list[Job], seed: int) -> float:
    """Play them on eight slots, and return the largest slowdown of a first token."""
    settings = settings_for(H200, Contract(reading_pace_s=0.040))
    limits = evolve(LIMITS, n_ctx=CELLS, n_ctx_seq=CELLS, n_slots=SLOTS + 1)
    world = Simulation(deadline, profile=H200, seed=seed, settings=settings, limits=limits)
    draw, asked = random.Random(seed), list[SimulatedRequest]()

    def ask(tokens: int) -> None:
        client, answer = draw.randrange(CLIENTS), draw.randint(1, 2 * ANSWER)
        asked.append(world.submit(tokens, answer, client=client, awaits="answer"))

    for at, tokens, _ in work:
        world.at(at, lambda tokens=tokens: ask(tokens))  # type: ignore[misc]
    world.run(work[-1][0] + 0.1)
    while any(request.end is None for request in asked):
        world.run(1.0)
    return max(
        request.ttft_s / (own_s + MOMENT_S)
        for request, (_, _, own_s) in zip(asked, work, strict=True)
    )


def least_possible(work: list[Job]) -> float:
    """Return the smallest stretch for which all first tokens are in time, the earliest due first."""

    def met(stretch: float) -> bool:
        due: list[list[float]] = []
        now, coming = 0.0, 0
        while coming < len(work) or due:
            now = now if due else max(now, work[coming][0])
            while coming < len(work) and work[coming][0] <= now:
                at, _, own_s = work[coming]
                heapq.heappush(due, [at + stretch * (own_s + MOMENT_S), own_s])
                coming += 1
            until = work[coming][0] if coming < len(work) else math.inf
            if now + due[0][1] > until:
                due[0][1] -= until - now
                now = until
                continue
            now += due[0][1]
            if now > heapq.heappop(due)[0] + 1e-9:
                return False
        return True

    low, high = 0.0, 1.0
    while not met(high):
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if met(middle) else (middle, high)
    return low


@pytest.mark.parametrize("load", [0.8, 1.3])
def test_the_largest_slowdown_is_near_the_least_possible(load: float) -> None:
    """Six where the machine can do it, and half more than the least possible where it cannot."""
    work = jobs(load, seed=3)
    if load > 1:
        work = [job for job in work if job[0] <= 60.0]
    assert largest_slowdown(work, seed=3) <= max(6.0, 1.5 * least_possible(work))
