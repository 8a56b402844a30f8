"""From chunks to the arrays of one decode, with slices only and without a loop over tokens.

Sequences that compute one token each, as streams do, are written together.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from itertools import takewhile

import numpy as np

from uma_trio.backend.base import Batch, IntArray
from uma_trio.engine.chunk import Chunk
from uma_trio.engine.sequences import Sequence


class BatchBuilder:
    """Writes chunks into the arrays of a batch, in their order."""

    def __init__(self, n_ctx: int, scratch_slot: int) -> None:
        self._scratch_slot = scratch_slot
        self._positions: IntArray = np.arange(n_ctx, dtype=np.int32)

    def fill(
        self,
        batch: Batch,
        chunks: Ordered[Chunk],
        sequences: Mapping[int, Sequence],
        *,
        extra_rows: int = 0,
        ballast: int = 0,
    ) -> None:
        """Write the tokens of each chunk; what is not known yet (a prepared tick) is written as 0.

        Rows of logits that nobody reads come last, so that they move nobody's: the `extra_rows` of
        the last chunk, and `ballast` in the scratch slot, which has to be emptied after the decode.
        """
        single = list(takewhile(_is_single, chunks))
        _fill_single(batch, single, sequences)
        at = len(single)
        for chunk in chunks[at:]:
            at = self._fill_chunk(batch, at, chunk, sequences[chunk.key])
        if extra_rows:
            batch.want[at - extra_rows : at] = 1
        if ballast:
            end = at + ballast
            batch.token[at:end] = batch.token[0]
            batch.pos[at:end] = self._positions[:ballast]
            batch.slot[at:end] = self._scratch_slot
            batch.want[at:end] = 1

    def _fill_chunk(self, batch: Batch, at: int, chunk: Chunk, sequence: Sequence) -> int:
        """Write one chunk from row `at` on; return the row behind it."""
        start, stop, end = chunk.start, chunk.start + chunk.n_tokens, at + chunk.n_tokens
        known = end - len(chunk.drafts)
        batch.token[at:known] = sequence.tokens[start : stop - len(chunk.drafts)]
        batch.token[known:end] = chunk.drafts
        batch.pos[at:end] = self._positions[start:stop]
        batch.slot[at:end] = sequence.slot
        batch.want[at:end] = 0
        batch.want[end - chunk.n_rows - chunk.n_scored : end] = 1
        return end


def _fill_single(batch: Batch, chunks: Ordered[Chunk], sequences: Mapping[int, Sequence]) -> None:
    """Write chunks of one token each from row 0 on."""
    n = len(chunks)
    if not n:
        return
    owners = [sequences[chunk.key] for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    batch.token[:n] = [owner.tokens[at] for owner, at in zip(owners, starts, strict=True)]
    batch.pos[:n] = starts
    batch.slot[:n] = [owner.slot for owner in owners]
    batch.want[:n] = [chunk.n_rows + chunk.n_scored for chunk in chunks]


def _is_single(chunk: Chunk) -> bool:
    return chunk.n_tokens == 1
