"""Saved pages: matched exact to the token, within a budget, each namespace alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from uma_trio.backend.base import IntArray, Saved
from uma_trio.engine.kv.pages import Page, PageTrie, common
from uma_trio.engine.kv.store import PageStore
from uma_trio.policy.prefix import PAGE, PINNED_SHARE, Prices, moves_out, rent

CELLS = 1000  # bytes of a saved page


def ids(tokens: Sequence[int]) -> IntArray:
    """Return tokens as an array."""
    return np.array(tokens, np.int32)


def saved(n: int = CELLS) -> Saved:
    """Return `n` bytes of cells."""
    return np.zeros(n, np.uint8).data


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def put(
    store: PageStore,
    tokens: Sequence[int],
    namespace: str = "1",
    *,
    owner: tuple[int, ...] = (1,),
    cost_s: float = 1.0,
) -> list[Page | None]:
    """Save tokens page by page, as far as there is room."""
    pages: list[Page | None] = []
    parent: Page | None = None
    for at in range(0, len(tokens), PAGE):
        part = ids(tokens[at : at + PAGE])
        parent = store.add(namespace, parent, part, saved(), owner=owner, cost_s=cost_s)
        pages.append(parent)
        if parent is None:
            break
    return pages


def room_for(n_pages: int) -> int:
    """Return a budget for so many full pages."""
    return n_pages * (CELLS + 4 * PAGE + 1024) + 500


def test_a_match_is_exact_to_the_token() -> None:
    """It ends within a page where the tokens part, and in the child that goes furthest."""
    store = PageStore(room_for(20), Clock())
    base = list(range(100))
    put(store, [*base, *range(200, 250)])
    put(store, [*base, *range(300, 320)])
    assert store.match("1", ids([*base, 300, 301, 7]))[1] == 102
    assert store.match("1", ids([*base, 200, 9]))[1] == 101
    assert store.match("1", ids([*base[:70], 9]))[1] == 70
    assert store.match("1", ids([9, *base])) == (None, 0)
    assert store.match("2", ids(base)) == (None, 0)


def test_a_longer_page_takes_the_place_of_its_beginning() -> None:
    """A conversation that goes on leaves no stumps behind."""
    store = PageStore(room_for(20), Clock())
    put(store, range(70))
    put(store, range(100))
    assert store.n_pages == 2
    assert store.match("1", ids(range(100)))[1] == 100


def test_the_same_page_is_kept_once() -> None:
    """Saving it again returns the one that is there."""
    store = PageStore(room_for(20), Clock())
    assert put(store, range(70)) == put(store, range(70))
    assert store.n_pages == 2


def test_what_saves_least_by_the_byte_goes_first() -> None:
    """Of pages used once the cheaper to compute again, whatever their order."""
    store = PageStore(room_for(3), Clock())
    for first, cost_s in ((100, 3.0), (200, 1.0), (300, 2.0)):
        put(store, range(first, first + PAGE), cost_s=cost_s)
    put(store, range(400, 400 + PAGE), cost_s=2.5)
    found = [store.match("1", ids(range(n, n + PAGE)))[1] for n in (100, 200, 300, 400)]
    assert found == [PAGE, 0, PAGE, PAGE]
    assert store.evicted == 1


def test_what_was_used_again_outlives_a_flood() -> None:
    """A hundred prompts that come once do not push out the one that comes often."""
    store = PageStore(room_for(10), Clock())
    often = [page for page in put(store, range(2 * PAGE)) if page is not None]
    for n in range(100):
        store.used(often)
        put(store, range(1000 * n + 500, 1000 * n + 500 + 2 * PAGE))
    assert store.match("1", ids(range(2 * PAGE)))[1] == 2 * PAGE


def test_what_is_not_used_again_goes_in_the_end() -> None:
    """Worth counts from a level that rises with every eviction, so that old fame fades."""
    store = PageStore(room_for(4), Clock())
    for n in range(30):
        pages = [page for page in put(store, range(1000 * n, 1000 * n + PAGE)) if page]
        store.used(pages)
    assert store.match("1", ids(range(PAGE)))[1] == 0
    assert store.match("1", ids(range(29_000, 29_000 + PAGE)))[1] == PAGE


def test_a_client_over_its_share_loses_first() -> None:
    """A flood from one client leaves another's page, although it is worth less."""
    store = PageStore(room_for(6), Clock())
    put(store, range(PAGE), "2", owner=(2,), cost_s=0.001)
    for n in range(1, 40):
        put(store, range(1000 * n, 1000 * n + PAGE), "1", owner=(1,), cost_s=9.0)
    assert store.match("2", ids(range(PAGE)))[1] == PAGE


