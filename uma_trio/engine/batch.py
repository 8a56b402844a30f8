"""From steps to the arrays of one decode, with slices only and without a loop over tokens.

Sequences that compute one token each, as streams do, are written together.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from itertools import takewhile

import numpy as np

from uma_trio.backend.base import Batch, IntArray
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.step import Step


class BatchBuilder:
    """Writes steps into the arrays of a batch, in their order."""

    def __init__(self, n_ctx: int, scratch_slot: int) -> None:
        self._scratch_slot = scratch_slot
        self._positions: IntArray = np.arange(n_ctx, dtype=np.int32)

    def fill(
        self,
        batch: Batch,
        steps: Ordered[Step],
        sequences: Mapping[int, Sequence],
        *,
        extra_rows: int = 0,
        ballast: int = 0,
    ) -> None:
        """Write the tokens of each step; what is not known yet (a prepared tick) is written as 0.

        Rows of logits that nobody reads come last, so that they move nobody's: the `extra_rows` of
        the last step, and `ballast` in the scratch slot, which has to be emptied after the decode.
        """
        single = list(takewhile(_is_single, steps))
        _fill_single(batch, single, sequences)
        at = len(single)
        for step in steps[at:]:
            at = self._fill_step(batch, at, step, sequences[step.key])
        if extra_rows:
            batch.want[at - extra_rows : at] = 1
        if ballast:
            end = at + ballast
            batch.token[at:end] = batch.token[0]
            batch.pos[at:end] = self._positions[:ballast]
            batch.slot[at:end] = self._scratch_slot
            batch.want[at:end] = 1

    def _fill_step(self, batch: Batch, at: int, step: Step, sequence: Sequence) -> int:
        """Write one step from row `at` on; return the row behind it."""
        start, stop, end = step.start, step.start + step.n_tokens, at + step.n_tokens
        known = end - len(step.drafts)
        batch.token[at:known] = sequence.tokens[start : stop - len(step.drafts)]
        batch.token[known:end] = step.drafts
        batch.pos[at:end] = self._positions[start:stop]
        batch.slot[at:end] = sequence.slot
        batch.want[at:end] = 0
        batch.want[end - step.n_rows - step.n_scored : end] = 1
        return end


def _fill_single(batch: Batch, steps: Ordered[Step], sequences: Mapping[int, Sequence]) -> None:
    """Write steps of one token each from row 0 on."""
    n = len(steps)
    if not n:
        return
    owners = [sequences[step.key] for step in steps]
    starts = [step.start for step in steps]
    batch.token[:n] = [owner.tokens[at] for owner, at in zip(owners, starts, strict=True)]
    batch.pos[:n] = starts
    batch.slot[:n] = [owner.slot for owner in owners]
    batch.want[:n] = [step.n_rows + step.n_scored for step in steps]


def _is_single(step: Step) -> bool:
    return step.n_tokens == 1
