"""Who owns which KV slot, and how many cells are spoken for.

Slots (KV sequence ids) are few and reused for ever; cells are shared by all. Admission
reserves cells before a sequence computes anything, so that what was promised to one request
cannot be taken by another.
"""

from __future__ import annotations

from attrs import frozen


class LedgerError(Exception):
    """The books do not balance: a bug of ours, never a fault of a request."""


@frozen
class _Entry:
    slot: int
    cells: int


class KvLedger:
    """The books of one KV cache.

    Invariant: every slot is free or owned by exactly one key, and `reserved_cells` is the sum
    of what the owners reserved. `free_cells` can go below zero when background sequences grow
    past their part; admission then stops until it recovers.
    """

    def __init__(self, n_slots: int, n_cells: int) -> None:
        self._n_slots = n_slots
        self._n_cells = n_cells
        self._free = list(range(n_slots - 1, -1, -1))
        self._entries: dict[int, _Entry] = {}
        self._reserved = 0

    @property
    def n_slots(self) -> int:
        """How many slots there are."""
        return self._n_slots

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
        """How many cells nobody has reserved."""
        return self._n_cells - self._reserved

    def take(self, key: int, cells: int) -> int:
        """Give `key` a slot and reserve `cells`; return the slot.

        Raises :class:`LedgerError` if it has one already or none is free.
        """
        if key in self._entries or not self._free:
            raise LedgerError(f"cannot give {key} a slot: {len(self._free)} free")
        slot = self._free.pop()
        self._entries[key] = _Entry(slot, cells)
        self._reserved += cells
        return slot

    def reserve(self, key: int, cells: int) -> None:
        """Change what `key` has reserved."""
        entry = self._entry(key)
        self._entries[key] = _Entry(entry.slot, cells)
        self._reserved += cells - entry.cells

    def release(self, key: int) -> int:
        """Take the slot back; return it, so that its cells can be dropped."""
        entry = self._entry(key)
        del self._entries[key]
        self._free.append(entry.slot)
        self._reserved -= entry.cells
        return entry.slot

    def check(self) -> None:
        """Raise :class:`LedgerError` unless the books balance (tests, and when idle)."""
        slots = sorted(self._free + [e.slot for e in self._entries.values()])
        if slots != list(range(self._n_slots)):
            raise LedgerError(f"slots do not partition: {slots}")
        if self._reserved != sum(e.cells for e in self._entries.values()):
            raise LedgerError("reserved cells do not add up")

    def _entry(self, key: int) -> _Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise LedgerError(f"{key} owns no slot") from None
