"""The options of a context, checked against the model's file before llama.cpp meets them.

What it would answer by ending the process, or the kernel by ending us, is answered with a sentence.
Asks nothing of the library, which `uma-trio doctor` cannot load where it was compiled for another
processor: where the layers are is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from attrs import frozen

from uma_trio.backend.base import ModelError
from uma_trio.backend.bindings import LlamaRefused, current
from uma_trio.backend.gguf_header import GgufHeader
from uma_trio.backend.kv_memory import (
    attention_only,
    available_memory,
    kv_bytes,
    score_bytes,
    score_copy_bytes,
    sliding_window,
)
from uma_trio.backend.kv_types import kv_pair, kv_type_name
from uma_trio.words import mib

#: Fewest tokens of a slot for which the KV cache is cut into streams by itself: most chats fit.
LEAST_STREAM: Final = 4096
MAX_SLOTS: Final = 256  # LLAMA_MAX_SEQ (src/llama-cparams.h)
# LLAMA_FLASH_ATTN_TYPE_* (include/llama.h): -1 leaves it to llama.cpp.
FLASH_LEFT, FLASH_OFF, FLASH_ON = -1, 0, 1


def checked(header: GgufHeader, *, n_ctx: int, n_slots: int, threads: int, kv_type: str) -> str:
    """Check what can be known before loading; return the full name of the KV type."""
    path = header.path
    if not header.tensors:
        raise ModelError(f"{path} holds a vocabulary and no weights; get the whole model.")
    if header.metadata.get("general.type") == "adapter":
        raise ModelError(f"{path} is a LoRA adapter; name the model it belongs to.")
    if header.architecture == "clip":
        raise ModelError(f"{path} is a multimodal projector; name the language model beside it.")
    if not header.architecture:
        raise ModelError(f"{path} does not say its architecture; download it again.")
    try:
        kv_type = kv_type_name(kv_type)
    except ValueError as error:
        raise ModelError(f"--kv-type: {error}.") from error
    if not 1 <= n_slots <= MAX_SLOTS:
        raise ModelError(f"--parallel must be 1 to {MAX_SLOTS}, not {n_slots}.")
    if n_ctx < 1 or threads < 1:
        raise ModelError(f"--n-ctx ({n_ctx}) and --threads ({threads}) must be at least 1.")
    return kv_type


def uses_streams(layout: str, header: GgufHeader, *, n_ctx: int, n_slots: int, flash: int) -> bool:
    """Return whether each slot gets a stream of the KV cache. Raises :class:`ModelError` if `layout` asks in vain."""
    can = attention_only(header) and not sliding_window(header)
    if layout == "streams" and not can:
        raise ModelError(
            f"--kv-layout streams: {header.path} has sliding windows or a recurrent memory, which takes the unified"
            " cache; leave it at auto."
        )
    if layout != "auto" or n_slots < 2:
        return layout == "streams" and n_slots > 1
    return can and flash != FLASH_OFF and n_ctx // n_slots >= LEAST_STREAM


def spare_sequences(n_slots: int) -> int:
    """Return how many sequences a context has beside its slots: one for saving what leaves hold, if there is a number."""
    return int(n_slots < MAX_SLOTS - 2)


def flash_type(wanted: str, kv_type: str) -> int:
    """Return llama.cpp's number for an option. Raises :class:`ModelError` if V is quantised and it is off.

    auto is llama.cpp's own choice: on wherever the backend can. On CPUs with a tiled kernel it is faster in either
    layout of the cache: 0.7 to 0.9 of the time of a chat behind four sequences of 1,024 tokens (0.5B, Q4_0, two cores).
    """
    if wanted == "off" and kv_pair(kv_type)[1].quantised:
        raise ModelError(
            f"--flash-attention off: a quantised V cache (--kv-type {kv_type}) needs it; leave it"
            " at auto, or take --kv-type f16, or k=q8_0,v=f16."
        )
    return {"auto": FLASH_LEFT, "on": FLASH_ON, "off": FLASH_OFF}[wanted]


@cache
def library_of_needs(gpu_layers: int) -> str:
    """Return what tells builds of llama.cpp apart that sum up memory; "" where it also depends on which GPUs there are."""
    try:
        gpu = current().gpu
    except LlamaRefused:
        return ""
    return library() if not gpu or gpu_layers == 0 else ""


@cache
def library(files: str = "*.so*") -> str:
    """Return what tells builds of llama.cpp apart: the version and the sizes of their files; "" if it is not known."""
    try:
        build = current()
    except LlamaRefused:
        return ""
    sizes = {file.name: file.stat().st_size for file in build.libraries.glob(files)}
    return f"{build.version} {sorted(sizes.items())}"


def refuse_without_room(
    header: GgufHeader,
    placement: Placement,
    *,
    n_ctx: int,
    n_batch: int,
    kv_type: str,
    flash: int,
) -> None:
    """Refuse a context whose part in the machine's memory does not fit there.

    The kernel would only end us once it is filled. What a device has no room for llama.cpp says.
    """
    room = available_memory()
    if room is None or not attention_only(header):
        return
    whole = context_bytes(header, n_ctx, n_batch, kv_type, flash)
    need = int(placement.host_share * whole)
    if need > room:
        what = "The KV cache"
        if flash == FLASH_OFF:
            what = "The KV cache with the scores of attention to it (--flash-attention off)"
        raise ModelError(
            f"{what} needs {mib(need)} for --n-ctx {n_ctx}, and {mib(room)} are free;"
            f" try --n-ctx {max(256, n_ctx * room // need // 2 // 256 * 256)}"
            " or a smaller --kv-type such as q8_0."
        )


def context_bytes(header: GgufHeader, n_ctx: int, n_batch: int, kv_type: str, flash: int) -> int:
    """Return the bytes of a context: its KV cache, and the scores of attention where it has them."""
    scores = 0
    if flash == FLASH_OFF:
        scores = score_bytes(header, n_ctx, n_batch) + score_copy_bytes(header, n_ctx, n_batch)
    return kv_bytes(header, n_ctx, kv_type) + scores


@frozen
class Placement:
    """`offloaded` of `layers` layers are on `devices`, the others on the CPU.

    The output counts as a layer, and is the first to be offloaded; the others hold KV cells.
    """

    layers: int
    offloaded: int = 0
    devices: str = ""

    @classmethod
    def of(cls, blocks: int, devices: Sequence[str], gpu_layers: int) -> Placement:
        """Return where llama.cpp puts a model of so many `blocks` if told `gpu_layers` (-1: all).

        `devices` are those that layers can be offloaded to.
        """
        layers = blocks + 1
        if not devices or gpu_layers == 0:
            return cls(layers)
        offloaded = layers if gpu_layers < 0 else min(gpu_layers, layers)
        return cls(layers, offloaded, ", ".join(devices))

    @property
    def on_gpu(self) -> bool:
        return self.offloaded > 0

    @property
    def all_on_gpu(self) -> bool:
        return self.offloaded == self.layers

    @property
    def attends_on_gpu(self) -> bool:
        """Whether a device computes attention, and so keeps KV cells."""
        return self.offloaded > 1

    @property
    def host_share(self) -> float:
        """Which part of the KV cells lies in the machine's memory."""
        blocks = self.layers - 1
        return (blocks - max(0, self.offloaded - 1)) / blocks if blocks else 1.0

    def __str__(self) -> str:
        """Say it for people; empty where all is computed by the CPU."""
        if not self.on_gpu:
            return ""
        if self.all_on_gpu:
            return self.devices
        return f"{self.devices} ({self.offloaded} of {self.layers} layers)"
