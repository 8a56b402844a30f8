"""llama.cpp as an encoder: BERT and its kinds, on the CPU, in a context of their own.

A step that is larger than ``n_ubatch`` ends the process (llama-context.cpp, encode): sizes are checked here first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_lib import LogSink
from uma_trio.backend._llama_options import FLASH_ON
from uma_trio.backend._llama_parts import Parts
from uma_trio.backend._llama_vocab import LlamaVocabulary, ModelHandle
from uma_trio.backend.base import FloatArray, IntArray, ModelError
from uma_trio.backend.encoder import EncodeFailed, EncoderInfo, Pair, Pooling
from uma_trio.backend.gguf_header import read_header

#: Longer inputs are refused, whatever the model was trained for: the compute buffer grows with them.
MAX_CONTEXT: Final = 8192
MAX_INPUTS: Final = 256  # LLAMA_MAX_SEQ (src/llama-cparams.h)
# A step may hold so many tokens where the model takes fewer: short inputs are cheaper together.
_LEAST_ROWS: Final = 256
_CALIBRATION_ROWS: Final = 64
# LLAMA_POOLING_TYPE_* (include/llama.h).
_POOLINGS: Final[dict[int, Pooling]] = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
_MEAN: Final = 1
_UNMAPPED: Final = (
    0  # LLAMA_LOAD_MODE_NONE: a mapped file is memory, which llama.cpp asserts against
)
_NOTHING: Final = (-1, 0)  # the file does not say, or says none


def n_rows(n_ctx_train: int) -> tuple[int, int]:
    """Return the longest input, and the tokens of the largest step, of a model with this context."""
    longest = max(1, min(n_ctx_train, MAX_CONTEXT))
    return longest, max(longest, _LEAST_ROWS)


def context_params(rows: int, threads: int, pooling: int, parts: Parts | None) -> Any:
    """Return the parameters of an encoder's context. A step has at most `rows` tokens."""
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = rows
    params.n_seq_max = MAX_INPUTS
    params.n_threads = params.n_threads_batch = threads
    params.embeddings = True
    params.pooling_type = pooling
    # Without it attention spans the whole step for each input.
    params.flash_attn_type = FLASH_ON
    params.kv_unified = True
    params.offload_kqv = params.op_offload = False
    params.no_perf = True
    if parts is not None:
        params.cb_eval = parts.callback
    return params


def pooling_of(path: Path) -> int:
    """Return what to tell llama.cpp: what the file says, or the mean if it says nothing. Raises ModelError."""
    said = read_header(path).number("pooling_type", -1)
    return _MEAN if said in _NOTHING else said


class LlamaEncoder:
    """See :class:`uma_trio.backend.encoder.EncoderModel`. Made by :meth:`load`."""

    def __init__(self, model: ModelHandle, context: int, info: EncoderInfo, parts: Parts) -> None:
        self.info = info
        self.vocabulary = LlamaVocabulary(model)
        self._context: int | None = context
        self._rows = _Rows(info.max_tokens)
        self._parts = parts
        self._inputs = 0
        parts.attach(context, self._rows.struct)
        tokens = np.zeros(min(_CALIBRATION_ROWS, info.n_ctx), np.int32)
        self._rows.put([tokens], info)
        for _ in range(2):  # the first time memory is touched for the first time
            if parts.calibrate(len(tokens)) != 0:
                raise ModelError(f"{info.path} cannot be computed.")

    @classmethod
    def load(cls, path: str | Path, *, threads: int, log: LogSink | None = None) -> Self:
        """Load the weights and make the context. Probe the file first: llama.cpp may end the process.

        Raises :class:`ModelError`.
        """
        lib.start()
        if log is not None:
            lib.set_log_sink(log)
        path = Path(path)
        model = load_weights(path)
        parts = Parts()
        context, info = make_encoder_context(model, path, threads, parts)
        return cls(model, context, info, parts)

    def rows_within(self, part_s: float) -> int:
        """Return how many tokens a step may have for its longest part to take at most `part_s`."""
        return self._parts.rows_within(part_s)

    def begin(self, inputs: Sequence[IntArray]) -> None:
        """Begin a step."""
        self._rows.put(inputs, self.info)
        self._inputs = len(inputs)
        self._parts.begin(sum(map(len, inputs)))

    def next_s(self) -> float:
        """Return the predicted seconds of the next part."""
        return self._parts.next_s()

    def advance(self, most_s: float) -> FloatArray | None:
        """Compute parts for at most `most_s`; return the vectors at the end."""
        status = self._parts.advance(most_s)
        if status is None:
            return None
        if status != 0:
            raise EncodeFailed(f"the encoder failed with status {status}")
        out = np.empty((self._inputs, self.info.width), np.float32)
        for index in range(self._inputs):
            address = lib.embeddings_seq(self._context, index)
            if not address:
                raise EncodeFailed("the encoder made no vector")
            row = (ctypes.c_float * self.info.width).from_address(address)
            out[index] = np.ctypeslib.as_array(row)
        if not np.isfinite(out).all():
            raise EncodeFailed("the encoder made numbers that are not finite")
        return out

    def drop(self) -> None:
        """Give up the step."""
        self._parts.drop()

    def close(self) -> None:
        """Free the context, and end the thread."""
        if self._context is not None:
            context, self._context = self._context, None
            self._parts.close()
            llama.llama_free(context)


