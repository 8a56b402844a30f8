"""Factories of sequences and states: all that a policy test needs."""

from __future__ import annotations

from attrs import evolve

from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.state import (
    GuardMemory,
    MeasuredTick,
    Memory,
    SchedulerState,
    SequenceView,
    Waiting,
)

STAIRS = {1: 8.0, 2: 11.7, 3: 16.2, 4: 11.1, 5: 15.2, 8: 18.8, 16: 25.9, 32: 48.7, 64: 93.5}
COST = CostModel(Staircase(tuple(STAIRS), tuple(ms / 1e3 for ms in STAIRS.values())))

_VIEW = SequenceView(
    key=0, lane="interactive", pending=1, computed=10, started=True, credit=8, arrived=0.0
)
_WAITING = Waiting(key=0, lane="interactive", client=0, cells=10, passed_over=0, arrived=0.0)


def decoder(key: int, **changes: object) -> SequenceView:
    """Return a sequence that decodes."""
    return evolve(_VIEW, key=key, arrived=float(key), **changes)


def prompt(key: int, pending: int = 100, **changes: object) -> SequenceView:
    """Return a sequence that has not started."""
    return evolve(
        _VIEW,
        **{"key": key, "arrived": float(key), "computed": 0, "started": False, "pending": pending}
        | changes,
    )


def waiting(key: int, **changes: object) -> Waiting:
    """Return a request without a slot."""
    return evolve(_WAITING, **{"key": key, "arrived": float(key)} | changes)


def after(now: SchedulerState, *ticks: MeasuredTick) -> SchedulerState:
    """Return `now` with `ticks` measured before it."""
    return evolve(now, before=ticks[-1].work, measured=ticks)


def state(*sequences: SequenceView, n_batch: int = 512, target: int = 32) -> SchedulerState:
    """Return a state of these sequences, before which nothing was measured."""
    return SchedulerState(
        now=100.0,
        tick=1,
        sequences=sequences,
        n_batch=n_batch,
        free_cells=1000,
        memory=Memory(target_tokens=target),
    )


def situation(*views: SequenceView, cost: CostModel = COST, **remembered: object) -> SchedulerState:
    """Return a state in the middle of things: the cost is known, and the guard remembers something."""
    guard = GuardMemory(**remembered)  # type: ignore[arg-type]
    return evolve(state(*views), memory=Memory(cost=cost, guard=guard))
