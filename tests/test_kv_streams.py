"""A KV cache with a stream for each slot: prefixes are held by several, copied on write, saved and restored whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_kit import N_BATCH, N_SLOTS, assert_same, decode, feed, prompt, text

from uma_trio.backend.base import Backend, DecodeStatus, FloatArray, ModelError

pytestmark = pytest.mark.real
CELLS = 512  # of each stream


def load(path: Path, **options: str) -> Backend:
    """Load a model with four streams."""
    from uma_trio.backend.llama import LlamaBackend

    chosen = {"flash_attention": "on", "kv_layout": "streams"} | options
    return LlamaBackend.load(
        path, n_ctx=CELLS * N_SLOTS, n_slots=N_SLOTS, n_batch=N_BATCH, threads=1, **chosen
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a model with attention alone, and one with windows."""
    pytest.importorskip("gguf")
    from models.synthetic import PRESETS, Shape, write_model

    folder = tmp_path_factory.mktemp("models")
    return {
        "exact": write_model(folder / "exact.gguf", Shape(width=256, kind="Q8_0")),
        "window": write_model(folder / "window.gguf", PRESETS["window-tiny"]),
        "hybrid": write_model(folder / "hybrid.gguf", PRESETS["hybrid-tiny"]),
    }


@pytest.fixture
def backend(models: dict[str, Path]) -> Iterator[Backend]:
    """Give a backend with four streams of 512 cells."""
    made = load(models["exact"])
    yield made
    made.close()


def go_on(backend: Backend, slot: int, tokens: list[int]) -> FloatArray:
    """Compute tokens behind what a slot holds; return the logits of the last one."""
    start = backend.kv_length(slot)
    rows = [(slot, start + i, token, int(i == len(tokens) - 1)) for i, token in enumerate(tokens)]
    for at in range(0, len(rows), N_BATCH):
        assert decode(backend, rows[at : at + N_BATCH]) == DecodeStatus.OK
    return backend.logits(1)[0].copy()


def test_a_slot_has_its_part_of_the_cells(backend: Backend) -> None:
    limits = backend.limits
    assert (limits.n_ctx, limits.n_ctx_seq, limits.n_streams) == (CELLS * 4, CELLS, 4)


def test_a_leaf_takes_over_the_stream_of_an_ended_request(backend: Backend) -> None:
    """No cell is copied, and the next request continues in it."""
    past, more = text(1, 200), text(2, 9)
    want = feed(backend, 0, past + more)
    backend.kv_remove(0, 200)
    leaf, stream = backend.limits.leaf_ids[0], backend.kv_stream(0)
    assert backend.kv_copy(0, leaf, 0, 200)
    backend.kv_remove(0)
    assert backend.kv_used() == 200
    assert backend.kv_copy(leaf, 2, 0, 200)
    assert_same(go_on(backend, 2, more), want)
    assert backend.kv_stream(2) == stream
    assert backend.kv_length(leaf) == 200


def test_two_that_share_a_prefix_diverge(backend: Backend) -> None:
    """Each computes what it would compute alone, also in one batch."""
    past, one, two = text(1, 150), text(2, 20), text(3, 20)
    want_one, want_two = feed(backend, 0, past + one), feed(backend, 1, past + two)
    for slot in (0, 1):
        backend.kv_remove(slot)
    feed(backend, 3, past)
    assert backend.kv_copy(3, 0, 0, 150)
    assert backend.kv_copy(3, 1, 0, 150)
    backend.kv_remove(3)
    assert backend.kv_stream(0) == backend.kv_stream(1)
    rows = [
        (slot, 150 + i, token, int(i == 19))
        for slot, own in ((0, one), (1, two))
        for i, token in enumerate(own)
    ]
    assert decode(backend, rows) == DecodeStatus.OK
    got = backend.logits(2).copy()
    assert_same(got[0], want_one)
    assert_same(got[1], want_two)
    assert backend.kv_stream(0) != backend.kv_stream(1)


def test_a_request_continues_before_the_end_of_what_another_computes(backend: Backend) -> None:
    """The longer one keeps its cells."""
    past = text(1, 120)
    want_long = feed(backend, 0, [*past, 97])
    want_short = feed(backend, 1, [*past[:80], 98])
    for slot in (0, 1):
        backend.kv_remove(slot)
    feed(backend, 0, past)
    assert backend.kv_copy(0, 1, 0, 80)
    assert_same(go_on(backend, 1, [98]), want_short)
    assert_same(go_on(backend, 0, [97]), want_long)


