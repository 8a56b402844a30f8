"""LoRA adapters: loaded once for the weights that they belong to, and set in a context before it is used."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_load import compute_tokens, load_model, make_context
from uma_trio.backend._llama_options import FLASH_OFF
from uma_trio.backend._llama_vocab import ModelHandle
from uma_trio.backend.base import Adapter, ModelError
from uma_trio.backend.gguf_header import mark_of


def set_adapters(context: int, model: ModelHandle, adapters: Sequence[Adapter]) -> None:
    """Have a context compute with these adapters. Raises :class:`ModelError`.

    Each is loaded once, and goes with the weights (llama-model.cpp, ~llama_model). Try a file in a process of its own
    first: llama.cpp may end the process at it.
    """
    pointers = [_loaded(model, adapter.path) for adapter in adapters]
    n = len(pointers)
    status = llama.llama_set_adapters_lora(
        context,
        (llama.llama_adapter_lora_p_ctypes * n)(
            *(ctypes.cast(each, llama.llama_adapter_lora_p_ctypes) for each in pointers)
        ),
        n,
        (ctypes.c_float * n)(*[adapter.scale for adapter in adapters]),
    )
    if status != 0:
        raise ModelError(f"llama.cpp cannot use {', '.join(str(a.path) for a in adapters)}.")


def try_adapter(path: Path, adapter: Path) -> None:
    """Compute two tokens of a model with an adapter. Raises :class:`ModelError`; llama.cpp may end the process."""
    lib.start()
    model = load_model(path, gpu_layers=0, as_stored=True)
    context = make_context(
        model.pointer, path, n_ctx=256, n_seq_max=1, streams=False, n_batch=32, threads=1,
        kv_type="f16", flash=FLASH_OFF,
    )  # fmt: skip
    try:
        set_adapters(context, model, [Adapter("", adapter)])
        if not compute_tokens(context):
            raise ModelError(f"The model cannot be computed with the adapter {adapter}.")
    finally:
        llama.llama_free(context)


def _loaded(model: ModelHandle, path: Path) -> int:
    """Return an adapter, loaded from the file as it is now: one that was replaced is another one.

    Those of earlier files stay until the model goes: a context may still compute with them.
    """
    key = (path, mark_of(path))
    known = model.adapters.get(key)
    if known is not None:
        return known
    lib.forget_errors()
    pointer = llama.llama_adapter_lora_init(model.pointer, str(path).encode())
    if not pointer:
        reason = lib.last_error() or "it gave no reason"
        raise ModelError(
            f"llama.cpp cannot load the adapter {path} ({reason}); name one that was made for this model."
        )
    found = model.adapters[key] = int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)
    return found
