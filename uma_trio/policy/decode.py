"""Who waits for the next word is served first."""

from __future__ import annotations

from attrs import evolve

from uma_trio.policy.plan import Plan, PlanItem, Skip
from uma_trio.policy.rotation import rotate
from uma_trio.policy.state import SchedulerState


def select_decoders(state: SchedulerState, plan: Plan) -> Plan:
    """Give one token to each decoding sequence, in turn if the batch cannot hold all."""
    ready = [view for view in state.sequences if view.credit > 0 and view.decoding]
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
