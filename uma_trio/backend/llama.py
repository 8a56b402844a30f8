"""llama.cpp as a backend: one model, one context, one batch that numpy owns.

Owns the ``llama_context``, which is for one thread only, and the addresses of the batch. The
engine writes the batch's arrays; a decode is one call with the same struct each time; logits
are read where llama.cpp wrote them. What would end the process inside llama.cpp (an assert on
a batch that is too large, on a slot out of range) is checked here first and answered with
``INVALID``. Facts about llama.cpp are from the vendored 0c1e57098.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Self, TypedDict

import numpy as np
from attrs import evolve, frozen

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_info import described, model_info, placed
from uma_trio.backend._llama_lib import LogSink, SystemInfo, system_info
from uma_trio.backend._llama_load import (
    DRAFT_ROWS,
    Progress,
    can_go_back,
    load_model,
    make_context,
    release,
    set_adapters,
)
from uma_trio.backend._llama_memory import CacheMemory
from uma_trio.backend._llama_options import (
    FLASH_OFF,
    Placement,
    checked,
    flash_type,
    refuse_without_room,
    spare_sequences,
    uses_streams,
)
from uma_trio.backend._llama_parts import DecodeParts, with_parts
from uma_trio.backend._llama_state import identity_of
from uma_trio.backend._llama_streams import StreamMemory
from uma_trio.backend._llama_vocab import LlamaVocabulary, ModelHandle
from uma_trio.backend.base import (
    Adapter,
    BackendDied,
    Batch,
    ContextLimits,
    DecodeStatus,
    FloatArray,
    Interrupt,
    ModelFacts,
    Overlap,
    Saved,
    Traits,
    nothing,
)
from uma_trio.backend.gguf_header import GgufHeader, read_header
from uma_trio.backend.kv_memory import N_BATCH
from uma_trio.backend.polite import at_once, politely

__all__ = ["LlamaBackend", "SystemInfo", "system_info"]


@frozen(eq=False)
class _Recipe:
    """How the context of a model was made, for another one on the same weights."""

    model: ModelHandle
    header: GgufHeader
    cells: _Cells
    flash: int
    make: Callable[..., int]


@frozen(eq=False)
class _Begun:
    """A decode of `n_tokens`, after which the slots hold so many cells (`ends`), or why it is not computed."""

    context: int
    n_tokens: int
    ends: list[int]
    status: int | None = None


class _Cells(TypedDict):
    """How much of a KV cache there is, and of which type."""

    n_ctx: int
    n_batch: int
    kv_type: str


class LlamaBackend:
    """See :class:`uma_trio.backend.base.Backend`. Made by :meth:`load`.

    The arrays that `logits` returns point into llama.cpp's memory and must not be touched after
    `close`.
    """

    def __init__(
        self,
        vocabulary: LlamaVocabulary,
        info: ModelFacts,
        context: int,
        n_slots: int,
        kv_type: str,
        placement: Placement,
        parts: DecodeParts | None,
        *,
        whole_cache: bool,
        keeps_high_water: bool,
        recipe: _Recipe,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._context: int | None = context
        self._placement, self._keeps_high_water = placement, keeps_high_water
        self._recipe, self._adapters = recipe, tuple(adapters)
        self.model = info
        limits = _limits(context, info, n_slots, whole_cache=whole_cache)
        self.vocabulary = vocabulary  # which keeps the weights alive
        self._cache = f"KV {kv_type}{' without flash attention' if whole_cache else ''}"
        threads = int(llama.llama_n_threads(context))
        self.description = described(system_info(), placement, threads, self._cache)
        self._compute = DecodeCall(gpu=placement.on_gpu)
        self._flag: Any = None  # while the next decode, or the running one, may be interrupted
        self._kv = _memory(context, limits, keeps_high_water=keeps_high_water)
        self.limits = evolve(limits, leaf_ids=self._kv.leaf_ids)
        self.batch = Batch(limits.n_batch)
        self._struct = self._own_batch()
        self._length = [0] * n_slots
        self._n_rows = 0
        self._logits_address = 0
        self._logits: FloatArray = np.empty((0, info.n_vocab), np.float32)
        self._parts = parts
        self._begun: _Begun | None = None
        # Of ggml's backends only the CPU's asks whether to go on.
        self._traits = Traits(
            overlaps=self._compute.goes_on,
            interruptible=not placement.on_gpu and limits.can_go_back,
            shape_costs=placement.on_gpu,
            longest_part=1.0 if parts is None else parts.longest,
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        n_ctx: int,
        n_slots: int,
        threads: int,
        n_batch: int | None = None,
        kv_type: str = "f16",
        kv_layout: str = "auto",
        scratch_slots: int = 0,
        flash_attention: str = "auto",
        mlock: bool = False,
        mmap: bool = True,
        gpu_layers: int = -1,
        n_cpu_moe: int = 0,
        holds_extent: bool | None = None,
        progress: Progress | None = None,
        log: LogSink | None = None,
        parts: bool = False,
        polite: bool = False,
    ) -> Self:
        """Check the file, load the weights, make the context.

        `n_ctx` counts KV cells for all slots together (llama.cpp rounds it up to a multiple of
        256). `kv_layout` is the option; in one unified cache there are `scratch_slots` more than `n_slots`. `n_batch` is the tokens of one decode at the most; None is 512, and 1,024 where a GPU computes
        all layers and has room for it. `gpu_layers` -1 is all, of which the first `n_cpu_moe` have their experts in RAM, `holds_extent` says whether `kv_retire` keeps the high-water
        mark (None: with layers on a GPU, whose graphs may depend on it), `progress` gets 0.0 to 1.0
        and may raise to stop the loading, `log` gets llama.cpp's warnings and errors. With `parts` decodes on a CPU are
        computed in parts, if they take long. If it is `polite` it yields the cores to other models. Raises
        :class:`ModelError`.
        """
        _listen(log)
        header = read_header(path := Path(path))
        kv_type = checked(header, n_ctx=n_ctx, n_slots=n_slots, threads=threads, kv_type=kv_type)
        placement = placed(system_info(), header, gpu_layers)
        cells: _Cells = {"n_ctx": n_ctx, "n_batch": n_batch or N_BATCH, "kv_type": kv_type}
        flash = flash_type(flash_attention, kv_type)
        refuse_without_room(header, placement, **cells, flash=flash)
        run = politely if polite else at_once
        read = partial(
            load_model, path, mlock=mlock, mmap=mmap, gpu_layers=gpu_layers, n_cpu_moe=n_cpu_moe
        )
        model = run(partial(read, progress=progress))
        streams = uses_streams(kv_layout, header, n_ctx=n_ctx, n_slots=n_slots, flash=flash)
        n_slots += 0 if streams else scratch_slots
        wide = n_batch is None and placement.all_on_gpu and flash != FLASH_OFF
        spare = 0 if streams else spare_sequences(n_slots)
        made = partial(
            make_context,
            *(model.pointer, path),
            **cells,
            n_seq_max=n_slots + spare,
            streams=streams,
            threads=threads,
            flash=flash,
            wide=wide,
        )
        context, in_parts = run(partial(with_parts, made, wanted=parts and not placement.on_gpu))
        info = model_info(model.pointer, header, kv_type)
        backend = cls(
            *(LlamaVocabulary(model), info, context, n_slots, kv_type, placement, in_parts),
            whole_cache=flash == FLASH_OFF,
            keeps_high_water=placement.on_gpu if holds_extent is None else holds_extent,
            recipe=_Recipe(model, header, cells, flash, made),
        )
        release(header.parts)
        return backend

    def variant(self, adapters: Sequence[Adapter]) -> LlamaBackend:
        """Return a backend with these adapters on the same weights, in a context of its own.

        It has the same vocabulary. May be called on any thread, also while this one computes or after it was closed. Try
        the adapters in a process of their own first (:func:`~uma_trio.backend.llama_probe.probe_adapter`). Raises
        :class:`ModelError`.
        """
        recipe = self._recipe
        refuse_without_room(recipe.header, self._placement, **recipe.cells, flash=recipe.flash)
        parts = None if self._parts is None else DecodeParts(self._parts.share)
        context = recipe.make(callback=None if parts is None else parts.graph.callback)
        try:
            set_adapters(context, recipe.model, adapters)
            return LlamaBackend(
                *(self.vocabulary, self.model, context, self.limits.n_slots),
                *(recipe.cells["kv_type"], self._placement, parts),
                whole_cache=self.limits.whole_cache,
                keeps_high_water=self._keeps_high_water,
                recipe=recipe,
                adapters=adapters,
            )
        except BaseException:
            llama.llama_free(context)
            raise

    @property
    def traits(self) -> Traits:
        if self._traits.overlaps != self._compute.goes_on:
            self._traits = evolve(self._traits, overlaps=self._compute.goes_on)
        return self._traits

    def arm(self) -> Interrupt | None:
        """Let the next decode be interrupted; None on a GPU, or with a recurrent memory.

        Each armed decode has a flag of its own, so that an interrupt which comes late sets one
        that is not read any more.
        """
        if self._context is None:
            raise BackendDied("the backend is closed")
        if not self._traits.interruptible:
            return None
        flag = self._flag = ctypes.create_string_buffer(2)
        lib.set_abort_callback(self._context, lib.strlen, ctypes.addressof(flag))
        return partial(flag.__setitem__, 0, b"x")

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        begun = self._prepared(n_tokens)
        if begun.status is not None:
            while_computing()
            return self._finished(begun, begun.status)
        return self._finished(begun, self._compute(begun.context, self._struct, while_computing))

    def begin_decode(
        self, n_tokens: int, while_computing: Overlap = nothing, *, predicted_s: float
    ) -> None:
        if self._parts is None:
            raise ValueError("this context computes no decode in parts")
        begun = self._begun = self._prepared(n_tokens)
        while_computing()
        if begun.status is None:
            call = partial(lib.decode, begun.context, self._struct)
            self._parts.begin(call, predicted_s)

    def advance_decode(self, most_s: float, is_wanted: Callable[[], bool] = bool) -> int | None:
        begun, parts = self._begun, self._parts
        if begun is None or parts is None:
            raise ValueError("no decode was begun")
        status = begun.status
        if status is None:
            status = parts.graph.advance(most_s, is_wanted)
            if status is None:
                return None
        self._begun = None
        return self._finished(begun, status)

    def _prepared(self, n_tokens: int) -> _Begun:
        """Check a batch and name its sequences; what is returned has a status if it cannot be computed."""
        if self._context is None:
            raise BackendDied("the backend is closed")
        self._n_rows = 0
        ends = self._ends(n_tokens)
        if ends is None:
            return _Begun(self._context, n_tokens, [], DecodeStatus.INVALID)
        slots = self.batch.slot[:n_tokens]
        if self.limits.n_streams > 1:
            used = np.unique(slots).tolist()
            if not self._kv.prepare(used):
                return _Begun(self._context, n_tokens, ends, DecodeStatus.NO_KV_ROOM)
            for slot in used:  # a sequence id is the number of its stream
                self._slot_ids[slot] = self._kv.stream(slot)
        np.take(self._slot_addresses, slots, out=self._seq_id[:n_tokens], mode="clip")
        self._struct.n_tokens = n_tokens
        return _Begun(self._context, n_tokens, ends)

    def _finished(self, begun: _Begun, status: int) -> int:
        """Note what a decode that returned `status` left in the cache; return the final status."""
        if status == DecodeStatus.NO_KV_ROOM and not begun.status and self._kv.lower_high_water():
            status = self._compute(begun.context, self._struct, nothing)
        slots, positions = self.batch.slot[: begun.n_tokens], self.batch.pos[: begun.n_tokens]
        if status == DecodeStatus.OK:
            self._kv.placed(slots, positions)
            self._length = begun.ends
            self._n_rows = int(np.count_nonzero(self.batch.want[: begun.n_tokens]))
        elif status not in (DecodeStatus.NO_KV_ROOM, DecodeStatus.INVALID):
            self._kv.removed(slots, positions)
            self._length = [self.kv_length(slot) for slot in range(self.limits.n_slots)]
        if self._flag is not None:
            lib.set_abort_callback(self._context, None, None)
            self._flag = None
        return status

    def logits(self, n_rows: int) -> FloatArray:
        """Return the first `n_rows` rows of the latest decode, in batch order: a view.

        Raises ValueError if it did not succeed or fewer rows were wanted.
        """
        if n_rows > self._n_rows:
            raise ValueError(f"{n_rows} rows of logits are asked for, {self._n_rows} are there")
        address = lib.get_logits(self._context)
        if address != self._logits_address:
            shape = (self.limits.n_rows, self.model.n_vocab)
            memory = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
            self._logits = np.ctypeslib.as_array(memory).reshape(shape)
            self._logits_address = address
        return self._logits[:n_rows]

    def kv_remove(self, slot: int, first: int = 0) -> bool:
        self._check_id(slot)
        done = self._kv.remove(slot, first)
        self._measure(slot)
        return done

    def kv_retire(self, slot: int) -> None:
        self._check_id(slot)
        self._kv.retire(slot)
        self.kv_remove(slot)

    def kv_lower_high_water(self) -> None:
        if self._context is not None:
            self._kv.lower_high_water()

    def kv_length(self, slot: int) -> int:
        self._check_id(slot)
        return self._kv.length(slot)

    def kv_first(self, slot: int) -> int:
        self._check_id(slot)
        return self._kv.first(slot)

    def kv_copy(self, src: int, dst: int, first: int, last: int) -> bool:
        self._check_id(src)
        self._check_id(dst)
        done = self._kv.copy(src, dst, first, last)
        self._measure(dst)
        return done

    def kv_save(self, slot: int, first: int, last: int, page: int) -> Sequence[Saved] | None:
        self._check_id(slot)
        return self._kv.save(slot, first, last, page)

    def kv_restore(self, slot: int, saved: Sequence[Saved]) -> bool:
        self._check_id(slot)
        done = self._kv.restore(slot, saved)
        self._measure(slot)
        return done

    def kv_identity(self) -> str:
        streams = "streams" if self.limits.n_streams > 1 else "unified"
        cache = f"{self._cache}, {streams}, {self._placement}"
        return identity_of(self._recipe.header.parts, self._adapters, cache)

    def kv_shortage(self, slots: Sequence[int], n_tokens: int) -> int:
        return self._kv.shortage(slots, n_tokens)

    def kv_stream(self, slot: int) -> int:
        return self._kv.stream(slot)

    def kv_used(self) -> int:
        return self._kv.used()

    def kv_shared(self, slots: Sequence[int]) -> int:
        return self._kv.shared(slots)

    def kv_portions(self, leaves: Sequence[int]) -> list[float]:
        return self._kv.portions(leaves)

    def kv_runs(self, slot: int, first: int, last: int) -> int:
        return self._kv.runs(slot, first, last)

    def kv_high_water(self) -> int:
        return self._kv.high_water()

    def close(self) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            self._logits = np.empty((0, self.model.n_vocab), np.float32)
            self._n_rows = 0
            if self._parts is not None:
                self._parts.graph.close(context)
            llama.llama_free(context)

    def _own_batch(self) -> Any:
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
        if np.count_nonzero(batch.want[:n_tokens]) > limits.n_rows:
            return None
        ends = self._length.copy()
        slots, positions = batch.slot[:n_tokens].tolist(), batch.pos[:n_tokens].tolist()
        for slot, position in zip(slots, positions, strict=True):
            if not 0 <= slot < limits.n_slots or ends[slot] != position:
                return None
            ends[slot] = position + 1
        return ends

    def _measure(self, slot: int) -> None:
        """Ask llama.cpp where `slot` ends, if it can be in a batch."""
        if slot < self.limits.n_slots:
            self._length[slot] = self._kv.length(slot)

    def _check_id(self, seq: int) -> None:
        if self._context is None:
            raise BackendDied("the backend is closed")
        self._kv.check(seq)


def _listen(log: LogSink | None) -> None:
    lib.start()
    lib.set_log_sink(log)
    if log is not None and lib.amx_is_miscompiled():
        log("warning", "AMX was compiled by a GCC that gets it wrong; see uma-trio doctor")


def _memory(
    context: int, limits: ContextLimits, *, keeps_high_water: bool
) -> CacheMemory | StreamMemory:
    memory = int(llama.llama_get_memory(context))
    if limits.n_streams > 1:
        return StreamMemory(
            context, memory, n_slots=limits.n_slots, cells=int(llama.llama_n_ctx_seq(context))
        )
    return CacheMemory(
        context,
        memory,
        n_slots=limits.n_slots,
        n_ctx=limits.n_ctx,
        window=limits.window,
        can_go_back=limits.can_go_back,
        scratch=limits.n_slots if int(llama.llama_n_seq_max(context)) > limits.n_slots else None,
        keeps_high_water=keeps_high_water,
    )


def _limits(context: int, info: ModelFacts, n_slots: int, *, whole_cache: bool) -> ContextLimits:
    n_ctx = int(llama.llama_n_ctx_seq(context))
    return ContextLimits(
        n_ctx=int(llama.llama_n_ctx(context)),
        n_ctx_seq=min(n_ctx, info.n_ctx_train) if info.n_ctx_train > 0 else n_ctx,
        n_slots=n_slots,
        n_streams=n_slots if n_ctx < int(llama.llama_n_ctx(context)) else 1,
        n_batch=int(llama.llama_n_batch(context)),
        whole_cache=whole_cache,
        n_rows=n_slots + DRAFT_ROWS,
        can_go_back=can_go_back(context),
        window=max(0, int(llama.llama_model_n_swa(llama.llama_get_model(context)))),
    )


# After so many decodes in a row that were over when their call came back a device is taken for one that waits. On
# CUDA the first two decodes of a shape launch each kernel and capture a graph, which may take as long as they do.
OVER = 8


class DecodeCall:
    """Calls llama_decode and waits for its end, with `while_computing` before the longer of the two.

    The CPU computes inside of the call. A GPU goes on after it came back, unless layers were
    left to the CPU or its driver is one that waits; which it is shows in the latest decodes.
    """

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self.goes_on = gpu  # whether it computes on after the call, as it lately did
        self._over = 0  # decodes in a row that were over when their call came back

    def __call__(self, context: int, batch: Any, while_computing: Overlap) -> int:
        """Return the status, with the logits there if it is OK."""
        goes_on = self.goes_on
        if not goes_on:
            while_computing()
        began = perf_counter()
        status: int = lib.decode(context, batch)
        back = waiting = perf_counter()
        if goes_on:
            while_computing()
            waiting = perf_counter()
        if self._gpu and status == DecodeStatus.OK:
            lib.synchronize(context)
            called_s = back - began
            # Where that took longer than the call, whether there was anything to wait for is unknown.
            hidden = waiting - back > called_s
            if perf_counter() - waiting > called_s or (goes_on and hidden):
                self._over, self.goes_on = 0, True
            else:
                self._over += 1
                self.goes_on = goes_on and self._over < OVER
        return status
