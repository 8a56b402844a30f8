"""Saving leaves in pages, in slices, and the time that this takes on this machine."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from uma_trio.backend.base import Backend, Saved
from uma_trio.engine.kv.disk import ModelDisk
from uma_trio.engine.kv.leaves import Leaf
from uma_trio.engine.kv.pages import Page, below_root
from uma_trio.engine.kv.store import PageStore
from uma_trio.machine.background import Charges
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.prefix import PAGE, SAVING_SHARE, SCATTERED, Copying

#: Sessions whose latest turn is known.
MOST_SESSIONS = 1024
#: Saved leaves of which it is known which request left them: it may still be told of a tool call.
MOST_LATEST = 64
#: How many times as long as else what called a tool is kept.
CALLED = 2.0
#: A page is not saved where that takes more than so many times what computing it again would: a
#: request that comes meanwhile waits for it.
MOST_TIMES = 4.0
_FIRST_S = 2e-6  # a token, until one was measured
_MOST_S = 0.020  # of saving time that is put by; a page of a slow bus fits
# Computing a token, where no cost model says; a fortieth more for each page before.
_UNKNOWN_S = 1e-3


@frozen(eq=False)
class _Turn:
    """The end of the turn of a session that the request `handle` computed."""

    handle: int
    page: Page


class Saving:
    """The queue of leaves to save."""

    def __init__(
        self,
        backend: Backend,
        store: PageStore,
        clock: Callable[[], float],
        charges: Charges,
        session_ttl_s: float,
        copying: Copying | None = None,
        disk: ModelDisk | None = None,
    ) -> None:
        self._backend = backend
        self._disk = disk
        self._store = store
        self._clock = clock
        self._session_ttl_s = session_ttl_s
        self._sessions: OrderedDict[tuple[str, str], _Turn] = OrderedDict()
        self._latest: OrderedDict[int, Leaf] = OrderedDict()
        self._queue: list[Leaf] = []
        self._put_by_s = 0.0
        self._earned_s = 0.0
        self._last = clock() if store.budget else 0.0
        self.save_takes = CellTimes.saving(backend, _FIRST_S, copying)
        restore_s = _FIRST_S if copying is None else copying.restore_s
        self.restore_takes = CellTimes(restore_s, restore_s, guessed=copying is None)
        self.failures = 0
        self._ledger = charges
        self.cost: CostModel | None = None
        self._whole_only = backend.limits.n_streams > 1
        window = backend.limits.window
        # A page saved behind the window of its own end lacks cells that the next one needs.
        self._can = store.budget > 0 and not 0 < window < PAGE

    def now(self) -> float:
        """Return the time by which leaves are used."""
        return self._clock()

    @property
    def due(self) -> bool:
        """Whether there is a leaf to save."""
        return bool(self._queue)

    @property
    def save_s(self) -> float:
        """The seconds to save a token of contiguous cells."""
        return self.save_takes[False]

    @property
    def token_s(self) -> float:
        """The seconds to restore a token."""
        return self.restore_takes[False]

    def restore_s(self, page: Page) -> float:
        return self.token_s * len(page.tokens)

    def worth_restoring(self, pages: Sequence[Page]) -> bool:
        """Whether restoring pages takes no longer than computing them, as far as is known.

        If saving is faster than the measured restore, its time is used: the first restore may have
        been slow.
        """
        if self.restore_takes.guessed(scattered=False):
            return True
        token_s = min(self.token_s, self.save_s)
        return token_s * sum(len(page.tokens) for page in pages) <= sum(
            page.cost_s for page in pages
        )

    def restored(self, n_tokens: int, took_s: float) -> None:
        self.restore_takes.learn(scattered=False, token_s=took_s / n_tokens)

    def add(self, leaf: Leaf) -> None:
        """Queue a leaf to be saved, without its saved part."""
        n_bytes = len(leaf.tokens) * self._backend.model.cell_bytes
        if not self._can or (self._whole_only and n_bytes > self._store.budget):
            self.give_up(leaf)
            return
        self._find(leaf)
        if leaf.unsaved:
            self._queue.append(leaf)
        else:
            self._whole(leaf)

    def give_up(self, leaf: Leaf) -> None:
        """Note that a leaf is never saved. It is dropped when it has cost what it is worth."""
        self.forget(leaf)
        leaf.given_up = True

    def again_s(self, leaf: Leaf) -> float:
        """Return the time to compute a leaf again, as estimated at the first call."""
        leaf.again_s = leaf.again_s or self.worth_s(len(leaf.tokens))
        return leaf.again_s

    def first(self, leaf: Leaf) -> None:
        """Save this leaf before all others, if it is to be saved at all."""
        if leaf in self._queue and self._queue[0] is not leaf:
            self._queue.remove(leaf)
            self._queue.insert(0, leaf)

    def will_save(self, leaf: Leaf) -> bool:
        """Whether a leaf is still to be saved, and not given up."""
        return leaf in self._queue

    def forget(self, leaf: Leaf) -> None:
        if leaf in self._queue:
            self._queue.remove(leaf)

    def earn(self, seconds: float) -> None:
        """Allow additional saving time: the cost of an unsaved leaf while it has to stay."""
        self._earned_s += seconds

    def price_s(self, leaf: Leaf) -> float:
        """Return the expected time to save the rest of a leaf, by how scattered its cells are."""
        n = leaf.unsaved
        runs = self._backend.kv_runs(leaf.seq, leaf.saved, len(leaf.tokens)) - 1
        share = min(1.0, runs * PAGE / (SCATTERED * n)) if n else 0.0
        scattered_s = share * self.save_takes[True] if share else 0.0  # which may be infinite
        return n * (scattered_s + (1.0 - share) * self.save_takes[False])

    def some(self, most_s: float, *, share: bool = True) -> float:
        """Save pages in the earned time, plus saving's `share` of the time since the last call.

        Pages that would take longer than `most_s` are skipped. Returns the seconds that it took.
        """
        now = self._clock()
        self._put_by_s = min(_MOST_S, self._put_by_s + SAVING_SHARE * (now - self._last))
        self._last = now
        allowed_s = self._earned_s + (self._put_by_s if share else 0.0)
        spent_s = took_s = 0.0
        while self._queue and (need_s := self._page_s(self._queue[0])) <= min(
            allowed_s - spent_s, most_s - took_s
        ):
            page_s = self._save()
            took_s += page_s
            spent_s += max(page_s, need_s)
        self._put_by_s -= max(0.0, spent_s - self._earned_s)
        self._earned_s = max(0.0, self._earned_s - spent_s) if self._queue else 0.0
        return took_s

    def one(self, most_s: float = math.inf) -> bool:
        """Save a page; False if none would take at most `most_s`."""
        if self._queue and not self._page_s(self._queue[0]) <= most_s:
            quick = (leaf for leaf in self._queue if self._page_s(leaf) <= most_s)
            first = next(quick, None)
            if first is None:
                return False
            self.first(first)
        if not self._queue:
            return False
        self._save()
        return True

    def at_once(self, leaf: Leaf, most_s: float) -> float:
        """Save the rest of a leaf, no page that should end after `most_s`; return how long it took."""
        took_s = 0.0
        self.first(leaf)
        while leaf in self._queue and took_s + self._page_s(leaf) <= most_s:
            took_s += self._save()
        return took_s

    def next_s(self, quick_s: float = 0.0) -> float:
        """Return how long the next page should take: one of at most `quick_s` if there is any, or the first."""
        return next(
            (s for leaf in self._queue if (s := self._page_s(leaf)) <= quick_s),
            self._page_s(self._queue[0]),
        )

    def _page_s(self, leaf: Leaf) -> float:
        first, last = self._next_part(leaf)
        n = last if self._whole_only else last - first
        return self.save_takes[self._scattered(leaf, first, last)] * n

    def _next_part(self, leaf: Leaf) -> tuple[int, int]:
        """Return which positions are saved next: a page, or all where the backend copies whole sequences only."""
        end = len(leaf.tokens)
        return leaf.saved, end if self._whole_only else min(leaf.saved + PAGE, end)

    def _scattered(self, leaf: Leaf, first: int, last: int) -> bool:
        return self._backend.kv_runs(leaf.seq, first, last) >= SCATTERED

    def _save(self) -> float:
        """Save the next page of the first leaf; give the leaf up where that fails."""
        leaf, began = self._queue[0], self._clock()
        self._look_again(leaf)
        if not leaf.unsaved:
            self._queue.pop(0)
            self._whole(leaf)
            return 0.0
        first, last = self._next_part(leaf)
        scattered = self._scattered(leaf, first, last)
        known_s = 0.0 if self.save_takes.guessed(scattered=scattered) else self._page_s(leaf)
        if known_s > MOST_TIMES * self._cost_s(first, last - first):
            self._queue.pop(0)
            self.give_up(leaf)
            return 0.0
        saved = self._backend.kv_save(leaf.seq, first, last, PAGE)
        if saved is None:
            self.failures += 1
        else:
            self._store_pages(leaf, saved)
        took_s = self._clock() - began
        self._ledger.spend(leaf.owner, took_s)
        if leaf.saved < last:
            self._queue.pop(0)
            self.give_up(leaf)
            return took_s
        n = last if self._whole_only else last - first
        self.save_takes.learn(scattered=scattered, token_s=took_s / n)
        if not leaf.unsaved:
            self._queue.pop(0)
            self._whole(leaf)
        return took_s

    def _store_pages(self, leaf: Leaf, saved: Sequence[Saved]) -> None:
        """Store the next pages of a leaf, until one finds no room."""
        for cells in saved:
            first, last = leaf.saved, min(leaf.saved + PAGE, len(leaf.tokens))
            page = self._store.add(
                leaf.namespace,
                leaf.page,
                leaf.tokens[first:last],
                cells,
                owner=leaf.owner,
                cost_s=self._cost_s(first, last - first),
            )
            if page is None:
                break
            leaf.page = page
        self._offer(leaf)

    def _offer(self, leaf: Leaf) -> None:
        if self._disk is not None and leaf.page is not None:
            self._disk.offer(leaf.namespace, leaf.page)

    def sessions(self, namespace: str) -> list[str]:
        """Return the sessions of a namespace whose latest turn is saved."""
        return [
            session
            for (name, session), turn in self._sessions.items()
            if name == namespace and turn.page.saved is not None
        ]

    def clear(self, mine: Callable[[str], bool]) -> None:
        """Forget the sessions and latest answers of the namespaces for which `mine` is true."""
        for key in [key for key in self._sessions if mine(key[0])]:
            del self._sessions[key]
        for handle in [n for n, leaf in self._latest.items() if mine(leaf.namespace)]:
            del self._latest[handle]

    def pin(self, namespace: str, session: str, seconds: float) -> None:
        """Pin the latest turn of a session for this time; 0 removes the pin."""
        turn = self._sessions.get((namespace, session))
        if turn is not None and turn.page.saved is not None:
            self._store.pin(turn.page.path, self._clock() + seconds if seconds else 0.0)

    def _whole(self, leaf: Leaf) -> None:
        self._offer(leaf)
        self._latest[leaf.handle] = leaf
        if len(self._latest) > MOST_LATEST:
            self._latest.popitem(last=False)
        self.pin_leaf(leaf)

    def keep(self, handle: int) -> None:
        """Keep a request's saved prefix for longer; an unsaved one is marked in its leaf."""
        leaf = self._latest.get(handle)
        if leaf is not None:
            leaf.called = True
            self.pin_leaf(leaf)

    def pin_leaf(self, leaf: Leaf) -> None:
        """Keep a whole leaf before all else for a while, if it is a session's or a tool was called.

        Of a session the latest one is kept. A tool may take as long again as a person does.
        """
        ttl_s = self._session_ttl_s * (CALLED if leaf.called else 1.0)
        page = leaf.page
        if page is None or page.saved is None or not ttl_s:
            return
        if leaf.session is None:
            wanted = leaf.called
        else:
            wanted = self._is_latest((leaf.namespace, leaf.session), _Turn(leaf.handle, page))
        if wanted:
            self._store.pin(page.path, self._clock() + ttl_s)

    def _is_latest(self, key: tuple[str, str], turn: _Turn) -> bool:
        """Note the latest turn of a session, in place of the one before; False if a later one is saved.

        An older one may be saved after it, or be told of late that it called a tool.
        """
        before = self._sessions.get(key)
        if before is not None and before.page.saved is not None and before.handle > turn.handle:
            return False
        if before is not None:
            del self._sessions[key]
            self._store.pin(before.page.path, 0.0)
        elif len(self._sessions) >= MOST_SESSIONS:
            self._sessions.popitem(last=False)
        self._sessions[key] = turn
        # Evicted pages would keep their tokens here, outside of the budget.
        while next(iter(self._sessions.values())).page.saved is None:
            self._sessions.popitem(last=False)
        return True

    def _find(self, leaf: Leaf) -> None:
        page, n = self._store.match(leaf.namespace, leaf.tokens)
        if page is not None and n < page.end:
            page = page.parent
        if page is not None and page.end - page.start < PAGE and n < len(leaf.tokens):
            page = page.parent
        leaf.page = below_root(page)

    def _look_again(self, leaf: Leaf) -> None:
        """Find what has changed since the latest page of a leaf.

        That one may have been evicted, and another that shares its cells may have been saved.
        """
        if leaf.page is not None and leaf.page.saved is None:
            self._find(leaf)
        trie = self._store.trie
        while leaf.unsaved:
            tokens = leaf.tokens[leaf.saved : leaf.saved + PAGE]
            there = trie.get(leaf.namespace, leaf.page, tokens)
            if there is None:
                break
            leaf.page = there

    def worth_s(self, n: int) -> float:
        """Return what computing the first `n` tokens of a prompt takes, page by page.

        The cost of a page grows evenly with what is before it, so that of all is the middle one's.
        """
        pages, rest = divmod(n, PAGE)
        middle = PAGE * (pages - 1) / 2
        return (pages * self._cost_s(middle, PAGE) if pages else 0.0) + (
            self._cost_s(n - rest, rest) if rest else 0.0
        )

    def _cost_s(self, start: float, n: int) -> float:
        """Return what computing a page took, or would take, behind `start` tokens."""
        if self.cost is None:
            return n * _UNKNOWN_S * (1 + start / PAGE / 40)
        return self.cost.seconds(Work(n, 1, round(n * start)))


