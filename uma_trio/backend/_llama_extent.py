"""How far llama.cpp looks into the KV cache, held still while sequences come and go.

A decode works on the cells up to the last one in use, in steps of 256 (`get_n_kv` in
llama-kv-cache.cpp). On CUDA another step is another graph, and the two ticks that launch and
capture it are slow: beside prompts that end and begin, one tick in ten. So the last cell of a
sequence that ends may stay, in a sequence that nobody computes, and the step with it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from uma_trio.backend import _llama_lib as lib

# Which cell of the cache it is nobody tells, so that those of the latest sequences stay, and the one
# that counts is among them. They are lost to others, but where those find no room.
MOST_KEPT: Final = 64


class Extent:
    """The cells that stay, of one llama.cpp memory; they belong to the sequence `keeper`."""

    def __init__(self, memory: int, keeper: int) -> None:
        self._memory = memory
        self._keeper = keeper
        self._kept: deque[int] = deque()  # their positions, in the sequences that they were of

    def keep(self, slot: int) -> None:
        """Let the last cell of `slot` stay when the others go."""
        last = lib.seq_pos_max(self._memory, slot)
        if last < 0:
            return
        if len(self._kept) == MOST_KEPT:
            oldest = self._kept.popleft()
            lib.seq_rm(self._memory, self._keeper, oldest, oldest + 1)
        lib.seq_cp(self._memory, slot, self._keeper, last, last + 1)
        self._kept.append(last)

    def let_go(self) -> bool:
        """Drop all that stayed; False if that is nothing."""
        if not self._kept:
            return False
        lib.seq_rm(self._memory, self._keeper, -1, -1)
        self._kept.clear()
        return True
