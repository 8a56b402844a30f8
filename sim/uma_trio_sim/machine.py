"""How long a simulated tick takes: a cost table, the time between two decodes, and noise.

A :class:`Profile` is what is known of a machine: a built-in table or a daemon's cost file. A :class:`MachineRun` is one run on it, with a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from attrs import define, evolve, field, frozen

from uma_trio.engine.chunk import TickResult
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.costing.store import Unusable, recall
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

Cost = Callable[[Work, SchedulerState, Plan], float]
"""Seconds of a decode, without noise."""

Noise = Callable[[random.Random, int, float], float]
"""A factor of a decode's time, by its tokens and the virtual time."""

Host = Callable[[random.Random, int, float], float]
"""Seconds between two decodes, by the running sequences and the virtual time."""

HOST_S = 0.0004  # the daemon's own, in its benchmarks

# Milliseconds of one llama_decode by tokens, llama.cpp 0c1e57098. All but the last: 0.5B shape,
# two cores of AVX-512 servers; those of "slow" were restless. The last: 8B shape, Q4_0, one GPU.
# Between and behind the entries of a table lie straight lines.
TABLES: dict[str, dict[int, float]] = {
    "q4_0": {
        1: 8.0, 2: 11.7, 3: 16.2, 4: 11.1, 5: 15.2, 6: 19.9, 7: 24.8, 8: 18.8, 12: 25.2, 16: 25.9,
        17: 29.5, 20: 34.0, 32: 48.7, 64: 93.5, 128: 192.0, 256: 384.0, 512: 770.0,
    },
    "q4_0-slow": {1: 15, 2: 25, 4: 38, 8: 70, 16: 114, 32: 215, 64: 410},
    "q8_0": {
        1: 15.9, 2: 32.2, 3: 38.0, 4: 41.5, 5: 51.8, 6: 52.1, 7: 55.2, 8: 48.2, 12: 56.8, 16: 61.9,
        17: 71.5, 20: 76.6, 32: 111.0, 64: 198.0, 128: 379.0,
    },
    "q4_k_m": {
        1: 14.9, 2: 31.2, 3: 35.1, 4: 35.6, 5: 42.7, 6: 44.6, 7: 48.0, 8: 49.1, 12: 58.9, 16: 61.4,
        17: 70.6, 20: 81.2, 32: 130.0, 64: 210.0, 128: 403.0,
    },
    "h200": {
        1: 3.82, 2: 4.06, 3: 4.28, 4: 4.60, 5: 5.34, 8: 6.28, 9: 7.87, 16: 7.79, 32: 9.35,
        64: 11.8, 128: 16.9, 256: 28.2, 512: 45.7,
    },
}  # fmt: skip
GPUS = frozenset({"h200"})
# Seconds that the first and the second tick of a shape take longer there (2026-11-23).
FIRST_S, SECOND_S = 0.0011, 0.0018


class NoCost(Exception):
    """The file holds no cost model; the message says what to do."""


@frozen
class Profile:
    """What is known of a machine.

    `believed` is the cost model that a policy starts with. A machine that `overlaps` computes
    while the engine goes on, as a GPU does, and cannot be interrupted.
    """

    name: str
    cost: Cost
    believed: CostModel
    noise: Noise
    host: Host
    overlaps: bool = False


@define
class MachineRun:
    """One run of a machine. It counts seconds and computed tokens by client.

    Of `drafted` guesses that were computed so many were `accepted`; wrong ones are no tokens.
    """

    profile: Profile
    random: random.Random
    used_s: dict[int, float] = field(factory=dict)
    tokens: dict[int, int] = field(factory=dict)
    drafted: int = 0
    accepted: int = 0
    was_idle: bool = True

    @classmethod
    def of(cls, profile: Profile, seed: int = 0) -> MachineRun:
        """Return a machine whose noise is drawn with `seed`."""
        return cls(profile, random.Random(seed))

    def idle(self) -> None:
        """Note that there is nothing to compute."""
        self.was_idle = True

    def times(self, work: Work, state: SchedulerState, plan: Plan) -> tuple[float, float]:
        """Return the seconds before this tick's decode, and those of the decode."""
        profile = self.profile
        host_s = profile.host(self.random, len(state.sequences), state.now)
        if self.was_idle:  # the host finished its work for the tick before while it was idle
            host_s, self.was_idle = 0.0, False
        noise = profile.noise(self.random, plan.n_tokens + plan.ballast, state.now)
        return host_s, profile.cost(work, state, plan) * noise

    def charge(self, completed: TickResult, took_s: float) -> None:
        """Charge a tick to its clients, by the rows of each."""
        plan, views = completed.tick.plan, completed.tick.state.views
        per_row = took_s / plan.n_tokens
        for outcome in completed.outcomes:
            client = views[outcome.chunk.key].client
            self.used_s[client] = self.used_s.get(client, 0.0) + per_row * outcome.chunk.n_tokens
            self.tokens[client] = self.tokens.get(client, 0) + outcome.kept
            if outcome.chunk.drafts:
                self.drafted += len(outcome.chunk.drafts)
                self.accepted += outcome.right


def steady(_random: random.Random, _n_tokens: int, _now: float) -> float:
    """No noise."""
    return 1.0


def gaussian(sigma: float) -> Noise:
    """Noise of this standard deviation; no tick is quicker than nine tenths of its time."""
    return lambda draw, _n_tokens, _now: max(0.9, draw.gauss(1.0, sigma))


def always(seconds: float) -> Host:
    """The same time between any two decodes."""
    return lambda _random, _n_sequences, _now: seconds


def staircase(milliseconds: dict[int, float]) -> Staircase:
    """Return the staircase of a table in milliseconds."""
    return Staircase(tuple(milliseconds), tuple(ms / 1e3 for ms in milliseconds.values()))


def modelled(
    name: str,
    model: CostModel,
    noise: Noise = steady,
    *,
    believed: CostModel | None = None,
    overlaps: bool = False,
) -> Profile:
    """Return a machine that takes what `model` says, with the host time in it.

    A policy starts with `model` too, unless it is to have `believed` something else.
    """
    decode = evolve(model, host_s=0.0, contended_host_s=0.0)
    return Profile(
        name,
        lambda work, _state, _plan: decode.seconds(work),
        model if believed is None else believed,
        noise,
        always(model.host_s),
        overlaps,
    )


def built_in(name: str, noise: Noise = steady) -> Profile:
    """Return one of the measured tables as a machine."""
    model, gpu = CostModel(staircase(TABLES[name]), host_s=HOST_S), name in GPUS
    if gpu:
        model = evolve(model, recapture_s=FIRST_S, capture_s=SECOND_S)
    return modelled(name, model, noise, overlaps=gpu)


def from_cost_file(path: Path, noise: Noise = steady) -> Profile:
    """Return the machine that a daemon measured and stored; `uma-trio doctor --cost` names the file.

    A model in which a change of shape costs is a GPU's, so its decodes overlap.

    Raises:
        NoCost: there is none in the file.
    """
    try:
        model, why = recall(path), "there is no such file"
    except Unusable as unusable:
        model, why = None, str(unusable)
    if model is None:
        message = f"{path}: no cost model: {why}; `uma-trio doctor --cost` names the file"
        raise NoCost(message)
    model = evolve(model, host_s=HOST_S)
    return modelled(path.stem, model, noise, overlaps=model.recapture_s > 0)
