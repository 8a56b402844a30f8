"""From a plan to the arrays of one decode: slices only, no loop over tokens.

Sequences that compute one token each, as streams do, are written together.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import compress, islice, takewhile

import numpy as np

from uma_trio.backend.base import Batch, IntArray
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.state import SequenceView

Share = tuple[Sequence, SequenceView, int]
"""A sequence, where it stands when the batch begins, and how many of its tokens are in that."""


class BatchBuilder:
    """Writes sequences into the arrays of a batch.

    A sequence gets a logits row exactly when this batch computes the last token it knows:
    nobody can sample an unfinished prompt.
    """

    def __init__(self, n_ctx: int, scratch_slot: int) -> None:
        self._scratch_slot = scratch_slot
        self._positions: IntArray = np.arange(n_ctx, dtype=np.int32)

    def fill(
        self, batch: Batch, shares: Collection[Share], ballast: int = 0, *, extra_rows: int = 0
    ) -> tuple[Sequence, ...]:
        """Write `n` tokens of each sequence from where it stands; return whose rows come back.

        Where it stands is what its view says, which may be further than it is: what it does not
        know yet is written as 0. Rows that nobody reads come last, so that they move nobody's:
        the `extra_rows` of the last sequence, and `ballast` in the scratch slot, which whoever
        decodes must empty after.
        """
        single = list(takewhile(_is_single, shares))
        rows = _fill_single(batch, single)
        at = len(single)
        for sequence, view, n in islice(shares, at, None):
            start, stop = view.computed, view.computed + n
            end = at + n
            batch.token[at:end] = sequence.tokens[start:stop]
            batch.pos[at:end] = self._positions[start:stop]
            batch.slot[at:end] = sequence.slot
            batch.want[at:end] = 0
            if n == view.pending:
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


def _fill_single(batch: Batch, shares: list[Share]) -> list[Sequence]:
    """Write the next token of each from the first row on; return whose rows come back."""
    n = len(shares)
    if not n:
        return []
    sequences = [sequence for sequence, _, _ in shares]
    last = [view.pending == 1 for _, view, _ in shares]
    batch.token[:n] = [sequence.tokens[view.computed] for sequence, view, _ in shares]
    batch.pos[:n] = [view.computed for _, view, _ in shares]
    batch.slot[:n] = [sequence.slot for sequence in sequences]
    batch.want[:n] = last
    return list(compress(sequences, last))


def _is_single(share: Share) -> bool:
    return share[2] == 1
