"""The memory that a daemon needs beside the one that it replaces, which serves meanwhile with the same model.

A mapped file is in memory once for both. The KV cache is not, nor are weights that are read instead of mapped, or
that ggml rearranges for the processor: these it copies.
"""

from __future__ import annotations

import platform
from typing import Final

from uma_trio.backend._llama_options import context_bytes
from uma_trio.backend.base import ModelError
from uma_trio.backend.gguf_header import GgufHeader
from uma_trio.backend.kv_memory import available_memory
from uma_trio.backend.placement import Placement

# ggml-cpu/repack.cpp, ggml_repack_get_optimal_repack_type: types of which some processor has an arrangement of its own.
_REARRANGED_X86: Final = frozenset({2, 10, 12, 20, 39})  # Q4_0, Q2_K, Q4_K, IQ4_NL, MXFP4
_REARRANGED: Final = _REARRANGED_X86 | {8, 13, 14}  # Q8_0, Q5_K, Q6_K
_PROCESS_BYTES: Final = 300 << 20  # Python, logits, llama.cpp's scratch buffers


def refuse_without_room_beside(
    header: GgufHeader,
    placement: Placement,
    *,
    n_ctx: int,
    n_batch: int,
    kv_type: str,
    flash: int,
    mmap: bool,
) -> None:
    """Refuse to load beside a daemon that serves, where the machine's memory does not allow both.

    Of layers on a device only llama.cpp knows the room; it refuses to load them, and the daemon serves on.

    Raises:
        ModelError: there is too little; the message has the sum, and the way that needs no second copy.
    """
    room = available_memory()
    context = int(placement.host_share * context_bytes(header, n_ctx, n_batch, kv_type, flash))
    weights = copied_weights(header, placement, mmap=mmap)
    need = context + weights + _PROCESS_BYTES
    if room is not None and need > room:
        raise ModelError(
            f"--replace needs {_mib(need)} beside the daemon that serves: {_mib(weights)} of weights that are not"
            f" shared, {_mib(context)} of KV cache, {_mib(_PROCESS_BYTES)} for the process; {_mib(room)} are free."
            " It serves on. `uma-trio service restart` loses no request either and needs no second copy;"
            " without a service, stop it with `uma-trio stop` and start this one."
        )


def copied_weights(header: GgufHeader, placement: Placement, *, mmap: bool) -> int:
    """Return the bytes of weights in the machine's memory that a process has for itself."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    rearranged = _REARRANGED_X86 if x86 else _REARRANGED
    copied = sum(
        tensor.n_bytes for tensor in header.tensors if not mmap or tensor.kind in rearranged
    )
    return int(copied * (1.0 - placement.offloaded / placement.layers))


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):,.0f} MiB"
