"""The likeliest token of a row of logits, and whether there is one."""

from __future__ import annotations

from typing import Final

import numpy as np

from uma_trio.backend.base import FloatArray
from uma_trio.engine.sampling.shortlist import IdArray

NOT_FINITE: Final = -1  # what is answered for a row that has no sane maximum


def greedy(logits: FloatArray) -> IdArray:
    """Return the likeliest token of each row of ``logits[n, vocab]``, the lowest id on a tie.

    A row with NaN or +inf, or without any finite logit, is answered with `NOT_FINITE`: argmax
    stops at the first NaN, so looking at the maximum is enough.
    """
    ids: IdArray = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(ids)), ids])
    if not finite.all():
        ids[~finite] = NOT_FINITE
    return ids


def likeliest_but(row: FloatArray, masked: IdArray) -> int:
    """Return the likeliest token that is not masked, or `NOT_FINITE`; the row is left as it was."""
    hidden = row[masked]
    row[masked] = -np.inf
    (likeliest,) = greedy(row[np.newaxis])
    row[masked] = hidden
    return int(likeliest)


def without(row: FloatArray, masked: IdArray) -> FloatArray:
    """Return a copy of the row in which masked tokens are -inf."""
    masked_row = row.copy()
    masked_row[masked] = -np.inf
    return masked_row
