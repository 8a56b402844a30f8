"""What inputs of a causal encoder begin with, kept in its KV cache from one batch to the next.

An instruction before each query, or a template and a query before each document, is computed once. What is kept
is one sequence of cells, which those of the inputs share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_options import MAX_SLOTS
from uma_trio.backend.base import IntArray

#: The sequence of what is kept. Inputs have those below it.
KEPT: Final = MAX_SLOTS - 1
#: The longest that is kept, and the shortest that is worth a copy.
MOST: Final = 1024
LEAST: Final = 8
_NOTHING: Final = np.zeros(0, np.int32)


class KeptPrefix:
    """The beginning that is kept in one memory. With `keeps` False nothing is: state cannot be cut off behind it.

    It is one user's, and only inputs of that user have it: how soon an answer comes would tell others what it is.
    """

    def __init__(self, memory: int, *, keeps: bool) -> None:
        self._memory, self._keeps = memory, keeps
        self._kept = self._latest = _NOTHING
        self._kept_for = self._latest_of = ""

    def begin(self, inputs: Sequence[IntArray], users: Sequence[str]) -> list[int]:
        """Give each input what is kept of it; return how many of its tokens that is. The last one is computed."""
        found: list[int] = []
        for seq, (tokens, user) in enumerate(zip(inputs, users, strict=True)):
            n = min(self._common(tokens, user), len(tokens) - 1)
            found.append(n if n >= LEAST else 0)
            if found[-1]:
                lib.seq_cp(self._memory, KEPT, seq, 0, n)
        return found

    def end(self, inputs: Sequence[IntArray], users: Sequence[str]) -> None:
        """Keep what all inputs of the first one's user begin with, if that is more than is kept of it; forget the rest."""
        first, user = inputs[0], users[0]
        others = [tokens for tokens, whose in zip(inputs, users, strict=True) if whose == user][1:]
        if not others and self._latest_of == user:
            others = [self._latest]
        n = min(MOST, *(common(first, tokens) for tokens in others or [_NOTHING]))
        if self._keeps and n >= LEAST and n > self._common(first[:n], user):
            lib.seq_rm(self._memory, KEPT, -1, -1)
            lib.seq_cp(self._memory, 0, KEPT, 0, n)
            self._kept, self._kept_for = first[:n].copy(), user
        self._latest, self._latest_of = inputs[-1], users[-1]
        for seq in range(len(inputs)):
            lib.seq_rm(self._memory, seq, -1, -1)

    def clear(self) -> None:
        """Forget everything: a batch was not computed to its end."""
        for seq in range(MAX_SLOTS):
            lib.seq_rm(self._memory, seq, -1, -1)
        self._kept = self._latest = _NOTHING

    def _common(self, tokens: IntArray, user: str) -> int:
        """Return how many tokens of a user's input are kept."""
        return common(self._kept, tokens) if user == self._kept_for else 0


def common(one: IntArray, other: IntArray) -> int:
    """Return how many tokens two texts begin with alike."""
    n = min(len(one), len(other))
    differs = np.flatnonzero(one[:n] != other[:n])
    return int(differs[0]) if len(differs) else n
