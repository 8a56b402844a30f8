"""What is loaded and what computes it, read from llama.cpp for people and for the cost model."""

from __future__ import annotations

import ctypes
from typing import Final

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_lib import SystemInfo
from uma_trio.backend._llama_options import Placement
from uma_trio.backend.base import ModelFacts
from uma_trio.backend.gguf_header import GgufHeader, name_of
from uma_trio.backend.kv_memory import kv_bytes, weights_read
from uma_trio.words import one_line

_META_KEYS: Final = 4096
_META_CHARS: Final = 65536
# CPU features worth a word in one line; the rest is for the doctor.
_TELLING: Final = ("AMX_INT8", "AVX512", "AVX2", "NEON", "SVE", "DOTPROD", "RVV", "VSX")


def model_info(model: int, header: GgufHeader, kv_type: str) -> ModelFacts:
    """Return what the loaded model and the header of its file say."""
    text = ctypes.create_string_buffer(256)
    llama.llama_model_desc(model, text, len(text))
    template = llama.llama_model_chat_template(model, None)
    metadata = _metadata(model)
    size = int(llama.llama_model_size(model))
    weights = weights_read(header, size)
    return ModelFacts(
        name=name_of(metadata.get("general.name"), header.path),
        description=one_line(text.value.decode("utf-8", "replace")),
        n_vocab=int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))),
        n_ctx_train=int(llama.llama_model_n_ctx_train(model)),
        n_params=int(llama.llama_model_n_params(model)),
        size_bytes=size,
        n_embd=int(llama.llama_model_n_embd(model)),
        weight_bytes=weights.always,
        cell_bytes=kv_bytes(header, 1024, kv_type) / 1024,
        expert_bytes=weights.expert,
        experts=header.number("expert_count"),
        experts_used=header.number("expert_used_count"),
        chat_template=template.decode("utf-8", "replace") if template else None,
        path=str(header.path),
        metadata=metadata,
    )


def _metadata(model: int) -> dict[str, str]:
    """Return the model's scalar metadata as text, without the long ones."""
    key, value = ctypes.create_string_buffer(512), ctypes.create_string_buffer(_META_CHARS)
    metadata = {}
    for index in range(min(int(llama.llama_model_meta_count(model)), _META_KEYS)):
        if llama.llama_model_meta_key_by_index(model, index, key, len(key)) < 0:
            continue
        length = llama.llama_model_meta_val_str_by_index(model, index, value, len(value))
        if 0 <= length < _META_CHARS and not key.value.startswith(b"tokenizer."):
            name, said = (one.value.decode("utf-8", "replace") for one in (key, value))
            metadata[one_line(name)] = one_line(said)
    return metadata


def placed(system: SystemInfo, header: GgufHeader, gpu_layers: int) -> Placement:
    """Return where the layers of a model are computed."""
    devices = [gpu.description or gpu.name for gpu in system.gpus]
    return Placement.of(header.number("block_count"), devices, gpu_layers)


def described(system: SystemInfo, placement: Placement, threads: int, cache: str) -> str:
    """Return one line for people: what computes, with how many threads and which KV cache."""
    where = str(placement)
    if not where:
        cpu = system.features.get("CPU", {})
        telling = [name for name in _TELLING if cpu.get(name, "0") not in ("0", lib.MISCOMPILED)][
            :2
        ]
        where = " ".join(["CPU", f"({', '.join(telling)})"] if telling else ["CPU"])
    return f"{where}, {threads} thread{'s' * (threads != 1)}, {cache}"