def load_weights(path: Path, *, no_alloc: bool = False) -> ModelHandle:
    """Load the weights of an encoder to the CPU; with `no_alloc` only what they are. Raises ModelError."""
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    if no_alloc:
        params.no_alloc, params.load_mode = True, _UNMAPPED
    if lib.amx_is_miscompiled():
        params.use_extra_bufts = False
    lib.forget_errors()
    pointer = llama.llama_model_load_from_file(str(path).encode(), params)
    if not pointer:
        reason = lib.last_error() or "it gave no reason"
        raise ModelError(f"llama.cpp cannot load {path} ({reason}); download it again.")
    return ModelHandle(int(pointer))


def make_encoder_context(
    model: ModelHandle, path: Path, threads: int, parts: Parts | None = None
) -> tuple[int, EncoderInfo]:
    """Make the context of an encoder. Raises :class:`ModelError`."""
    pointer = model.pointer
    longest, rows = n_rows(int(llama.llama_model_n_ctx_train(pointer)))
    lib.forget_errors()
    params = context_params(rows, threads, pooling_of(path), parts)
    context = llama.llama_init_from_model(pointer, params)
    if not context:
        reason = lib.last_error() or "llama.cpp gave no reason"
        raise ModelError(f"The context for {path} could not be made ({reason}).")
    if llama.llama_get_memory(context):
        llama.llama_free(context)
        raise ModelError(
            f"{path} writes text and is no encoder; name a BERT kind (bge, nomic-embed, MiniLM, e5)."
        )
    return int(context), _info(pointer, context, path, longest, rows)


def _info(model: int, context: int, path: Path, longest: int, rows: int) -> EncoderInfo:
    text = ctypes.create_string_buffer(256)
    llama.llama_model_desc(model, text, len(text))
    pooling = _POOLINGS.get(int(llama.llama_pooling_type(context)))
    if pooling is None:
        raise ModelError(f"{path} has a kind of pooling that is not known here; update uma-trio.")
    ranks = pooling == "rank"
    n_out = int(llama.llama_model_n_cls_out(model)) if ranks else 0
    labels = [llama.llama_model_cls_label(model, index) for index in range(n_out)]
    name = read_header(path).metadata.get("general.name") or path.stem
    return EncoderInfo(
        name=str(name),
        path=str(path),
        description=text.value.decode("utf-8", "replace"),
        n_ctx=longest,
        width=n_out if ranks else int(llama.llama_model_n_embd_out(model)),
        pooling=pooling,
        n_params=int(llama.llama_model_n_params(model)),
        size_bytes=int(llama.llama_model_size(model)),
        max_inputs=MAX_INPUTS,
        max_tokens=rows,
        labels=tuple((label or b"").decode("utf-8", "replace") for label in labels),
        pair=_pair(llama.llama_model_get_vocab(model)),
    )


def _pair(vocab: Any) -> Pair:
    """Return what stands around a query and a document, as llama-server has it (format_prompt_rerank)."""
    begin = (int(llama.llama_vocab_bos(vocab)),) if llama.llama_vocab_get_add_bos(vocab) else ()
    end = (int(llama.llama_vocab_eos(vocab)),) if llama.llama_vocab_get_add_eos(vocab) else ()
    middle = (int(llama.llama_vocab_sep(vocab)),) if llama.llama_vocab_get_add_sep(vocab) else ()
    return Pair(begin, (*end, *middle), end)


class _Rows:
    """The batch of a step: arrays of numpy, and the struct that points at them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._n_seq_id = np.ones(capacity, np.int32)
        self._want = np.ones(capacity, np.int8)
        self._ids = np.arange(MAX_INPUTS, dtype=np.int32)
        self._addresses = self._ids.ctypes.data + np.arange(MAX_INPUTS, dtype=np.uintp) * 4
        self._seq_id = np.full(capacity, self._addresses[0], np.uintp)
        self.struct = llama.llama_batch()
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._n_seq_id),
            ("seq_id", self._seq_id),
            ("logits", self._want),
        ):
            kind = dict(llama.llama_batch._fields_)[name]
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, kind))

    def put(self, inputs: Sequence[IntArray], info: EncoderInfo) -> None:
        """Write the inputs of a step. Raises ValueError where llama.cpp would end the process."""
        lengths = [len(tokens) for tokens in inputs]
        if not 0 < len(inputs) <= info.max_inputs or not 0 < sum(lengths) <= self._capacity:
            raise ValueError(f"{len(inputs)} inputs of {sum(lengths)} tokens are no step")
        if min(lengths) < 1 or max(lengths) > info.n_ctx:
            raise ValueError(f"an input must have 1 to {info.n_ctx} tokens")
        at = 0
        for index, tokens in enumerate(inputs):
            end = at + len(tokens)
            self._token[at:end] = tokens
            self._pos[at:end] = np.arange(len(tokens))
            self._seq_id[at:end] = self._addresses[index]
            at = end
        self.struct.n_tokens = at
