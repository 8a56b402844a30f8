"""What a model takes once it is loaded, found without memory for its weights and its KV cache (``no_alloc``); and whether it computes.

For a process that may end: llama.cpp ends it at some files.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend import llama_encoder
from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_info import placed
from uma_trio.backend._llama_load import compute_tokens, load_model, make_context
from uma_trio.backend._llama_options import (
    FLASH_OFF,
    Placement,
    checked,
    flash_type,
    spare_sequences,
)
from uma_trio.backend._llama_vocab import LlamaVocabulary, ModelHandle
from uma_trio.backend.base import ModelError
from uma_trio.backend.gguf_header import GgufHeader, read_header
from uma_trio.backend.kv_memory import N_BATCH, kv_bytes, score_copy_bytes
from uma_trio.backend.needs import Estimate, Needs, Question
from uma_trio.words import MIB

# llama-context.cpp, sched_reserve and the constructor: "%10s compute buffer size = %8.2f MiB".
_COMPUTE: Final = re.compile(r" compute buffer size = +([0-9.]+) MiB")
_OUTPUT: Final = re.compile(r" output buffer size = +([0-9.]+) MiB")
_FEW: Final = 256  # cells
# Each first byte and each later byte that UTF-8 has: vocabularies without a token for one throw where it is looked for.
_EVERY_BYTE: Final = "".join(
    map(chr, (*range(0x800), *range(0x800, 0xD800, 0x400), 0xE000, 0xFFFD, *range(0x10000, 0x110000, 0x8000)))
)  # fmt: skip
_ANONYMOUS: Final = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)


def of_encoder(path: Path) -> Needs:
    """Return what an encoder needs. Raises :class:`ModelError`."""
    said = _listen()
    model = llama_encoder.load_weights(path, no_alloc=True)
    context, info, room = llama_encoder.make_encoder_context(model, path, threads=1)
    parts = breakdown(context)
    llama.llama_free(context)
    if parts is None:
        kv = llama_encoder.cache_bytes(read_header(path), room)
        return Needs(info.n_ctx, info.size_bytes, 0, kv, _told(_COMPUTE, said))
    kv, compute = sum(part.context for part in parts), sum(part.compute for part in parts)
    return Needs(info.n_ctx, info.size_bytes, 0, kv, compute)


def of_model(path: Path, question: Question) -> Estimate:
    """Return what a model that writes needs, loaded as the question says. Raises :class:`ModelError`."""
    said = _listen()
    header = read_header(path)
    n_ctx = question.n_ctx
    kv_type = checked(
        header, n_ctx=n_ctx, n_slots=question.n_slots, threads=1, kv_type=question.kv_type
    )
    placement = placed(lib.system_info(), header, question.gpu_layers)
    flash = flash_type(question.flash_attention, kv_type)
    before = _anonymous()
    model = load_model(
        path, gpu_layers=question.gpu_layers, n_cpu_moe=question.n_cpu_moe, no_alloc=True
    )
    trial = _Trial(model, header, placement, question, kv_type, said)
    trial.needs(n_ctx, flash)
    trial.other = max(0, _anonymous() - before)
    curve = tuple(trial.needs(n, flash) for n in sorted({n_ctx, *question.others}))
    needs = next(each for each in curve if each.n_ctx == n_ctx)
    return Estimate(needs, curve, header.number("context_length"))


def compute_two_tokens(path: Path, question: Question | None) -> None:
    """Tokenise every kind of byte, and compute two tokens, on one thread of the CPU. Without a question it is an encoder.

    Most of what llama.cpp asserts of a model it asserts only while it computes. The weights are mapped, so that they are in
    memory once for all processes, and read from the disk once. Raises :class:`ModelError`.
    """
    _listen()
    if question is None:
        model = llama_encoder.load_weights(path, as_stored=True)
        contexts = [llama_encoder.make_encoder_context(model, path, threads=1, most=_FEW)[0]]
    else:
        model = load_model(path, gpu_layers=0, as_stored=True)
        flash = flash_type(question.flash_attention, question.kv_type)
        contexts = [_small_context(model, path, question, flash)]
    vocabulary = LlamaVocabulary(model)
    for special in (False, True):
        vocabulary.tokenize(_EVERY_BYTE, add_special=special, parse_special=special)
    for context in contexts:
        if not compute_tokens(context, encodes=not llama.llama_get_memory(context)):
            raise ModelError(f"{path}: llama.cpp cannot compute this model; download it again.")


def _small_context(model: ModelHandle, path: Path, question: Question, flash: int) -> int:
    return make_context(
        model.pointer,
        path,
        n_ctx=_FEW,
        n_seq_max=1,
        streams=False,
        n_batch=32,
        threads=1,
        kv_type=question.kv_type,
        flash=flash,
    )


class _Trial:
    """A model without its weights, of which contexts are made to see what they take."""

    def __init__(
        self,
        model: ModelHandle,
        header: GgufHeader,
        placement: Placement,
        question: Question,
        kv_type: str,
        said: list[str],
    ) -> None:
        self.other = 0
        self._model, self._header, self._placement = model, header, placement
        self._question, self._kv_type, self._said = question, kv_type, said

    def needs(self, n_ctx: int, flash: int) -> Needs:
        """Return what the model takes with such a context."""
        self._said.clear()
        slots = self._question.n_slots
        context = make_context(
            self._model.pointer,
            self._header.path,
            n_ctx=n_ctx,
            n_seq_max=slots + spare_sequences(slots),
            streams=False,
            n_batch=N_BATCH,
            threads=1,
            kv_type=self._kv_type,
            flash=flash,
            wide=self._placement.all_on_gpu and flash != FLASH_OFF,
        )
        try:
            return evolve(self._sum(context, n_ctx), work=self._work(n_ctx, flash))
        finally:
            llama.llama_free(context)

    def _sum(self, context: int, n_ctx: int) -> Needs:
        output, parts = _told(_OUTPUT, self._said), breakdown(context)
        if parts is None:  # by the header, and by what llama.cpp writes
            weights = int(llama.llama_model_size(self._model.pointer))
            kv = kv_bytes(self._header, n_ctx, self._kv_type)
            compute = _told(_COMPUTE, self._said) + output
            return Needs(n_ctx, weights, 0, kv, compute, self.other)
        host = [part for part in parts if not part.on_device]
        mapped = sum(part.model for part in host if part.mappable and self._question.mmap)
        return Needs(
            n_ctx,
            own=sum(part.model for part in host) - mapped,
            mapped=max(0, mapped - self._seldom_read(sum(part.model for part in parts))),
            kv=sum(part.context for part in host),
            compute=sum(part.compute for part in host) + output,
            other=self.other,
            device=sum(p.model + p.context + p.compute for p in parts if p.on_device),
        )

    def _work(self, n_ctx: int, flash: int) -> int:
        """Return what ggml's CPU backend takes to multiply scores with V, where it does that without flash attention."""
        if flash != FLASH_OFF or self._placement.host_share == 0:
            return 0
        return score_copy_bytes(self._header, n_ctx, N_BATCH)

    def _seldom_read(self, weights: int) -> int:
        """Return the bytes of the tokens' embeddings, where a tick reads only the rows of its tokens.

        It reads all of them where they are the output's matrix, too, and llama.cpp has made no copy for that.
        """
        sizes = {tensor.name: tensor.n_bytes for tensor in self._header.tensors}
        apart = "output.weight" in sizes or weights > sum(sizes.values())
        return sizes.get("token_embd.weight", 0) if apart else 0


