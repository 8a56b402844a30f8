"""From a plan to the arrays of one decode: slices only, no loop over tokens.

Sequences that compute one token each, as streams do, are written together.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import compress, islice, takewhile

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
        self, shares: Collection[tuple[Sequence, int]], ballast: int = 0, *, extra_rows: int = 0
    ) -> tuple[Sequence, ...]:
        """Write `n` tokens of each sequence from where it stands; return whose rows come back.

        Rows that nobody reads come last, so that they move nobody's: the `extra_rows` of the last
        sequence, and `ballast` in the scratch slot, which whoever decodes must empty after.
        """
        batch = self._batch
        single = [sequence for sequence, _ in takewhile(_is_single, shares)]
        rows = self._fill_single(single)
        at = len(single)
        for sequence, n in islice(shares, at, None):
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
        if extra_rows:
            batch.want[at - extra_rows : at] = 1
        if ballast:
            end = at + ballast
            batch.token[at:end] = batch.token[0]
            batch.pos[at:end] = self._positions[:ballast]
            batch.slot[at:end] = self._scratch_slot
            batch.want[at:end] = 1
        return tuple(rows)

    def _fill_single(self, sequences: list[Sequence]) -> list[Sequence]:
        """Write the next token of each from the first row on; return whose rows come back."""
        batch, n = self._batch, len(sequences)
        if not n:
            return []
        last = [sequence.pending == 1 for sequence in sequences]
        batch.token[:n] = [sequence.tokens[sequence.computed] for sequence in sequences]
        batch.pos[:n] = [sequence.computed for sequence in sequences]
        batch.slot[:n] = [sequence.slot for sequence in sequences]
        batch.want[:n] = last
        return list(compress(sequences, last))


def _is_single(share: tuple[Sequence, int]) -> bool:
    return share[1] == 1
