"""The tick after the one that a GPU computes, drawn up meanwhile.

It is planned for what will be if nobody comes, ends or is changed, and its batch is filled but for
the tokens that are still to be chosen. So where that comes true, it is launched as soon as they
are, and all there is to do about them is done while it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from collections.abc import Set as AbstractSet

import numpy as np
from attrs import frozen

from uma_trio.backend.base import Batch, IntArray
from uma_trio.engine.figures import Job
from uma_trio.engine.messages import Credit, InboxMessage


@frozen(eq=False)
class Ahead:
    """`job`, whose `batch` lacks tokens in some `rows`: those at `chosen` of the tick before it.

    `parked` are the requests that will have no credit then. `ends_show` says whether those tokens
    alone tell who ends by them.
    """

    job: Job
    batch: Batch
    rows: IntArray
    chosen: IntArray
    parked: frozenset[int]
    ends_show: bool

    @classmethod
    def behind(cls, computed: Job, job: Job, batch: Batch) -> Ahead:
        """Return what is drawn up behind the tick that is `computed`."""
        place = {sequence.handle: n for n, sequence in enumerate(computed.rows)}
        wanted = np.flatnonzero(batch.want[: job.n_tokens])
        both = [n for n, sequence in enumerate(job.rows) if sequence.handle in place]
        return cls(
            job,
            batch,
            rows=wanted[both].astype(np.int32),
            chosen=np.array([place[job.rows[n].handle] for n in both], np.int32),
            parked=frozenset([view.key for view in job.state.sequences if view.credit <= 0]),
            # A stop string is only found in the text.
            ends_show=not any(sequence.submit.stop for sequence in computed.rows),
        )

    def holds(
        self, tokens: Ordered[int], ends: AbstractSet[int], messages: Ordered[InboxMessage]
    ) -> bool:
        """Whether it is what comes next, now that these tokens are chosen and these messages came.

        `ends` are the tokens after which a sequence does not go on.
        """
        if not (self.ends_show and self.job.plan.items and ends.isdisjoint(tokens)):
            return False
        return all(isinstance(m, Credit) and m.handle not in self.parked for m in messages)

    def load(self, batch: Batch, tokens: Ordered[int]) -> Job:
        """Write it into the arrays of the next decode, with the tokens that were chosen."""
        batch.take(self.batch, self.job.n_tokens)
        batch.token[self.rows] = np.array(tokens, np.int32)[self.chosen]
        return self.job
