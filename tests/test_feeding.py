"""Texts are taken in for drafts as background work: within an allowance, charged, and beside a GPU's decode."""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import define, field
from drafts_kit import FLAT
from engine_kit import KINDS, Bench, OnDevice
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.engine.drafts import Drafter, Feeding
from uma_trio.engine.drafts.drafting import Drafting, Unread
from uma_trio.engine.drafts.lookup import INDEXED_A_TICK
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.sequences import Sequence
from uma_trio.machine.background import Charges
from uma_trio.policy.deadline import deadline
from uma_trio.policy.fairness import Path
from uma_trio_sim.fake import FakeBackend

TOKEN_S = 5e-6


@define(eq=False)
class Reader(Drafting):
    """Has a text of so many tokens of each of the programs 1, 2, ..., each of which takes its time."""

    left: list[int]
    now: float = 0.0
    read: Counter[Path] = field(factory=Counter)

    def unread(self, running: object) -> list[Unread]:
        """Return a part of each text."""
        parts = [Unread((n,), min(left, INDEXED_A_TICK)) for n, left in enumerate(self.left, 1)]
        return [part for part in parts if part.n_tokens]

    def take_in(self, part: Unread) -> None:
        """Take in a part."""
        self.left[part.program[0] - 1] -= part.n_tokens
        self.read[part.program] += part.n_tokens
        self.now += TOKEN_S * part.n_tokens


def feeding(reader: Reader, charges: Charges, *, overlaps: bool = False) -> Feeding:
    """Return what feeds `reader`."""
    return Feeding(reader, charges, lambda: reader.now, lambda: overlaps, {})


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=16), st.floats(1e-4, 5e-3))
def test_texts_are_taken_in_within_what_is_left_and_charged_to_whose_they_are(
    texts: list[int], most_s: float
) -> None:
    """After a few parts a token takes what was measured, and no part is longer than what fits."""
    reader, charges = Reader(list(texts)), Charges()
    work, spent = feeding(reader, charges), Counter[Path]()
    for n in range(200):
        before = reader.now
        if not work.claim(idle=False):
            break
        took_s = work.advance(most_s, idle=False)
        assert took_s == pytest.approx(reader.now - before)
        if n > 20:
            assert took_s <= 1.05 * most_s
        spent.update(charges.take())
    assert spent == pytest.approx({path: TOKEN_S * n for path, n in reader.read.items()})


def test_a_text_is_taken_in_to_its_end() -> None:
    """Little by little, however little is left of each tick."""
    reader = Reader([1000, 10])
    work = feeding(reader, Charges())
    while work.claim(idle=False):
        work.advance(2e-4, idle=False)
    assert reader.left == [0, 0]


def test_beside_a_decode_that_leaves_the_host_free_nobody_waits_for_it_and_nobody_pays() -> None:
    """Between two ticks of such a device there is none of it."""
    reader, charges = Reader([300]), Charges()
    work = feeding(reader, charges, overlaps=True)
    assert not work.claim(idle=False)
    work.take_in_all()
    assert reader.left == [300 - INDEXED_A_TICK]
    assert charges.take() == {}


class Noting(Drafter):
    """Notes what it takes in, and whether the backend is computing then."""

    backend: FakeBackend

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, bool]] = []

    def take_in(self, part: Unread) -> None:
        """Note it."""
        computing = isinstance(self.backend, OnDevice) and self.backend.computing
        self.noted.append((part.n_tokens, computing))
        super().take_in(part)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_taken_in_while_it_is_computed(kind: type[FakeBackend]) -> None:
    """Beside the decodes of a GPU, and between those of a CPU; in parts, each token once."""
    drafter = Noting()
    drafter.backend = backend = kind(n_slots=5, n_ctx=4000, n_rows=24)
    settings = EngineSettings(cost=FLAT, scratch_slots=1)
    bench = Bench(
        *(backend, deadline),
        settings=settings,
        drafter=drafter,
        clock=lambda: 0.02 * backend.decodes,
    )
    bench.submit([1 + n % 200 for n in range(700)], max_tokens=4)
    bench.run()
    parts = [n for n, _ in drafter.noted]
    assert all(n <= INDEXED_A_TICK for n in parts)
    assert 700 - 1 <= sum(parts) <= 700 + 4
    assert {beside for _, beside in drafter.noted} == {kind is OnDevice}


def test_a_sequence_that_has_gone_is_taken_in_no_more() -> None:
    """What was to be done for it is dropped without harm."""
    bench = Bench()
    bench.submit("hello", max_tokens=4)
    bench.engine.tick()
    (sequence,) = bench.engine.registry.running.values()
    assert isinstance(sequence, Sequence)
    Drafter().take_in(Unread((1,), 4, sequence))
