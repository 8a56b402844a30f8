"""What idle prefixes cost others: shared cells once, and nothing where a request holds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from engine_kit import Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefix_cache import MIB, MINE, ask, letters, save_all

from uma_trio.backend.base import Saved
from uma_trio.engine.kv.leaves import Leaf, Leaves
from uma_trio.engine.kv.usage import REUSED, Reuse
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio_sim.fake import FakeBackend

CELL_S = 2.0**-40  # a cell of anybody, to each token; a power of two, so that sums are exact


class CountsSaves(FakeBackend):
    """A backend that counts the tokens that are saved."""

    saved = 0

    def kv_save(self, slot: int, first: int, last: int, page: int) -> Sequence[Saved] | None:
        """Save, and count."""
        self.saved += last - first
        return super().kv_save(slot, first, last, page)


def bench(backend: FakeBackend | None = None) -> Bench:
    """Return an engine whose cost model prices a cell of anybody."""
    cost = CostModel(Staircase((1, 64), (0.001, 0.010)), used_cell_s=CELL_S)
    made = backend or FakeBackend(n_ctx=4096, n_slots=4, n_batch=64)
    return Bench(made, settings=EngineSettings(prefix_bytes=MIB, cost=cost))


def charge(made: Bench, n_tokens: int) -> float:
    """Let leaves pay for a tick of so many tokens; return what all of them paid."""
    room = made.engine.cells.prefix.room
    before = room.rent_s
    room.charge(n_tokens, made.engine.memory.cost)
    return room.rent_s - before


def owing_nothing(leaves: Leaves) -> Leaves:
    """Return these leaves as if they had paid no rent yet."""
    for leaf in leaves:
        leaf.paid_s = 0.0
    return leaves


def answered_alike(made: Bench, own: tuple[int, ...]) -> list[Leaf]:
    """Answer prompts that share 300 tokens, one after another; return the leaves they left."""
    for n in own:
        ask(made, [*letters(9, 300), *letters(n, 40)], namespace=MINE)
    return list(made.engine.cells.prefix.leaves)


@settings(deadline=None)
@given(st.sets(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 64))
def test_cells_that_several_leaves_share_are_paid_for_once(own: set[int], n_tokens: int) -> None:
    """All leaves together pay for the cells that are in use, and each for its part of them."""
    made = bench()
    leaves = answered_alike(made, tuple(own))
    paid_s = charge(made, n_tokens)
    assert paid_s == pytest.approx(CELL_S * n_tokens * made.backend.kv_used())
    assert [leaf.cells for leaf in leaves] == pytest.approx([300 / len(own) + 43] * len(own))


def test_what_is_shared_is_paid_by_the_last_who_keeps_it() -> None:
    """When the other one has gone, its whole length counts."""
    made = bench()
    one, two = answered_alike(made, (1, 2))
    made.engine.cells.prefix.room.drop(one)
    assert charge(made, 1) == CELL_S * len(two.tokens)


def test_a_leaf_pays_nothing_for_cells_of_a_request() -> None:
    """They would be there without it; so it stays, and room is not made by dropping it."""
    made = bench()
    prompt = letters(1, 200)
    ask(made, prompt)
    made.submit([*prompt, 33, 34], 60, namespace=MINE)
    made.ticks(20)
    (leaf,) = made.engine.cells.prefix.leaves
    leaf.paid_s = 0.0
    assert charge(made, 1) == CELL_S * 3, "the last three tokens of an answer are its own"
    made.engine.cells.prefix.room.drop(leaf)
    made.run()


def test_room_is_not_made_by_dropping_what_a_request_holds() -> None:
    """That would free nothing, and the next one could not begin with it."""
    made = bench(FakeBackend(n_ctx=512, n_slots=4, n_batch=64))
    prompt = letters(1, 200)
    ask(made, prompt, 1)
    made.submit([*prompt, 33], 250, namespace=MINE)
    made.ticks(2)
    room, backend = made.engine.cells.prefix.room, made.backend
    room.make([], 512 - backend.kv_used() + 1)
    assert not room.drop_all()
    assert len(made.engine.cells.prefix.leaves) == 1
    made.run()


def test_leaves_that_share_leave_as_one_alone_would() -> None:
    """A part of the rent is held against the same part of the way out and back."""
    alone, alike = bench(), bench()
    ask(alone, [*letters(9, 300), *letters(1, 40)])
    answered_alike(alike, (1, 2, 3))
    save_all(alone)
    save_all(alike)
    for made in (alone, alike):
        takes_s = made.engine.cells.prefix.saving.save_s + made.engine.cells.prefix.saving.token_s
        leaves = owing_nothing(made.engine.cells.prefix.leaves)
        charge(made, int(takes_s / CELL_S) - 1)
        assert not any(leaf.leaving for leaf in leaves)
        charge(made, 2)
        assert all(leaf.leaving for leaf in leaves)


def test_what_cannot_be_saved_goes_for_its_part_of_what_it_is_worth() -> None:
    """Two that share most of it are given up no sooner than one alone."""
    made = bench()
    made.backend.kv_fails = lambda verb: verb == "save"
    answered_alike(made, (1, 2))
    save_all(made)
    leaves = owing_nothing(made.engine.cells.prefix.leaves)
    leaf = next(iter(leaves))
    assert leaf.given_up
    reused = made.engine.cells.prefix.reuse.of(leaf.owner)
    charge(made, int(reused * made.engine.cells.prefix.saving.again_s(leaf) / CELL_S / 343) - 1)
    assert not any(leaf.leaving for leaf in leaves)
    charge(made, 2)
    assert all(leaf.leaving for leaf in leaves)


def test_pages_that_leaves_share_are_saved_once() -> None:
    """Whoever is saved later finds them there."""
    backend = CountsSaves(n_ctx=4096, n_slots=4, n_batch=64)
    made = bench(backend)
    answered_alike(made, (1, 2, 3))
    save_all(made)
    assert not any(leaf.unsaved for leaf in made.engine.cells.prefix.leaves)
    assert backend.saved == 343 + 2 * (343 - 256), "four full pages are the same"


def test_a_leaf_that_is_found_saved_is_its_sessions_latest_turn() -> None:
    """Whoever saved its last page: it is pinned and known like one that was saved for itself."""
    made = bench()
    prompt = letters(1, 128)
    ask(made, prompt, 1, session="s")
    (leaf,) = made.engine.cells.prefix.leaves
    saving, store = made.engine.cells.prefix.saving, made.engine.cells.prefix.store
    made.engine.cells.prefix.saving.one()
    store.clear([MINE])  # its first page is evicted
    page = None
    for at in (0, 64):
        tokens = np.array(prompt[at : at + 64], np.int32)
        saved = made.backend.kv_save(leaf.seq, at, at + 64, 64)
        assert saved is not None
        page = store.add(MINE, page, tokens, saved[0], owner=5, cost_s=1.0)
    save_all(made)
    assert not leaf.unsaved
    assert saving.sessions(MINE) == ["s"]
    assert page is not None
    assert page.pinned_until > made.clock() + 200


def ticks_until_it_goes(made: Bench, leaf: Leaf) -> int:
    """Return how many ticks of a million tokens a leaf pays rent for before it leaves."""
    for tick in range(10_000):
        if leaf.leaving:
            return tick
        charge(made, 1_000_000)
    raise AssertionError("it never leaves")


def test_what_a_client_leaves_that_never_comes_back_to_anything_goes_sooner() -> None:
    """Its prompts were always new, and so the next one is likely to be."""

    def stays(prompts: list[list[int]]) -> int:
        made = bench()
        made.backend.kv_fails = lambda verb: verb == "save"
        for prompt in prompts:
            ask(made, prompt, client=7)
        save_all(made)
        *_, leaf = owing_nothing(made.engine.cells.prefix.leaves)
        leaf.leaving = False
        return ticks_until_it_goes(made, leaf)

    chat = [letters(1, 200)[: 100 + 20 * n] for n in range(5)]
    news = [letters(n, 180) for n in range(5)]
    assert stays(chat) > 3 * stays(news)


def test_a_first_prompt_tells_nothing_of_a_client_and_the_latest_ones_count() -> None:
    """Half is assumed of who is not known."""
    reuse = Reuse()
    reuse.note((1,), 0.0)
    assert reuse.of((1,)) == reuse.of((2,)) == REUSED
    for _ in range(200):
        reuse.note((1,), 0.0)
    assert reuse.of((1,)) < 0.05
    for _ in range(40):
        reuse.note((1,), 1.0)
    assert reuse.of((1,)) > 0.8


def test_what_takes_longer_to_restore_than_to_compute_is_computed() -> None:
    """As on a device behind a slow bus."""
    made = bench()
    prompt = letters(1, 200)
    ask(made, prompt)
    save_all(made)
    made.engine.cells.prefix.room.drop_all()
    saving = made.engine.cells.prefix.saving
    for takes in (saving.save_takes, saving.restore_takes):
        for _ in range(60):
            takes.learn(scattered=False, token_s=1.0)
    assert ask(made, prompt).end.cached_tokens == 0
