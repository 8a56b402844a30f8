"""Cells that several sequences hold, that leave the cache and come back: both backends.

A hit must not change a token, so where llama.cpp computes without flash attention (and the fake
always) the logits behind shared and restored cells have to be the same to the bit. (With heads of 64
and quantised weights, that is. Where a sequence's cells lie moves the last bits of some other models,
hit or miss.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backend_kit import N_BATCH, N_CTX, N_SLOTS, decode, feed, prompt, text

from uma_trio.backend.base import Backend, DecodeStatus, FloatArray
from uma_trio_sim.fake import FakeBackend

WINDOW = 32
REAL = [pytest.param(kind, marks=pytest.mark.real) for kind in ("llama", "llama as on a GPU")]


def load(path: Path, *, keeps: bool = False) -> Backend:
    """Load a random model without flash attention."""
    from uma_trio.backend.llama import LlamaBackend

    return LlamaBackend.load(
        path,
        n_ctx=N_CTX,
        n_slots=N_SLOTS,
        n_batch=N_BATCH,
        threads=1,
        flash_attention="off",
        holds_extent=keeps,
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Write two random models, by their window."""
    pytest.importorskip("gguf")
    from models.synthetic import PRESETS, Shape, write_model

    folder = tmp_path_factory.mktemp("models")
    return {
        0: write_model(folder / "exact.gguf", Shape(width=256, kind="Q8_0")),
        WINDOW: write_model(folder / "window.gguf", PRESETS["window-tiny"]),
    }


@pytest.fixture(params=["fake", *REAL])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Give a backend with 512 cells and 4 slots, of each kind."""
    if request.param == "fake":
        made: Backend = FakeBackend(n_ctx=N_CTX, n_slots=N_SLOTS, n_batch=N_BATCH)
    else:
        keeps = request.param != "llama"
        made = load(request.getfixturevalue("models")[0], keeps=keeps)
    yield made
    made.close()


@pytest.fixture(params=["fake", pytest.param("llama", marks=pytest.mark.real)])
def windowed(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Give a backend some of whose layers look back 32 positions only."""
    if request.param == "fake":
        made: Backend = FakeBackend(n_ctx=N_CTX, n_slots=N_SLOTS, n_batch=N_BATCH, window=WINDOW)
    else:
        made = load(request.getfixturevalue("models")[WINDOW])
    yield made
    made.close()


def go_on(backend: Backend, slot: int, tokens: list[int]) -> FloatArray:
    """Compute `tokens` behind what `slot` holds; return the last row of logits."""
    start = backend.kv_length(slot)
    for at in range(0, len(tokens), N_BATCH):
        rows = prompt(slot, tokens[at : at + N_BATCH], start + at)
        assert decode(backend, rows) == DecodeStatus.OK
    return backend.logits(1)[0].copy()


def lengths(backend: Backend) -> list[int]:
    """Return what each slot holds."""
    return [backend.kv_length(slot) for slot in range(N_SLOTS)]


def test_logits_behind_a_copy_are_those_behind_the_original(backend: Backend) -> None:
    """To the bit, and also once the sequence that computed it has gone."""
    shared, own = text(1, 100), text(2, 9)
    want = feed(backend, 0, shared + own)
    backend.kv_remove(0)
    feed(backend, 1, shared + text(3, 30))
    assert backend.kv_copy(1, 2, 0, 100)
    assert backend.kv_copy(1, 3, 0, 100)
    np.testing.assert_array_equal(go_on(backend, 2, own), want)
    backend.kv_remove(1)
    np.testing.assert_array_equal(go_on(backend, 3, own), want)


