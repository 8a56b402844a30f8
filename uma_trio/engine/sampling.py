"""From a row of logits to a token: greedy for a whole tick, a :class:`Sampler` per sequence.

The rules and their order are those of llama.cpp's own chain (src/llama-sampler.cpp of the
vendored 0c1e57098): top_k, then top_p, then min_p, then temperature, then one draw. They are
numpy and not llama.cpp's chain because numpy is faster here (``benches/sampling.py``): the
chain first copies the row into 12-byte records, which alone costs more than everything below.

A row of logits is a view into the backend's memory and is left as it was: what must not be drawn
is masked in place for one choice. Greedy sampling reads it once; the others select the few tokens
that can be drawn before they sort anything. Only a draw from the whole vocabulary, and top_p
without top_k, need a working copy of the row (:attr:`Sampler.in_place`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from uma_trio.backend.base import FloatArray, IntArray
from uma_trio.engine.messages import SamplingParams

IdArray = NDArray[np.intp]

NOT_FINITE: Final = -1  # what `greedy` answers for a row that has no sane maximum

# Rows of the grid whose column maxima give a lower bound for the k-th largest logit. 64 keeps
# the grid's 2,400 columns (vocabulary of 152k) well above any usual top_k.
_GRID_ROWS: Final = 64
# How many of the likeliest tokens top_p sorts first, second; then all (llama.cpp: 256, all).
_TOP_P_STEPS: Final = (256, 8192)
_SORTED_AS_FLOATS: Final = 1024
# A draw over the whole vocabulary sums blocks of this many, then looks inside one block.
_BLOCK: Final = 512
# Below this, dividing by the temperature overflows float32 and leaves what greedy leaves.
_MIN_TEMPERATURE: Final = 1e-6


class NonFinite(ArithmeticError):
    """A row of logits holds NaN or +inf, or nothing but -inf: no token can be chosen."""


def greedy(logits: FloatArray) -> IntArray:
    """Return the likeliest token of each row of ``logits[n, vocab]``, the lowest id on a tie.

    A row with NaN or +inf, or without any finite logit, is answered with `NOT_FINITE`: argmax
    stops at the first NaN, so looking at the maximum is enough.
    """
    ids = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(ids)), ids])
    return np.where(finite, ids, NOT_FINITE).astype(np.int32)


class Sampler:
    """Chooses the tokens of one sequence, from its own stream of random numbers.

    The same parameters (with their seed) and the same rows give the same tokens, whatever
    else runs. Call it once for each token; the call draws at most one random number.
    """

    __slots__ = ("_masked", "_never", "_params", "_random", "greedy")

    def __init__(self, params: SamplingParams, end_tokens: Collection[int]) -> None:
        self._params = params
        self._random = random.Random(params.seed)
        self._never = frozenset(end_tokens) if params.ignore_eos else frozenset[int]()
        self._masked: IdArray | None = (
            np.array(sorted(self._never), np.intp) if self._never else None
        )
        self.greedy = params.temperature <= 0.0

    def choose(self, row: FloatArray, likeliest: int) -> int:
        """Return the next token for one row of logits, ``[vocab]``. Raises `NonFinite`.

        `likeliest` is what :func:`greedy` says of this row; where that is what is asked for the
        row is not read again.
        """
        if likeliest == NOT_FINITE:
            raise NonFinite("the row has no finite maximum")
        if self.greedy and likeliest not in self._never:
            return likeliest
        return self(row)

    def __call__(self, row: FloatArray) -> int:
        """Return the next token for one row of logits, ``[vocab]``. Raises `NonFinite`."""
        if self._masked is None:
            return self._choose(row)
        hidden = row[self._masked]
        row[self._masked] = -np.inf  # cheaper than a copy of the row, and undone
        try:
            return self._choose(row)
        finally:
            row[self._masked] = hidden

    def _choose(self, row: FloatArray) -> int:
        if self.greedy:
            best = int(row.argmax())
            _check(row[best])
            return best
        if self._filters:
            ids, probs = self._filtered(row)
            return int(ids[_draw(probs, self._random.random())])
        return _draw_from_all(self._weights(row), self._random.random())

    def candidates(self, row: FloatArray) -> tuple[IdArray, FloatArray]:
        """Return the tokens that can be drawn and their probabilities (for tests and tools).

        Likeliest first if a filter sorted them, by id otherwise. Raises `NonFinite`.
        """
        if self._masked is not None:
            row = _without(row, self._masked)
        if self.greedy:
            best = row.argmax()
            _check(row[best])
            return np.array([best], np.intp), np.ones(1, np.float32)
        if self._filters:
            ids, probs = self._filtered(row)
        else:
            probs = self._weights(row)
            ids = np.arange(len(probs))
        return ids, probs / probs.sum()

    def in_place(self, n_vocab: int) -> bool:
        """Whether a row of so many logits is read where it lies, and never copied whole."""
        params = self._params
        if self.greedy:
            return True
        if params.top_k > 0:
            return _has_grid(params.top_k, n_vocab)
        return params.min_p > 0.0 and params.top_p >= 1.0

    @property
    def _filters(self) -> bool:
        params = self._params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    def _filtered(self, row: FloatArray) -> tuple[IdArray, FloatArray]:
        """Return what the filters leave and its weights (probabilities but for a factor)."""
        params = self._params
        top = row.max()
        _check(top)
        if params.top_k > 0:
            ids, values = _largest(row, params.top_k)
            if params.top_p < 1.0:
                weights = np.exp(values - top)
                keep = _nucleus(weights, float(weights.sum(dtype=np.float64)), params.top_p)
                ids, values = ids[:keep], values[:keep]
        elif params.top_p < 1.0:
            ids, values = _top_p(row, top, params.top_p)
        else:
            ids = np.flatnonzero(row >= _min_logit(top, params.min_p))
            return ids, self._weights(row[ids])
        if params.min_p > 0.0:
            # Sorted by now, so that what passes is a beginning; the first always does.
            keep = max(1, int(np.count_nonzero(values >= _min_logit(top, params.min_p))))
            ids, values = ids[:keep], values[:keep]
        return ids, self._weights(values)

    def _weights(self, logits: FloatArray) -> FloatArray:
        """Return ``exp((logits - max) / temperature)``: 1 for the likeliest."""
        top = logits.max()
        _check(top)
        with np.errstate(over="ignore"):
            weights: FloatArray = np.subtract(logits, top)
            temperature = max(self._params.temperature, _MIN_TEMPERATURE)
            if temperature != 1.0:
                weights *= np.float32(1.0 / temperature)
            return np.exp(weights, out=weights)


def _check(top: np.floating) -> None:
    if not math.isfinite(top):
        raise NonFinite(f"the largest logit is {top}")


def _without(row: FloatArray, masked: IdArray) -> FloatArray:
    masked_row = row.copy()
    masked_row[masked] = -np.inf
    return masked_row


def _min_logit(top: np.floating, min_p: float) -> np.float32:
    """Return the logit from which on a token is at least `min_p` times as likely as the top."""
    return np.float32(top + np.float32(math.log(min_p)))


def _has_grid(k: int, n_vocab: int) -> bool:
    """Whether the `k` largest are found by the maxima of columns, without a copy of the row."""
    return 2 * k <= n_vocab // _GRID_ROWS


def _largest(row: FloatArray, k: int) -> tuple[IdArray, FloatArray]:
    """Return ids and logits of the `k` largest, descending, the lower id first on a tie.

    The k-th largest of the maxima of any k or more disjoint parts is at most the k-th largest
    of all, so comparing with it leaves little more than `k` to sort. `row` holds no NaN.
    """
    n_vocab = len(row)
    columns = n_vocab // _GRID_ROWS
    if _has_grid(k, n_vocab):
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


def _descending(values: FloatArray) -> IdArray:
    """Return the order that sorts `values` descending and keeps equal ones as they are."""
    if len(values) <= _SORTED_AS_FLOATS:
        return np.argsort(-values, kind="stable")
    # numpy's stable argsort takes 12 ms for a whole vocabulary, its plain sort of integers a
    # tenth. So: the float's bits, mapped to an unsigned order, above the index.
    bits = (values + np.float32(0.0)).view(np.uint32)  # + 0.0 makes -0.0 equal to 0.0
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    keys = (~ascending).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(len(values), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.intp)


def _top_p(row: FloatArray, top: np.floating, top_p: float) -> tuple[IdArray, FloatArray]:
    """Return ids and logits of the likeliest tokens that together reach `top_p`, descending."""
    weights = np.subtract(row, top)
    np.exp(weights, out=weights)
    total = float(weights.sum(dtype=np.float64))
    for k in (*_TOP_P_STEPS, len(row)):
        ids, values = _largest(row, k)
        keep = _nucleus(weights[ids], total, top_p)
        if keep < k:
            break
    return ids[:keep], values[:keep]


def _nucleus(weights: FloatArray, total: float, top_p: float) -> int:
    """Return how many of the descending `weights` it takes to reach the share `top_p`."""
    reached = np.cumsum(weights, dtype=np.float64)
    return min(int(np.searchsorted(reached, top_p * total)) + 1, len(weights))


def _draw(weights: FloatArray, u: float) -> int:
    """Return an index, drawn in proportion to `weights` by `u` of [0, 1)."""
    reached = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(reached, u * reached[-1], side="right"))
    # Rounding may push u * total to the total itself; then the likeliest stands in.
    return index if index < len(weights) else int(weights.argmax())


def _draw_from_all(weights: FloatArray, u: float) -> int:
    """Like `_draw` for a whole vocabulary: find the block first, then look inside it."""
    n_blocks, rest = divmod(len(weights), _BLOCK)
    whole = n_blocks * _BLOCK
    sums = weights[:whole].reshape(n_blocks, _BLOCK).sum(axis=1, dtype=np.float32)
    reached = np.empty(n_blocks + 1, np.float64)
    np.cumsum(sums, out=reached[:-1], dtype=np.float64)
    before_rest = reached[-2] if n_blocks else 0.0
    reached[-1] = before_rest + (weights[whole:].sum(dtype=np.float64) if rest else 0.0)
    target = u * reached[-1]
    block = min(int(np.searchsorted(reached, target, side="right")), n_blocks)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
    within = np.cumsum(inside, dtype=np.float64)
    target -= reached[block - 1] if block else 0.0
    index = int(np.searchsorted(within, target, side="right"))
    if index < len(inside):
        return block * _BLOCK + index
    # Block sums are float32 and may exceed what adding one by one reaches.
    return block * _BLOCK + int(inside.argmax()) if len(inside) else int(weights.argmax())
