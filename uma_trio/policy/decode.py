"""Who waits for the next word is served first."""

from __future__ import annotations

from attrs import evolve

from uma_trio.policy.plan import Plan, PlanItem, Skip
from uma_trio.policy.rotation import rotate
from uma_trio.policy.state import SchedulerState, SequenceView


def select_decoders(state: SchedulerState, plan: Plan) -> Plan:
    """Give one token to each decoding sequence, in turn if the batch cannot hold all."""
    return _serve(state, plan, [view for view in state.sequences if _ready(view)])


def select_interactive(state: SchedulerState, plan: Plan) -> Plan:
    """Give one token to each interactive stream, whatever it costs everyone else."""
    streams = [v for v in state.sequences if _ready(v) and v.lane == "interactive"]
    return _serve(state, plan, streams)


def _ready(view: SequenceView) -> bool:
    return view.credit > 0 and view.decoding


def _serve(state: SchedulerState, plan: Plan, ready: list[SequenceView]) -> Plan:
    if not ready:
        return plan
    room = state.n_batch - plan.n_tokens
    if len(ready) > room:
        ready = rotate(ready, state.memory.decode_cursor)
    served, left_out = ready[:room], ready[room:]
    items = tuple(PlanItem(view.key, 1, "decode", "decode: one token each") for view in served)
    skipped = tuple(
        Skip(view.key, "decode: the batch is full, its turn is next") for view in left_out
    )
    cursor = served[-1].key if left_out and served else state.memory.decode_cursor
    return evolve(
        plan,
        items=plan.items + items,
        skipped=plan.skipped + skipped,
        memory=evolve(plan.memory, decode_cursor=cursor),
    )
