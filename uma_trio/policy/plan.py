"""What a policy answers: which sequence computes how many tokens this tick, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from uma_trio.policy.evolving import value
from uma_trio.policy.state import Memory

Phase = Literal["decode", "prefill"]


@value
class PlanItem:
    """`n_tokens` of the sequence `key`; `reason` is one phrase for a person.

    The last `n_drafts` of them are guesses about its answer, each with a logits row to check it by.
    """

    key: int
    n_tokens: int
    phase: Phase
    reason: str
    n_drafts: int = 0


@value
class Skip:
    """A sequence that gets nothing this tick, and why."""

    key: int
    reason: str


@frozen
class Limit:
    """How long this tick may take.

    `seconds` is infinite when no interactive stream is decoding, and under a policy without limits.
    `solo_s` is what the interactive streams alone would cost. Newcomers' prompts may take a tick to
    `newcomer_s`, but have no part in a `grant`. An `isolated` tick holds streams alone.
    `reach_s` is what `seconds` may become if the streams are served alone for a while. Where there are
    none, a tick without newcomers takes at most `brief_s`, if any size of it is so short.
    """

    seconds: float
    reason: str
    solo_s: float = 0.0
    newcomer_s: float = math.inf
    isolated: bool = False
    grant: bool = False
    reach_s: float = math.inf
    step_s: float = 0.0
    brief_s: float = math.inf


NO_LIMIT = Limit(float("inf"), "nobody interactive is decoding")
UNGUARDED = Limit(float("inf"), "this policy sets no limit")


@value
class Plan:
    """One tick's work, in batch order: at most one item a sequence, within ``n_batch``.

    `ballast` rows are computed and thrown away, where more rows cost less than fewer.
    The last of `extra_rows` tokens of the last item ask for logits that nobody reads, to keep the
    batch's shape.
    `paces` says by key how many seconds after the token before it a stream's next token is shown, at
    the earliest. A stream that is not in it is shown all that there is at once.
    `predicted_s` is what the cost model expects and `moved_bytes` what the tick reads and
    writes by the model's own numbers; 0 where unknown.
    """

    items: tuple[PlanItem, ...] = ()
    skipped: tuple[Skip, ...] = ()
    ballast: int = 0
    extra_rows: int = 0
    limit: Limit = UNGUARDED
    predicted_s: float = 0.0
    moved_bytes: float = 0.0
    memory: Memory = field(factory=Memory)
    paces: Mapping[int, float] = field(factory=dict)

    @property
    def n_tokens(self) -> int:
        """How many tokens of sequences the batch will have."""
        return sum([item.n_tokens for item in self.items])
