"""The output of a policy: the number of tokens of each sequence in this tick, and the reasons."""

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
    """`n_tokens` of the sequence `key`. `reason` is a phrase for people.

    The last `n_drafts` of them are guesses at its answer, each with a logits row to verify it.
    """

    key: int
    n_tokens: int
    phase: Phase
    reason: str
    n_drafts: int = 0


@value
class Skip:
    """A sequence that is left out of this tick, and the reason."""

    key: int
    reason: str


@frozen
class Limit:
    """The time limit of this tick.

    `seconds` is infinite if no interactive stream is decoding, and under a policy without limits.
    `solo_s` is the predicted time of the interactive streams alone. Newcomers' prompts may extend
    the tick to `newcomer_s`, but are not part of a `grant`. An `isolated` tick contains streams
    only. `reach_s` is the largest value of `seconds` that isolated ticks can reach. Without
    streams, a tick without newcomers takes at most `brief_s`, if some size of it is that short.
    `step_s` is the least time between two due tokens of a stream. Alone, a token of that stream takes
    `drafted_part` of its time without guesses. Other work `saves` if it waits for ticks that are longer
    than a step, so that readers have to be ahead for them.
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
    drafted_part: float = 1.0
    saves: bool = False


NO_LIMIT = Limit(float("inf"), "no answer is read as it comes")
UNGUARDED = Limit(float("inf"), "this policy sets no limit")


@value
class Plan:
    """The work of one tick, in batch order: at most one item per sequence, within ``n_batch``.

    - `ballast` rows are computed and discarded, where a larger tick is faster.
    - The last `extra_rows` tokens of the last item ask for logits that are not used, to keep the
      batch's shape.
    - `paces` has, by key, the least number of seconds between two shown tokens of a stream. A
      stream without a pace shows each token at once.
    - `predicted_s` is the time that the cost model predicts and `moved_bytes` the bytes that the
      tick reads and writes; 0 if unknown.
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
        """The number of tokens of sequences in the batch."""
        return sum([item.n_tokens for item in self.items])
