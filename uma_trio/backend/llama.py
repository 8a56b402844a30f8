"""llama.cpp as a backend: one model, one context, one batch that numpy owns.

Owns the ``llama_context``, which is for one thread only, and the addresses of the batch. The
engine writes the batch's arrays; a decode is one call with the same struct each time; logits
are read where llama.cpp wrote them. What would end the process inside llama.cpp (an assert on
a batch that is too large, on a slot out of range) is checked here first and answered with
``INVALID``. Facts about llama.cpp are from the vendored 0c1e57098.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import llama_cpp.llama_cpp as llama
import numpy as np

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_compute import Compute
from uma_trio.backend._llama_extent import Extent
from uma_trio.backend._llama_info import described, model_info
from uma_trio.backend._llama_lib import LogSink, SystemInfo, system_info
from uma_trio.backend._llama_options import (
    FLASH_OFF,
    MAX_SLOTS,
    checked,
    chosen_flash,
    refuse_without_room,
)
from uma_trio.backend._llama_vocab import LlamaVocabulary, ModelHandle
from uma_trio.backend.base import (
    Aside,
    BackendDied,
    Batch,
    DecodeStatus,
    FloatArray,
    Interrupt,
    Limits,
    ModelError,
    ModelInfo,
    nothing,
)
from uma_trio.backend.gguf_header import read_header
from uma_trio.backend.kv_memory import KV_TYPES, N_BATCH
from uma_trio.backend.mapped_file import release

__all__ = ["LlamaBackend", "SystemInfo", "system_info"]

# load_mode by (mmap, mlock): LLAMA_LOAD_MODE_NONE, MMAP, MLOCK, MMAP_MLOCK (include/llama.h).
_LOAD_MODE: Final = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}

Progress = Callable[[float], None]


class LlamaBackend:
    """See :class:`uma_trio.backend.base.Backend`. Made by :meth:`load`.

    `limits.n_slots` is also how many rows of logits one decode may ask for. The arrays that
    `logits` returns point into llama.cpp's memory and must not be touched after `close`.
    """

    def __init__(
        self,
        vocabulary: LlamaVocabulary,
        info: ModelInfo,
        context: int,
        *,
        n_slots: int,
        kv_type: str,
        whole_cache: bool,
    ) -> None:
        self._context: int | None = context
        self._memory = int(llama.llama_get_memory(context))
        n_ctx = int(llama.llama_n_ctx_seq(context))
        self.model = info
        self.limits = Limits(
            n_ctx=int(llama.llama_n_ctx(context)),
            n_ctx_seq=min(n_ctx, info.n_ctx_train) if info.n_ctx_train > 0 else n_ctx,
            n_slots=n_slots,
            n_batch=int(llama.llama_n_batch(context)),
            whole_cache=whole_cache,
        )
        self.vocabulary = vocabulary  # which keeps the weights alive
        system = system_info()
        cache = f"KV {kv_type}{' without flash attention' if whole_cache else ''}"
        self.description = described(system, int(llama.llama_n_threads(context)), cache)
        self._compute = Compute(gpu=bool(system.gpus))
        spare = int(llama.llama_n_seq_max(context)) > n_slots
        self._extent = Extent(self._memory, n_slots) if spare and _can_go_back(context) else None
        # Of ggml's backends only the CPU's asks whether to go on.
        self._interruptible = not system.gpus and _can_go_back(context)
        self._flag: Any = None  # while the next decode, or the running one, may be interrupted
        self.batch = Batch(self.limits.n_batch)
        self._struct = self._own_batch()
        self._length = [0] * self.limits.n_slots
        self._n_rows = 0
        self._logits_address = 0
        self._logits: FloatArray = np.empty((0, info.n_vocab), np.float32)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        n_ctx: int,
        n_slots: int,
        threads: int,
        n_batch: int = N_BATCH,
        kv_type: str = "f16",
        flash_attention: str = "auto",
        mlock: bool = False,
        mmap: bool = True,
        gpu_layers: int = -1,
        holds_extent: bool | None = None,
        progress: Progress | None = None,
        log: LogSink | None = None,
    ) -> Self:
        """Check the file, load the weights, make the context.

        `n_ctx` counts KV cells for all slots together (llama.cpp rounds it up to a multiple
        of 256), `gpu_layers` -1 is all, `holds_extent` says whether `kv_retire` keeps the cache
        as large as it was (None: on a GPU, whose graphs may depend on it), `progress` gets 0.0 to
        1.0 and may raise to stop the loading, `log` gets llama.cpp's warnings and errors.
        Raises :class:`ModelError`.
        """
        lib.start()
        lib.set_log_sink(log)
        if log is not None and lib.amx_is_miscompiled():
            log("warning", "AMX was compiled by a GCC that gets it wrong; see uma-trio doctor")
        path = Path(path)
        header = read_header(path)
        kv_type = checked(header, n_ctx=n_ctx, n_slots=n_slots, threads=threads, kv_type=kv_type)
        size = {"n_ctx": n_ctx, "n_batch": n_batch}
        gpu = bool(system_info().gpus)
        flash = chosen_flash(flash_attention, header, **size, kv_type=kv_type, gpu=gpu)
        refuse_without_room(header, **size, kv_type=kv_type, flash=flash, gpu=gpu)
        model = _load_model(path, mlock=mlock, mmap=mmap, gpu_layers=gpu_layers, progress=progress)
        release(header.parts)
        info = model_info(model.pointer, header, kv_type)
        _refuse_unsuitable(model.pointer, path)
        vocabulary = LlamaVocabulary(model)
        holds = gpu if holds_extent is None else holds_extent
        context = _make_context(
            model.pointer,
            path,
            **size,
            n_slots=n_slots,
            spare_sequences=int(holds and n_slots < MAX_SLOTS),
            threads=threads,
            kv_type=kv_type,
            flash=flash,
        )
        whole = flash == FLASH_OFF
        return cls(vocabulary, info, context, n_slots=n_slots, kv_type=kv_type, whole_cache=whole)

    @property
    def computes_beside(self) -> bool:
        """Whether the GPU went on after the last call, and so will after the next."""
        return self._compute.goes_on

    def arm(self) -> Interrupt | None:
        """Let the next decode be interrupted; None on a GPU, or with a recurrent memory.

        Each armed decode has a flag of its own, so that an interrupt which comes late sets one
        that nobody reads any more.
        """
        if self._context is None:
            raise BackendDied("the backend is closed")
        if not self._interruptible:
            return None
        flag = self._flag = ctypes.create_string_buffer(2)
        lib.set_abort_callback(self._context, lib.strlen, ctypes.addressof(flag))
        return partial(flag.__setitem__, 0, b"x")

    def decode(self, n_tokens: int, aside: Aside = nothing) -> int:
        """Compute rows ``[:n_tokens]`` of the batch. See the contract in ``backend.base``."""
        if self._context is None:
            raise BackendDied("the backend is closed")
        self._n_rows = 0
        ends = self._ends(n_tokens)
        if ends is None:
            aside()
            status: int = DecodeStatus.INVALID
        else:
            status = self._decode(self._context, n_tokens, ends, aside)
        if self._flag is not None:
            lib.set_abort_callback(self._context, None, None)
            self._flag = None
        return status

    def _decode(self, context: int, n_tokens: int, ends: list[int], aside: Aside) -> int:
        slots = self.batch.slot[:n_tokens]
        np.take(self._slot_addresses, slots, out=self._seq_id[:n_tokens], mode="clip")
        self._struct.n_tokens = n_tokens
        status = self._compute(context, self._struct, aside)
        if status == DecodeStatus.NO_KV_ROOM and self._extent and self._extent.let_go():
            status = self._compute(context, self._struct, nothing)
        if status == DecodeStatus.OK:
            self._length = ends
            self._n_rows = int(np.count_nonzero(self.batch.want[:n_tokens]))
        elif status not in (DecodeStatus.NO_KV_ROOM, DecodeStatus.INVALID):
            self._length = [self.kv_length(slot) for slot in range(self.limits.n_slots)]
        return status

    def logits(self, n_rows: int) -> FloatArray:
        """Return the first `n_rows` rows of the latest decode, in batch order: a view.

        Raises ValueError if it did not succeed or fewer rows were wanted.
        """
        if n_rows > self._n_rows:
            raise ValueError(f"{n_rows} rows of logits are asked for, {self._n_rows} are there")
        address = lib.get_logits(self._context)
        if address != self._logits_address:
            shape = (self.limits.n_slots, self.model.n_vocab)
            memory = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
            self._logits = np.ctypeslib.as_array(memory).reshape(shape)
            self._logits_address = address
        return self._logits[:n_rows]

    def kv_remove(self, slot: int, first: int = 0) -> bool:
        """Drop the cells of `slot` from position `first` on; False if only all can go."""
        self._check_slot(slot)
        done: bool = lib.seq_rm(self._memory, slot, first, -1)
        self._length[slot] = self.kv_length(slot)
        return done

    def kv_retire(self, slot: int) -> None:
        """Drop the cells of `slot`, but perhaps for one that holds the cache's extent."""
        self._check_slot(slot)
        if self._extent:
            self._extent.keep(slot)
        self.kv_remove(slot)

    def kv_settle(self) -> None:
        """Let go of what holds the cache's extent."""
        if self._extent and self._context is not None:
            self._extent.let_go()

    def kv_length(self, slot: int) -> int:
        """Return how many positions llama.cpp holds for `slot`."""
        self._check_slot(slot)
        return int(lib.seq_pos_max(self._memory, slot)) + 1

    def close(self) -> None:
        """Free the context; the weights go when nobody holds this or the vocabulary any more."""
        if self._context is not None:
            context, self._context = self._context, None
            self._logits = np.empty((0, self.model.n_vocab), np.float32)
            self._n_rows = 0
            llama.llama_free(context)

    def _own_batch(self) -> Any:
        """Build the struct that points at our arrays. They live as long as this object."""
        capacity = self.limits.n_batch
        self._n_seq_id = np.ones(capacity, np.int32)
        self._slot_ids = np.arange(self.limits.n_slots, dtype=np.int32)
        self._slot_addresses = (
            self._slot_ids.ctypes.data + np.arange(self.limits.n_slots, dtype=np.uintp) * 4
        )
        self._seq_id = np.full(capacity, self._slot_addresses[0], np.uintp)
        struct = llama.llama_batch()
        for name, array in (
            ("token", self.batch.token),
            ("pos", self.batch.pos),
            ("n_seq_id", self._n_seq_id),
            ("seq_id", self._seq_id),
            ("logits", self.batch.want),
        ):
            kind = dict(llama.llama_batch._fields_)[name]
            setattr(struct, name, ctypes.cast(array.ctypes.data, kind))
        return struct

    def _ends(self, n_tokens: int) -> list[int] | None:
        """Return where each slot would end after the batch; None if it breaks the contract.

        llama.cpp checks less: an empty slot may start anywhere, a position may come twice, any
        slot below 256 is taken. And it ends the process where a limit is passed. Plain Python
        is faster here than numpy for the usual batch of a row per slot.
        """
        limits, batch = self.limits, self.batch
        if not 0 < n_tokens <= limits.n_batch:
            return None
        if np.count_nonzero(batch.want[:n_tokens]) > limits.n_slots:
            return None
        ends = self._length.copy()
        slots, positions = batch.slot[:n_tokens].tolist(), batch.pos[:n_tokens].tolist()
        for slot, position in zip(slots, positions, strict=True):
            if not 0 <= slot < limits.n_slots or ends[slot] != position:
                return None
            ends[slot] = position + 1
        return ends

    def _check_slot(self, slot: int) -> None:
        if self._context is None:
            raise BackendDied("the backend is closed")
        if not 0 <= slot < self.limits.n_slots:  # llama.cpp would end the process
            raise IndexError(f"there is no slot {slot}")