_RATE: Final = 0.2  # how quickly later measurements change it
_SCATTERED: Final = 20.0  # times what cells take that lie together, on a CPU


class CellTimes:
    """Seconds per token, separately for scattered and contiguous cells.

    Until the first measurement it is an estimate, which that measurement replaces: a CPU and a GPU
    on a bus differ by a factor of ten.
    """

    @classmethod
    def saving(cls, backend: Backend, together_s: float, copying: Copying | None) -> CellTimes:
        """Return what saving takes: as measured at start-up (`copying`), or an estimate.

        On a device that was not measured it is infinite until it is, in idle time. There llama.cpp copies each
        run of cells in each layer with a separate call, over a bus of unknown speed: on an H200 a page of
        contiguous cells took 16 to 34 ms, and a request waited 180 ms for scattered ones.
        """
        if copying is not None:
            return cls(copying.save_s, copying.scattered_s, guessed=False)
        if backend.traits.shape_costs:
            return cls(math.inf, math.inf)
        return cls(together_s, _SCATTERED * together_s)

    def __init__(self, together_s: float, scattered_s: float, *, guessed: bool = True) -> None:
        self._seconds = {False: together_s, True: scattered_s}
        self._guessed = {False, True} if guessed else set()

    def __getitem__(self, scattered: bool) -> float:
        return self._seconds[scattered]

    def guessed(self, *, scattered: bool) -> bool:
        """Whether it was never measured."""
        return scattered in self._guessed

    def learn(self, *, scattered: bool, token_s: float) -> None:
        if scattered in self._guessed:
            self._guessed.remove(scattered)
            self._seconds[scattered] = token_s
        else:
            self._seconds[scattered] += _RATE * (token_s - self._seconds[scattered])
