"""The accounting of the KV cache: slots, sequence ids, the scratch slot, reservations, cells.

Slots (the KV sequence ids that a batch may use) are few and reused; cells are shared by all
sequences. Admission reserves cells before a sequence computes anything, so no other request can
take them. Only this module frees the cells of a slot.
"""

from __future__ import annotations

from attrs import frozen

from uma_trio.backend.base import Backend


class KvError(Exception):
    """The accounting is inconsistent: a bug of the engine, never a fault of a request."""


@frozen
class _Entry:
    slot: int
    cells: int


class KvCache:
    """The books of one backend's KV cache; what is shared, saved and restored is the prefix cache's.

    `scratch` keeps the last slot for ballast rows (:attr:`scratch_slot`). `keeps_high_water`: cells
    are dropped such that the cache's high-water mark stays where it is until
    :meth:`lower_high_water`, for backends on which its change makes ticks slow.

    Invariant: every slot is free or owned by exactly one key, and `reserved_cells` is the sum of
    what the owners reserved. `free_cells` can go below zero when background sequences grow past
    their part; admission then stops until it recovers.
    """

    def __init__(
        self, backend: Backend, *, scratch: bool = False, keeps_high_water: bool = False
    ) -> None:
        self._backend = backend
        self._n_cells = backend.limits.n_ctx
        self.n_slots = backend.limits.n_slots - scratch
        #: Where ballast rows are computed; without a scratch slot no plan has any.
        self.scratch_slot = self.n_slots
        self._keeps_high_water = keeps_high_water
        self._free = list(range(self.n_slots - 1, -1, -1))
        self._entries: dict[int, _Entry] = {}
        self._reserved = 0
        self._shared = 0

    @property
    def free_slots(self) -> int:
        """How many slots nobody owns."""
        return len(self._free)

    @property
    def reserved_cells(self) -> int:
        """How many cells are spoken for."""
        return self._reserved

    @property
    def free_cells(self) -> int:
        """How many cells nobody has reserved; what several share is one's alone."""
        return self._n_cells - self._reserved + self._shared

    @property
    def shared_cells(self) -> int:
        """How many cells fewer are held in slots than if nobody shared any."""
        return self._shared

    def take(self, key: int, cells: int) -> int:
        """Give `key` a slot and reserve `cells`; return the slot.

        Raises :class:`KvError` if it has one already or none is free.
        """
        if key in self._entries or not self._free:
            raise KvError(f"cannot give {key} a slot: {len(self._free)} free")
        slot = self._free.pop()
        self._entries[key] = _Entry(slot, cells)
        self._reserved += cells
        return slot

    def reserve(self, key: int, cells: int) -> None:
        """Change what `key` has reserved."""
        entry = self._entry(key)
        self._entries[key] = _Entry(entry.slot, cells)
        self._reserved += cells - entry.cells

    def release(self, key: int) -> None:
        """Take the slot of `key` back and drop its cells."""
        entry = self._entry(key)
        del self._entries[key]
        self._free.append(entry.slot)
        self._reserved -= entry.cells
        if self._keeps_high_water:
            self._backend.kv_retire(entry.slot)
        else:
            self._backend.kv_remove(entry.slot)

    def recount(self) -> None:
        """Count anew what is shared; to be called after cells were shared, and after a release."""
        self._shared = self._backend.kv_shared([entry.slot for entry in self._entries.values()])

    def truncate(self, key: int, n: int) -> int:
        """Drop all but the first `n` cells of `key`; return how many are left.

        That is fewer than `n` where the cache held fewer, and none where this kind of memory
        cannot drop a part.
        """
        slot = self._entry(key).slot
        kept = min(self._backend.kv_length(slot), n)
        if self._backend.kv_remove(slot, kept):
            return kept
        self._backend.kv_remove(slot)
        return 0

    def clear_scratch(self) -> None:
        """Drop what ballast rows left behind."""
        self._backend.kv_remove(self.scratch_slot)

    @property
    def high_water(self) -> int:
        """How many cells a decode spans, whosever they are; 0 if none, or if that is not known."""
        return self._backend.kv_high_water()

    def lower_high_water(self) -> None:
        """Let the high-water mark fall to the cells in use."""
        self._backend.kv_lower_high_water()

    def check(self) -> None:
        """Raise :class:`KvError` unless the books balance (tests, and when idle)."""
        slots = sorted(self._free + [e.slot for e in self._entries.values()])
        if slots != list(range(self.n_slots)):
            raise KvError(f"slots do not partition: {slots}")
        if self._reserved != sum(e.cells for e in self._entries.values()):
            raise KvError("reserved cells do not add up")

    def _entry(self, key: int) -> _Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise KvError(f"{key} owns no slot") from None