def _load_model(
    path: Path, *, mlock: bool, mmap: bool, gpu_layers: int, progress: Progress | None
) -> ModelHandle:
    """Load the weights. What `progress` raises stops the loading and comes out here."""
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
    if lib.amx_is_miscompiled():
        params.use_extra_bufts = False  # keeps weights out of AMX's layout, and of other ones
    params.load_mode = _LOAD_MODE[mmap, mlock]
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
    return ModelHandle(int(pointer))


def _make_context(
    model: int,
    path: Path,
    *,
    n_ctx: int,
    n_slots: int,
    spare_sequences: int,
    n_batch: int,
    threads: int,
    kv_type: str,
    flash: int,
) -> int:
    """Make the one context of a model."""
    params = llama.llama_context_default_params()
    params.n_ctx = n_ctx
    # One ubatch per decode, so that a tick reads the weights once (llama-kv-cache.cpp,
    # init_batch: one stream is split by size alone).
    params.n_batch = params.n_ubatch = n_batch
    params.n_seq_max = n_slots + spare_sequences
    # A row per sequence, and no fewer are taken: more would reserve n_batch rows of 152k floats in
    # the graph's memory, and as many from the start means that the buffer of logits never moves.
    params.n_outputs_max = params.n_seq_max
    params.n_outputs_max_per_seq = 0
    # Both, as llama.cpp uses the second for any batch of two tokens or more.
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = flash
    params.type_k = params.type_v = KV_TYPES[kv_type].ggml_type
    params.kv_unified = True
    # A full-size cache for sliding windows, so that a part of a sequence can be dropped.
    params.swa_full = True
    params.no_perf = True
    lib.forget_errors()
    context = llama.llama_init_from_model(model, params)
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


def _refuse_unsuitable(model: int, path: Path) -> None:
    """Refuse models that do not write text from left to right, one token after another."""
    if llama.llama_model_has_encoder(model):
        raise ModelError(f"{path} is an encoder-decoder model; name one that only decodes.")
    if llama.llama_model_is_diffusion(model):
        raise ModelError(f"{path} is a diffusion model, which has no next token; name another.")
    if not llama.llama_model_has_decoder(model):
        raise ModelError(f"{path} only encodes; name a model that generates text.")


def _can_go_back(context: int) -> bool:
    """Whether its memory can forget the latest tokens; a recurrent state cannot."""
    model = llama.llama_get_model(context)
    return not (llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model))
