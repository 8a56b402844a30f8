"""From a plan to the arrays of one decode: slices only, no loop over tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from uma_trio.backend.base import Batch, IntArray
from uma_trio.engine.sequences import Sequence


@frozen
class Filled:
    """What a batch holds: its length, and whose logits rows come back, in order."""

    n_tokens: int
    rows: tuple[Sequence, ...]


class BatchBuilder:
    """Writes sequences into the backend's arrays.

    A sequence gets a logits row exactly when this batch computes the last token it knows:
    nobody can sample an unfinished prompt.
    """

    def __init__(self, batch: Batch, n_ctx: int) -> None:
        self._batch = batch
        self._positions: IntArray = np.arange(n_ctx, dtype=np.int32)

    def fill(self, work: Iterable[tuple[Sequence, int]]) -> Filled:
        """Write `n` tokens of each sequence from where it stands; return what was written."""
        batch, at, rows = self._batch, 0, []
        for sequence, n in work:
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
        return Filled(at, tuple(rows))
