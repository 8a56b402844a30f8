"""Slots and reservations of the KV cache, against a model of them in two lines."""

from __future__ import annotations

import numpy as np
import pytest
from engine_kit import Sink
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from uma_trio.engine.cells import Cells, KvError
from uma_trio.engine.messages import SamplingParams, Submit
from uma_trio.engine.sampling import Sampler
from uma_trio.engine.sequences import NO_SLOT, Sequence
from uma_trio.machine.background import Charges
from uma_trio.text.stream import TokenText
from uma_trio_sim.fake import FakeBackend


def cells(n_slots: int, n_ctx: int) -> Cells:
    """Return the cells of a backend of that size, without prefixes."""
    return Cells(
        FakeBackend(n_slots=n_slots, n_ctx=n_ctx),
        lambda: 0.0,
        lambda _handle, _beginning: None,
        scratch=False,
        keeps_high_water=False,
        prefix_bytes=0,
        session_ttl_s=0.0,
        copying=None,
        charges=Charges(),
    )


def sequence(handle: int, n: int = 1) -> Sequence:
    """Return a request that reserves `n` cells when it is admitted."""
    prompt, params = np.zeros(n, np.int32), SamplingParams()
    submit = Submit(handle, prompt, 0, params, (), "interactive", 0, 9, Sink(), 0.0)
    return Sequence(submit, Sampler(params, ()), TokenText([]))


class CellsMachine(RuleBasedStateMachine):
    """Admits, changes and lets go; the books must balance after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = cells(4, 100)
        self.owners: dict[int, Sequence] = {}
        self.next_key = 0

    @precondition(lambda self: len(self.owners) < 4)
    @rule(n=st.integers(0, 80))
    def admit(self, n: int) -> None:
        """A slot is given to one owner at a time."""
        new = sequence(self.next_key, n)
        self.cells.admit(new)
        assert new.reserved == n
        assert new.slot not in {owner.slot for owner in self.owners.values()}
        self.owners[self.next_key] = new
        self.next_key += 1

    @precondition(lambda self: len(self.owners) == 4)
    @rule()
    def admit_too_many(self) -> None:
        """No slot is given twice."""
        with pytest.raises(KvError):
            self.cells.admit(sequence(-1))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), n=st.integers(0, 80))
    def reserve(self, data: st.DataObject, n: int) -> None:
        """A reservation can change."""
        self.cells.reserve(self.owners[data.draw(st.sampled_from(sorted(self.owners)))], n)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def gone(self, data: st.DataObject) -> None:
        """What was taken comes back."""
        left = self.owners.pop(data.draw(st.sampled_from(sorted(self.owners))))
        self.cells.release(left)
        assert (left.slot, left.reserved) == (NO_SLOT, 0)

    @invariant()
    def balanced(self) -> None:
        """Slots partition and cells add up."""
        self.cells.check()
        assert self.cells.free_slots == 4 - len(self.owners)
        assert self.cells.free_cells == 100 - sum(one.reserved for one in self.owners.values())


TestCellsMachine = CellsMachine.TestCase
TestCellsMachine.settings = settings(max_examples=50, deadline=None)


def test_an_owner_cannot_take_a_second_slot() -> None:
    """One request, one slot."""
    held, owner = cells(2, 10), sequence(1)
    held.admit(owner)
    with pytest.raises(KvError):
        held.admit(owner)


def test_a_stranger_cannot_give_back() -> None:
    """Only an owner can."""
    with pytest.raises(KvError, match="owns no slot"):
        cells(2, 10).release(sequence(5))
