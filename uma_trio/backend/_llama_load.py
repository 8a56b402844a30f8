"""Making llama.cpp's model and context: each of its refusals becomes one sentence."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_options import FLASH_OFF
from uma_trio.backend._llama_vocab import ModelHandle
from uma_trio.backend.base import Adapter, ModelError
from uma_trio.backend.gguf_header import mark_of
from uma_trio.backend.kv_memory import GPU_BATCH
from uma_trio.backend.kv_types import kv_pair

# Logits rows beyond one for each sequence: 10 MB of a vocabulary of 152k.
DRAFT_ROWS: Final = 16

# load_mode by (mmap, mlock): LLAMA_LOAD_MODE_NONE, MMAP, MLOCK, MMAP_MLOCK (include/llama.h).
_LOAD_MODE: Final = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}

Progress = Callable[[float], None]


def load_model(
    path: Path,
    *,
    mlock: bool = False,
    mmap: bool = True,
    gpu_layers: int,
    n_cpu_moe: int = 0,
    progress: Progress | None = None,
    no_alloc: bool = False,
    as_stored: bool = False,
    writes: bool = True,
) -> ModelHandle:
    """Load the weights, or with `no_alloc` only what they are. What `progress` raises stops it and comes out here.

    The routed experts of the first `n_cpu_moe` layers stay in the machine's memory wherever the layers are.
    `as_stored`: the CPU gets them mapped from the file, and never rearranged in memory of this process.

    Raises:
        ModelError: llama.cpp cannot load it, or it should be a model that `writes` and is none.
    """
    raised: list[BaseException] = []

    def report(share: float, _user_data: object) -> bool:
        try:
            if progress is not None:
                progress(share)
        except BaseException as error:  # nothing may unwind through C
            raised.append(error)
            return False
        return True

    params = llama.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    if as_stored or lib.amx_is_miscompiled():
        params.use_extra_bufts = False  # keeps weights out of AMX's layout, and of other ones
    params.no_alloc = no_alloc
    overrides = _experts_in_ram(n_cpu_moe)
    params.tensor_buft_overrides = ctypes.addressof(overrides)
    params.load_mode = _LOAD_MODE[mmap and not no_alloc, mlock]
    callback = llama.llama_progress_callback(report)
    params.progress_callback = callback
    lib.forget_errors()
    pointer = llama.llama_model_load_from_file(str(path).encode(), params)
    if raised:
        if pointer:
            llama.llama_model_free(pointer)
        raise raised[0]
    if not pointer:
        reason = lib.last_error() or "it gave no reason"
        raise ModelError(
            f"llama.cpp cannot load {path} ({reason}); download it again,"
            " or get it as a GGUF made for this version of llama.cpp."
        )
    model = ModelHandle(int(pointer))
    if writes:
        refuse_unsuitable(model.pointer, path)
    return model


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override (include/llama.h)."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def _experts_in_ram(n_layers: int) -> ctypes.Array[_Override]:
    """Return overrides, ended by an empty one, that keep the experts of the first layers in the CPU's buffers."""
    if not n_layers:
        return (_Override * 1)()
    layers = "|".join(map(str, range(n_layers)))
    pattern = rf"blk\.({layers})\.ffn_\w*exps\."
    return (_Override * 2)(_Override(pattern.encode(), lib.cpu_buffer_type()), _Override())