def test_cells_stay_in_a_leaf_after_their_sequence_has_gone(backend: Backend) -> None:
    """They are there for a slot again, whole or in part."""
    tokens, own = text(1, 80), text(2, 9)
    want = feed(backend, 0, tokens[:50] + own)
    backend.kv_remove(0)
    feed(backend, 0, tokens)
    leaf = backend.limits.leaf_ids[0]
    assert backend.kv_copy(0, leaf, 0, 80)
    backend.kv_retire(0)
    feed(backend, 1, text(5, 200))
    assert (backend.kv_length(leaf), backend.kv_first(leaf)) == (80, 0)
    assert backend.kv_copy(leaf, 3, 0, 50)
    np.testing.assert_array_equal(go_on(backend, 3, own), want)
    assert backend.kv_remove(leaf)
    assert (backend.kv_length(leaf), backend.kv_first(leaf)) == (0, -1)


def test_all_leaves_hold_cells_and_none_can_be_in_a_batch(backend: Backend) -> None:
    """A row that names one is invalid, whatever it holds."""
    feed(backend, 0, text(1, 5))
    for leaf in backend.limits.leaf_ids:
        assert backend.kv_copy(0, leaf, 0, 5)
    assert decode(backend, [(backend.limits.leaf_ids[0], 5, 97, 1)]) == DecodeStatus.INVALID
    for leaf in backend.limits.leaf_ids:
        assert backend.kv_remove(leaf)
    assert decode(backend, [(0, 5, 97, 1)]) == DecodeStatus.OK


def test_shared_cells_are_used_once(backend: Backend) -> None:
    """Nine holders of 400 cells leave 112 for others."""
    feed(backend, 0, text(1, 400))
    for leaf in backend.limits.leaf_ids[:8]:
        assert backend.kv_copy(0, leaf, 0, 400)
    assert backend.kv_high_water() == 400
    feed(backend, 1, text(2, 112))
    assert decode(backend, [(2, 0, 97, 1)]) == DecodeStatus.NO_KV_ROOM
    backend.kv_remove(0)
    assert decode(backend, [(2, 0, 97, 1)]) == DecodeStatus.NO_KV_ROOM
    for leaf in backend.limits.leaf_ids[:8]:
        backend.kv_remove(leaf)
    assert decode(backend, [(2, 0, 97, 1)]) == DecodeStatus.OK


def test_leaves_keep_what_no_slot_holds(backend: Backend) -> None:
    """Each its part of what several of them hold."""
    one, two = backend.limits.leaf_ids[:2]
    feed(backend, 0, text(1, 60))
    assert backend.kv_copy(0, one, 0, 60)
    assert backend.kv_copy(0, two, 0, 40)
    assert backend.kv_portions([one, two]) == [0.0, 0.0]
    backend.kv_remove(0, 10)
    assert backend.kv_portions([one, two]) == [35.0, 15.0]
    backend.kv_retire(0)
    assert backend.kv_portions([one, two]) == [40.0, 20.0]
    assert sum(backend.kv_portions([one, two])) == backend.kv_used()


@pytest.mark.parametrize(
    ("src", "dst", "first", "last"),
    [(0, 1, 0, 21), (0, 1, 5, 10), (0, 2, 0, 20), (0, 0, 0, 20), (3, 1, 0, 1), (0, 1, 7, 7)],
)
def test_a_copy_that_does_not_fit_changes_nothing(
    backend: Backend, src: int, dst: int, first: int, last: int
) -> None:
    """Neither more than there is, nor elsewhere than behind what is held, nor onto itself."""
    feed(backend, 0, text(1, 20))
    feed(backend, 2, text(2, 7))
    before = lengths(backend)
    assert not backend.kv_copy(src, dst, first, last)
    assert lengths(backend) == before


@pytest.mark.parametrize("seq", [-1, N_SLOTS, 10**6])
@pytest.mark.real
def test_a_sequence_that_does_not_exist_is_refused(models: dict[int, Path], seq: int) -> None:
    """llama.cpp would end the process; `N_SLOTS` is what we save by way of."""
    backend = load(models[0])
    for verb in (backend.kv_remove, backend.kv_length, backend.kv_first):
        with pytest.raises(IndexError):
            verb(seq)
    with pytest.raises(IndexError):
        backend.kv_copy(0, seq, 0, 1)
    backend.close()


