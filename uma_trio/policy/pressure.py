"""What to give up when the KV cache has no room: the smallest sufficient measure."""

from __future__ import annotations

from attrs import frozen

from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SequenceView


@frozen
class Shrink:
    """Try again with at most this many tokens in the batch."""

    n_tokens: int


@frozen
class Preempt:
    """Drop this sequence's cells and compute them again later. Its stream only pauses."""

    key: int


@frozen
class Fail:
    """End this sequence: it cannot be served at all."""

    key: int


Relief = Shrink | Preempt | Fail


def relieve(plan: Plan, sequences: tuple[SequenceView, ...]) -> Relief:
    """Choose the measure that makes room after `plan` did not fit.

    First a smaller prefill; then a preemption of the newest background sequence, or else of the
    newest one. A sequence that is alone and still does not fit fails.
    """
    decoders = sum(item.phase == "decode" for item in plan.items)
    smaller = max(decoders, 1, plan.n_tokens // 2)
    if smaller < plan.n_tokens:
        return Shrink(smaller)
    holding = [view for view in sequences if view.computed > 0]
    planned = {item.key for item in plan.items}
    if len({view.key for view in holding} | planned) <= 1:
        return Fail(plan.items[0].key)
    background = [view for view in holding if view.lane == "background"]
    return Preempt(max(background or holding, key=lambda view: (view.arrived, view.key)).key)
