"""What a tick reads of the weights, by the list of tensors in the model's header."""

from __future__ import annotations

from pathlib import Path

import pytest

from uma_trio.backend.gguf_header import GgufHeader, Tensor, Value
from uma_trio.backend.kv_memory import WeightsRead, weights_read


def header(experts: int = 0, **sizes: int) -> GgufHeader:
    """Return the header of a model with tensors of these sizes; two underscores are a dot."""
    metadata: dict[str, Value] = {"general.architecture": "llama", "llama.expert_count": experts}
    tensors = tuple(Tensor(name.replace("__", "."), size) for name, size in sizes.items())
    return GgufHeader(Path("m"), (Path("m"),), 3, metadata, tensors, 1)


def test_a_dense_model_is_read_whole() -> None:
    """The embedding too where no other tensor gives the output."""
    read = weights_read(header(token_embd__weight=700, blk__0__ffn_up__weight=300), 1000)
    assert read == WeightsRead(1000, 0)


def test_of_an_embedding_beside_an_output_only_rows_are_read() -> None:
    """A row for each token is nothing beside the weights."""
    model = header(token_embd__weight=700, output__weight=200, blk__0__ffn_up__weight=100)
    assert weights_read(model, 1000) == WeightsRead(300, 0)


def test_an_expert_is_its_part_of_every_layer() -> None:
    """Layers may differ, some have none, and shared experts and routers are read always."""
    model = header(
        experts=4,
        output__weight=100,
        blk__0__ffn_up__weight=40,
        blk__1__ffn_up_exps__weight=80,
        blk__1__ffn_up_shexp__weight=20,
        blk__2__ffn_up_exps__weight=120,
        blk__2__ffn_gate_inp__weight=5,
    )
    assert weights_read(model, 365) == WeightsRead(165, 50)


@pytest.mark.parametrize("experts", [0, 4])
def test_weights_of_an_unknown_type_are_read_always(experts: int) -> None:
    """Their size is not known, only what is left of the whole: rather too much than too little."""
    assert weights_read(header(experts, blk__0__ffn_up_exps__weight=0), 50) == WeightsRead(50, 0)
