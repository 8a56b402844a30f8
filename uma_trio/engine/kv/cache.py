"""The prefix cache: a request uses a prefix that was computed before; its answer is the same.

When a request gets a slot, the cache looks for its longest prefix in its own namespace, exact to
the token. Cells in the KV cache (of a running request or a leaf) are shared at once. Saved pages
are restored in slices, between ticks; those on disk are read into memory before, by other threads. If another request is about to compute the prefix, the
request waits for that one and then shares its cells (a fork). While it waits it is *blocked*: it has
its slot and is in no plan. When a request ends, is cancelled or preempted, its cells become a leaf.

Leaves are saved in slices, and leave the KV cache when they cost more than their return would
(:mod:`uma_trio.engine.kv.room`). Any failure counts as a miss.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

from attrs import define, field

from uma_trio.backend.base import Backend
from uma_trio.engine.kv.disk import ModelDisk, Reading
from uma_trio.engine.kv.leaves import Leaf, Leaves
from uma_trio.engine.kv.pages import Page, common
from uma_trio.engine.kv.room import Room
from uma_trio.engine.kv.saving import Saving
from uma_trio.engine.kv.search import FoundPrefix, Source, search, shared_with
from uma_trio.engine.kv.store import PageStore
from uma_trio.engine.kv.usage import NamespaceUse, Reuse
from uma_trio.engine.sequences import NO_SLOT, Sequence
from uma_trio.machine.background import Charges
from uma_trio.observe.figures import PrefixFigures
from uma_trio.observe.records import Beginning, Wait
from uma_trio.policy.prefix import LEAST_HIT, PAGE, Copying
from uma_trio.policy.state import FirstToken
from uma_trio.words import Lane

#: Pages that were read and are taken into memory before one tick, beside others that compute: about 2 ms.
_MOST_RECEIVED = 64


@define(eq=False)
class _Blocked:
    """A request that has a slot and waits: for `pages`, for `leader` to compute `coming` tokens, or for a `reading`.

    The pages in `locked` are in memory and needed when all of the reading is.
    """

    sequence: Sequence
    source: Source
    found: FoundPrefix
    pages: deque[Page] = field(factory=deque)
    leader: int | None = None
    coming: int = 0
    reading: Reading | None = None
    locked: list[Page] = field(factory=list)


class PrefixCache:
    """The prefix cache of one engine. For the engine's thread; `clock` gives seconds.

    Saved pages take at most `budget` bytes; with 0 the cache is disabled. `recount` is called after
    cells have been shared or dropped, `note` for each request with a hit, when the request can
    continue. `store` has the pages of an earlier cache of the same model, `disk` those in files. `until_others_s` returns
    how long readers of other models leave the machine.
    """

    def __init__(
        self,
        backend: Backend,
        budget: int,
        clock: Callable[[], float],
        recount: Callable[[], None],
        note: Callable[[int, Beginning], None],
        *,
        session_ttl_s: float = 300.0,
        copying: Copying | None = None,
        charges: Charges,
        store: PageStore | None = None,
        disk: ModelDisk | None = None,
        until_others_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._until_others_s = until_others_s
        self._backend = backend
        self._recount = recount
        self._note = note
        self._clock = clock
        self._limits = backend.limits
        self.on = budget > 0 and len(self._limits.leaf_ids) > 0
        self.store = store or PageStore(budget, clock)
        self.leaves = Leaves(backend)
        self.charges = charges
        self.disk = disk if self.on else None
        self.saving = Saving(
            backend, self.store, clock, self.charges, session_ttl_s, copying, self.disk
        )
        self.reuse = Reuse()
        self.room = Room(backend, self.leaves, self.saving, self.reuse)
        self.blocked: dict[int, _Blocked] = {}
        self.hits: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.tokens_saved = 0
        self.usage = NamespaceUse()
        self._promoted: dict[int, Lane] = {}  # leaders of persons, by what their own lane is
        self._waited_for: set[int] = set()  # leaders that are due when their followers are

    # --- a request comes ---

    def begin(self, sequence: Sequence, running: Mapping[int, Sequence]) -> FoundPrefix:
        """Give a request with a new slot its cached prefix; return the result of the search."""
        if not self.on:
            return FoundPrefix()
        if self._empties_for(sequence, running):
            self.room.empty(self._until_others_s())
        submit = sequence.submit
        found = self._search(sequence, running)
        self._note_miss(sequence, found)
        if not sequence.preempted and submit.namespace is not None and submit.keeps:
            self.reuse.note(submit.program, found.covered / sequence.known)
        if not self._waits(sequence, found):
            self._take(sequence, found)
        self.room.make_way(len(sequence.tokens) - found.there, found.leaf)
        return found

    def _note_miss(self, sequence: Sequence, found: FoundPrefix) -> None:
        namespace = sequence.submit.namespace
        if namespace is None or not sequence.submit.keeps:
            return
        use, page = self.usage.of(namespace), found.page
        use.asked += 0 if sequence.preempted else sequence.n_prompt
        if found.resident <= found.saved and (page is None or found.saved == page.end):
            missed = self.store.miss(namespace, page, sequence.tokens[: sequence.known - 1])
            use.missed += PAGE * missed

    def search(self, sequence: Sequence, running: Mapping[int, Sequence]) -> FoundPrefix:
        """Return what of a request is cached, or about to be; nothing changes."""
        if not self.on:
            return FoundPrefix()
        return self._search(sequence, running)

    def _search(self, sequence: Sequence, running: Mapping[int, Sequence]) -> FoundPrefix:
        leaders = self._leaders(running)
        return search(sequence, leaders, self.leaves, self.store, self.disk)

    def shared_with(self, sequence: Sequence, running: Mapping[int, Sequence]) -> int:
        """Return the number of cells that a waiting request would share with running ones.

        Requests that wait themselves are not counted: such a request may come to wait for this one,
        if it is preempted and starts again, and both would wait for ever.
        """
        return shared_with(sequence, running.values()) if self.on else 0

    def _waits(self, sequence: Sequence, found: FoundPrefix) -> bool:
        """Hold a request until another has computed what they share, if that is worth it."""
        leader = found.leader
        if leader is None or not found.waits(sequence.known - 1):
            return False
        self._block(_Blocked(sequence, "fork", found, leader=leader.handle, coming=found.coming))
        return True

    def _block(self, blocked: _Blocked) -> None:
        blocked.sequence.blocked_since = self._clock()
        self.blocked[blocked.sequence.handle] = blocked

    def _unblock(self, sequence: Sequence) -> _Blocked | None:
        """Hold a request no longer, and note how long it waited; return what it waited for."""
        blocked = self.blocked.pop(sequence.handle, None)
        if blocked is not None and sequence.blocked_since is not None:
            sequence.blocked_until = self._clock()
            sequence.prefix_s += sequence.blocked_until - sequence.blocked_since
            sequence.blocked_since = None
        return blocked

    def wait_of(self, sequence: Sequence, running: Mapping[int, Sequence]) -> Wait | None:
        """Return what a blocked request waits for; None if it is not blocked."""
        blocked = self.blocked.get(sequence.handle)
        if blocked is None:
            return None
        if blocked.reading is not None:
            return Wait(
                f"its beginning is read from the disk, {len(blocked.reading.parts)} pages are left"
            )
        if blocked.leader is None:
            return Wait(
                f"its beginning is restored from memory, {len(blocked.pages)} pages are left"
            )
        leader = running.get(blocked.leader)
        done = min(leader.computed, blocked.coming) if leader is not None else 0
        why = "another request computes the same beginning"
        return Wait(why, (blocked.leader,), blocked.coming, done)

    def _leaders(self, running: Mapping[int, Sequence]) -> Iterator[Sequence]:
        """Yield those that a request may wait for or share with.

        None that waits for another itself: that one may come to wait for this request, when it is
        preempted and begins again, and neither would ever end.
        """
        return (other for other in running.values() if not self._is_follower(other))

    def _is_follower(self, sequence: Sequence) -> bool:
        blocked = self.blocked.get(sequence.handle)
        return blocked is not None and blocked.leader is not None

    def _take(
        self,
        sequence: Sequence,
        found: FoundPrefix,
        source: Source | None = None,
        *,
        reads: bool = True,
    ) -> None:
        """Share what is resident, then restore what is saved beyond that, once what is on disk has been read."""
        if reads and self._reads(sequence, found):
            return
        pages = found.pages if self.saving.worth_restoring(found.pages) else ()
        if pages and self._limits.n_streams > 1:  # only a whole sequence can be restored
            pages = pages[0].path[:-1] + pages
        n = min(found.resident, pages[0].start) if pages else found.resident
        if n and found.leaf is not None and self._limits.n_streams > 1:
            self.leaves.shorten(found.leaf, n)
        if n and not self._backend.kv_copy(found.seq, sequence.slot, 0, n):
            self.failures["copy"] += 1
            n = 0
        if pages and pages[0].start != n:  # the copy failed, or was never there
            pages = pages[0].path[:-1] + pages
        if found.leaf is not None and n:
            self.leaves.use(found.leaf, self._clock())
            self.room.used(found.leaf)
        self.leaves.recount()
        kind: Source = source or ("leaf" if found.leaf is not None else "running")
        if pages:
            for page in pages:
                page.locked += 1
            self._block(_Blocked(sequence, source or "saved", found, deque(pages)))
        else:
            self._begin_from(sequence, n, kind, found)

    def _reads(self, sequence: Sequence, found: FoundPrefix) -> bool:
        """Hold a request until the pages that are on disk alone are in memory, as far as these have room there."""
        pages, disk = found.stored_pages, self.disk
        readings = [each.reading for each in self.blocked.values() if each.reading is not None]
        left = self.store.budget - sum(reading.n_bytes for reading in readings)
        if disk is None or not pages or sum(p.n_bytes for p in pages) > left:
            return False
        if not disk.is_worth(pages):
            return False
        known = [] if found.page is None else list(found.page.path[: pages[0].start // PAGE])
        for page in known:
            page.locked += 1
        self._block(_Blocked(sequence, "disk", found, reading=disk.read(pages), locked=known))
        return True

    def _receive(self, blocked: _Blocked, running: Mapping[int, Sequence], most: int) -> None:
        """Take pages that were read into memory; when all are there, the request goes on as with saved ones."""
        reading, began, submit = blocked.reading, self._clock(), blocked.sequence.submit
        if reading is None or submit.namespace is None:
            return
        parts, added = reading.parts, 0
        while parts and parts[0].done and added < most:
            part, page = parts[0], None
            if part.cells is not None:
                page = self.store.add(
                    submit.namespace,
                    blocked.locked[-1] if blocked.locked else None,
                    part.page.tokens,
                    part.cells,
                    owner=submit.program,
                    cost_s=part.page.cost_s,
                )
            if page is None:
                self.failures["read"] += 1
                reading.cancel()
                break
            page.stored = part.page
            page.locked += 1
            blocked.locked.append(page)
            parts.popleft()
            added += 1
        self.charges.spend(submit.program, self._clock() - began)
        if parts:
            return
        self._unblock(blocked.sequence)
        self._release(blocked)
        found = self._search(blocked.sequence, running)
        if not self._waits(blocked.sequence, found):
            self._take(blocked.sequence, found, "disk" if found.saved else None, reads=False)

    def _empties_for(self, sequence: Sequence, running: Mapping[int, Sequence]) -> bool:
        """Whether a request is alone and asks for an answer that can be had again.

        Others keep the first milliseconds that saving and restoring cost (docs/explained/memory.md).
        """
        params = sequence.submit.params
        if not self._limits.whole_cache or not (params.seed_named or params.temperature == 0):
            return False
        return all(other is sequence for other in running.values())

    def _begin_from(self, sequence: Sequence, n: int, source: Source, found: FoundPrefix) -> None:
        """Let a request go on from what its slot holds, if that is whole."""
        backend, slot, window = self._backend, sequence.slot, self._limits.window
        # The last token has the logits. Without flash attention one row alone is summed in another order than
        # two (docs/explained/memory.md); a request that shares with a running one is not alone.
        alone = self._limits.whole_cache and source in ("leaf", "saved", "disk")
        n = min(n, sequence.known - 1 - alone)
        if n and backend.kv_length(slot) > n:
            backend.kv_remove(slot, n)
        if n and (
            backend.kv_length(slot) != n
            or not 0 <= backend.kv_first(slot) <= (max(0, n - window) if window else 0)
        ):
            self.failures["incomplete"] += 1
            n = 0
        if n < LEAST_HIT:
            backend.kv_remove(slot)
            n = 0
        sequence.resume(n)
        self._recount()
        self.leaves.recount()
        if n:
            self.hits[source] += 1
            self.tokens_saved += n
            namespace = sequence.submit.namespace
            if namespace is not None and sequence.submit.keeps and not sequence.preempted:
                self.usage.of(namespace).there += n
        if found.apart:
            mine = int(sequence.tokens[found.apart])
            self._note(
                sequence.handle,
                Beginning(n, source, self.saving.worth_s(n), found.apart, mine, found.other),
            )

    # --- while others compute ---

    def is_alone(self, running: Mapping[int, Sequence]) -> bool:
        """Whether all requests wait for their prefixes, so that there is no tick."""
        return len(self.blocked) >= len(running)

    def settle(self, running: Mapping[int, Sequence]) -> None:
        """Let forks go on whose leader is done, leaders be due for those that wait, and leaves go that may.

        If there are ticks only some of what was read is taken into memory. Call it between decodes.
        """
        if self.on:
            self.room.release_leaves()
        if not (self.blocked or self._promoted or self._waited_for):
            return
        alone = self.is_alone(running)
        for blocked in tuple(self.blocked.values()):
            if blocked.leader is not None:
                self._follow(blocked, running)
            elif blocked.reading is not None:
                self._receive(blocked, running, sys.maxsize if alone else _MOST_RECEIVED)
        self._promote(running)
        self._inherit(running)

    def next_restore_s(self) -> float | None:
        """Return how long restoring the next page should take; None if no request waits for one."""
        first = self._next_blocked()
        return None if first is None else sum(map(self.saving.restore_s, self._part_of(first)))

    def restore_next(self) -> float:
        """Restore the next page; return the seconds that it took."""
        first = self._next_blocked()
        return 0.0 if first is None else self._restore(first)

    def _next_blocked(self) -> _Blocked | None:
        return next((blocked for blocked in self.blocked.values() if blocked.pages), None)

    def _follow(self, blocked: _Blocked, running: Mapping[int, Sequence]) -> None:
        leader = running.get(blocked.leader) if blocked.leader is not None else None
        goes_on = leader is not None and leader.credit > 0 and not self._is_follower(leader)
        if goes_on and leader is not None and leader.computed < blocked.coming:
            return
        self._unblock(blocked.sequence)
        found = self._search(blocked.sequence, running)
        if not self._waits(blocked.sequence, found):
            self._take(blocked.sequence, found, "fork" if leader is not None else None)

    def _promote(self, running: Mapping[int, Sequence]) -> None:
        blocked = self.blocked.values()
        needed = {
            h.leader for h in blocked if h.leader is not None and h.sequence.lane == "interactive"
        }
        for handle in [handle for handle in self._promoted if handle not in needed]:
            lane = self._promoted.pop(handle)
            if handle in running:
                running[handle].move_to(lane)
        for handle in needed:
            leader = running.get(handle)
            if leader is not None and leader.lane == "background":
                self._promoted[handle] = leader.lane
                leader.move_to("interactive")

    def _inherit(self, running: Mapping[int, Sequence]) -> None:
        """Let leaders be due when the first of their followers is.

        A follower has less to compute, and is due earlier: requests that are due between the two would delay both.
        """
        firsts: dict[int, tuple[FirstToken, ...]] = {}
        for blocked in self.blocked.values():
            first = blocked.sequence.view.first
            if blocked.leader is not None and first is not None:
                firsts[blocked.leader] = (*firsts.get(blocked.leader, ()), first)
        for handle in self._waited_for | firsts.keys():
            if handle in running:
                running[handle].inherit(firsts.get(handle, ()))
        self._waited_for = set(firsts)

    def _part_of(self, blocked: _Blocked) -> list[Page]:
        """Return the pages that are restored next, at once: all of them where only whole sequences can be."""
        return list(blocked.pages)[: None if self._limits.n_streams > 1 else 1]

    def _restore(self, blocked: _Blocked) -> float:
        """Restore the next pages of a request; return the seconds that it took."""
        began, pages, slot = self._clock(), self._part_of(blocked), blocked.sequence.slot
        n_tokens = sum(len(page.tokens) for page in pages)
        self.room.make([slot], n_tokens)
        saved = [page.saved for page in pages if isinstance(page.saved, memoryview)]
        done = len(saved) == len(pages) and self._backend.kv_restore(slot, saved)
        for page in pages:
            blocked.pages.popleft()
            page.locked -= 1
        page, took_s = pages[-1], self._clock() - began
        self.charges.spend(blocked.sequence.submit.program, took_s)
        if done:
            self.saving.restored(n_tokens, took_s)
            self.store.used(tuple(pages))
        else:
            self.failures["restore"] += 1
        if not done or not blocked.pages:
            self._release(blocked)
            self._unblock(blocked.sequence)
            n = self._backend.kv_length(blocked.sequence.slot)
            n = min(
                n, common(page.path[-1].tokens, blocked.sequence.tokens[page.start :]) + page.start
            )
            self._begin_from(blocked.sequence, n, blocked.source, blocked.found)
        return took_s

    def _release(self, blocked: _Blocked) -> None:
        for page in (*blocked.pages, *blocked.locked):
            page.locked -= 1
        blocked.pages.clear()
        blocked.locked.clear()
        if blocked.reading is not None:
            blocked.reading.cancel()

    # --- a request goes ---

    def detach(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Keep the cells of a request that loses its slot as a leaf, if they are worth it."""
        if not self.on or sequence.slot == NO_SLOT:
            return
        self.leaves.recount()
        blocked = self._unblock(sequence)
        if blocked is not None:
            self._release(blocked)
        lane = self._promoted.pop(sequence.handle, None)
        if lane is not None:
            sequence.move_to(lane)
        namespace, n = sequence.submit.namespace, sequence.computed
        keep = keep and sequence.submit.keeps
        if not keep or blocked is not None or namespace is None or n < LEAST_HIT:
            return
        tokens = sequence.tokens[:n].copy()
        if self.leaves.covering(namespace, tokens):
            return
        seq = self.leaves.free_id()
        if seq is None:
            oldest = next(iter(self.leaves))
            self.room.drop(oldest)
            seq = oldest.seq
        submit, now = sequence.submit, self._clock()
        leaf = Leaf(seq, tokens, namespace, submit.program, submit.session, now, submit.handle)
        if not self.leaves.keep(leaf, sequence.slot):
            self.failures["copy"] += 1
            return
        self.room.used(leaf)
        for other in self.leaves.within(leaf):
            self.room.drop(other)
        self.saving.add(leaf)

    def keep(self, handle: int) -> None:
        """Keep a request's prefix for longer, because its answer called a tool."""
        for leaf in self.leaves:
            leaf.called = leaf.called or leaf.handle == handle
        self.saving.keep(handle)

    def lane_set(self, handle: int) -> None:
        """Note that a client chose the lane of a request; forks do not change it any more."""
        self._promoted.pop(handle, None)

    def figures(self) -> PrefixFigures:
        failures = dict(self.failures)
        if self.saving.failures:
            failures["save"] = self.saving.failures
        return PrefixFigures(
            hits=dict(self.hits),
            failures=failures,
            tokens=self.tokens_saved,
            rent_s=self.room.rent_s,
            evicted=self.store.evicted,
            ghost_hits=self.store.ghost_hits,
            bytes=self.store.n_bytes,
            pages=self.store.n_pages,
            leaves=len(self.leaves),
            leaf_tokens=self.leaves.n_tokens,
            disk_bytes=0 if self.disk is None else self.disk.disk.n_bytes,
            disk_written=0 if self.disk is None else self.disk.disk.written,
        )

    def clear(self, mine: Callable[[str], bool]) -> int:
        """Drop the leaves and pages of namespaces for which `mine` is true; return their tokens."""
        n = 0
        for leaf in self.leaves:
            if mine(leaf.namespace):
                n += len(leaf.tokens)
                self.room.drop(leaf)
        self.store.clear([name for name in self.store.namespaces if mine(name)])
        self.saving.clear(mine)
        for name in self.usage.namespaces:
            if mine(name):
                self.usage.clear(name)
        return n
