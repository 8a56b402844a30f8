"""Does the simulation predict what a real run measured?

The arrivals, the machine and its noise come from a trace. The same work is simulated under the same
policy, and the figures are compared. docs/SIMULATION.md says what this shows and what it does not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from statistics import median

from attrs import evolve, fields, frozen

from uma_trio.backend.base import ContextLimits
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.records import TickRecord
from uma_trio.engine.trace import traced
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import TracedTick
from uma_trio.policy.state import SchedulerState
from uma_trio_sim.fitted import profile
from uma_trio_sim.guesses import NO_GUESSES, Texts
from uma_trio_sim.machine import Profile
from uma_trio_sim.simulation import Simulation
from uma_trio_sim.trace import Figures, Recording, TracedRequest, figures, requests_of, sessions
from uma_trio_sim.workload import ENDLESS, Session, play

BOUNDS = {"itl_p95": 0.10, "ttft_p50": 0.10, "tokens_s": 0.05}
"""By how much of the measured value a prediction may be off."""


@frozen
class Compared:
    """One figure. `within` is None where there is no bound."""

    name: str
    measured: float
    predicted: float
    bound: float | None

    @property
    def off(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        if self.predicted == self.measured:
            return 0.0
        return self.predicted / self.measured - 1.0 if self.measured else math.inf

    @property
    def within(self) -> bool | None:
        """Whether that is within the bound."""
        return None if self.bound is None else abs(self.off) <= self.bound


def compare(recording: Recording, seeds: Sequence[int], *, closed: bool = True) -> list[Compared]:
    """Return each figure as measured, and as simulations with these seeds predict it (medians).

    Raises:
        TraceError: the trace has no stream of two tokens.
        PolicyError: its policy is not here.
    """
    measured, machine = figures(recording.ticks), profile(recording.ticks)
    predicted = [predict(recording, machine, seed=seed, closed=closed) for seed in seeds]
    return [
        Compared(
            figure.name,
            float(getattr(measured, figure.name)),
            float(median(getattr(one, figure.name) for one in predicted)),
            BOUNDS.get(figure.name),
        )
        for figure in fields(Figures)
    ]


def predict(
    recording: Recording, machine: Profile, *, seed: int = 0, closed: bool = True
) -> Figures:
    """Simulate the recorded work on `machine`, under the recorded policy."""
    ticks: list[TracedTick] = []

    def keep(state: SchedulerState, plan: Plan, record: TickRecord) -> None:
        ticks.append(traced(state, plan, record))

    requests = requests_of(recording.ticks)
    work = [_bounded(one, recording) for one in sessions(requests, closed=closed)]
    world = Simulation(
        find_policy(recording.header.policy),
        profile=machine,
        seed=seed,
        settings=_settings(recording),
        limits=_limits(recording, work),
        recorder=Recorder(keep),
        guesses=_texts(requests),
    )
    play(world, work)
    last = recording.ticks[-1]
    world.run(last.state.now + last.decode_s - requests[0].arrived)
    return figures(ticks, began=0.0)


def _texts(requests: Sequence[TracedRequest]) -> Texts | None:
    """Return that answers are guessed at as recorded, if any was: each request brings its own guesses."""
    guessed = any(request.guesses is not None for request in requests)
    return (lambda _draw: NO_GUESSES) if guessed else None


def _bounded(session: Session, recording: Recording) -> Session:
    """Return `session` with answers that end, though not within four times the recorded ticks."""
    most = 4 * len(recording.ticks)
    return Session(
        session.client,
        session.lane,
        session.start,
        [evolve(t, answer=most) if t.answer == ENDLESS else t for t in session.turns],
    )


def _settings(recording: Recording) -> EngineSettings:
    first = recording.ticks[0].state
    return EngineSettings(
        tick_budget_s=first.tick_budget_s,
        contract=first.contract,
        scratch_slots=int(any(tick.state.spare_rows > 0 for tick in recording.ticks)),
        cost=first.memory.cost,
        traffic=first.traffic,
    )


def _limits(recording: Recording, work: Sequence[Session]) -> ContextLimits:
    """Return slots as the trace shows them, and cells that never run out.

    A trace does not say what requests had reserved.
    """
    states = [tick.state for tick in recording.ticks]
    # An older trace does not say how many there were; with a slot for ballast its states have a row for each.
    rows = max(state.spare_rows + len(state.sequences) for state in states)
    n_slots = recording.header.slots or rows
    longest = max(turn.prompt + turn.answer for session in work for turn in session.turns)
    cells = (n_slots + 1) * longest
    n_batch = max(state.n_batch for state in states)
    # Older traces do not say how many rows there are, and have no drafts.
    known = [state.n_rows for state in states if state.n_rows < sys.maxsize]
    return ContextLimits(cells, cells, n_slots, n_batch, n_rows=max(known, default=n_slots))
