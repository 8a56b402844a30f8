"""llama.cpp as an encoder, on the CPU, in a context of its own: BERT's kinds, and causal models that pool the last token.

A batch that is larger than ``n_ubatch`` ends the process (llama-context.cpp, encode): sizes are checked here first. A
causal model (Qwen3-Embedding, Qwen3-Reranker) has a KV cache. It computes a long input in chunks, with equal results,
and what inputs begin with alike once (:class:`KeptPrefix`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Self

import numpy as np
from attrs import frozen

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend._llama_lib import LogSink
from uma_trio.backend._llama_load import Progress, load_model
from uma_trio.backend._llama_options import FLASH_ON, MAX_SLOTS
from uma_trio.backend._llama_parts import EncoderParts
from uma_trio.backend._llama_vocab import LlamaVocabulary, ModelHandle
from uma_trio.backend.base import FloatArray, IntArray, ModelError, Vocabulary
from uma_trio.backend.encoder import EncodeFailed, EncoderInfo, Pair, Pooling
from uma_trio.backend.gguf_header import GgufHeader, read_header
from uma_trio.backend.kv_memory import attention_only, kv_bytes, sliding_window
from uma_trio.words import one_line

#: Longer inputs are refused, whatever the model was trained for: the compute buffer grows with them.
MAX_CONTEXT: Final = 8192
#: The same of a causal model, whose KV cache grows with them.
MAX_CAUSAL: Final = 4096
#: Tokens that a causal model computes at once. llama.cpp makes the logits of each: 4 bytes for each word it knows.
CHUNK: Final = 256
MAX_INPUTS: Final = MAX_SLOTS
_KV_TYPE: Final = "f16"
# A batch may hold so many tokens where the model takes fewer: short inputs are cheaper together.
_LEAST_ROWS: Final = 256
_CALIBRATION_ROWS: Final = 64
# LLAMA_POOLING_TYPE_* (include/llama.h).
_POOLINGS: Final[dict[int, Pooling]] = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
_MEAN: Final = 1
_NOTHING: Final = (-1, 0)  # the file does not say, or says none


@frozen
class EncoderRoom:
    """The longest input in tokens, the tokens that are computed at once, and the cells of a KV cache (0: none)."""

    longest: int
    rows: int
    cells: int = 0


def room_of(header: GgufHeader, *, cached: bool, most: int | None = None) -> EncoderRoom:
    """Return what a model gets, with a KV cache or without; `most` tokens are enough for an input."""
    trained = header.number("context_length", 1)
    if not cached:
        longest = max(1, min(trained, most or MAX_CONTEXT))
        return EncoderRoom(longest, max(longest, _LEAST_ROWS))
    longest = max(1, min(trained, most or MAX_CAUSAL))
    return EncoderRoom(longest, CHUNK, max(longest, CHUNK) + MOST)


def cache_bytes(header: GgufHeader, room: EncoderRoom) -> int:
    """Return the bytes of the KV cache of an encoder; 0 if it has none."""
    return kv_bytes(header, room.cells, _KV_TYPE)


def context_params(
    room: EncoderRoom, threads: int, pooling: int, parts: EncoderParts | None
) -> Any:
    params = llama.llama_context_default_params()
    params.n_batch = params.n_ubatch = room.rows
    params.n_ctx = room.cells or room.rows
    params.n_seq_max = MAX_INPUTS
    params.n_threads = params.n_threads_batch = threads
    params.embeddings = True
    params.pooling_type = pooling
    # Without it attention spans the whole batch for each input.
    params.flash_attn_type = FLASH_ON
    params.kv_unified = True
    params.offload_kqv = params.op_offload = False
    params.no_perf = True
    if parts is not None:
        params.cb_eval = parts.callback
    return params


def pooling_of(header: GgufHeader) -> int:
    """Return what to tell llama.cpp: what the file says, or the mean if it says nothing."""
    said = header.number("pooling_type", -1)
    return _MEAN if said in _NOTHING else said


class LlamaEncoder:
    """See :class:`uma_trio.backend.encoder.EncoderModel`. Made by :meth:`load`."""

    def __init__(
        self,
        model: ModelHandle,
        context: int,
        info: EncoderInfo,
        room: EncoderRoom,
        parts: EncoderParts,
    ) -> None:
        self.info = info
        self.vocabulary = LlamaVocabulary(model)
        self._context: int | None = context
        self._memory = int(llama.llama_get_memory(context) or 0)
        header = read_header(Path(info.path))
        self._room = room
        keeps = attention_only(header) and not sliding_window(header)
        self._beginning = KeptPrefix(self._memory, keeps=keeps) if self._memory else None
        self._rows = Rows(self._room.rows)
        self._parts = parts
        self._inputs: Sequence[IntArray] = ()
        self._computed = 0  # of the tokens of a single input
        parts.attach(context, self._rows.struct, causal=self._memory != 0)
        tokens = np.zeros(min(_CALIBRATION_ROWS, info.n_ctx), np.int32)
        self._rows.put([tokens], [0])
        for _ in range(2):  # the first time memory is touched for the first time
            parts.calibrate(len(tokens))
            self._forget()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        threads: int,
        log: LogSink | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Load the weights and make the context. Probe the file first: llama.cpp may end the process.

        `progress` gets 0.0 to 1.0 and may raise to stop the loading. Raises :class:`ModelError`.
        """
        lib.start()
        if log is not None:
            lib.set_log_sink(log)
        path = Path(path)
        model = load_weights(path, progress=progress)
        parts = EncoderParts()
        context, info, room = make_encoder_context(model, path, threads, parts)
        return cls(model, context, info, room, parts)

    def rows_within(self, part_s: float) -> int:
        """Return how many tokens a batch may have for its longest part to take at most `part_s`."""
        return self._parts.rows_within(part_s)

    def begin(self, inputs: Sequence[IntArray], users: Sequence[str] = ()) -> None:
        """Begin a batch; `users` says whose each input is."""
        info, lengths = self.info, [len(tokens) for tokens in inputs]
        if not 0 < len(inputs) <= info.max_inputs or sum(lengths) > info.max_tokens:
            raise ValueError(f"{len(inputs)} inputs of {sum(lengths)} tokens are no batch")
        if min(lengths) < 1 or max(lengths) > info.n_ctx:
            raise ValueError(f"an input must have 1 to {info.n_ctx} tokens")
        if len(inputs) > 1 and sum(lengths) > self._room.rows:
            raise ValueError(f"several inputs of {sum(lengths)} tokens are too many for a batch")
        self._inputs, self._users = inputs, users or [""] * len(inputs)
        firsts = [0] * len(inputs)
        if self._beginning is not None:
            firsts = self._beginning.begin(inputs, self._users)
        self._computed = firsts[0]
        rest = [tokens[first:] for tokens, first in zip(inputs, firsts, strict=True)]
        if len(inputs) == 1:
            rest = [rest[0][: self._room.rows]]
        self._go(rest, firsts)

    def next_s(self) -> float:
        """Return the predicted seconds of the next part."""
        return self._parts.next_s()

    def advance(self, most_s: float) -> FloatArray | None:
        """Compute parts for at most `most_s`; return the vectors at the end."""
        until = perf_counter() + most_s
        while True:
            status = self._parts.advance(max(until - perf_counter(), 0.0))
            if status is None:
                return None
            if status != 0:
                self._forget()
                raise EncodeFailed(f"the encoder failed with status {status}")
            if not self._goes_on():
                break
            if self._parts.next_s() > until - perf_counter():
                return None
        try:
            found = self._vectors()
        except EncodeFailed:
            self._forget()  # what is kept may be why
            raise
        if self._beginning is not None:
            self._beginning.end(self._inputs, self._users)
        return found

    def _go(self, rest: Sequence[IntArray], firsts: Sequence[int]) -> None:
        n_tokens = self._rows.put(rest, firsts)
        self._computed += n_tokens
        self._parts.begin(n_tokens)

    def _goes_on(self) -> bool:
        """Begin the next chunk of a long input; False if there is none."""
        if len(self._inputs) > 1 or self._computed == len(self._inputs[0]):
            return False
        first = self._computed
        self._go([self._inputs[0][first : first + self._room.rows]], [first])
        return True

    def _vectors(self) -> FloatArray:
        out = np.empty((len(self._inputs), self.info.width), np.float32)
        for index in range(len(self._inputs)):
            address = lib.embeddings_seq(self._context, index)
            if not address:
                raise EncodeFailed("the encoder made no vector")
            row = (ctypes.c_float * self.info.width).from_address(address)
            out[index] = np.ctypeslib.as_array(row)
        if not np.isfinite(out).all():
            raise EncodeFailed("the encoder made numbers that are not finite")
        return out

    def drop(self) -> None:
        self._parts.drop()
        self._forget()

    def _forget(self) -> None:
        """Forget what is in the cache, if there is one."""
        if self._beginning is not None:
            self._beginning.clear()

    def close(self) -> None:
        """Free the context, and end the thread."""
        if self._context is not None:
            context, self._context = self._context, None
            self._parts.close()
            llama.llama_free(context)


