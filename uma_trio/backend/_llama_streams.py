"""A KV cache with one stream of cells per slot (`kv_unified = false`), in which attention spans only the cells of its own sequence.

llama.cpp ties a sequence id to its stream. Here sequences (slots and leaves) are *holders* of a prefix of a stream:
a leaf takes over the stream of an ended request, a request continues in the stream of a leaf, and two requests that
share a prefix hold the same stream until one of them computes a token behind it. Only then is the stream copied, on
the device (copy on write). `seq_cp` between streams copies all cells of a stream, also those that hold nothing: 18 ms
for 4.4 GB on an H100.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from attrs import define

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_state import NotUnderstood, SequenceState
from uma_trio.backend.base import IntArray, Saved

_NONE: Final = -1


@define
class _Holder:
    """`length` positions of `stream`."""

    stream: int = _NONE
    length: int = 0


class StreamMemory:
    """The memory of one context with as many streams as slots, each of `cells` cells.

    Same verbs as :class:`._llama_memory.CacheMemory`. Every id is the caller's to check (:meth:`check`).
    """

    def __init__(self, context: int, memory: int, *, n_slots: int, cells: int) -> None:
        self._context = context
        self._memory = memory
        self._cells = cells
        self.n_streams = n_slots
        # A leaf that is a prefix of another one is dropped by the engine, so that more ids are never used.
        self.leaf_ids = range(n_slots, 3 * n_slots)
        self._holders = [_Holder() for _ in range(3 * n_slots)]
        # How many cells of each stream are in use: the longest holder's.
        self._filled = [0] * n_slots

    def check(self, seq: int) -> None:
        if not 0 <= seq < len(self._holders):
            raise IndexError(f"there is no slot {seq}")

    def stream(self, slot: int) -> int:
        return self._holders[slot].stream

    def shortage(self, slots: Iterable[int], n_tokens: int) -> int:
        del n_tokens
        return max(0, len(self._in_want(slots)) - self._free()) * self._cells

    def prepare(self, slots: Iterable[int]) -> bool:
        in_want = self._in_want(slots)
        if in_want and len(in_want) > self._free():
            return False
        for slot in in_want:
            holder, stream = self._holders[slot], self._free_stream()
            if stream is None:
                return False
            if holder.length:
                lib.seq_cp(self._memory, holder.stream, stream, -1, -1)
                lib.seq_rm(self._memory, stream, holder.length, -1)
                self._filled[stream] = holder.length
            holder.stream = stream
        return True

    def placed(self, slots: IntArray, positions: IntArray) -> None:
        last = dict(zip(slots.tolist(), positions.tolist(), strict=True))  # positions ascend
        for slot, position in last.items():
            holder = self._holders[slot]
            holder.length = position + 1
            self._filled[holder.stream] = max(self._filled[holder.stream], holder.length)

    def removed(self, slots: IntArray, positions: IntArray) -> None:
        del positions
        for slot in set(slots.tolist()):
            holder = self._holders[slot]
            if holder.stream != _NONE:
                lib.seq_rm(self._memory, holder.stream, holder.length or -1, -1)

    def length(self, seq: int) -> int:
        return self._holders[seq].length

    def first(self, seq: int) -> int:
        return 0 if self._holders[seq].length else -1

    def high_water(self) -> int:
        return 0

    def used(self) -> int:
        return sum(self._filled)

    def shared(self, seqs: Sequence[int]) -> int:
        longest: dict[int, int] = {}
        for holder in (self._holders[seq] for seq in seqs):
            longest[holder.stream] = max(longest.get(holder.stream, 0), holder.length)
        return sum(self._holders[seq].length for seq in seqs) - sum(longest.values())

    def portions(self, leaves: Sequence[int]) -> list[float]:
        """Return how many cells of each stream only `leaves` hold, for each leaf its part.

        A slot can compute in a stream only once no leaf reaches beyond it.
        """
        longest = [0] * self.n_streams
        for holder in self._holders[: self.n_streams]:
            if holder.stream != _NONE:
                longest[holder.stream] = max(longest[holder.stream], holder.length)
        beyond = [h.length - longest[h.stream] for h in (self._holders[leaf] for leaf in leaves)]
        streams = [
            self._holders[leaf].stream for leaf, n in zip(leaves, beyond, strict=True) if n > 0
        ]
        return [
            max(0, n) / max(1, streams.count(self._holders[leaf].stream))
            for leaf, n in zip(leaves, beyond, strict=True)
        ]

    def runs(self, seq: int, first: int, last: int) -> int:
        del seq
        return int(first < last)

    def remove(self, seq: int, first: int = 0) -> bool:
        holder = self._holders[seq]
        if holder.stream == _NONE or (first and first >= holder.length):
            return True
        holder.length, stream = first, holder.stream
        if not first:
            holder.stream = _NONE
        self._trim(stream)
        return True

    def copy(self, src: int, dst: int, first: int, last: int) -> bool:
        source, target = self._holders[src], self._holders[dst]
        if src == dst or first or target.length or not 0 < last <= source.length:
            return False
        target.stream, target.length = source.stream, last
        return True

    def save(self, seq: int, first: int, last: int, page: int) -> list[Saved] | None:
        holder = self._holders[seq]
        if not 0 <= first < last <= holder.length:
            return None
        size = int(lib.state_size(self._context, holder.stream, 0))
        buffer = np.empty(size, np.uint8)
        done = int(lib.state_get(self._context, buffer.ctypes.data, size, holder.stream, 0))
        if not 0 < done == size:
            return None
        try:
            state = SequenceState.parse(buffer, self.n_streams, self._filled[holder.stream])
        except NotUnderstood:
            return None
        return [state.part(at, min(at + page, last)) for at in range(first, last, page)]

    def restore(self, seq: int, saved: Sequence[Saved]) -> bool:
        """Put saved parts into `seq`, which holds nothing; False, and it holds nothing, if that fails.

        llama.cpp replaces a whole sequence, so nothing can be put behind what is there.
        """
        holder, stream = self._holders[seq], self._free_stream()
        if holder.length or stream is None:
            return False
        try:
            data, n = SequenceState.joined(saved, self.n_streams)
        except NotUnderstood:
            return False
        if n > self._cells:
            return False
        done = lib.state_set(self._context, data.ctypes.data, len(data), stream, 0)
        if done != len(data):
            lib.seq_rm(self._memory, stream, -1, -1)
            return False
        holder.stream, holder.length = stream, n
        self._filled[stream] = n
        return True

    def retire(self, slot: int) -> None:
        del slot

    def lower_high_water(self) -> bool:
        return False

    def _in_want(self, slots: Iterable[int]) -> list[int]:
        found, taken = [], set()
        for slot in sorted(set(slots)):
            holder = self._holders[slot]
            if (
                holder.stream == _NONE
                or holder.stream in taken
                or self._filled[holder.stream] > holder.length
            ):
                found.append(slot)
            else:
                taken.add(holder.stream)
        return found

    def _free(self) -> int:
        return self.n_streams - len({holder.stream for holder in self._holders} - {_NONE})

    def _free_stream(self) -> int | None:
        held = {holder.stream for holder in self._holders}
        return next((stream for stream in range(self.n_streams) if stream not in held), None)

    def _trim(self, stream: int) -> None:
        longest = max((h.length for h in self._holders if h.stream == stream), default=0)
        if longest < self._filled[stream] or not longest:
            lib.seq_rm(self._memory, stream, longest or -1, -1)
        self._filled[stream] = longest