def test_saved_cells_come_back_in_another_slot(backend: Backend) -> None:
    """In pages, from a slot and from a leaf; the logits behind them are the same to the bit."""
    shared, own = text(1, 150), text(2, 9)
    want = feed(backend, 0, shared + own)
    leaf = backend.limits.leaf_ids[3]
    assert backend.kv_copy(0, leaf, 0, 150)
    bounds = [(0, 64), (64, 128), (128, 150)]
    pages = [
        backend.kv_save(seq, *page, N_CTX)
        for seq, page in zip((0, leaf, leaf), bounds, strict=True)
    ]
    backend.kv_remove(0)
    backend.kv_remove(leaf)
    feed(backend, 1, text(4, 70))
    for page in pages:
        assert page is not None
        assert backend.kv_restore(2, page)
    assert (backend.kv_length(2), backend.kv_first(2)) == (150, 0)
    np.testing.assert_array_equal(go_on(backend, 2, own), want)


def test_saving_leaves_everything_as_it_was(backend: Backend) -> None:
    """The sequence goes on, and nothing more is held."""
    tokens, own = text(1, 70), text(2, 5)
    want = feed(backend, 0, tokens + own)
    feed(backend, 1, tokens)
    high = backend.kv_high_water()
    assert backend.kv_save(1, 0, 64, N_CTX) is not None
    assert backend.kv_high_water() == high
    np.testing.assert_array_equal(go_on(backend, 1, own), want)


@pytest.mark.parametrize(("first", "last"), [(0, 21), (5, 5), (-1, 5), (20, 21)])
def test_what_is_not_held_is_not_saved(backend: Backend, first: int, last: int) -> None:
    """None, for parts that reach beyond, or are nothing."""
    feed(backend, 0, text(1, 20))
    assert backend.kv_save(0, first, last, N_CTX) is None


def test_what_does_not_belong_behind_a_slot_is_not_restored(backend: Backend) -> None:
    """The slot keeps what it had, and goes on with it."""
    want = feed(backend, 0, text(1, 50))
    pages = [backend.kv_save(0, 0, 20, N_CTX), backend.kv_save(0, 20, 40, N_CTX)]
    backend.kv_remove(0)
    for slot, page in ((1, pages[1]), (2, pages[0])):
        assert page is not None
        feed(backend, 2, text(1, 10))
        assert not backend.kv_restore(slot, page)
        assert lengths(backend) == [0, 0, 10, 0]
        np.testing.assert_array_equal(go_on(backend, 2, text(1, 50)[10:]), want)
        backend.kv_remove(2)


def test_a_restore_without_room_fails_and_changes_nothing(backend: Backend) -> None:
    """One cell less than it needs."""
    feed(backend, 0, text(1, 60))
    page = backend.kv_save(0, 0, 60, N_CTX)
    assert page is not None
    backend.kv_remove(0)
    feed(backend, 1, text(2, N_CTX - 59))
    assert not backend.kv_restore(0, page)
    assert lengths(backend) == [0, N_CTX - 59, 0, 0]
    assert backend.kv_remove(1, N_CTX - 60)
    assert backend.kv_restore(0, page)


def test_a_leaf_keeps_what_windows_have_passed(windowed: Backend) -> None:
    """Whoever computes beside it, a hit on a part of it gives the logits of a miss."""
    tokens, own = text(1, 200), text(2, 6)
    want = feed(windowed, 0, tokens[:120] + own)
    windowed.kv_remove(0)
    leaf = windowed.limits.leaf_ids[0]
    for at in range(0, 200, 50):
        go_on(windowed, 0, tokens[at : at + 50])
        assert windowed.kv_copy(0, leaf, at, at + 50)
    windowed.kv_remove(0)
    for slot in (1, 2):
        feed(windowed, slot, text(slot, 100))
    assert windowed.kv_first(leaf) == 0
    assert windowed.kv_copy(leaf, 3, 0, 120)
    np.testing.assert_allclose(go_on(windowed, 3, own), want, atol=1e-3)