def test_without_a_free_stream_there_is_no_room_and_nothing_changes(backend: Backend) -> None:
    """What is short is what leaves have to free; then it works."""
    for slot in range(4):
        feed(backend, slot, text(slot, 40))
    leaves = backend.limits.leaf_ids
    for slot in range(4):
        assert backend.kv_copy(slot, leaves[slot], 0, 40)
        backend.kv_remove(slot)
    assert backend.kv_shortage([1], 10) == CELLS
    assert decode(backend, prompt(1, text(9, 10))) == DecodeStatus.NO_KV_ROOM
    assert [backend.kv_length(leaf) for leaf in leaves[:4]] == [40] * 4
    backend.kv_remove(leaves[2])
    assert backend.kv_shortage([1], 10) == 0
    assert decode(backend, prompt(1, text(9, 10))) == DecodeStatus.OK


def test_pages_of_a_sequence_come_back(backend: Backend) -> None:
    """Saved whole or in part, restored in another slot beside others."""
    past, more = text(1, 150), text(2, 9)
    want = feed(backend, 0, past + more)
    first = backend.kv_save(0, 0, 128, 64)
    rest = backend.kv_save(0, 128, 150, 64)
    assert first is not None
    assert rest is not None
    assert [len(first), len(rest)] == [2, 1]
    backend.kv_remove(0)
    feed(backend, 1, text(5, 30))
    assert backend.kv_restore(2, [*first, *rest])
    assert (backend.kv_length(2), backend.kv_first(2)) == (150, 0)
    assert_same(go_on(backend, 2, more), want)


def test_parts_that_do_not_belong_together_are_not_restored(backend: Backend) -> None:
    feed(backend, 0, text(1, 150))
    pages = backend.kv_save(0, 0, 150, 64)
    assert pages is not None
    assert not backend.kv_restore(1, pages[1:])
    assert not backend.kv_restore(1, [])
    assert not backend.kv_restore(0, pages)
    assert [backend.kv_length(slot) for slot in range(4)] == [150, 0, 0, 0]


def test_an_interrupted_decode_leaves_the_streams_as_they_were(backend: Backend) -> None:
    """Also where some of its sequences were finished."""
    past = text(1, 50)
    want = feed(backend, 0, [*past, *text(2, 60)])
    backend.kv_remove(0, 50)
    interrupt = backend.arm()
    assert interrupt is not None
    rows = [(0, 50 + i, token, 0) for i, token in enumerate(text(2, 60))]
    rows += [(1, i, token, 0) for i, token in enumerate(text(3, 4))]
    assert decode(backend, rows, while_computing=interrupt) == DecodeStatus.ABORTED
    assert [backend.kv_length(slot) for slot in range(2)] == [50, 0]
    assert_same(go_on(backend, 0, text(2, 60)), want)


@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_other_memories_keep_the_unified_cache(models: dict[str, Path], kind: str) -> None:
    """And say so where streams are asked for."""
    made = load(models[kind], kv_layout="auto", flash_attention="auto")
    assert made.limits.n_streams == 1
    made.close()
    with pytest.raises(ModelError, match="--kv-layout"):
        load(models[kind])


def test_short_slots_share_one_cache_by_default(models: dict[str, Path]) -> None:
    """A slot of less than 4,096 tokens would refuse what one request can use today."""
    made = load(models["exact"], kv_layout="auto")
    assert (made.limits.n_streams, made.limits.n_ctx_seq) == (1, CELLS * 4)
    made.close()


def test_a_leaf_that_reaches_beyond_a_request_in_its_stream_can_be_dropped_for_it(
    backend: Backend,
) -> None:
    """With every other stream in use the request computes in place."""
    feed(backend, 0, text(1, 200))
    leaf = backend.limits.leaf_ids[0]
    assert backend.kv_copy(0, leaf, 0, 200)
    backend.kv_remove(0)
    assert backend.kv_copy(leaf, 0, 0, 120)
    for slot in (1, 2, 3):
        feed(backend, slot, text(slot, 20))
    assert backend.kv_portions([leaf]) == [80.0]
    assert backend.kv_shortage([0], 1) > 0
    backend.kv_remove(leaf)
    assert backend.kv_shortage([0], 1) == 0
    assert decode(backend, prompt(0, text(7, 5), 120)) == DecodeStatus.OK