def load_weights(path: Path, **how: Any) -> ModelHandle:
    """Load the weights of an encoder to the CPU, as :func:`load_model` does. Raises ModelError."""
    return load_model(path, gpu_layers=0, writes=False, **how)


def make_encoder_context(
    model: ModelHandle,
    path: Path,
    threads: int,
    parts: EncoderParts | None = None,
    most: int | None = None,
) -> tuple[int, EncoderInfo, EncoderRoom]:
    """Make the context of an encoder, for inputs of `most` tokens if that is enough. Raises :class:`ModelError`."""
    header = read_header(path)
    pooling = pooling_of(header)
    # Whether there is a cache llama.cpp decides by the kind of model; files mostly say it, too.
    causal = header.number("attention.causal", 1) != 0
    for cached in (causal, not causal):
        room = room_of(header, cached=cached, most=most)
        if cached and _POOLINGS.get(pooling) not in ("last", "rank"):
            continue
        context = _new_context(model, path, context_params(room, threads, pooling, parts))
        if bool(llama.llama_get_memory(context)) == cached:
            return context, _info(model, context, header, room), room
        llama.llama_free(context)
    raise ModelError(
        f"{path} writes text and is no encoder; name a BERT kind (bge, nomic-embed, MiniLM, e5), or a model whose "
        "file says that its last token is the vector (Qwen3-Embedding) or the score (Qwen3-Reranker)."
    )


