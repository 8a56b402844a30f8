"""Random numbers that are found by their place: no state, so that none is used up by who looks at it.

The n-th token of an answer is drawn with the n-th number of its seed, whatever was computed in vain
before it. The numbers are those of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014), whose n-th output is a function of its seed and n.
"""

from __future__ import annotations

import random
from typing import Final

_BITS: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_UNIT: Final = 2.0**-53


class Numbers:
    """Numbers of [0, 1), one for each place from 0 on; the same `seed` gives the same ones.

    `seed` is a number or a text. It is hashed, so that those of neighbouring seeds have nothing in common.
    """

    __slots__ = ("_key",)

    def __init__(self, seed: int | str) -> None:
        self._key = random.Random(seed).getrandbits(64)

    def __call__(self, place: int) -> float:
        """Return the number of a place."""
        bits = (self._key + (place + 1) * _STEP) & _BITS
        bits = ((bits ^ (bits >> 30)) * _MIX[0]) & _BITS
        bits = ((bits ^ (bits >> 27)) * _MIX[1]) & _BITS
        return ((bits ^ (bits >> 31)) >> 11) * _UNIT
