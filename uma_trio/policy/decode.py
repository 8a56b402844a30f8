"""The first stages of every policy: skip parked sequences, then serve decoding ones.

A slow reader is an input of scheduling: a sequence without credit is skipped and keeps its KV
cells, and all other sequences continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan, PlanItem, Skip
from uma_trio.policy.state import SchedulerState, SequenceView


def leave_out_parked(state: SchedulerState, plan: Plan) -> Plan:
    """Skip every sequence whose stream is full. It keeps its cells."""
    parked = tuple(
        Skip(view.key, "parked: its reader is behind")
        for view in state.sequences
        if view.credit <= 0
    )
    return evolve(plan, skipped=plan.skipped + parked) if parked else plan


def one_token_each(views: Sequence[SequenceView]) -> tuple[PlanItem, ...]:
    """Return an item of one token for each of `views`."""
    return tuple([_one_token(view.key) for view in views])


def select_decoders(state: SchedulerState, plan: Plan) -> Plan:
    """Give one token to each decoding sequence, round robin if the batch cannot hold all."""
    return _serve(state, plan, [v for v in state.sequences if v.credit > 0 and v.decoding])


def select_interactive(state: SchedulerState, plan: Plan) -> Plan:
    """Give one token to each interactive stream, whatever it costs other work."""
    return _serve(state, plan, state.protected)


def rotate(views: Iterable[SequenceView], cursor: int) -> list[SequenceView]:
    """Return `views` by key, beginning with the first key above `cursor`.

    Keys only grow, so the order is stable when sequences come and go.
    """
    ordered = sorted(views, key=lambda view: view.key)
    behind = [view for view in ordered if view.key > cursor]
    return behind + ordered[: len(ordered) - len(behind)]


@lru_cache(maxsize=256)
def _one_token(key: int) -> PlanItem:
    return PlanItem(key, 1, "decode", "decode: one token each")


def _serve(state: SchedulerState, plan: Plan, ready: Sequence[SequenceView]) -> Plan:
    if not ready:
        return plan
    room = state.n_batch - plan.n_tokens
    if len(ready) > room:
        ready = rotate(ready, state.memory.decode_cursor)
    served, left_out = ready[:room], ready[room:]
    items = plan.items + one_token_each(served)
    if not left_out:
        return evolve(plan, items=items)
    skipped = tuple(
        Skip(view.key, "decode: the batch is full, its turn is next") for view in left_out
    )
    cursor = served[-1].key if served else state.memory.decode_cursor
    return evolve(
        plan,
        items=items,
        skipped=plan.skipped + skipped,
        memory=evolve(plan.memory, decode_cursor=cursor),
    )
