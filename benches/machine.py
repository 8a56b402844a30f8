"""How long a simulated tick takes: a staircase, what passes between two decodes, and noise.

A :class:`Profile` says what is known of a machine: a built-in table, a daemon's cost file, or what
a trace shows (:mod:`benches.recording`). A :class:`Machine` is one run on it, with its own seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from attrs import define, evolve, field, frozen

from uma_trio.cost_store import recall
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

Cost = Callable[[Work, SchedulerState, Plan], float]  # seconds of the decode, without noise
# A factor of the decode, by its tokens and the time; seconds between decodes, by how many
# sequences run and the time.
Noise = Callable[[random.Random, int, float], float]
Host = Callable[[random.Random, int, float], float]

HOST_S = 0.0004  # the daemon's own, in its benchmarks

# Milliseconds of one llama_decode by tokens, llama.cpp 0c1e57098. The first three: 0.5B shape, two
# cores of an AVX-512 server. The last: 8B shape, Q4_0. What is not in a table continues its line.
TABLES: dict[str, dict[int, float]] = {
    "q4_0": {
        1: 8.0, 2: 11.7, 3: 16.2, 4: 11.1, 5: 15.2, 6: 19.9, 7: 24.8, 8: 18.8, 12: 25.2, 16: 25.9,
        17: 29.5, 20: 34.0, 32: 48.7, 64: 93.5, 128: 192.0, 256: 384.0, 512: 770.0,
    },
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


class NoCost(Exception):
    """The file holds no cost model; the message says what to do."""


@frozen
class Profile:
    """What is known of a machine. `believed` is what a policy is told of it at the start."""

    name: str
    cost: Cost
    believed: CostModel
    noise: Noise
    host: Host


@define
class Machine:
    """One run of a machine; it also keeps the books: seconds and tokens by client."""

    profile: Profile
    random: random.Random
    used_s: dict[int, float] = field(factory=dict)
    tokens: dict[int, int] = field(factory=dict)
    rested: bool = True

    @classmethod
    def of(cls, profile: Profile, seed: int = 0) -> Machine:
        """Return a machine whose noise is drawn with `seed`."""
        return cls(profile, random.Random(seed))

    def rest(self) -> None:
        """There is nothing to compute."""
        self.rested = True

    def times(self, work: Work, state: SchedulerState, plan: Plan) -> tuple[float, float]:
        """Return what passes before this tick's decode and during it."""
        profile = self.profile
        host_s = profile.host(self.random, len(state.sequences), state.now)
        if self.rested:  # the host's work for the tick before was done while it rested
            host_s, self.rested = 0.0, False
        noise = profile.noise(self.random, plan.n_tokens + plan.ballast, state.now)
        return host_s, profile.cost(work, state, plan) * noise

    def book(self, state: SchedulerState, plan: Plan, took_s: float) -> None:
        """Write down whom a tick was for, by the tokens of each."""
        clients = {view.key: view.client for view in state.sequences}
        per_token = took_s / plan.n_tokens
        for item in plan.items:
            client = clients[item.key]
            self.used_s[client] = self.used_s.get(client, 0.0) + per_token * item.n_tokens
            self.tokens[client] = self.tokens.get(client, 0) + item.n_tokens


def steady(_random: random.Random, _n_tokens: int, _now: float) -> float:
    """No noise."""
    return 1.0


def gaussian(sigma: float) -> Noise:
    """Noise of this standard deviation; no tick is quicker than nine tenths of its step."""
    return lambda draw, _n_tokens, _now: max(0.9, draw.gauss(1.0, sigma))


def always(seconds: float) -> Host:
    """The same time between any two decodes."""
    return lambda _random, _n_sequences, _now: seconds


def staircase(milliseconds: dict[int, float]) -> Staircase:
    """Return the staircase of a table in milliseconds."""
    return Staircase(tuple(milliseconds), tuple(ms / 1e3 for ms in milliseconds.values()))


def modelled(
    name: str, model: CostModel, noise: Noise = steady, *, believed: CostModel | None = None
) -> Profile:
    """Return a machine that takes what `model` says, with the host time that it names."""
    decode = evolve(model, host_s=0.0, company_s=0.0)
    return Profile(
        name,
        lambda work, _state, _plan: decode.seconds(work),
        model if believed is None else believed,
        noise,
        always(model.host_s),
    )


def built_in(name: str, noise: Noise = steady) -> Profile:
    """Return one of the measured tables as a machine."""
    return modelled(name, CostModel(staircase(TABLES[name]), host_s=HOST_S), noise)


def from_cost_file(path: Path, noise: Noise = steady) -> Profile:
    """Return the machine that a daemon measured and stored (`uma-trio doctor --cost` names it).

    Raises:
        NoCost: there is none in the file.
    """
    model = recall(path)
    if model is None:
        message = f"{path}: no cost model of this version; `uma-trio doctor --cost` names the file"
        raise NoCost(message)
    return modelled(path.stem, evolve(model, host_s=HOST_S), noise)
