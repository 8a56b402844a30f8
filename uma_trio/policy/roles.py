"""Who a sequence is to the contract: a protected stream, a newcomer, or everyone else."""

from __future__ import annotations

from uma_trio.policy.state import SequenceView


def is_newcomer(view: SequenceView, most_tokens: int) -> bool:
    """Whether it is a person's prompt, and not yet so far into it that it is a document."""
    return view.lane == "interactive" and view.computed < most_tokens and not view.decoding
