"""The KV cache's slots and reservations, against a model of them in two lines."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from uma_trio.backend.fake import FakeBackend
from uma_trio.engine.kv import KvCache, KvError


def cache(n_slots: int, n_ctx: int) -> KvCache:
    """Return the cache of a backend of that size."""
    return KvCache(FakeBackend(n_slots=n_slots, n_ctx=n_ctx))


class CacheMachine(RuleBasedStateMachine):
    """Takes, changes and gives back; the books must balance after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = cache(4, 100)
        self.owners: dict[int, tuple[int, int]] = {}
        self.next_key = 0

    @precondition(lambda self: len(self.owners) < 4)
    @rule(cells=st.integers(0, 80))
    def take(self, cells: int) -> None:
        """A slot is given to one owner at a time."""
        slot = self.kv.take(self.next_key, cells)
        assert slot not in {s for s, _ in self.owners.values()}
        self.owners[self.next_key] = (slot, cells)
        self.next_key += 1

    @precondition(lambda self: len(self.owners) == 4)
    @rule()
    def take_too_many(self) -> None:
        """No slot is given twice."""
        with pytest.raises(KvError):
            self.kv.take(-1, 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), cells=st.integers(0, 80))
    def reserve(self, data: st.DataObject, cells: int) -> None:
        """A reservation can change."""
        key = data.draw(st.sampled_from(sorted(self.owners)))
        self.kv.reserve(key, cells)
        self.owners[key] = (self.owners[key][0], cells)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """What was taken comes back."""
        key = data.draw(st.sampled_from(sorted(self.owners)))
        self.kv.release(key)
        del self.owners[key]

    @invariant()
    def balanced(self) -> None:
        """Slots partition and cells add up."""
        self.kv.check()
        assert self.kv.free_slots == 4 - len(self.owners)
        assert self.kv.free_cells == 100 - sum(c for _, c in self.owners.values())


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=50, deadline=None)


def test_an_owner_cannot_take_a_second_slot() -> None:
    """One request, one slot."""
    kv = cache(2, 10)
    kv.take(1, 1)
    with pytest.raises(KvError):
        kv.take(1, 1)


def test_a_stranger_cannot_give_back() -> None:
    """Only an owner can release."""
    with pytest.raises(KvError, match="owns no slot"):
        cache(2, 10).release(5)
