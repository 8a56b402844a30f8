"""The rates of a fluid node, measured on the simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from uma_trio.policy.deadline import deadline
from uma_trio_cluster.simulation.node import Rates
from uma_trio_sim.machine import Profile
from uma_trio_sim.simulation import Simulation
from uma_trio_sim.world import SimulatedRequest

_STREAMS: Final = (0, 1, 2, 4, 8, 12)
_PROMPT: Final = 4096
_ENDLESS: Final = 4096
_WARM: Final = 8  # tokens of each stream before anything is measured
_TOKENS: Final = 40


def fitted(profile: Profile, streams: Sequence[int] = _STREAMS) -> Rates:
    """Return the rates of a machine: a prompt of 4,096 tokens is computed beside so many streams."""
    found = [_measured(profile, n) for n in streams]
    prompts, alone, busy = zip(*found, strict=True)
    return Rates(tuple(streams), prompts, alone, busy)


def _measured(profile: Profile, n: int) -> tuple[float, float, float]:
    """Return prompt tokens a second, and seconds a token without and with a prompt."""
    simulation = Simulation(deadline, profile=profile)
    streams = [simulation.submit(16, _ENDLESS, client=i + 1) for i in range(n)]
    while any(len(stream.computed_times) < _WARM for stream in streams):
        simulation.run(0.01)
    alone = _each_s(simulation, streams, lambda: _shortest(streams) >= _WARM + _TOKENS)
    prompt = simulation.submit(_PROMPT, 1, client=n + 1)
    busy = _each_s(simulation, streams, lambda: bool(prompt.token_times))
    return _PROMPT / prompt.ttft_s, alone, busy


def _shortest(streams: Sequence[SimulatedRequest]) -> int:
    return min((len(stream.computed_times) for stream in streams), default=_WARM + _TOKENS)


def _each_s(
    simulation: Simulation, streams: Sequence[SimulatedRequest], is_over: Callable[[], bool]
) -> float:
    """Return the seconds of a token of each stream until something is over."""
    began = simulation.clock()
    before = sum(len(stream.computed_times) for stream in streams)
    while not is_over():
        simulation.run(0.01)
    tokens = sum(len(stream.computed_times) for stream in streams) - before
    return (simulation.clock() - began) * len(streams) / tokens if tokens else 0.01
