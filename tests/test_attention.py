"""Flash attention on a CPU: what is timed both ways, how it is remembered, and what is chosen by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from uma_trio.backend import _llama_options
from uma_trio.backend._llama_options import (
    FLASH_LEFT,
    FLASH_OFF,
    FLASH_ON,
    chosen_flash,
    flash_is_open,
    room_for_context,
)
from uma_trio.backend.attention import (
    CHAT,
    NEEDED,
    SHAPES,
    WIDE,
    WORTH,
    AttentionShape,
    Seconds,
    Subject,
    chat_s,
    prefers_flash,
)
from uma_trio.backend.gguf_header import GgufHeader, read_header
from uma_trio.backend.kv_memory import N_BATCH
from uma_trio.backend.placement import Placement
from uma_trio.models import bundled_model
from uma_trio.policy.costing.attention import (
    Timed,
    attention_file,
    flash_is_faster,
    recall,
    remember,
)
from uma_trio.policy.costing.neighbours import CpuTimes

MODEL = Subject("a model", 1000, "k=f16,v=f16", 2, "1.0")
CPU = Placement.of(9, [], -1)
SIZES = {"n_ctx": 4096, "n_batch": N_BATCH, "kv_type": "f16"}


def both(on: float, off: float = 1.0) -> Seconds:
    """Return times that are the same for each token of a chat."""
    return {
        shape: (off * seconds, on * seconds)
        for shape, seconds in zip(SHAPES, (1, 2, 3, 4), strict=True)
    }


def quiet() -> CpuTimes:
    """Tell of a machine that nobody uses."""
    return CpuTimes(0.0, 0.0)


class Neighbours:
    """A machine of one processor, of which others use the part `share` in each second between two readings."""

    def __init__(self, share: float) -> None:
        self.share, self.now = share, 0.0

    def __call__(self) -> CpuTimes:
        """Return the counters, a second later."""
        self.now += 1.0
        return CpuTimes(self.now, 0.0, self.share * self.now, self.now)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin on a machine that was never measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def header() -> GgufHeader:
    """Return the header of a model with attention only."""
    return read_header(bundled_model())


def test_what_is_faster_by_more_than_its_worth_is_chosen() -> None:
    """An even choice is against flash attention, without which a lone answer can be repeated exactly."""
    assert prefers_flash(both(1.0 - WORTH - 0.01))
    assert not prefers_flash(both(1.0 - WORTH + 0.01))
    assert not prefers_flash(both(1.5))


def test_shapes_count_as_often_as_a_chat_has_them() -> None:
    """Prompts of company that take 0.7 of the time do not pay for streams that take 2.4 times as long."""
    slow_decodes = {
        shape: (seconds, seconds * (0.7 if shape == AttentionShape(1, 64) else 2.4))
        for shape, seconds in {
            AttentionShape(1, 1): 0.030,
            AttentionShape(4, 1): 0.040,
            AttentionShape(4, 4): 0.100,
            AttentionShape(1, 64): 0.480,
        }.items()
    }
    assert not prefers_flash(slow_decodes)
    fast_decodes = slow_decodes | {
        AttentionShape(1, 1): (0.030, 0.031),
        AttentionShape(4, 4): (0.100, 0.090),
    }
    assert prefers_flash(fast_decodes | {AttentionShape(4, 1): (0.040, 0.040)})


def test_without_wide_ticks_prompts_are_computed_in_mixed_ones() -> None:
    """A machine too slow for a wide tick still has a choice, by the same tokens."""
    per_token = {shape: (shape.n_tokens * 1.0, shape.n_tokens * 0.5) for shape in SHAPES}
    off_s, on_s = chat_s({shape: per_token[shape] for shape in NEEDED})
    assert (off_s, on_s) == pytest.approx((1149, 574.5))
    remember(MODEL, Timed({shape: per_token[shape] for shape in NEEDED}))
    assert recall(MODEL) is not None
    remember(MODEL, Timed({WIDE: per_token[WIDE]}))
    assert recall(MODEL) is None


def test_a_chat_has_prompts_and_answers() -> None:
    """Its decodes compute all of its tokens."""
    tokens = sum(n * shape.tokens * shape.sequences for shape, n in CHAT.items())
    assert tokens == pytest.approx(1020 + 129)


def test_what_was_timed_comes_back() -> None:
    """Exactly, with what disturbed it."""
    remember(MODEL, Timed(both(0.5), 0.25))
    assert recall(MODEL) == Timed(both(0.5), 0.25)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "b"},
        {"size_bytes": 1},
        {"kv_type": "f32"},
        {"threads": 3},
        {"library": "1.1"},
    ],
    ids=str,
)
def test_times_are_of_one_subject(other: dict[str, object]) -> None:
    """Another model, type, number of threads or build is timed anew."""
    remember(MODEL, Timed(both(0.5)))
    assert recall(evolve(MODEL, **other)) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"others":0,"rows":[]}', b"\xff", b'{"others":0.0,"rows":[{"sequences":1}]}'],
)
def test_a_damaged_file_counts_as_none(content: bytes) -> None:
    """What is stored is measured again."""
    path = attention_file(MODEL)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert recall(MODEL) is None
    assert flash_is_faster(MODEL, lambda: both(0.5), quiet)
    assert recall(MODEL) == Timed(both(0.5))


def test_times_that_cannot_be_are_not_used() -> None:
    """No decode takes no time."""
    remember(MODEL, Timed(both(0.0)))
    assert recall(MODEL) is None


def test_a_subject_is_measured_once() -> None:
    """Later starts recall what the first one found."""
    assert flash_is_faster(MODEL, lambda: both(0.5), quiet)
    assert flash_is_faster(MODEL, lambda: pytest.fail("measured again"), quiet)


def test_what_was_measured_beside_others_is_measured_again() -> None:
    """Of two measurements the one that others disturbed less is kept."""
    assert flash_is_faster(MODEL, lambda: both(0.5), Neighbours(0.4))
    assert flash_is_faster(MODEL, lambda: both(1.5), Neighbours(0.9))
    assert not flash_is_faster(MODEL, lambda: both(1.5), Neighbours(0.0))
    assert not flash_is_faster(MODEL, lambda: pytest.fail("measured again"), quiet)


def test_a_machine_that_is_never_quiet_is_measured_at_three_starts() -> None:
    """The least disturbed of the three measurements stays, whichever it was."""
    busy = [Neighbours(0.5), Neighbours(0.3), Neighbours(0.4)]
    times = [both(1.5), both(0.5), both(1.5)]
    for neighbours, seconds in zip(busy, times, strict=True):
        flash_is_faster(MODEL, lambda seconds=seconds: seconds, neighbours)
    assert flash_is_faster(MODEL, lambda: pytest.fail("measured again"), Neighbours(0.5))
    timed = recall(MODEL)
    assert timed is not None
    assert timed.seconds == both(0.5)
    assert timed.is_final


def test_a_measurement_that_finds_nothing_is_not_remembered() -> None:
    """The next start may have more time for it."""
    assert flash_is_faster(MODEL, dict, quiet) is None
    assert recall(MODEL) is None


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    """The choice is made, and measured again at the next start."""
    (tmp_path / "uma-trio").write_text("in the way")
    assert flash_is_faster(MODEL, lambda: both(0.5), quiet)


@pytest.mark.parametrize(
    ("faster", "told"), [(True, FLASH_ON), (False, FLASH_OFF), (None, FLASH_OFF)]
)
def test_auto_on_a_cpu_is_what_was_faster(
    header: GgufHeader, faster: bool | None, told: int
) -> None:
    """Without a measurement it is off; what somebody asks for is not measured."""
    assert chosen_flash("auto", header, CPU, **SIZES, faster=faster) == told
    assert chosen_flash("on", header, CPU, **SIZES, faster=faster) == FLASH_ON
    assert chosen_flash("off", header, CPU, **SIZES, faster=faster) == FLASH_OFF


def test_the_choice_is_open_where_both_ways_are_possible(header: GgufHeader) -> None:
    """On a CPU, with a V that is not quantised, if nobody asked for one of them."""
    card = Placement.of(9, ["Big GPU"], -1)
    assert flash_is_open("auto", header, CPU, **SIZES)
    assert not flash_is_open("on", header, CPU, **SIZES)
    assert not flash_is_open("off", header, CPU, **SIZES)
    assert not flash_is_open("auto", header, card, **SIZES)
    assert not flash_is_open("auto", header, CPU, **SIZES | {"kv_type": "q8_0"})
    assert flash_is_open("auto", header, CPU, **SIZES | {"kv_type": "k=q8_0,v=f16"})


def test_a_machine_without_room_is_not_measured(
    header: GgufHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two contexts would not fit; with no room for scores either it is left to llama.cpp."""
    room = header.size_bytes + (1 << 20)
    monkeypatch.setattr(_llama_options, "available_memory", lambda: room)
    left = room_for_context(header, CPU)
    assert left == 1 << 20
    assert not flash_is_open("auto", header, CPU, **SIZES, room=left)
    assert chosen_flash("auto", header, CPU, **SIZES, room=left) == FLASH_LEFT