def make_context(
    model: int,
    path: Path,
    *,
    n_ctx: int,
    n_seq_max: int,
    streams: bool,
    n_batch: int,
    threads: int,
    kv_type: str,
    flash: int,
    wide: bool = False,
    callback: Any = None,
) -> int:
    """Make the one context of a model. A `wide` one computes up to `GPU_BATCH` tokens at once, if it has room.

    `callback` is asked before each node of a graph (:mod:`uma_trio.backend._llama_parts`).
    """
    params = llama.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_seq_max = n_seq_max
    # A row per sequence (no fewer are taken), and some for drafts. Rows of every token would reserve
    # n_batch rows of 152k floats in the graph's memory.
    params.n_outputs_max = params.n_seq_max + DRAFT_ROWS
    params.n_outputs_max_per_seq = 0
    # Both, as llama.cpp uses the second for any batch of two tokens or more.
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = flash
    params.type_k, params.type_v = (kind.ggml_type for kind in kv_pair(kv_type))
    params.kv_unified = not streams
    # A full-size cache for sliding windows, so that a part of a sequence can be dropped.
    params.swa_full = True
    params.no_perf = True
    if callback is not None:
        params.cb_eval = callback
    context = None
    for size in (GPU_BATCH, n_batch) if wide else (n_batch,):
        # One ubatch per decode, so that a tick reads the weights once (llama-kv-cache.cpp,
        # init_batch: one stream is split by size alone).
        params.n_batch = params.n_ubatch = size
        lib.forget_errors()
        context = context or llama.llama_init_from_model(model, params)
    if not context:
        reason = lib.last_error() or "llama.cpp gave no reason"
        raise ModelError(
            f"The context for {path} could not be made ({reason});"
            f" try a smaller --n-ctx (now {n_ctx}) or another --kv-type (now {kv_type})."
        )
    if not llama.llama_get_memory(context):
        llama.llama_free(context)
        raise ModelError(f"{path} is an embedding model; name one that generates text.")
    return int(context)


def compute_tokens(context: int, *, encodes: bool = False) -> bool:
    """Compute two tokens in an empty context, as the first ones of sequence 0; False if llama.cpp refuses them."""
    tokens = (llama.llama_token * 2)(0, 0)
    compute = llama.llama_encode if encodes else llama.llama_decode
    return int(compute(context, llama.llama_batch_get_one(tokens, 2))) == 0


def refuse_unsuitable(model: int, path: Path) -> None:
    """Refuse models that do not write text from left to right, one token after another."""
    if llama.llama_model_has_encoder(model):
        raise ModelError(f"{path} is an encoder-decoder model; name one that only decodes.")
    if llama.llama_model_is_diffusion(model):
        raise ModelError(f"{path} is a diffusion model, which has no next token; name another.")
    if not llama.llama_model_has_decoder(model):
        raise ModelError(f"{path} only encodes; name a model that generates text.")


def can_go_back(context: int) -> bool:
    """Whether its memory can forget the latest tokens, however many: a recurrent state cannot.

    The memory itself is asked, too: two tokens are computed and the last of them is dropped. One
    that keeps a few earlier states could do that and no more, so that this alone proves nothing.
    """
    model = llama.llama_get_model(context)
    if llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model):
        return False
    memory = int(llama.llama_get_memory(context))
    forgets = (
        compute_tokens(context)
        and bool(lib.seq_rm(memory, 0, 1, -1))
        and lib.seq_pos_max(memory, 0) == 0
    )
    lib.seq_rm(memory, -1, -1, -1)
    return forgets


_READ_ONLY_SHARED = "r--s"  # what llama.cpp maps, and what may be dropped without loss


def release(files: Iterable[Path]) -> None:
    """Let the kernel take back every page of `files` that this process has mapped.

    What is still needed comes back page by page when it is read, from the page cache if no program
    wanted the memory: once, in the first decode (5 ms for 500 MB). Pages that are locked stay, and
    so does everything where the system has no ``/proc``.
    """
    names = {os.path.realpath(file) for file in files}
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        where, mode, _offset, _device, _inode, *name = line.split(maxsplit=5)
        if mode == _READ_ONLY_SHARED and name and name[0] in names:
            begin, end = (int(address, 16) for address in where.split("-"))
            _dont_need(begin, end - begin)


def _dont_need(address: int, length: int) -> None:
    """Call madvise; what it refuses (locked pages) stays as it was."""
    pointer, size = ctypes.c_void_p(address), ctypes.c_size_t(length)
    ctypes.CDLL(None).madvise(pointer, size, mmap.MADV_DONTNEED)


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
