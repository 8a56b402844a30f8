"""Where layers are decides what a GPU's machine does; that it has one does not."""

from __future__ import annotations

import pytest

from uma_trio.backend import _llama_options, kv_memory
from uma_trio.backend._llama_options import FLASH_LEFT, Placement, refuse_without_room
from uma_trio.backend.base import ModelError
from uma_trio.backend.gguf_header import GgufHeader, read_header
from uma_trio.models import bundled_model

CARD = ["Big GPU"]


@pytest.fixture(scope="module")
def header() -> GgufHeader:
    """Return the header of a model."""
    return read_header(bundled_model())


@pytest.mark.parametrize(
    ("gpu_layers", "devices", "offloaded", "told"),
    [
        (-1, CARD, 25, "Big GPU"),
        (99, CARD, 25, "Big GPU"),
        (12, CARD, 12, "Big GPU (12 of 25 layers)"),
        (12, [*CARD, "Small GPU"], 12, "Big GPU, Small GPU (12 of 25 layers)"),
        (0, CARD, 0, ""),
        (-1, [], 0, ""),
    ],
)
def test_layers_go_where_there_is_a_device_and_they_may(
    gpu_layers: int, devices: list[str], offloaded: int, told: str
) -> None:
    """24 blocks and the output; each count has a description of its own, and so a cost file."""
    placement = Placement.of(24, devices, gpu_layers)
    assert (placement.offloaded, str(placement)) == (offloaded, told)
    assert placement.on_gpu is (offloaded > 0)


def test_cells_are_where_the_attention_of_their_layers_is() -> None:
    """The output goes first, and has none."""
    shares = [Placement.of(24, CARD, n).host_share for n in (0, 1, 13, 25, -1)]
    assert shares == [1.0, 1.0, 0.5, 0.0, 0.0]
    attends = [Placement.of(24, CARD, n).attends_on_gpu for n in (0, 1, 2)]
    assert attends == [False, False, True]


def test_memory_is_checked_for_the_layers_that_are_in_it(
    header: GgufHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them with --gpu-layers 0, whatever card there is; none if all are on it."""
    need = kv_memory.kv_bytes(header, 4096, "f16")
    monkeypatch.setattr(_llama_options, "available_memory", lambda: need * 3 // 4)
    sizes = {"n_ctx": 4096, "n_batch": 512, "kv_type": "f16", "flash": FLASH_LEFT}
    blocks = header.number("block_count")
    with pytest.raises(ModelError, match="KV cache needs"):
        refuse_without_room(header, Placement.of(blocks, CARD, 0), **sizes)
    for gpu_layers in (1 + blocks // 2, -1):
        refuse_without_room(header, Placement.of(blocks, CARD, gpu_layers), **sizes)


def test_a_model_without_blocks_is_all_on_the_host() -> None:
    """Whatever such a file is, nothing is divided by it."""
    assert Placement.of(0, CARD, -1).host_share == 1.0
