"""From a plan to the arrays of one decode: slices only, no loop over tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from uma_trio.backend.base import Batch, IntArray
from uma_trio.engine.sequences import Sequence


class BatchBuilder:
    """Writes sequences into the backend's arrays.

    A sequence gets a logits row exactly when this batch computes the last token it knows:
    nobody can sample an unfinished prompt.
    """

    def __init__(self, batch: Batch, n_ctx: int, scratch_slot: int) -> None:
        self._batch = batch
        self._scratch_slot = scratch_slot
        self._positions: IntArray = np.arange(n_ctx, dtype=np.int32)

    def fill(
        self, shares: Iterable[tuple[Sequence, int]], ballast: int = 0, *, extra_row: bool = False
    ) -> tuple[Sequence, ...]:
        """Write `n` tokens of each sequence from where it stands; return whose rows come back.

        Rows that nobody reads come last, so that they move nobody's: the `extra_row` of the last
        sequence, and `ballast` in the scratch slot, which whoever decodes must empty after.
        """
        batch, at, rows = self._batch, 0, []
        for sequence, n in shares:
            start, stop = sequence.computed, sequence.computed + n
            end = at + n
            batch.token[at:end] = sequence.tokens[start:stop]
            batch.pos[at:end] = self._positions[start:stop]
            batch.slot[at:end] = sequence.slot
            batch.want[at:end] = 0
            if stop == sequence.known:
                batch.want[end - 1] = 1
                rows.append(sequence)
            at = end
        if extra_row:
            batch.want[at - 1] = 1
        if ballast:
            end = at + ballast
            batch.token[at:end] = batch.token[0]
            batch.pos[at:end] = self._positions[:ballast]
            batch.slot[at:end] = self._scratch_slot
            batch.want[at:end] = 1
        return tuple(rows)