def lose_the_window(backend: Backend) -> None:
    """Leave 200 tokens in slot 0, of which others have taken what is out of its window."""
    feed(backend, 1, text(8, 60))
    feed(backend, 0, text(1, 200))
    backend.kv_remove(1)
    feed(backend, 2, text(4, 200))  # begins below, and goes on into cells that count as empty
    backend.kv_remove(2)


def test_lost_windows_are_told(windowed: Backend) -> None:
    """A copy from the middle of a sequence that others have overwritten says that it is no good."""
    want = feed(windowed, 0, [*text(1, 100), 97])
    windowed.kv_remove(0)
    lose_the_window(windowed)
    assert windowed.kv_first(0) > 100 - WINDOW
    assert windowed.kv_copy(0, 1, 0, 100)
    assert not 0 <= windowed.kv_first(1) <= 100 - WINDOW
    assert float(np.abs(go_on(windowed, 1, [97]) - want).max()) > 0.01, "it would be wrong"


def test_the_end_of_a_sequence_can_be_gone_on_from_whatever_was_lost(windowed: Backend) -> None:
    """The window of its last position is never taken."""
    want = feed(windowed, 0, [*text(1, 200), 97])
    windowed.kv_remove(0)
    lose_the_window(windowed)
    leaf = windowed.limits.leaf_ids[0]
    assert windowed.kv_copy(0, leaf, 0, 200)
    windowed.kv_remove(0)
    feed(windowed, 2, text(9, 150))
    assert windowed.kv_copy(leaf, 3, 0, 200)
    assert 0 <= windowed.kv_first(3) <= 200 - WINDOW
    np.testing.assert_allclose(go_on(windowed, 3, [97]), want, atol=1e-3)


def test_saved_cells_of_a_window_come_back(windowed: Backend) -> None:
    """Saved at its end, a sequence goes on from there."""
    want = feed(windowed, 0, [*text(1, 100), 97])
    page = windowed.kv_save(0, 0, 100, N_CTX)
    windowed.kv_remove(0)
    assert page is not None
    assert windowed.kv_restore(1, page)
    assert 0 <= windowed.kv_first(1) <= 100 - WINDOW
    np.testing.assert_allclose(go_on(windowed, 1, [97]), want, atol=1e-3)


def test_a_memory_that_cannot_go_back_has_no_leaves() -> None:
    """Nothing of a recurrent state can be shared: every verb says no."""
    backend = FakeBackend(can_remove_part=False)
    feed(backend, 0, text(1, 20))
    assert not backend.limits.can_go_back
    assert not backend.limits.leaf_ids
    assert not backend.kv_copy(0, 1, 0, 20)
    assert backend.kv_save(0, 0, 20, N_CTX) is None


def test_injected_failures_change_nothing() -> None:
    """The fake's copy, save and restore fail when told to."""
    backend = FakeBackend()
    feed(backend, 0, text(1, 20))
    page = backend.kv_save(0, 0, 20, N_CTX)
    assert page is not None
    backend.kv_fails = lambda _verb: True
    assert not backend.kv_copy(0, 1, 0, 20)
    assert backend.kv_save(0, 0, 20, N_CTX) is None
    assert not backend.kv_restore(1, page)
    assert backend.kv_length(1) == 0
    assert backend.used_cells == 20


def test_what_another_model_saved_is_refused() -> None:
    """The fake knows its own by its key."""
    one, two = FakeBackend(key=1), FakeBackend(key=2)
    feed(one, 0, text(1, 20))
    page = one.kv_save(0, 0, 20, N_CTX)
    assert page is not None
    assert not two.kv_restore(0, page)
