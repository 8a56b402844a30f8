"""Factories of sequences and states: all that a policy test needs."""

from __future__ import annotations

from collections import defaultdict

from attrs import evolve

from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.state import (
    FirstToken,
    FirstTokens,
    GuardMemory,
    MeasuredTick,
    Memory,
    SchedulerState,
    SequenceView,
    Waiting,
)
from uma_trio.policy.stretch import (
    OwnMachine,
    Wanted,
    common_stretch,
    is_brief,
    level_of,
    prefill_s,
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


def waited_for(now: SchedulerState) -> SchedulerState:
    """Return `now` with the deadlines of its prompts, as the engine notes them in the order of arrival."""
    cost = now.memory.cost or COST
    machines: defaultdict[int, OwnMachine] = defaultdict(OwnMachine)
    views = {view.key: view for view in now.sequences}
    prompts = [view for view in now.sequences if view.lane == "interactive" and not view.started]
    level = level_of([view.path for view in prompts])
    own_s = {v.key: prefill_s(cost, now.n_batch, v.due, v.computed) for v in prompts}
    for view in sorted(prompts, key=lambda view: (view.arrived, view.key)):
        for node in view.path:
            machines[node].add(view.key, view.arrived, own_s[view.key])
    wanted = []
    for view in prompts:
        ends = tuple([machines[node].ends()[view.key] for node in view.path])
        own = own_s[view.key]
        fits = view.due <= min(now.n_batch, now.contract.newcomer_tokens)
        short = fits and is_brief(cost, own)
        first = FirstToken(view.arrived, own_s[view.key], ends, short=short)
        views[view.key] = evolve(view, first=first)
        wanted.append(Wanted(view.arrived, ends[level] - view.arrived, own_s[view.key]))
    known = FirstTokens(common_stretch(now.now, wanted, now.memory.prompts_share), level)
    return evolve(now, sequences=tuple(views.values()), first_tokens=known)
