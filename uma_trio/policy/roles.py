"""Who a sequence is to the contract: a protected stream, a newcomer, or everyone else."""

from __future__ import annotations

from uma_trio.policy.state import SchedulerState, SequenceView


def is_protected(view: SequenceView) -> bool:
    """Whether it is a stream that somebody reads now."""
    return view.lane == "interactive" and view.decoding and view.credit > 0


def protected(state: SchedulerState) -> list[SequenceView]:
    """Return the streams that the contract protects now."""
    return [view for view in state.sequences if is_protected(view)]


def is_newcomer(view: SequenceView, most_tokens: int) -> bool:
    """Whether it is a person's prompt, and not yet so far into it that it is a document."""
    return view.lane == "interactive" and not view.decoding and view.computed < most_tokens
