"""The cells of the KV cache: which requests hold them now, and what earlier requests left in them.

Slots (the KV sequence ids that a batch may use) are few and reused; cells are shared by all sequences. Admission
reserves cells before a sequence computes anything, so no other request can take them. Behind this face are the prefixes
that are cached, saved and shared (:mod:`uma_trio.engine.kv`). What happens to a request here, in order: it is
*admitted* (a slot, reserved cells), *begins* (with the prefix that is found for it), is charged for each *tick*, and is
*released* (its cells may stay as a leaf). Before each decode *room is made* for its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Ordered

from uma_trio.backend.base import Backend
from uma_trio.engine.kv.cache import PrefixCache
from uma_trio.engine.kv.disk import ModelDisk as ModelDisk
from uma_trio.engine.kv.disk import PrefixDisk as PrefixDisk
from uma_trio.engine.kv.search import FoundPrefix
from uma_trio.engine.kv.store import PageStore as PageStore
from uma_trio.engine.sequences import NO_SLOT, Sequence
from uma_trio.machine.background import Charges
from uma_trio.observe.figures import PrefixFigures
from uma_trio.observe.records import Beginning, Wait
from uma_trio.policy.cost import CostModel
from uma_trio.policy.prefix import Copying


class KvError(Exception):
    """The accounting is inconsistent: a bug of the engine, never a fault of a request."""


class Cells:
    """The cells of one engine. For its thread. `running` are the sequences that have a slot, by key.

    `scratch` keeps the last slot for ballast rows (:attr:`scratch_slot`). With `keeps_high_water` cells are dropped such
    that the cache's high-water mark stays where it is until :meth:`lower_mark`, for backends on which a change of it
    makes ticks slow. Saved pages take at most `prefix_bytes`; with 0 no prefix is cached. `note` is
    called for each request that had a prefix or could have had one, when it can continue. What background work takes, by user, is
    written into `charges`. `store` has the saved pages of an earlier engine of the same model, `disk` those in files.

    Invariant: every slot is free or held by exactly one request, and `reserved` is the sum of what these reserved.
    """

    def __init__(
        self,
        backend: Backend,
        clock: Callable[[], float],
        note: Callable[[int, Beginning], None],
        *,
        scratch: bool,
        keeps_high_water: bool,
        prefix_bytes: int,
        session_ttl_s: float,
        copying: Copying | None,
        charges: Charges,
        store: PageStore | None = None,
        disk: ModelDisk | None = None,
        until_others_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._backend = backend
        self._n_cells = backend.limits.n_ctx
        #: How many slots requests may have.
        self.n_slots = backend.limits.n_slots - scratch
        #: Where ballast rows are computed; without a scratch slot no plan has any.
        self.scratch_slot = self.n_slots
        self._keeps_high_water = keeps_high_water
        self._free = list(range(self.n_slots - 1, -1, -1))
        self._owners: dict[int, Sequence] = {}
        #: How many cells are spoken for.
        self.reserved = 0
        #: How many cells fewer are held in slots than without sharing.
        self.shared = 0
        self.prefix = PrefixCache(
            backend,
            prefix_bytes,
            clock,
            self._recount,
            note,
            session_ttl_s=session_ttl_s,
            copying=copying,
            charges=charges,
            store=store,
            disk=disk,
            until_others_s=until_others_s,
        )

    # --- how many there are ---

    @property
    def free_slots(self) -> int:
        """The number of free slots."""
        return len(self._free)

    @property
    def free_cells(self) -> int:
        """The number of cells that are not reserved; what several requests share counts once.

        Below zero where background requests grew past their part: admission stops until it recovers.
        """
        return self._n_cells - self.reserved + self.shared

    @property
    def high_water(self) -> int:
        """How many cells a decode spans, whosever they are; 0 if none, or if that is not known."""
        return self._backend.kv_high_water()

    @property
    def store(self) -> PageStore:
        """The saved pages, which may outlive the model."""
        return self.prefix.store

    @property
    def next_restore_s(self) -> float:
        """The seconds to restore the next page that a request waits for; 0 if none does."""
        return self.prefix.next_restore_s() or 0.0

    @property
    def is_saving(self) -> bool:
        """Whether a prefix is yet to be saved."""
        return self.prefix.saving.due

    def figures(self) -> PrefixFigures | None:
        """Return the counters of the prefix cache; None if it is off."""
        return self.prefix.figures() if self.prefix.on else None

    # --- a request ---

    def cached(self, sequence: Sequence, running: Mapping[int, Sequence]) -> FoundPrefix:
        """Return what of a request is cached, or about to be; nothing changes."""
        return self.prefix.search(sequence, running)

    def shared_with(self, sequence: Sequence, running: Mapping[int, Sequence]) -> int:
        """Return how many cells a waiting request would share with running ones."""
        return self.prefix.shared_with(sequence, running)

    def admit(self, sequence: Sequence) -> None:
        """Give a request a slot, and reserve all cells that it may need.

        Raises :class:`KvError` if it has a slot already or none is free.
        """
        if sequence.handle in self._owners or not self._free:
            raise KvError(f"cannot give {sequence.handle} a slot: {len(self._free)} free")
        self._owners[sequence.handle] = sequence
        sequence.slot = self._free.pop()
        self.reserve(sequence, sequence.cells)

    def begin(self, sequence: Sequence, running: Mapping[int, Sequence]) -> FoundPrefix:
        """Give an admitted request its cached prefix, or hold it until that is there; return what was found."""
        return self.prefix.begin(sequence, running)

    def reserve(self, sequence: Sequence, n: int) -> None:
        """Change how many cells a request has reserved."""
        self.reserved += n - sequence.reserved
        sequence.reserved = n

    def truncate(self, sequence: Sequence) -> None:
        """Make the cells of a request and its counter of computed tokens agree, keeping as much as can be kept.

        That is nothing where this kind of memory cannot drop a part.
        """
        backend, slot = self._backend, sequence.slot
        kept = min(backend.kv_length(slot), sequence.computed)
        if not backend.kv_remove(slot, kept):
            backend.kv_remove(slot)
            kept = 0
        sequence.rewind(kept)

    def lane_set(self, handle: int) -> None:
        """Note that a client chose the lane of a request; forks do not change it any more."""
        self.prefix.lane_set(handle)

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take the slot of a request back. Its cells stay as a leaf if they are worth it and `keep` allows.

        Raises :class:`KvError` if it has none.
        """
        if sequence.handle not in self._owners:
            raise KvError(f"{sequence.handle} owns no slot")
        self.prefix.detach(sequence, keep=keep)
        del self._owners[sequence.handle]
        if self._keeps_high_water:
            self._backend.kv_retire(sequence.slot)
        else:
            self._backend.kv_remove(sequence.slot)
        self._free.append(sequence.slot)
        self.reserve(sequence, 0)
        sequence.slot = NO_SLOT
        if self.prefix.on:
            self._recount()

    def check(self) -> None:
        """Raise :class:`KvError` unless the books balance (for tests)."""
        slots = sorted(self._free + [sequence.slot for sequence in self._owners.values()])
        if slots != list(range(self.n_slots)):
            raise KvError(f"slots do not partition: {slots}")
        if self.reserved != sum(sequence.reserved for sequence in self._owners.values()):
            raise KvError("reserved cells do not add up")

    def _recount(self) -> None:
        self.shared = self._backend.kv_shared([one.slot for one in self._owners.values()])

    # --- requests that wait for cells ---

    @property
    def blocked(self) -> Collection[int]:
        """The requests that have a slot and wait for their prefix, by key."""
        return self.prefix.blocked.keys()

    def wait_of(self, sequence: Sequence, running: Mapping[int, Sequence]) -> Wait | None:
        """Return what a blocked request waits for; None if it is not blocked."""
        return self.prefix.wait_of(sequence, running)

    # --- a tick ---

    def settle(self, running: Mapping[int, Sequence]) -> None:
        """Let requests go on for which what they wait for is there. Call it between decodes."""
        self.prefix.settle(running)

    def lower_mark(self, *, others: bool) -> None:
        """Let the high-water mark fall; where `others` compute only once it has cost as much as a change does."""
        room = self.prefix.room
        if not others or room.mark_costs():
            self._backend.kv_lower_high_water()
            room.mark_fell()

    def make_room(self, slots: Ordered[int], n_tokens: int) -> None:
        """Drop leaves until the tokens of the next decode, which are of these slots, have cells."""
        self.prefix.room.make(slots, n_tokens)

    def tick(self, n_tokens: int, cost: CostModel | None) -> None:
        """Charge leaves and free cells for what they added to a computed tick of so many tokens."""
        self.prefix.room.charge(n_tokens, cost)

    def clear_scratch(self) -> None:
        """Drop what ballast rows left behind."""
        self._backend.kv_remove(self.scratch_slot)

    def drop_leaves(self) -> bool:
        """Drop all leaves, after a decode found no room; False if there are none."""
        return self.prefix.room.drop_all()

    def empty(self) -> bool:
        """Drop all saved leaves while no request has a slot; False if one is not saved yet."""
        return not self.prefix.room.lingers()