def test_a_principal_with_many_programs_has_no_larger_part() -> None:
    """Its programs divide its part, so that a flood under many names leaves another's page."""
    store = PageStore(room_for(6), Clock())
    put(store, range(2 * PAGE), "2", owner=(2, 20), cost_s=0.001)
    for n in range(1, 40):
        put(store, range(1000 * n, 1000 * n + PAGE), "1", owner=(1, 100 + n), cost_s=9.0)
    assert store.match("2", ids(range(2 * PAGE)))[1] == 2 * PAGE


def test_pinned_pages_go_last_and_only_for_their_time() -> None:
    """Until then everything else goes first; then they are like any other."""
    clock = Clock()
    store = PageStore(room_for(12), clock)
    pinned = [page for page in put(store, range(PAGE), cost_s=0.001) if page]
    store.pin(pinned, 10.0)
    for n in range(1, 30):
        put(store, range(1000 * n, 1000 * n + PAGE))
    assert store.match("1", ids(range(PAGE)))[1] == PAGE
    clock.now = 11.0
    for n in range(30, 60):
        put(store, range(1000 * n, 1000 * n + PAGE))
    assert store.match("1", ids(range(PAGE)))[1] == 0


def test_no_more_than_a_part_of_the_budget_is_pinned() -> None:
    """Who pins everything has pinned a quarter, and the rest is evicted as ever."""
    store = PageStore(room_for(20), Clock())
    for n in range(20):
        store.pin([page for page in put(store, range(1000 * n, 1000 * n + PAGE)) if page], 1e9)
    pinned = [p for p in store.trie.pages("1") if p.pinned_until > 0]
    assert 0 < sum(page.n_bytes for page in pinned) <= PINNED_SHARE * store.budget


def test_a_page_that_a_restore_needs_is_not_evicted() -> None:
    """Nor is what comes before it; without other room nothing is saved."""
    store = PageStore(room_for(2), Clock())
    pages = [page for page in put(store, range(2 * PAGE)) if page]
    for page in pages:
        page.locked += 1
    assert put(store, range(1000, 1000 + PAGE)) == [None]
    assert store.match("1", ids(range(2 * PAGE)))[1] == 2 * PAGE
    pages[1].locked -= 1
    assert put(store, range(1000, 1000 + PAGE)) != [None]
    assert store.match("1", ids(range(2 * PAGE)))[1] == PAGE


def test_ghosts_tell_what_twice_the_budget_would_have_had() -> None:
    """A page that was evicted lately and is asked for again counts; one evicted long ago does not."""
    store = PageStore(room_for(100), Clock())
    for n in range(150):
        put(store, range(1000 * n, 1000 * n + PAGE))
    store.miss("1", None, ids(range(49_000, 49_000 + PAGE + 5)))
    assert store.ghost_hits == 1
    store.miss("1", None, ids(range(900_000, 900_000 + PAGE + 5)))
    store.miss("2", None, ids(range(49_000, 49_000 + PAGE + 5)))
    assert store.ghost_hits == 1


def test_a_budget_of_nothing_keeps_nothing() -> None:
    """Every page is refused."""
    store = PageStore(0, Clock())
    assert put(store, range(10)) == [None]
    assert store.n_bytes == 0


@pytest.mark.parametrize("n", [0, PAGE + 1])
def test_a_page_has_1_to_64_tokens(n: int) -> None:
    """Others are a mistake of the caller."""
    trie = PageTrie()
    with pytest.raises((ValueError, IndexError)):
        trie.add("1", None, ids(range(n)), saved())


