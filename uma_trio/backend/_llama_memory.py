"""What llama.cpp's KV cache holds: cells of sequences, shared, saved and restored.

One stream for all sequences (`kv_unified`), so that a copy only marks cells as held by one more.
Sequence ids from ``n_seq_max`` to 255 take part in everything but a batch, and cost no row of logits:
they are the leaves, where cells stay that no running sequence holds. A state *saved* from such an id
cannot be restored (its cells name no sequence, `state_write_meta`), so it goes by way of one below.

Where layers have a sliding window, a cell that is out of its only holder's window counts as empty
(`find_slot`), and a leaf would lose its past to the next computation. So each leaf is two
sequences there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_options import MAX_SLOTS
from uma_trio.backend.base import IntArray, Saved
from uma_trio.backend.cell_map import CellMap

# How many cells of ended sequences stay where the high-water mark is kept. Which of them it is is
# not looked up, so that many stay, and the one that counts is likely among them; when there are too
# many, all are dropped. They are also dropped when there is no room otherwise.
MOST_KEPT: Final = 64
_KEEPER: Final = MAX_SLOTS - 1  # the sequence id that holds them


class CacheMemory:
    """The memory of one context with `n_slots` slots; `can_go_back` says it is all attention.

    `scratch` is a sequence id below ``n_seq_max`` that no batch uses, for saving; None if there is
    none, and then no leaves. Every id is the caller's to check (:meth:`check`).
    """

    def __init__(
        self,
        context: int,
        memory: int,
        *,
        n_slots: int,
        n_ctx: int,
        window: int,
        can_go_back: bool,
        scratch: int | None,
        keeps_high_water: bool,
    ) -> None:
        self._context = context
        self._memory = memory
        self._n_slots, self._n_ctx = n_slots, n_ctx
        self._window = window
        self._scratch = scratch if can_go_back else None
        self._keeps = keeps_high_water and can_go_back and n_slots < MAX_SLOTS
        self.map = CellMap(n_ctx, MAX_SLOTS) if can_go_back else None
        step = 2 if window else 1
        first = MAX_SLOTS if self._scratch is None else self._scratch + 1
        self.leaf_ids = range(first, _KEEPER - step + 1, step)
        self._kept: list[int] = []

    @property
    def kept(self) -> int:
        """How many cells are held by no sequence, so that the high-water mark stays."""
        return len(self._kept)

    def check(self, seq: int) -> None:
        """Raise IndexError unless `seq` is a slot or a leaf: llama.cpp would end the process."""
        if not (0 <= seq < self._n_slots or seq in self.leaf_ids):
            raise IndexError(f"there is no slot {seq}")

    def placed(self, slots: IntArray, positions: IntArray) -> None:
        if self.map is not None:
            self.map.place(slots, positions)

    def removed(self, slots: IntArray, positions: IntArray) -> None:
        """Note that llama.cpp gave a batch up, and dropped what it had placed."""
        if self.map is None or not self.map.place(slots, positions):
            return
        for slot in set(slots.tolist()):
            self.map.drop(slot, int(positions[slots == slot].min()))

    def length(self, seq: int) -> int:
        return int(lib.seq_pos_max(self._memory, seq)) + 1

    def first(self, seq: int) -> int:
        """Return the first position from which on all layers hold everything; -1 for nothing."""
        return int(lib.seq_pos_min(self._memory, seq))

    def high_water(self) -> int:
        """Return how many cells a decode spans; 0 if that is not known."""
        return 0 if self.map is None else self.map.high_water

    def used(self) -> int:
        """Return how many cells sequences hold; those that only keep the mark are free."""
        if self.map is None:
            return 0
        return self.map.used - (self.map.only(self._kept) if self._kept else 0)

    def shared(self, seqs: Sequence[int]) -> int:
        """Return how many cells fewer `seqs` hold together than one by one."""
        return 0 if self.map is None else self.map.shared(seqs)

    def portions(self, leaves: Sequence[int]) -> list[float]:
        """Return how many cells only `leaves` keep, for each its part."""
        return [] if self.map is None else self.map.portions(leaves, range(self._n_slots))

    def runs(self, seq: int, first: int, last: int) -> int:
        return 0 if self.map is None else self.map.runs(seq, first, last)

    def remove(self, seq: int, first: int = 0) -> bool:
        """Drop positions from `first` on; False if only all can go."""
        done = True
        for one in self._ids(seq):
            done = bool(lib.seq_rm(self._memory, one, first, -1)) and done
            if self.map is not None and done:
                self.map.drop(one, first)
        return done

    def copy(self, src: int, dst: int, first: int, last: int) -> bool:
        """Let `dst` hold positions ``[first, last)`` of `src` too."""
        if self.map is None or not 0 <= first < last <= self.length(src):
            return False
        if src == dst or self.length(dst) != first:
            return False
        for one in self._ids(dst):
            lib.seq_cp(self._memory, src, one, first, last)
            self.map.share(src, one, first, last)
        return True

    def stream(self, slot: int) -> int:
        """Return 0: all sequences are in one stream."""
        del slot
        return 0

    def shortage(self, slots: Sequence[int], n_tokens: int) -> int:
        """Return how many cells have to be freed before `n_tokens` can be computed."""
        del slots
        return 0 if self.map is None else max(0, self.used() + n_tokens - self._n_ctx)

    def prepare(self, slots: Sequence[int]) -> bool:
        """Do nothing: llama.cpp finds cells for each token."""
        del slots
        return True

    def save(self, seq: int, first: int, last: int, page: int) -> list[Saved] | None:
        """Return positions ``[first, last)`` in parts of `page`; None without a way to do it."""
        parts = []
        for at in range(first, last, page):
            part = self._save(seq, at, min(at + page, last))
            if part is None:
                return None
            parts.append(part)
        return parts or None

    def _save(self, seq: int, first: int, last: int) -> Saved | None:
        if self._scratch is None or not 0 <= first < last <= self.length(seq):
            return None
        lib.seq_cp(self._memory, seq, self._scratch, first, last)
        try:
            size = int(lib.state_size(self._context, self._scratch, 0))
            order = self._order(seq, first, last)
            buffer = np.empty(size + len(order), np.uint8)
            buffer[size:] = order
            done = int(lib.state_get(self._context, buffer.ctypes.data, size, self._scratch, 0))
        finally:
            lib.seq_rm(self._memory, self._scratch, -1, -1)
        return buffer.data if 0 < done == size else None

    def restore(self, seq: int, saved: Sequence[Saved]) -> bool:
        """Put saved parts behind what `seq` holds; False, and `seq` as before, if that fails."""
        before = self.length(seq)
        for part in saved:
            if not self._restore(seq, part):
                if self.length(seq) > before:
                    self.remove(seq, before)
                return False
        return True

    def _restore(self, seq: int, saved: Saved) -> bool:
        if self._scratch is None or self.map is None:
            return False
        data, order = _apart(saved)
        done = lib.state_set(self._context, data.ctypes.data, len(data), self._scratch, 0)
        try:
            first, last = self.length(seq), self.length(self._scratch)
            fits = done == len(data) and first < last
            if not fits or (self.first(self._scratch) != first and not self._window):
                self._forget_restored(order)
                return False
            ids = self._ids(seq)
            self.map.restore(ids[0], order)
            for one in ids:
                lib.seq_cp(self._memory, self._scratch, one, first, last)
            for one in ids[1:]:
                self.map.share(ids[0], one, first, last)
            return True
        finally:
            lib.seq_rm(self._memory, self._scratch, -1, -1)

    def retire(self, slot: int) -> None:
        """Let the last cell of `slot` stay when the others go, where the mark is to be kept."""
        last = self.length(slot) - 1
        if not self._keeps or self.map is None or last < 0:
            return
        if self.kept == MOST_KEPT:
            self.lower_high_water()
        lib.seq_cp(self._memory, slot, _KEEPER, last, last + 1)
        self._kept.append(self.map.hold_last(slot))

    def lower_high_water(self) -> bool:
        """Drop all cells that stayed; False if that is none."""
        if not self._kept or self.map is None:
            return False
        lib.seq_rm(self._memory, _KEEPER, -1, -1)
        self.map.release(self._kept)
        self._kept = []
        return True

    def _ids(self, seq: int) -> tuple[int, ...]:
        return (seq, seq + 1) if self._window and seq >= self._n_slots else (seq,)

    def _order(self, seq: int, first: int, last: int) -> NDArray[np.uint8]:
        """Return the positions in the order of their cells, and how many they are, as bytes."""
        order = np.arange(0) if self.map is None else self.map.order(seq, first, last)
        return np.append(order, len(order)).astype(np.int32).view(np.uint8)

    def _forget_restored(self, order: IntArray) -> None:
        if self._scratch is None or self.map is None:
            return
        done = self.length(self._scratch) > 0
        if done and self.map.restore(self._scratch, order):
            self.map.drop_part(self._scratch, int(order.min()))


def _apart(saved: Saved) -> tuple[NDArray[np.uint8], IntArray]:
    """Return llama.cpp's part of what was saved, and the positions in the order of their cells."""
    data = np.frombuffer(saved, np.uint8)
    n = int(data[-4:].view(np.int32)[0])
    end = len(data) - 4 * (n + 1)
    return data[:end], data[end:-4].view(np.int32)
