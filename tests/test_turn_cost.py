"""What a turn costs does not grow with the conversation before it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import numpy as np
import pytest
from policy_kit import COST

from uma_trio.backend.base import IntArray
from uma_trio.engine.kv.pages import Page, PageTrie, common
from uma_trio.engine.kv.saving import Saving
from uma_trio.engine.kv.store import PageStore
from uma_trio.machine.background import Charges
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.prefix import PAGE
from uma_trio_sim.fake import FakeBackend


def calls(function: Callable[[], object]) -> int:
    """Return how many functions are called in `function`."""
    n = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal n
        n += event in ("call", "c_call")

    gc.disable()  # others' callbacks of it would count
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return n


def conversation(pages: int) -> tuple[PageTrie, IntArray]:
    """Return the saved pages of a conversation, and its tokens."""
    tokens = np.random.default_rng(1).integers(0, 9, pages * PAGE, dtype=np.int32)
    trie, page = PageTrie(), None
    for at in range(0, len(tokens), PAGE):
        page = trie.add("a", page, tokens[at : at + PAGE], memoryview(b""))
    return trie, tokens


def test_a_saved_conversation_is_looked_up_and_not_compared() -> None:
    """Each of its pages is one look into a dict and at its bytes; what is behind them is compared."""
    trie, tokens = conversation(200)
    more = np.concatenate([tokens, tokens[:100]])
    page, n = trie.match("a", more)
    assert (n, page.end if page else 0) == (len(tokens), len(tokens))
    assert calls(lambda: trie.match("a", more)) <= 2 * 200 + 20


@pytest.mark.parametrize("differs", [0, 1, 63, 64, 100, 128, 200 * PAGE - 1])
def test_what_is_found_ends_where_the_texts_part(differs: int) -> None:
    """Inside of a page, too."""
    trie, tokens = conversation(200)
    other = tokens.copy()
    other[differs] += 1
    page, n = trie.match("a", other)
    assert n == differs == common(tokens, other)
    assert (page.start if page else 0) <= max(0, differs - 1)


def test_a_page_that_went_is_not_found() -> None:
    """Nor are the ones before it lost."""
    trie, tokens = conversation(3)
    last, _ = trie.match("a", tokens)
    assert isinstance(last, Page)
    trie.remove(last)
    page, n = trie.match("a", tokens)
    assert (n, page) == (2 * PAGE, last.parent)


@pytest.mark.parametrize("cost", [None, COST])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 640, 10_007])
def test_what_a_prefix_is_worth_is_the_sum_of_its_pages(cost: CostModel | None, n: int) -> None:
    """It is found without going through them."""
    saving = Saving(FakeBackend(), PageStore(1 << 20, lambda: 0.0), lambda: 0.0, Charges(), 0.0)
    saving.cost = cost
    page_s = (
        (lambda at, m: m * saving.worth_s(1) * (1 + at / PAGE / 40))
        if cost is None
        else (lambda at, m: cost.seconds(Work(m, 1, m * at)))
    )
    parts = [page_s(at, min(PAGE, n - at)) for at in range(0, n, PAGE)]
    assert saving.worth_s(n) == pytest.approx(sum(parts))
    assert calls(lambda: saving.worth_s(n)) <= 40
