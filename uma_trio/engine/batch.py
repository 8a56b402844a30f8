"""From chunks to the arrays of one decode, with slices only and without a loop over tokens.

Sequences that compute one token each, as streams do, are written together.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from itertools import takewhile

import numpy as np
from attrs import frozen

from uma_trio.backend.base import Batch, IntArray
from uma_trio.engine.chunk import Chunk, Outcome, Tick, TickResult
from uma_trio.engine.messages import Credit, InboxMessage, changes_a_plan
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

        Rows of logits that are not read come last, so that they move no other: the `extra_rows` of
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


@frozen(eq=False)
class PreparedTick:
    """`tick`, whose `batch` lacks the tokens of some `rows`.

    These are the tokens of the outcomes `sources` (indices) of the tick before it. `parked` are the
    requests without credit at that time.
    """

    tick: Tick
    batch: Batch
    rows: IntArray
    sources: tuple[int, ...]
    parked: frozenset[int]

    @classmethod
    def behind(cls, computing: Tick, tick: Tick, batch: Batch) -> PreparedTick:
        """Return `tick` as what follows the one that is `computing`."""
        place = {chunk.key: n for n, chunk in enumerate(computing.chunks) if chunk.n_rows}
        rows, sources = [], []
        for row, chunk in zip(_first_rows(tick.chunks), tick.chunks, strict=True):
            if chunk.n_rows and chunk.key in place:
                rows.append(row + chunk.n_tokens - 1)
                sources.append(place[chunk.key])
        parked = frozenset([view.key for view in tick.state.sequences if view.credit <= 0])
        return cls(tick, batch, np.array(rows, np.int32), tuple(sources), parked)

    def follows(
        self,
        outcomes: Ordered[Outcome],
        sequences: Mapping[int, Sequence],
        messages: Ordered[InboxMessage],
    ) -> bool:
        """Whether it is the next tick, given the outcome of the one before it and the messages since."""
        if not self.tick.plan.items:
            return False
        for outcome in outcomes:
            sequence = sequences[outcome.chunk.key]
            if outcome.fault is not None or outcome.late:
                return False
            if outcome.tokens and _ends(sequence, outcome.tokens[-1].token):
                return False
        return not any(self._is_changed_by(message) for message in messages)

    def _is_changed_by(self, message: InboxMessage) -> bool:
        if isinstance(message, Credit):
            return message.handle in self.parked
        return changes_a_plan(message)

    def load(self, batch: Batch, completed: TickResult) -> Tick:
        """Write it into the arrays of the next decode, with the tokens it lacked."""
        batch.take(self.batch, self.tick.n_tokens)
        outcomes = completed.outcomes
        batch.token[self.rows] = [outcomes[n].tokens[-1].token for n in self.sources]
        return self.tick


def _ends(sequence: Sequence, token: int) -> bool:
    if token in sequence.sampler.ends:
        return True
    try:
        return bool(sequence.submit.stop) and sequence.text.stops_with(token)
    except Exception:  # as its commit is about to find out
        return True


def _first_rows(chunks: Ordered[Chunk]) -> list[int]:
    rows, at = [], 0
    for chunk in chunks:
        rows.append(at)
        at += chunk.n_tokens
    return rows
