"""Which cells of a unified KV cache are in use, placed as llama.cpp places them.

llama.cpp does not say where a sequence's cells lie, nor how far the highest of them is, and that
decides what a tick costs: attention spans all cells up to it (`get_n_kv`). But its placement is
deterministic (`find_slot` in llama-kv-cache.cpp): the first free cells from `head` on, which goes to
the end of what was placed and down to the first cell that is freed. So it can be computed along.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from uma_trio.backend.base import IntArray


class CellMap:
    """The cells of `n_seq` sequences that may share them, in a cache of `n_cells`.

    Positions of a sequence are consecutive from 0. Nothing here is proportional to the history but
    what drops or shares it.
    """

    def __init__(self, n_cells: int, n_seq: int) -> None:
        self._size = n_cells
        self._holders: NDArray[np.int16] = np.zeros(n_cells, np.int16)
        self._where: IntArray = np.zeros((n_seq, n_cells), np.int32)  # by sequence and position
        self._lengths: IntArray = np.zeros(n_seq, np.int32)
        self._cells: IntArray = np.arange(n_cells, dtype=np.int32)
        self._head = 0
        self.used = 0
        self.high_water = 0

    @property
    def head(self) -> int:
        """Where the search for free cells begins."""
        return self._head

    def length(self, seq: int) -> int:
        return int(self._lengths[seq])

    def exclusive(self, seq: int) -> NDArray[np.bool_]:
        """Return for each position of `seq` whether no other sequence holds its cell."""
        alone: NDArray[np.bool_] = self._holders[self._where[seq, : self._lengths[seq]]] == 1
        return alone

    def runs(self, seq: int, first: int, last: int) -> int:
        """Return in how many runs of neighbouring cells positions ``[first, last)`` lie."""
        cells = self._where[seq, first:last]
        return int(np.count_nonzero(np.diff(cells) != 1)) + 1 if len(cells) else 0

    def shared(self, seqs: Sequence[int]) -> int:
        """Return how many cells fewer `seqs` hold together than one by one."""
        held = np.zeros(self._size, np.bool_)
        total = 0
        for seq in seqs:
            cells = self._where[seq, : self._lengths[seq]]
            held[cells] = True
            total += len(cells)
        return total - int(np.count_nonzero(held))

    def portions(self, seqs: Sequence[int], but_for: Sequence[int]) -> list[float]:
        """Return how many cells each of `seqs` holds that none of `but_for` does.

        A cell that several of `seqs` hold counts for each in equal parts.
        """
        held = [self._cells_of(seq) for seq in seqs]
        holders = np.zeros(self._size, np.int32)
        for cells in held:
            holders[cells] += 1
        part = np.divide(1.0, holders, where=holders > 0, out=np.zeros(self._size))
        for seq in but_for:
            part[self._cells_of(seq)] = 0.0
        return [float(part[cells].sum()) for cells in held]

    def only(self, cells: list[int]) -> int:
        """Return how many of these cells have one holder."""
        return int(np.count_nonzero(self._holders[cells] == 1))

    def place(self, ids: IntArray, positions: IntArray) -> bool:
        """Place a token for each of `ids` and `positions`, in that order; False without room."""
        cells = self._free_cells(len(ids))
        if cells is None:
            return False
        self._holders[cells] = 1
        self._where[ids, positions] = cells
        self._lengths[ids] = positions + 1  # the last of each sequence counts
        self._head = int(cells[-1]) + 1
        self.used += len(cells)
        self.high_water = max(self.high_water, int(cells.max()) + 1)
        return True

    def order(self, seq: int, first: int, last: int) -> IntArray:
        """Return positions ``[first, last)`` in the order of their cells, as llama.cpp saves them."""
        order: IntArray = np.argsort(self._where[seq, first:last]).astype(np.int32)
        return first + order

    def restore(self, seq: int, order: IntArray) -> bool:
        """Place the positions of `seq` in this `order`; False without room."""
        if not self.place(np.full(len(order), seq, np.int32), order):
            return False
        self._lengths[seq] = int(order.max()) + 1
        return True

    def share(self, src: int, dst: int, first: int, last: int) -> None:
        """Let `dst`, which ends at `first`, hold positions ``[first, last)`` of `src` too."""
        cells = self._where[src, first:last]
        self._where[dst, first:last] = cells
        self._holders[cells] += 1
        self._lengths[dst] = last

    def drop(self, seq: int, first: int = 0) -> None:
        last = int(self._lengths[seq])
        if first >= last:
            return
        self._release(self._where[seq, first:last])
        self._lengths[seq] = first

    def drop_part(self, seq: int, first: int) -> None:
        """Let `seq`, which holds nothing before `first`, hold nothing at all."""
        self.drop(seq, first)
        self._lengths[seq] = 0

    def hold_last(self, seq: int) -> int:
        """Keep the last cell of `seq` outside of all sequences; return which it is."""
        cell = int(self._where[seq, self._lengths[seq] - 1])
        self._holders[cell] += 1
        return cell

    def release(self, cells: list[int]) -> None:
        """Release the cells that :meth:`hold_last` returned, each once."""
        for cell in cells:
            self._release(self._cells[cell : cell + 1])

    def _cells_of(self, seq: int) -> IntArray:
        cells: IntArray = self._where[seq, : self._lengths[seq]]
        return cells

    def _release(self, cells: IntArray) -> None:
        self._holders[cells] -= 1
        freed = cells[self._holders[cells] == 0]
        if not len(freed):
            return
        self.used -= len(freed)
        self._head = min(self._head, int(freed.min()))
        if int(freed.max()) + 1 == self.high_water:
            held = np.flatnonzero(self._holders[: self.high_water])
            self.high_water = int(held[-1]) + 1 if len(held) else 0

    def _free_cells(self, n: int) -> IntArray | None:
        """Return the `n` cells that llama.cpp would take; None if there are not so many."""
        if self.used + n > self._size:
            return None
        head = 0 if self._head > self.used + 2 * n else self._head
        if head + n <= self._size and not self._holders[head : head + n].any():
            run: IntArray = self._cells[head : head + n]
            return run
        behind: IntArray = self._cells[head:][self._holders[head:] == 0][:n]
        if len(behind) == n:
            return behind
        before = self._cells[:head][self._holders[:head] == 0][: n - len(behind)]
        return np.concatenate((behind, before))
