"""The next tick, planned and batched while a GPU computes the one before it.

It is planned from the predicted state: no request arrives, ends or is changed meanwhile. Its batch
lacks only the tokens that the running tick samples. If the prediction is right, it is launched as
soon as these are sampled, and the commit of the running tick overlaps with its decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered

import numpy as np
from attrs import frozen

from uma_trio.backend.base import Batch, IntArray
from uma_trio.engine.chunk import Chunk, Completed, Outcome, Tick
from uma_trio.engine.messages import Credit, InboxMessage, changes_a_plan
from uma_trio.engine.sequences import Sequence


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
        """Whether it is the next tick, given what came of the one before it and who wrote since."""
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

    def load(self, batch: Batch, completed: Completed) -> Tick:
        """Write it into the arrays of the next decode, with the tokens it lacked."""
        batch.take(self.batch, self.tick.n_tokens)
        outcomes = completed.outcomes
        batch.token[self.rows] = [outcomes[n].tokens[-1].token for n in self.sources]
        return self.tick


def _ends(sequence: Sequence, token: int) -> bool:
    """Whether `token` ends the answer of a sequence, by itself or by its text."""
    if token in sequence.sampler.ends:
        return True
    try:
        return bool(sequence.submit.stop) and sequence.text.stops_with(token)
    except Exception:  # as its commit is about to find out
        return True


def _first_rows(chunks: Ordered[Chunk]) -> list[int]:
    """Return in which row of the batch each chunk begins."""
    rows, at = [], 0
    for chunk in chunks:
        rows.append(at)
        at += chunk.n_tokens
    return rows
