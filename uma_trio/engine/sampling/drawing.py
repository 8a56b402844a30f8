"""From a list of tokens' logits to one of them: its filters, its temperature, one draw.

The lists are those of :mod:`uma_trio.engine.sampling.shortlist`. Everything here works along the last
axis: on one list with plain numbers, or on many at once with a column for each number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import SamplingParams

_BITS: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_UNIT: Final = 2.0**-53


class Numbers:
    """Numbers of [0, 1), one for each place from 0 on; the same `seed` gives the same ones.

    The n-th token of an answer is drawn with the n-th number of its seed, whatever was computed in vain before it. They
    are those of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), whose
    n-th output is a function of its seed and n.

    `seed` is a number or a text. It is hashed, so that those of neighbouring seeds have nothing in common.
    """

    __slots__ = ("_key",)

    def __init__(self, seed: int | str) -> None:
        self._key = random.Random(seed).getrandbits(64)

    def __call__(self, place: int) -> float:
        """Return the number of a place."""
        bits = (self._key + (place + 1) * _GAMMA) & _BITS
        bits = ((bits ^ (bits >> 30)) * _MIX[0]) & _BITS
        bits = ((bits ^ (bits >> 27)) * _MIX[1]) & _BITS
        return ((bits ^ (bits >> 31)) >> 11) * _UNIT


Number = float | NDArray[Any]  # or one for each list, as a column
Logit = np.float32 | FloatArray

# Below this, dividing by the temperature overflows float32 and leaves what greedy leaves.
_MIN_TEMPERATURE: Final = 1e-6
# A draw over the whole vocabulary sums blocks of this many, then looks inside one block.
_BLOCK: Final = 512


@frozen(eq=False)
class Filters:
    """What is left to do for a request once its list is found; of many requests if `together`.

    `top_p` is a part of what the list weighs, inf if there is none (`cumulative` says whether
    there is); the list descends then. `min_logit` is how far under the largest logit min_p goes
    (`bounded` says whether it is asked for), `scale` one over the temperature.
    """

    top_p: Number
    min_logit: Number
    scale: Number
    cumulative: bool
    bounded: bool

    @classmethod
    def of(cls, params: SamplingParams) -> Filters:
        """Return the filters of one request.

        Without top_k, top_p is a part of the whole vocabulary, and what is found is just that.
        """
        cumulative = params.top_k > 0 and params.top_p < 1.0
        return cls(
            top_p=params.top_p if cumulative else math.inf,
            min_logit=math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            scale=1.0 / max(params.temperature, _MIN_TEMPERATURE),
            cumulative=cumulative,
            bounded=params.min_p > 0.0,
        )

    @classmethod
    def together(cls, each: Sequence[Filters]) -> Filters:
        """Return those of many requests, for a list each."""
        return cls(
            top_p=column([f.top_p for f in each], np.float64),
            min_logit=column([f.min_logit for f in each], np.float32),
            scale=column([f.scale for f in each], np.float32),
            cumulative=any(f.cumulative for f in each),
            bounded=any(f.bounded for f in each),
        )

    def kept(self, values: FloatArray, top: Logit) -> NDArray[np.bool_]:
        """Return which tokens of these logits are left, `top` being the largest; that one is."""
        kept = np.ones(values.shape, np.bool_)
        for rule in self._rules(values, top, _under(values, top)):
            kept &= rule
        return kept

    def weights(self, values: FloatArray, top: Logit) -> FloatArray:
        """Return the probabilities but for a factor, 0 for what is not left.

        A list that is shorter than its neighbours ends in -inf, which weighs nothing.
        """
        under = _under(values, top)
        weights = _exp(under, self.scale)
        for rule in self._rules(values, top, under):
            weights *= rule
        return weights

    def _rules(
        self, values: FloatArray, top: Logit, under: FloatArray
    ) -> Iterator[NDArray[np.bool_]]:
        if self.bounded:
            yield values >= top + self.min_logit
        if self.cumulative:  # a token that stays has less than top_p before it
            reached = np.cumsum(np.exp(under), axis=-1, dtype=np.float64)
            left = np.ones(values.shape, np.bool_)
            np.less(reached[..., :-1], self.top_p * reached[..., -1:], out=left[..., 1:])
            yield left


def column(numbers: Sequence[Number], kind: type[np.floating[Any]]) -> NDArray[Any]:
    """Return a number for each list, so that it goes with all of its places."""
    return np.array(numbers, kind)[:, np.newaxis]


def weigh(logits: FloatArray, top: Logit, scale: Number = 1.0) -> FloatArray:
    """Return ``exp((logits - top) * scale)``: 1 for the largest, which is `top`."""
    under = _under(logits, top)
    return _exp(under, scale, out=under)


def _under(logits: FloatArray, top: Logit) -> FloatArray:
    with np.errstate(over="ignore"):  # what is further down than float32 reaches weighs nothing
        under: FloatArray = np.subtract(logits, top)
    return under


def _exp(under: FloatArray, scale: Number, out: FloatArray | None = None) -> FloatArray:
    if not isinstance(scale, float) or scale != 1.0:
        with np.errstate(over="ignore"):
            out = under = np.multiply(under, scale, out=out)
    return np.exp(under, out=out)


def draw(weights: FloatArray, u: Number) -> NDArray[np.intp]:
    """Return a place of each list, drawn in proportion to its `weights` by its `u` of [0, 1)."""
    reached = np.cumsum(weights, axis=-1, dtype=np.float64)
    # A number under 1 times the total stays under it, so that some place is beyond.
    places: NDArray[np.intp] = (reached > u * reached[..., -1:]).argmax(axis=-1)
    return places


def draw_from_all(weights: FloatArray, u: float) -> int:
    """Like `draw` for a whole vocabulary: find the block first, then look inside it."""
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