def _new_context(model: ModelHandle, path: Path, params: Any) -> int:
    lib.forget_errors()
    context = llama.llama_init_from_model(model.pointer, params)
    if not context:
        reason = lib.last_error() or "llama.cpp gave no reason"
        raise ModelError(f"The context for {path} could not be made ({reason}).")
    return int(context)


def _info(handle: ModelHandle, context: int, header: GgufHeader, room: EncoderRoom) -> EncoderInfo:
    model, path = handle.pointer, header.path
    text = ctypes.create_string_buffer(256)
    llama.llama_model_desc(model, text, len(text))
    pooling = _POOLINGS.get(int(llama.llama_pooling_type(context)))
    if pooling is None:
        raise ModelError(f"{path} has a kind of pooling that is not known here; update uma-trio.")
    ranks = pooling == "rank"
    n_out = int(llama.llama_model_n_cls_out(model)) if ranks else 0
    labels = [llama.llama_model_cls_label(model, index) for index in range(n_out)]
    return EncoderInfo(
        name=header.name,
        path=str(path),
        description=one_line(text.value.decode("utf-8", "replace")),
        n_ctx=room.longest,
        width=n_out if ranks else int(llama.llama_model_n_embd_out(model)),
        pooling=pooling,
        n_params=int(llama.llama_model_n_params(model)),
        size_bytes=int(llama.llama_model_size(model)),
        max_inputs=KEPT if room.cells else MAX_INPUTS,
        max_tokens=max(room.longest, room.rows),
        labels=tuple(one_line((label or b"").decode("utf-8", "replace")) for label in labels),
        architecture=header.architecture,
        pair=_pair(handle) if ranks else Pair(),
    )


def _pair(model: ModelHandle) -> Pair:
    template = llama.llama_model_chat_template(model.pointer, b"rerank")
    if template:
        return pair_of(template.decode("utf-8", "replace"), LlamaVocabulary(model))
    vocab = llama.llama_model_get_vocab(model.pointer)
    begin = (int(llama.llama_vocab_bos(vocab)),) if llama.llama_vocab_get_add_bos(vocab) else ()
    end = (int(llama.llama_vocab_eos(vocab)),) if llama.llama_vocab_get_add_eos(vocab) else ()
    middle = (int(llama.llama_vocab_sep(vocab)),) if llama.llama_vocab_get_add_sep(vocab) else ()
    return Pair(begin, (*end, *middle), end)


def pair_of(template: str, vocabulary: Vocabulary) -> Pair:
    """Return what stands around a query and a document by a template with ``{query}`` and ``{document}``.

    White space beside them is split into tokens together with the texts, as a text that was put together would be.

    Raises:
        ModelError: the template does not name both, the query first.
    """
    before, query, rest = template.partition("{query}")
    between, document, behind = rest.partition("{document}")
    if not query or not document:
        raise ModelError("The template of this reranker does not have {query} and then {document}.")
    edges = (_space_behind(before), _space_before(between), _space_behind(between))
    last = _space_before(behind)
    parts = (
        before.removesuffix(edges[0]),
        between.removeprefix(edges[1]).removesuffix(edges[2]),
        behind.removeprefix(last),
    )
    first, second, third = (
        tuple(vocabulary.tokenize(part, add_special=False, parse_special=True).tolist())
        for part in parts
    )
    return Pair(first, second, third, around_query=edges[:2], around_document=(edges[2], last))


