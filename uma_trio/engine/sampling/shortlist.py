"""The likeliest tokens: of every row of a tick, from one pass over its logits, or of one row.

What counts is memory: a row of 128k logits has half a megabyte, and sixteen of them are in no
cache by the time they are looked at. So `Shortlist` reads them once, for the maxima of columns;
what follows looks only into the few columns that can hold a token that is wanted. `largest` and
`nucleus` are for a single row, and for as many of its tokens as are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from uma_trio.backend.base import FloatArray
from uma_trio.engine.sampling.drawing import weigh

IdArray = NDArray[np.intp]
KeyArray = NDArray[np.uint64]

# Up to one in so many of the vocabulary is a short list; for more, a copy of the row is cheaper.
_SHORT: Final = 64
# Maxima of so many columns each are enough to find the bound from: fewer to put in order.
_FOLD: Final = 8
# `largest` finds a bound for a short list from columns of this depth; at most half of them, then.
_GRID_ROWS: Final = 32
# How many of the likeliest tokens `nucleus` sorts first, second; then all (llama.cpp: 256, all).
_NUCLEUS_SIZES: Final = (256, 8192)
_SORTED_AS_FLOATS: Final = 1024
_LOWEST: Final = np.finfo(np.float32).min
_ID_BITS: Final = np.uint64(32)
_ID_MASK: Final = np.uint64((1 << 32) - 1)
_NO_KEY: Final = np.uint64((1 << 64) - 1)


def is_short(k: int, n_vocab: int) -> bool:
    """Whether `Shortlist` finds the `k` largest of so many logits."""
    return 0 < k * _SHORT <= n_vocab


class Shortlist:
    """Finds the ``ks[row]`` largest of each row of ``[len(ks), n_vocab]`` logits.

    `is_short` holds for every k. What does not depend on the logits is done here, once.
    """

    def __init__(self, n_vocab: int, ks: Sequence[int]) -> None:
        self._n, self._n_vocab, self._width = len(ks), n_vocab, max(ks)
        self._deep = _depth(self._width, n_vocab)
        self._columns, self._rest = divmod(n_vocab, self._deep)
        self._parts, self._over = divmod(self._columns, _FOLD)
        self._ks = np.array(ks, np.intp)
        self._rows = np.arange(self._n)
        self._kth = self._parts - self._ks
        self._sorted_kths = sorted(set(self._kth.tolist()))
        self._down = np.arange(0, n_vocab, self._columns)
        self._places = np.arange(self._width)

    def __call__(self, logits: FloatArray) -> tuple[IdArray, FloatArray]:
        """Return ids and logits of the largest of each row, both ``[n, max(ks)]``.

        Descending, the lower id first on a tie; -inf is never listed, and fills the places that
        are left. So it is what a row starts with that has no finite logit; or one with NaN, while
        +inf is listed. `logits` is contiguous.
        """
        n, n_vocab, columns, rest = self._n, self._n_vocab, self._columns, self._rest
        whole = logits[:, : columns * self._deep]
        maxima = whole.reshape(n, self._deep, columns).max(axis=1)
        if rest:  # the ids that are left over lengthen the first columns by one
            np.maximum(maxima[:, :rest], logits[:, -rest:], out=maxima[:, :rest])
        bounds = self._bounds(maxima)
        rows, column = np.divmod(np.flatnonzero(maxima >= bounds[:, None]), columns)
        cells = (rows * n_vocab + column)[:, None] + self._down
        values = logits.reshape(-1).take(cells, mode="clip")
        if rest:
            values[column >= rest, -1] = -np.inf  # of the next row
        found = np.flatnonzero(values >= bounds[rows, None])
        rows, ids = np.divmod(cells.reshape(-1)[found], n_vocab)
        return self._in_order(logits, rows, _descending_keys(values.reshape(-1)[found], ids))

    def _bounds(self, maxima: FloatArray) -> FloatArray:
        """Return for each row a finite bound that its k-th largest logit reaches; NaN if it has NaN.

        The k-th largest of the maxima of any k or more disjoint parts is at most the k-th largest
        of all. With parts a few times as many as k, little more than k logits reach it.
        """
        parts, over = self._parts, self._over
        folded = maxima[:, : parts * _FOLD].reshape(self._n, _FOLD, parts).max(axis=1)
        if over:
            np.maximum(folded[:, 0], maxima[:, -over:].max(axis=1), out=folded[:, 0])
        largest_of_all = folded.max(axis=1)
        folded.partition(self._sorted_kths, axis=1)
        bounds: FloatArray = np.maximum(folded[self._rows, self._kth], _LOWEST)
        bounds[np.isnan(largest_of_all)] = np.nan  # a partition takes it for the largest
        return bounds

    def _in_order(
        self, logits: FloatArray, rows: IdArray, keys: KeyArray
    ) -> tuple[IdArray, FloatArray]:
        counts = np.bincount(rows, minlength=self._n)
        table = np.full((self._n, max(self._width, int(counts.max()))), _NO_KEY)
        first = np.cumsum(counts) - counts
        table[rows, np.arange(len(rows)) - first[rows]] = keys
        table.sort(axis=1)
        ids = _ids_of(table[:, : self._width])
        none = self._places >= np.minimum(counts, self._ks)[:, None]
        ids[none] = 0
        values = logits[self._rows[:, None], ids]
        values[none] = -np.inf
        return ids, values


def largest(row: FloatArray, k: int) -> tuple[IdArray, FloatArray]:
    """Return ids and logits of the `k` largest, descending, the lower id first on a tie.

    The k-th largest of the maxima of any k or more disjoint parts is at most the k-th largest
    of all, so comparing with it leaves little more than `k` to sort. `row` holds no NaN.
    """
    n_vocab = len(row)
    if is_short(k, n_vocab):
        columns = n_vocab // _GRID_ROWS
        maxima = row[: columns * _GRID_ROWS].reshape(_GRID_ROWS, columns).max(axis=0)
        maxima.partition(columns - k)
        ids = np.flatnonzero(row >= maxima[columns - k])
    elif k < n_vocab:
        ids = np.flatnonzero(row >= np.partition(row, n_vocab - k)[n_vocab - k])
    else:
        ids = np.arange(n_vocab)
    values = row[ids]
    order = _descending(values)[:k]
    return ids[order], values[order]


def nucleus(row: FloatArray, top: np.float32, top_p: float) -> tuple[IdArray, FloatArray]:
    """Return ids and logits of the likeliest tokens that together reach `top_p`, descending."""
    weights = weigh(row, top)
    enough = top_p * float(weights.sum(dtype=np.float64))
    for k in (*_NUCLEUS_SIZES, len(row)):
        ids, values = largest(row, k)
        reached = np.cumsum(weights[ids], dtype=np.float64)
        keep = int(np.searchsorted(reached, enough)) + 1
        if keep < k:
            break
    return ids[:keep], values[:keep]


def _descending(values: FloatArray) -> IdArray:
    if len(values) <= _SORTED_AS_FLOATS:
        return np.argsort(-values, kind="stable")
    # numpy's stable argsort takes 12 ms for a whole vocabulary, its plain sort of integers a tenth.
    keys = _descending_keys(values, np.arange(len(values)))
    keys.sort()
    return _ids_of(keys)


def _descending_keys(values: FloatArray, ids: IdArray) -> KeyArray:
    """Return integers that sort as the values do, descending, the lower id first on a tie.

    Sorting integers is several times as quick as a stable argsort. `_ids_of` gives the ids back.
    """
    bits = (values + np.float32(0.0)).view(np.uint32)  # + 0.0 makes -0.0 equal to 0.0
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (~ascending).astype(np.uint64) << _ID_BITS | ids.astype(np.uint64)


def _ids_of(keys: KeyArray) -> IdArray:
    return (keys & _ID_MASK).astype(np.intp)


def _depth(k: int, n_vocab: int) -> int:
    """Return how many logits a column has.

    About k columns are looked into, so that their depth weighs against the number of maxima;
    half of where both are equal was quickest, for a maximum is cheaper to make than a visit.
    """
    return max(1, int(math.sqrt(n_vocab / k) / 2))
