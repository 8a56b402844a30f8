"""How far llama.cpp looks into the KV cache, held still while sequences come and go.

A decode works on the cells up to the last one in use, in steps of 256 (`get_n_kv` in
llama-kv-cache.cpp). On CUDA another step is another graph, and the two ticks that launch and
capture it are slow: beside prompts that end and begin, one tick in ten. So the last cell of a
sequence that ends may stay, in a sequence that nobody computes, and the step with it.
"""

from __future__ import annotations

from typing import Final

from uma_trio.backend import _llama_lib as lib

# Which of the cells it is nobody tells, so that many stay, and the one that counts is likely among
# them; when there are too many, all go, and it begins anew. Whoever finds no room has theirs, too.
MOST_KEPT: Final = 64


class Extent:
    """The cells that stay, of one llama.cpp memory; they belong to the sequence `keeper`."""

    def __init__(self, memory: int, keeper: int) -> None:
        self._memory = memory
        self._keeper = keeper
        self.kept = 0

    def keep(self, slot: int) -> None:
        """Let the last cell of `slot` stay when the others go."""
        last = lib.seq_pos_max(self._memory, slot)
        if last < 0:
            return
        if self.kept == MOST_KEPT:
            self.let_go()
        lib.seq_cp(self._memory, slot, self._keeper, last, last + 1)
        self.kept += 1

    def let_go(self) -> bool:
        """Drop all that stayed; False if that is nothing."""
        if not self.kept:
            return False
        lib.seq_rm(self._memory, self._keeper, -1, -1)
        self.kept = 0
        return True
