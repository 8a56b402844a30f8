"""Who a sequence is to the contract: a protected stream, a newcomer, or everyone else."""

from __future__ import annotations

from uma_trio.policy.state import Lane, SchedulerState, SequenceView


def is_protected(view: SequenceView) -> bool:
    """Whether it is a stream that somebody reads now."""
    return view.lane == "interactive" and view.decoding and view.credit > 0


def protected(state: SchedulerState) -> list[SequenceView]:
    """Return the streams that the contract protects now."""
    return [view for view in state.sequences if is_protected(view)]


def is_newcomer(view: SequenceView, most_tokens: int) -> bool:
    """Whether it is a person's prompt, and not yet so far into it that it is a document."""
    return view.lane == "interactive" and not view.decoding and view.computed < most_tokens


def ready_clients(state: SchedulerState) -> set[int]:
    """Return the clients that can use machine time now."""
    return {view.client for view in state.sequences if view.credit > 0}


def riding_lanes(state: SchedulerState) -> set[Lane]:
    """Return the lanes that have more to compute than protected streams."""
    return {v.lane for v in state.sequences if v.credit > 0 and not is_protected(v)}