def _space_before(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _space_behind(text: str) -> str:
    return text[len(text.rstrip()) :]


class Rows:
    """Room for `capacity` tokens. `struct` is what is computed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._n_seq_id = np.ones(capacity, np.int32)
        self._want = np.ones(capacity, np.int8)
        self._ids = np.arange(MAX_SLOTS, dtype=np.int32)
        self._addresses = self._ids.ctypes.data + np.arange(MAX_SLOTS, dtype=np.uintp) * 4
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

    def put(self, inputs: Sequence[IntArray], firsts: Sequence[int]) -> int:
        """Write the tokens of inputs, each from position `firsts` on; return how many they are.

        An input is the sequence of its number. Raises ValueError where llama.cpp would end the process.
        """
        n_tokens = sum(map(len, inputs))
        if not 0 < n_tokens <= self._capacity or len(inputs) > MAX_SLOTS:
            raise ValueError(f"{len(inputs)} inputs of {n_tokens} tokens are no batch")
        at = 0
        for index, (tokens, first) in enumerate(zip(inputs, firsts, strict=True)):
            end = at + len(tokens)
            self._token[at:end] = tokens
            self._pos[at:end] = np.arange(first, first + len(tokens))
            self._seq_id[at:end] = self._addresses[index]
            at = end
        self.struct.n_tokens = n_tokens
        return n_tokens


#: The sequence of what is kept. Inputs have those below it.
KEPT: Final = MAX_SLOTS - 1
#: The longest that is kept, and the shortest that is worth a copy.
MOST: Final = 1024
LEAST: Final = 8
_NO_TOKENS: Final = np.zeros(0, np.int32)


class KeptPrefix:
    """What inputs of a causal encoder begin with, kept as one sequence of cells from one batch to the next.

    An instruction before each query, or a template and a query before each document, is computed once. With `keeps` False nothing is: state cannot be cut off behind it.

    It is one user's, and only inputs of that user have it: how soon an answer comes would tell others what it is.
    """

    def __init__(self, memory: int, *, keeps: bool) -> None:
        self._memory, self._keeps = memory, keeps
        self._kept = self._latest = _NO_TOKENS
        self._kept_for = self._latest_of = ""

    def begin(self, inputs: Sequence[IntArray], users: Sequence[str]) -> list[int]:
        """Give each input what is kept of it; return how many of its tokens that is. The last one is computed."""
        found: list[int] = []
        for seq, (tokens, user) in enumerate(zip(inputs, users, strict=True)):
            n = min(self._common(tokens, user), len(tokens) - 1)
            found.append(n if n >= LEAST else 0)
            if found[-1]:
                lib.seq_cp(self._memory, KEPT, seq, 0, n)
        return found

    def end(self, inputs: Sequence[IntArray], users: Sequence[str]) -> None:
        """Keep what all inputs of the first one's user begin with, if that is more than is kept of it; forget the rest."""
        first, user = inputs[0], users[0]
        others = [tokens for tokens, whose in zip(inputs, users, strict=True) if whose == user][1:]
        if not others and self._latest_of == user:
            others = [self._latest]
        n = min(MOST, *(common(first, tokens) for tokens in others or [_NO_TOKENS]))
        if self._keeps and n >= LEAST and n > self._common(first[:n], user):
            lib.seq_rm(self._memory, KEPT, -1, -1)
            lib.seq_cp(self._memory, 0, KEPT, 0, n)
            self._kept, self._kept_for = first[:n].copy(), user
        self._latest, self._latest_of = inputs[-1], users[-1]
        for seq in range(len(inputs)):
            lib.seq_rm(self._memory, seq, -1, -1)

    def clear(self) -> None:
        """Forget everything: a batch was not computed to its end."""
        for seq in range(MAX_SLOTS):
            lib.seq_rm(self._memory, seq, -1, -1)
        self._kept = self._latest = _NO_TOKENS

    def _common(self, tokens: IntArray, user: str) -> int:
        """Return how many tokens of a user's input are kept."""
        return common(self._kept, tokens) if user == self._kept_for else 0


def common(one: IntArray, other: IntArray) -> int:
    """Return how many tokens two texts begin with alike."""
    n = min(len(one), len(other))
    differs = np.flatnonzero(one[:n] != other[:n])
    return int(differs[0]) if len(differs) else n
