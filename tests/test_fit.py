"""The context that is chosen for a model from the memory of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.app.build import how_longer
from uma_trio.backend._llama_options import FLASH_OFF, context_bytes
from uma_trio.backend.base import ContextLimits
from uma_trio.backend.gguf_header import read_header
from uma_trio.backend.kv_memory import N_BATCH
from uma_trio.config.options import Config
from uma_trio.models import bundled_model
from uma_trio.models.files import fit_to_memory
from uma_trio.models.fit import (
    LONGEST_ON_CPU,
    LONGEST_ON_GPU,
    Memory,
    fit_context,
    layers_of_experts_off_device,
)

GB = 10**9
SEVEN_B, CELL = 4 * GB, 57_344  # Q4_0, f16


def test_a_7b_model_with_20_gb_free_has_slots_for_agents() -> None:
    fit = fit_context(Memory(20 * GB), SEVEN_B, CELL, trained=32_768)
    assert (fit.slots, fit.n_ctx) == (8, 8 * 16_384)


def test_a_context_ends_where_the_training_did() -> None:
    fit = fit_context(Memory(64 * GB), SEVEN_B, CELL, trained=8192)
    assert (fit.n_ctx, fit.reason) == (8 * 8192, "the model was trained for no more")


@pytest.mark.parametrize(
    ("on_device", "longest"), [(False, LONGEST_ON_CPU), (True, LONGEST_ON_GPU)]
)
def test_a_slot_is_capped_where_more_memory_buys_nothing(on_device: bool, longest: int) -> None:
    fit = fit_context(Memory(900 * GB, on_device), SEVEN_B, CELL, trained=1 << 20)
    assert fit.n_ctx == fit.slots * longest
    assert fit.largest > fit.n_ctx


@pytest.mark.parametrize(("free", "slots"), [(12, 8), (9, 4), (6, 4), (5, 2)])
def test_slots_become_fewer_before_they_are_too_short_for_a_chat(free: int, slots: int) -> None:
    fit = fit_context(Memory(free * GB), SEVEN_B, CELL, trained=131_072)
    assert fit.slots == slots


def test_the_slots_that_were_asked_for_stay() -> None:
    fit = fit_context(Memory(5 * GB), SEVEN_B, CELL, trained=32_768, slots=16)
    assert fit.slots == 16


def test_configured_models_share_the_memory() -> None:
    alone = fit_context(Memory(20 * GB), SEVEN_B, CELL, trained=32_768)
    shared = fit_context(Memory(20 * GB), SEVEN_B, CELL, trained=32_768, shares=3)
    assert shared.n_ctx < alone.n_ctx


@given(
    free=st.integers(0, 10**12),
    weights=st.integers(0, 10**11),
    cell=st.floats(0, 10**6),
    trained=st.integers(0, 1 << 21),
    slots=st.none() | st.integers(1, 256),
    shares=st.integers(1, 8),
    on_device=st.booleans(),
)
def test_what_is_chosen_fits_its_share(
    free: int,
    weights: int,
    cell: float,
    trained: int,
    slots: int | None,
    shares: int,
    on_device: bool,
) -> None:
    fit = fit_context(Memory(free, on_device), weights, cell, trained, slots, shares)
    each = fit.n_ctx // fit.slots
    assert each * fit.slots == fit.n_ctx <= fit.largest
    assert 0 < each <= (trained or each)
    assert each <= 512 or not cell or fit.n_ctx * cell * shares <= max(0, free - weights)


def test_experts_of_the_first_layers_leave_the_gpu_until_the_rest_fits() -> None:
    assert layers_of_experts_off_device([10] * 4, others=20, room=60) == 0
    assert layers_of_experts_off_device([10] * 4, others=20, room=45) == 2
    assert layers_of_experts_off_device([10] * 4, others=20, room=5) == 4


def test_scores_of_attention_have_room_where_flash_attention_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take several times what the KV cache takes."""
    pytest.importorskip("gguf")
    from models.synthetic import write_model

    path, free = write_model(tmp_path / "tiny.gguf"), 96 << 20
    monkeypatch.setattr("uma_trio.models.files.available_memory", lambda: free)
    header = read_header(path)
    on, off = [
        fit_to_memory(Config(model=path, flash_attention=each)).config for each in ("on", "off")
    ]
    assert on.cells == 8 * header.number("context_length")
    assert context_bytes(header, off.cells, N_BATCH, "f16", FLASH_OFF) < free / 2


@given(
    value=st.floats() | st.integers(-(1 << 63), 1 << 64) | st.lists(st.floats()).map(tuple),
    key=st.sampled_from(
        ["block_count", "attention.head_count_kv", "attention.key_length", "context_length"]
    ),
)
def test_a_context_is_chosen_whatever_a_file_says(value: object, key: str) -> None:
    """Infinite, negative or missing figures are those of a damaged file, which the load refuses in words."""
    known = read_header(bundled_model())
    header = evolve(known, metadata={**known.metadata, f"{known.architecture}.{key}": value})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("uma_trio.backend.llama_probe.header", lambda _path: header)
        config = fit_to_memory(Config(model=bundled_model())).config
    assert 0 < config.slots <= config.cells


LIMITS = ContextLimits(
    n_ctx=8192, n_ctx_seq=2048, n_slots=5, n_batch=512
)  # one slot is for ballast


@pytest.mark.parametrize(
    ("limits", "trained", "largest", "words"),
    [
        (LIMITS, 2048, 1 << 20, "trained for 2048"),
        (evolve(LIMITS, n_streams=4), 32_768, 65_536, "65536 fits this machine, 16384 tokens"),
        (LIMITS, 0, 65_536, "65536 fits this machine, 65536 tokens"),
        (LIMITS, 32_768, 2048, "fewer slots or --kv-type q8_0"),
    ],
)
def test_a_request_that_is_too_long_is_told_the_option_and_the_largest_that_fits(
    limits: ContextLimits, trained: int, largest: int, words: str
) -> None:
    found = how_longer(limits, 4, trained, largest)
    assert words in found
    assert "--n-ctx" in found
    assert trained == 2048 or "--n-ctx 8192 for --parallel 4" in found
