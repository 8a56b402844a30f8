"""What a policy answers: which sequence computes how many tokens this tick, and why."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from uma_trio.policy.state import Memory

Phase = Literal["decode", "prefill"]


@frozen
class PlanItem:
    """`n_tokens` of the sequence `key`; `reason` is one phrase for a person."""

    key: int
    n_tokens: int
    phase: Phase
    reason: str


@frozen
class Skip:
    """A sequence that gets nothing this tick, and why."""

    key: int
    reason: str


@frozen
class Plan:
    """One tick's work, in batch order: at most one item a sequence, within ``n_batch``."""

    items: tuple[PlanItem, ...] = ()
    skipped: tuple[Skip, ...] = ()
    memory: Memory = field(factory=Memory)

    @property
    def n_tokens(self) -> int:
        """How many rows the batch will have."""
        return sum(item.n_tokens for item in self.items)
