"""From rows of logits to tokens: :func:`choose` for a whole tick, a :class:`Sampler` per sequence.

The rules and their order are those of llama.cpp's own chain (src/llama-sampler.cpp of the
vendored 0c1e57098): top_k, then top_p, then min_p, then temperature, then one draw. They are
numpy and not llama.cpp's chain because numpy is faster here (``benches/sampling.py``): the
chain first copies the row into 12-byte records, which alone costs more than everything below.

The logits are a view into the backend's memory and are left as they were: what must not be drawn
is masked in place for one choice. They are read once for all rows: by argmax, or for the short
lists from which greedy and top_k rows are chosen together. A row that needs more than a short
list is then looked at by itself; only a draw from the whole vocabulary, and top_p without top_k,
need a working copy of it (:attr:`Sampler.in_place`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from uma_trio.backend.base import FloatArray, IntArray
from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.shortlist import IdArray, descending_keys, ids_of, is_short, shortlist

NOT_FINITE: Final = -1  # what is answered for a row that has no sane maximum
_NO_MAXIMUM: Final = "the row has no finite maximum"

# How many of the likeliest tokens top_p sorts first, second; then all (llama.cpp: 256, all).
_TOP_P_STEPS: Final = (256, 8192)
# A short list has at most half as many tokens as the vocabulary has columns of this depth.
_GRID_ROWS: Final = 32
# With fewer rows to draw from short lists, row by row is quicker: it takes fewer calls of numpy.
_TOGETHER: Final = 3
_SORTED_AS_FLOATS: Final = 1024
# A draw over the whole vocabulary sums blocks of this many, then looks inside one block.
_BLOCK: Final = 512
# Below this, dividing by the temperature overflows float32 and leaves what greedy leaves.
_MIN_TEMPERATURE: Final = 1e-6


class NonFinite(ArithmeticError):
    """A row of logits holds NaN or +inf, or nothing but -inf: no token can be chosen."""


class Sampler:
    """Chooses the tokens of one sequence, from its own stream of random numbers.

    The same parameters (with their seed) and the same rows give the same tokens, whatever
    else runs. A token draws at most one random number.
    """

    __slots__ = ("_random", "greedy", "min_logit", "never", "params", "scale")

    def __init__(self, params: SamplingParams, end_tokens: Collection[int]) -> None:
        self.params = params
        self.greedy = params.temperature <= 0.0
        self.never: IdArray | None = None  # what must not be drawn
        if params.ignore_eos and end_tokens:
            self.never = np.array(sorted(set(end_tokens)), np.intp)
        self.scale = np.float32(1.0 / max(params.temperature, _MIN_TEMPERATURE))
        # What min_p asks for: so far under the largest logit, or less.
        self.min_logit = np.float32(math.log(params.min_p) if params.min_p > 0.0 else -math.inf)
        self._random = random.Random(params.seed)

    def __call__(self, row: FloatArray) -> int:
        """Return the next token for one row of logits, ``[vocab]``. Raises `NonFinite`."""
        (token,) = choose(row[np.newaxis], [self])
        if token == NOT_FINITE:
            raise NonFinite(_NO_MAXIMUM)
        return token

    def random(self) -> float:
        """Draw the next number of [0, 1) of this sequence."""
        return self._random.random()

    def pick(self, row: FloatArray, likeliest: int) -> int:
        """Return the next token for a row whose (finite) maximum is known.

        What must not be drawn is -inf in it already.
        """
        if self.greedy:
            return likeliest
        top = row[likeliest]
        if self._filters:
            ids, probs = self._filtered(row, top)
            return int(ids[_draw(probs, self.random())])
        return _draw_from_all(self._weights(row, top), self.random())

    def candidates(self, row: FloatArray) -> tuple[IdArray, FloatArray]:
        """Return the tokens that can be drawn and their probabilities (for tests and tools).

        Likeliest first if a filter sorted them, by id otherwise. Raises `NonFinite`.
        """
        if self.never is not None:
            row = _without(row, self.never)
        (likeliest,) = greedy(row[np.newaxis])
        if likeliest == NOT_FINITE:
            raise NonFinite(_NO_MAXIMUM)
        if self.greedy:
            return np.array([likeliest], np.intp), np.ones(1, np.float32)
        if self._filters:
            ids, probs = self._filtered(row, row[likeliest])
        else:
            probs = self._weights(row, row[likeliest])
            ids = np.arange(len(probs))
        return ids, probs / probs.sum()

    def in_place(self, n_vocab: int) -> bool:
        """Whether a row of so many logits is read where it lies, and never copied whole."""
        params = self.params
        if self.greedy:
            return True
        if params.top_k > 0:
            return is_short(params.top_k, n_vocab)
        return params.min_p > 0.0 and params.top_p >= 1.0

    @property
    def _filters(self) -> bool:
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    def _filtered(self, row: FloatArray, top: np.float32) -> tuple[IdArray, FloatArray]:
        """Return what the filters leave and its weights (probabilities but for a factor)."""
        params = self.params
        if params.top_k > 0:
            ids, values = _largest(row, params.top_k)
            if params.top_p < 1.0:
                weights = np.exp(values - top)
                keep = _nucleus(weights, float(weights.sum(dtype=np.float64)), params.top_p)
                ids, values = ids[:keep], values[:keep]
        elif params.top_p < 1.0:
            ids, values = _top_p(row, top, params.top_p)
        else:
            ids = np.flatnonzero(row >= top + self.min_logit)
            return ids, self._weights(row[ids], top)
        if params.min_p > 0.0:
            # Sorted by now, so that what passes is a beginning; the first always does.
            keep = max(1, int(np.count_nonzero(values >= top + self.min_logit)))
            ids, values = ids[:keep], values[:keep]
        return ids, self._weights(values, top)

    def _weights(self, logits: FloatArray, top: np.float32) -> FloatArray:
        """Return ``exp((logits - top) / temperature)``: 1 for the likeliest."""
        with np.errstate(over="ignore"):
            weights: FloatArray = np.subtract(logits, top)
            if self.scale != 1.0:
                weights *= self.scale
            return np.exp(weights, out=weights)


def choose(logits: FloatArray, samplers: Sequence[Sampler]) -> list[int]:
    """Return the next token of each row of ``logits[n, vocab]``, one sampler a row, in order.

    `NOT_FINITE` stands for a row with NaN or +inf, or without any finite logit that may be
    drawn; the other rows are not touched by it. The tokens are those that each sampler gives for
    its row alone, in whatever company.
    """
    hidden = [
        (row, sampler.never, logits[row, sampler.never])
        for row, sampler in enumerate(samplers)
        if sampler.never is not None
    ]
    for row, never, _ in hidden:
        logits[row, never] = -np.inf  # cheaper than a copy of the row, and undone
    try:
        tokens = _choose(logits, samplers)
    finally:
        for row, never, values in hidden:
            logits[row, never] = values
    for row, _, values in hidden:
        if not (values < np.inf).all():
            tokens[row] = NOT_FINITE
    return tokens


def greedy(logits: FloatArray) -> IntArray:
    """Return the likeliest token of each row of ``logits[n, vocab]``, the lowest id on a tie.

    A row with NaN or +inf, or without any finite logit, is answered with `NOT_FINITE`: argmax
    stops at the first NaN, so looking at the maximum is enough.
    """
    ids = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(ids)), ids])
    return np.where(finite, ids, NOT_FINITE).astype(np.int32)


def _choose(logits: FloatArray, samplers: Sequence[Sampler]) -> list[int]:
    """Like `choose`, for logits in which what must not be drawn is -inf already."""
    n_vocab = logits.shape[1]
    listed = [
        row
        for row, sampler in enumerate(samplers)
        if not sampler.greedy and is_short(sampler.params.top_k, n_vocab)
    ]
    together = len(listed) >= _TOGETHER
    tokens = _from_lists(logits, samplers, listed) if together else greedy(logits).tolist()
    chosen = set(listed) if together else ()
    for row, sampler in enumerate(samplers):
        if not sampler.greedy and row not in chosen and tokens[row] != NOT_FINITE:
            tokens[row] = sampler.pick(logits[row], tokens[row])
    return tokens


def _from_lists(logits: FloatArray, samplers: Sequence[Sampler], listed: list[int]) -> list[int]:
    """Return the tokens drawn for the rows `listed`, for others the likeliest; or NOT_FINITE."""
    ks = [1] * len(samplers)
    for row in listed:
        ks[row] = samplers[row].params.top_k
    ids, values = shortlist(logits, ks)
    finite = np.isfinite(values[:, 0])
    tokens: list[int] = np.where(finite, ids[:, 0], NOT_FINITE).tolist()
    drawn = [row for row in listed if tokens[row] != NOT_FINITE]
    drawers = [samplers[row] for row in drawn]
    for row, token in zip(drawn, _draw_each(ids[drawn], values[drawn], drawers), strict=True):
        tokens[row] = token
    return tokens


def _draw_each(ids: IdArray, values: FloatArray, samplers: Sequence[Sampler]) -> list[int]:
    """Draw one token from each short list: its filters, its temperature, its random number.

    The columns are the ranks, so that each filter keeps a beginning of the row. Where a list is
    shorter than others it ends in -inf, which weighs nothing.
    """
    top_p = np.array([s.params.top_p for s in samplers])
    min_logit = np.array([s.min_logit for s in samplers])
    scale = np.array([s.scale for s in samplers])
    u = np.array([s.random() for s in samplers])
    rank = np.arange(ids.shape[1])
    top = values[:, :1]
    with np.errstate(over="ignore"):
        below = values - top
        kept = values >= top + min_logit[:, None]
        if (top_p < 1.0).any():
            reached = np.cumsum(np.exp(below), axis=1, dtype=np.float64)
            enough = (reached < (top_p * reached[:, -1])[:, None]).sum(axis=1)
            kept &= (rank <= enough[:, None]) | (top_p >= 1.0)[:, None]
        below *= scale[:, None]
    weights = np.exp(below) * kept
    reached = np.cumsum(weights, axis=1, dtype=np.float64)
    index = (reached <= (u * reached[:, -1])[:, None]).sum(axis=1)
    # Rounding may push u * total to the total itself; then the likeliest stands in.
    index[index == len(rank)] = 0
    tokens: list[int] = ids[np.arange(len(ids)), index].tolist()
    return tokens


def _without(row: FloatArray, masked: IdArray) -> FloatArray:
    masked_row = row.copy()
    masked_row[masked] = -np.inf
    return masked_row


def _largest(row: FloatArray, k: int) -> tuple[IdArray, FloatArray]:
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


def _descending(values: FloatArray) -> IdArray:
    """Return the order that sorts `values` descending and keeps equal ones as they are."""
    if len(values) <= _SORTED_AS_FLOATS:
        return np.argsort(-values, kind="stable")
    # numpy's stable argsort takes 12 ms for a whole vocabulary, its plain sort of integers a tenth.
    keys = descending_keys(values, np.arange(len(values)))
    keys.sort()
    return ids_of(keys)


def _top_p(row: FloatArray, top: np.float32, top_p: float) -> tuple[IdArray, FloatArray]:
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
