"""The saved pages, in memory or on disk, within a budget of bytes: eviction, and what a larger budget would keep.

There are two segments: pages used once, and pages used again. Within each the page that saves the
least time per byte is evicted (GreedyDual: its value counts from the level of the last eviction, so
the value of unused pages falls). A client that holds more than its share loses pages first, pinned
pages are evicted last, and a page is evicted after all pages that follow it.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final

from attrs import define, field, frozen

from uma_trio.backend.base import IntArray, Saved
from uma_trio.engine.kv.pages import Page, PageTrie, StoredFile
from uma_trio.policy.fairness import Path
from uma_trio.policy.prefix import AGAIN_SHARE, PINNED_SHARE, worth

# What one page costs beside its cells (an object, an entry in a dict and in a heap), and a ghost.
_PAGE_BYTES: Final = 1024
_GHOST_BYTES: Final = 160
_GHOST_SHARE: Final = 0.01

_SPARE_ENTRIES: Final = 256  # out of date, that are not looked for

_Entry = tuple[bool, float, int, int, Page]  # pinned, value, a number, the page's version
_Pin = tuple[float, int, Page]  # until when, a number


def _ranks(entry: _Entry) -> bool:
    """Whether an entry still says where its page belongs."""
    *_, version, page = entry
    return version == page.version and not page.children and page.saved is not None


def _holds(pin: _Pin) -> bool:
    """Whether a page is pinned until then, and no longer or shorter."""
    until, _, page = pin
    return page.pinned_until == until and page.saved is not None


@define
class _Segment:
    """Pages that were used equally often: by owner, those behind which there is none."""

    level: float = 0.0
    n_bytes: int = 0
    heaps: dict[Path, list[_Entry]] = field(factory=dict)


@frozen
class _Ghost:
    """What is remembered of an evicted page."""

    n_bytes: int
    namespace: str


class PageStore:
    """Saved pages of all namespaces, never more than `budget` bytes and `most_pages`. With `ghosts` evicted ones are remembered."""

    def __init__(
        self,
        budget: int,
        clock: Callable[[], float],
        *,
        most_pages: int = sys.maxsize,
        ghosts: bool = True,
    ) -> None:
        self.trie = PageTrie()
        self.budget = budget
        self.evicted = 0
        self.ghost_hits = 0
        self._clock = clock
        self._most_pages = most_pages
        self._remembers = ghosts
        self._segments = (_Segment(), _Segment())  # once, again
        self._by_owner: dict[Path, int] = {}
        self._ghosts: OrderedDict[bytes, _Ghost] = OrderedDict()
        self._ghost_bytes = 0
        self._pins: list[_Pin] = []  # in the order of their ends
        self._pinned = 0
        self._n = 0
        self._count = count()

    @property
    def _most_entries(self) -> int:
        """How many entries a heap may have before those that are out of date are thrown away."""
        return _SPARE_ENTRIES + 2 * self._n

    @property
    def n_bytes(self) -> int:
        """The size of everything: cells, tokens, ghosts, bookkeeping."""
        pages = sum(segment.n_bytes for segment in self._segments)
        return pages + len(self._ghosts) * _GHOST_BYTES

    @property
    def namespaces(self) -> frozenset[str]:
        """The namespaces with pages, or with evicted ones that are remembered."""
        return frozenset([*self.trie.namespaces, *(g.namespace for g in self._ghosts.values())])

    @property
    def n_pages(self) -> int:
        return self._n

    def held_by(self, owner: Path) -> int:
        return self._by_owner.get(owner, 0)

    def match(self, namespace: str, tokens: IntArray) -> tuple[Page | None, int]:
        """Return the page that the longest saved beginning ends in, and its length."""
        return self.trie.match(namespace, tokens)

    def miss(self, namespace: str, page: Page | None, tokens: IntArray) -> int:
        """Count the pages after `page` that twice the budget would have kept."""
        missed = 0
        if self._ghosts:
            for name in self.trie.absent(namespace, page, tokens):
                if name not in self._ghosts:
                    break
                missed += 1
        self.ghost_hits += missed
        return missed

    def add(
        self,
        namespace: str,
        parent: Page | None,
        tokens: IntArray,
        saved: Saved | StoredFile,
        *,
        owner: Path,
        cost_s: float,
    ) -> Page | None:
        """Save a page; None if there is no room for it, whatever else would go.

        Returns the one that is there if it has the same tokens.
        """
        there = self.trie.get(namespace, parent, tokens)
        if there is not None:
            return there
        n_bytes = len(saved) + tokens.nbytes + _PAGE_BYTES
        if parent is not None:
            parent.locked += 1
        try:
            fits = self._make_room(n_bytes)
        finally:
            if parent is not None:
                parent.locked -= 1
        if not fits:
            return None
        page = self.trie.add(namespace, parent, tokens, saved)
        page.owner, page.cost_s = owner, cost_s
        self._n += 1
        self._account(page, 1)
        self._forget([page.digest] if page.digest in self._ghosts else ())
        self._rank(page)
        for shorter in self.trie.beginnings(page):
            if not shorter.locked:
                self._drop(shorter)
        return page

    def used(self, pages: Iterable[Page]) -> None:
        for page in pages:
            self._account(page, -1)
            page.uses += 1
            self._account(page, 1)
            self._rank(page)

    def pin(self, pages: Iterable[Page], until: float) -> None:
        """Pin pages until this time, as far as pinned pages may take room; or unpin them."""
        now = self._clock()
        for page in pages:
            was = page.pinned_until > 0.0
            room = self._pinned + page.n_bytes <= PINNED_SHARE * self.budget
            if until > now and not was and not room:
                return
            self._pinned += page.n_bytes * ((until > now) - was)
            page.pinned_until = until if until > now else 0.0
            if page.pinned_until:
                heapq.heappush(self._pins, (until, next(self._count), page))
            self._rank(page)
        if len(self._pins) > self._most_entries:
            self._pins = [pin for pin in self._pins if _holds(pin)]
            heapq.heapify(self._pins)

    def clear(self, namespaces: Iterable[str]) -> int:
        """Drop the pages of these namespaces that no restore needs; return how many went.

        What is remembered of evicted ones is dropped, too.
        """
        before = self._n
        names = frozenset(namespaces)
        self._forget([name for name, ghost in self._ghosts.items() if ghost.namespace in names])
        for namespace in names:
            for page in reversed(tuple(self.trie.pages(namespace))):
                if not page.children and not page.locked:
                    self._drop(page)
        return before - self._n

    def _make_room(self, n_bytes: int) -> bool:
        while self.n_bytes + n_bytes > self.budget or self._n >= self._most_pages:
            victim = self._victim()
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _end_pins(self) -> None:
        while self._pins and self._pins[0][0] <= self._clock():
            pin = heapq.heappop(self._pins)
            if _holds(pin):
                self.pin((pin[2],), 0.0)

    def _victim(self) -> Page | None:
        self._end_pins()
        once, again = self._segments
        first = again if again.n_bytes > AGAIN_SHARE * self.budget else once
        over = self._over_share()
        last: Page | None = None  # pinned, if there is nothing else
        for segment in (first, again if first is once else once):
            entries = [e for owner in tuple(segment.heaps) if (e := self._top(segment, owner))]
            greedy = [e for e in entries if e[4].owner in over and not e[0]]
            chosen = min(greedy or entries, default=None, key=lambda e: e[:3])
            if chosen is None:
                continue
            if not chosen[0]:
                segment.level = max(segment.level, chosen[1])
                return chosen[4]
            last = last or chosen[4]
        return last

    def _over_share(self) -> frozenset[Path]:
        """Return the owners of more than their part of the budget, when several hold any.

        The budget is divided among principals, and the part of each among its programs.
        """
        principals = Counter(owner[:1] for owner in self._by_owner)
        share = self.budget / max(1, len(principals))
        return frozenset(
            owner for owner, held in self._by_owner.items() if held > share / principals[owner[:1]]
        )

    def _top(self, segment: _Segment, owner: Path) -> _Entry | None:
        """Return the page of `owner` that would go next; forget entries that are out of date."""
        heap = segment.heaps[owner]
        kept: list[_Entry] = []
        top: _Entry | None = None
        while heap and top is None:
            entry = heapq.heappop(heap)
            if not _ranks(entry):
                continue
            kept.append(entry)
            if not entry[4].locked:
                top = entry
        for entry in kept:
            heapq.heappush(heap, entry)
        if not heap:
            del segment.heaps[owner]
        return top

    def _rank(self, page: Page) -> None:
        """Put a page where its worth belongs, if it may go at all."""
        page.version += 1
        if page.children or page.parent is None or page.saved is None:
            return
        segment = self._segments[page.uses > 1]
        page.value = segment.level + worth(page.uses, page.cost_s, page.n_bytes)
        heap = segment.heaps.setdefault(page.owner, [])
        pinned = page.pinned_until > self._clock()
        entry = (pinned, page.value, next(self._count), page.version, page)
        heapq.heappush(heap, entry)
        if len(heap) > self._most_entries:
            heap[:] = [entry for entry in heap if _ranks(entry)]
            heapq.heapify(heap)

    def _account(self, page: Page, sign: int) -> None:
        n_bytes = sign * (page.n_bytes + _PAGE_BYTES)
        self._segments[page.uses > 1].n_bytes += n_bytes
        held = self._by_owner.get(page.owner, 0) + n_bytes
        self._by_owner[page.owner] = held
        if not held:
            del self._by_owner[page.owner]

    def _evict(self, page: Page) -> None:
        if self._remembers:
            self._ghosts[page.digest] = _Ghost(page.n_bytes, page.namespace)
            self._ghost_bytes += page.n_bytes
        self._drop(page)
        self.evicted += 1
        most = max(1, int(_GHOST_SHARE * self.budget / _GHOST_BYTES))
        while self._ghosts and (len(self._ghosts) > most or self._ghost_bytes > self.budget):
            self._forget([next(iter(self._ghosts))])

    def _forget(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._ghost_bytes -= self._ghosts.pop(name).n_bytes

    def _drop(self, page: Page) -> None:
        self._account(page, -1)
        if page.pinned_until > 0.0:
            self._pinned -= page.n_bytes
        parent = page.parent
        page.version += 1
        self.trie.remove(page)
        self._n -= 1
        if parent is not None and parent.parent is not None and not parent.children:
            self._rank(parent)