def _listen() -> list[str]:
    lib.start()
    said: list[str] = []
    lib.set_log_sink(lambda _level, text: said.append(text), with_info=True)
    return said


def _told(what: re.Pattern[str], said: Sequence[str]) -> int:
    return int(sum(map(float, what.findall("\n".join(said)))) * MIB)


def _anonymous() -> int:
    """Return the bytes that this process has for itself; 0 where the system does not say."""
    try:
        found = _ANONYMOUS.search(Path("/proc/self/status").read_text(encoding="ascii"))
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


_NAME: Final = "_Z26llama_get_memory_breakdownPK13llama_context"
_DEEPEST: Final = 64  # of a balanced tree with a handful of kinds
_IN_MACHINE: Final = (0, 3)  # ggml-backend.h: GGML_BACKEND_DEVICE_TYPE_CPU, _ACCEL
_DEFAULT: Final = "CPU"  # the kind that is mapped instead, where files are


class _Node(ctypes.Structure):
    """A node of the tree: its links, and the pair in it."""


_NODE: Final = ctypes.POINTER(_Node)
_Node._fields_ = (
    ("colour", ctypes.c_size_t),
    ("parent", _NODE),
    ("left", _NODE),
    ("right", _NODE),
    ("kind", ctypes.c_void_p),
    ("model", ctypes.c_size_t),
    ("context", ctypes.c_size_t),
    ("compute", ctypes.c_size_t),
)


class _Map(ctypes.Structure):
    """A ``std::map``; `root` is the parent of its header."""

    _fields_ = (
        ("compare", ctypes.c_size_t),
        ("colour", ctypes.c_size_t),
        ("root", _NODE),
        ("first", _NODE),
        ("last", _NODE),
        ("count", ctypes.c_size_t),
    )


@frozen
class MemoryKind:
    """The bytes of one kind of memory. `mappable` weights are not read where files are mapped."""

    on_device: bool
    mappable: bool
    model: int
    context: int
    compute: int


def breakdown(context: int) -> list[MemoryKind] | None:
    """Return the kinds of memory of a context; None where that cannot be read."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        get = lib.freed(_NAME, _Map, ctypes.c_void_p)
        judge = _judge()
    except AttributeError:
        return None
    found = get(context)
    parts = [judge(node) for node in _nodes(found.root, _DEEPEST)]
    return parts if len(parts) == found.count else None


def _nodes(node: Any, depth: int) -> Iterator[Any]:
    if node and depth:
        yield from _nodes(node.contents.left, depth - 1)
        yield node.contents
        yield from _nodes(node.contents.right, depth - 1)


def _judge() -> Callable[[Any], MemoryKind]:
    name = lib.freed("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    is_host = lib.freed("ggml_backend_buft_is_host", ctypes.c_bool, ctypes.c_void_p)
    device_of = lib.freed("ggml_backend_buft_get_device", ctypes.c_void_p, ctypes.c_void_p)
    type_of = lib.freed("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)

    def judge(node: Any) -> MemoryKind:
        device = device_of(node.kind)
        in_machine = is_host(node.kind) or not device or type_of(device) in _IN_MACHINE
        mappable = (name(node.kind) or b"").decode() == _DEFAULT
        return MemoryKind(not in_machine, mappable, node.model, node.context, node.compute)

    return judge