def test_a_leaf_leaves_when_it_has_paid_for_the_way() -> None:
    """Ski rental: rent of each cell adds up with ticks and tokens, against both ways."""
    prices = Prices(save_s=2e-6, restore_s=3e-6, used_cell_s=1e-9)
    assert not moves_out(prices, 0.0)
    assert rent(prices, 10) == pytest.approx(1e-8)
    assert not moves_out(prices, 4.99e-6)
    assert moves_out(prices, 5.01e-6)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(
    lambda kinds: [kind for kind in kinds for _ in range(40)]
)
NAMESPACE = st.sampled_from(["1", "1/salt", "2"])


class Pages(RuleBasedStateMachine):
    """Saves, matches, uses, pins, locks and clears at random; the books must balance."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = PageStore(room_for(5), self.clock)
        self.locked: list[Page] = []

    @rule(
        namespace=NAMESPACE,
        tokens=TOKENS,
        owner=st.tuples(st.integers(1, 2), st.integers(3, 4)),
        cost=st.floats(0, 2),
    )
    def save(self, namespace: str, tokens: list[int], owner: tuple[int, ...], cost: float) -> None:
        """Save a text, as far as there is room."""
        put(self.store, tokens, namespace, owner=owner, cost_s=cost)

    @rule(namespace=NAMESPACE, tokens=TOKENS, how=st.sampled_from(["use", "pin", "lock"]))
    def touch(self, namespace: str, tokens: list[int], how: str) -> None:
        """Use, pin or lock what there is of a text."""
        page, n = self.store.match(namespace, ids(tokens))
        have = [common(ids(tokens), self.whole(p)) for p in self.store.trie.pages(namespace)]
        assert n == max(have, default=0), "the longest there is"
        if page is None:
            return
        if how == "use":
            self.store.used(page.path)
        elif how == "pin":
            self.store.pin(page.path, self.clock.now + 5)
        else:
            page.locked += 1
            self.locked.append(page)

    def whole(self, page: Page) -> IntArray:
        """Return all tokens up to the end of a page."""
        return np.concatenate([one.tokens for one in page.path])

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        """Let pins end."""
        self.clock.now += seconds

    @precondition(lambda self: self.locked)
    @rule()
    def unlock(self) -> None:
        """A restore is done."""
        self.locked.pop().locked -= 1

    @rule(namespace=NAMESPACE)
    def clear(self, namespace: str) -> None:
        """Drop all that no restore needs."""
        self.store.clear([namespace])
        if not self.locked:
            assert namespace not in self.store.namespaces

    @invariant()
    def the_budget_is_kept(self) -> None:
        """Bytes are never more, and are those of the pages that are there."""
        pages = [p for name in self.store.trie.namespaces for p in self.store.trie.pages(name)]
        assert len(pages) == self.store.n_pages
        assert sum(p.n_bytes + 1024 for p in pages) <= self.store.n_bytes <= self.store.budget
        held = sum(self.store._by_owner.values())
        assert held == sum(p.n_bytes + 1024 for p in pages)

    @invariant()
    def pages_stand_on_pages(self) -> None:
        """Each has its cells, and so has all before it; only full ones have any behind them."""
        for name in self.store.trie.namespaces:
            for page in self.store.trie.pages(name):
                assert all(one.saved is not None for one in page.path)
                assert all(len(one.tokens) == PAGE for one in page.path[:-1])
        assert all(page.saved is not None for page in self.locked)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_is_used_and_pinned_again_and_again_takes_no_more_memory() -> None:
    """Entries that are out of date go, and the order of evictions stays what it was."""
    clock = Clock()
    store = PageStore(room_for(4), clock)
    pages = [put(store, range(n * 1000, n * 1000 + PAGE))[0] for n in range(4)]
    for n in range(2000):
        clock.now += 0.01
        page = pages[n % 3]
        assert page is not None
        store.used((page,))
        store.pin((page,), clock.now + 300)
    heaps = [heap for segment in store._segments for heap in segment.heaps.values()]
    assert sum(map(len, heaps)) + len(store._pins) < 1000
    put(store, range(9000, 9000 + PAGE))
    kept = [page is not None and page.saved is not None for page in pages]
    assert kept == [True, True, True, False], "the one that nobody used goes first"
