"""The cells of the KV cache: who holds them now, and what earlier requests left in them.

One face for two books over one backend: the slots and reservations (:mod:`uma_trio.engine.kv`), and the prefixes that
are cached, saved and shared (:mod:`uma_trio.engine.prefix`). What happens to a request here, in order: it is
*admitted* (a slot, reserved cells), *begins* (with the prefix that is found for it), is charged for each *tick*, and is
*gone* (its cells may stay as a leaf). Before each decode *room is made* for its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from uma_trio.backend.base import Backend
from uma_trio.engine.kv import KvCache
from uma_trio.engine.prefix.cache import PrefixCache
from uma_trio.engine.prefix.search import FoundPrefix
from uma_trio.engine.prefix.store import PageStore as PageStore
from uma_trio.engine.records import Beginning, Wait
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.side import Ledger
from uma_trio.policy.cost import CostModel
from uma_trio.policy.prefix import Copying
from uma_trio.telemetry.prefix import PrefixFigures


class Cells:
    """The cells of one engine. For its thread. `running` are the sequences that have a slot, by key.

    `scratch` keeps the last slot for ballast rows; `keeps_high_water` is for backends on which a change of the
    high-water mark makes ticks slow. Saved pages take at most `prefix_bytes`; with 0 no prefix is cached. `note` is
    called for each request that had a prefix or could have had one, when it can continue. What side work takes for whom is
    written into `ledger`. `store` has the saved pages of an earlier engine of the same model.
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
        ledger: Ledger,
        store: PageStore | None = None,
    ) -> None:
        self.books = KvCache(backend, scratch=scratch, keeps_high_water=keeps_high_water)
        self.prefix = PrefixCache(
            *(backend, prefix_bytes, clock, self.books.recount, note),
            session_ttl_s=session_ttl_s,
            copying=copying,
            ledger=ledger,
            store=store,
        )

    # --- how many there are ---

    @property
    def n_slots(self) -> int:
        """How many slots requests may have."""
        return self.books.n_slots

    @property
    def scratch_slot(self) -> int:
        """Where ballast rows are computed."""
        return self.books.scratch_slot

    @property
    def free_slots(self) -> int:
        """How many slots nobody has."""
        return self.books.free_slots

    @property
    def free_cells(self) -> int:
        """How many cells nobody has reserved; below zero where background requests grew past their part."""
        return self.books.free_cells

    @property
    def reserved(self) -> int:
        """How many cells are spoken for."""
        return self.books.reserved_cells

    @property
    def shared(self) -> int:
        """How many cells fewer are held in slots than if nobody shared any."""
        return self.books.shared_cells

    @property
    def high_water(self) -> int:
        """How many cells a decode spans, whosever they are; 0 if none, or if that is not known."""
        return self.books.high_water

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

        Raises :class:`uma_trio.engine.kv.KvError` if it has a slot already or none is free.
        """
        sequence.reserved = sequence.cells
        sequence.slot = self.books.take(sequence.handle, sequence.reserved)

    def begin(self, sequence: Sequence, running: Mapping[int, Sequence]) -> FoundPrefix:
        """Give an admitted request its cached prefix, or hold it until that is there; return what was found."""
        return self.prefix.begin(sequence, running)

    def reserve(self, sequence: Sequence, n: int) -> None:
        """Change how many cells a request has reserved."""
        sequence.reserved = n
        self.books.reserve(sequence.handle, n)

    def truncate(self, sequence: Sequence) -> None:
        """Make the cells of a request and its counter of computed tokens agree, keeping as much as can be kept."""
        sequence.rewind(self.books.truncate(sequence.handle, sequence.computed))

    def lane_set(self, handle: int) -> None:
        """Note that a client chose the lane of a request; forks do not change it any more."""
        self.prefix.lane_set(handle)

    def gone(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take the slot of a request back. Its cells stay as a leaf if they are worth it and `keep` allows."""
        self.prefix.gone(sequence, keep=keep)
        self.books.release(sequence.handle)
        if self.prefix.on:
            self.books.recount()

    # --- who waits for cells ---

    @property
    def blocked(self) -> Collection[int]:
        """The requests that have a slot and wait for their prefix, by key."""
        return self.prefix.blocked.keys()

    def wait_of(self, sequence: Sequence, running: Mapping[int, Sequence]) -> Wait | None:
        """Return what a blocked request waits for; None if it is not blocked."""
        return self.prefix.wait_of(sequence, running)

    # --- a tick ---

    def lower_mark(self, *, others: bool) -> None:
        """Let the high-water mark fall; where `others` compute only once it has cost as much as a change does."""
        room = self.prefix.room
        if not others or room.mark_costs():
            self.books.lower_high_water()
            room.mark_fell()

    def make_room(self, n_tokens: int) -> None:
        """Drop leaves until the tokens of the next decode have cells."""
        self.prefix.room.make(n_tokens)

    def tick(self, n_tokens: int, cost: CostModel | None) -> None:
        """Charge leaves and free cells for what they added to a computed tick of so many tokens."""
        self.prefix.room.charge(n_tokens, cost)

    def clear_scratch(self) -> None:
        """Drop what ballast rows left behind."""
        self.books.clear_scratch()

    def drop_leaves(self) -> bool:
        """Drop all leaves, after a decode found no room; False if there are none."""
        return self.prefix.room.drop_all()

    def empty(self) -> bool:
        """Drop all saved leaves while no request has a slot; False if one is not saved yet."""
        return not self.prefix.room.lingers()
