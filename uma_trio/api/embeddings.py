"""``POST /v1/embeddings`` as OpenAI has it, llama-server's ``/embedding``, and Ollama's ``/api/embed``."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from uma_protocol.rules import MAX_INT32, Flag, Integer, OneOf
from uma_trio.api.asking import MODEL, Anything
from uma_trio.api.encoding import encoder_for, refuse_without, width_of
from uma_trio.api.fields import Body, Field, decode, honoured, ignored, take
from uma_trio.api.loading import KEEP_ALIVE
from uma_trio.api.tokens import ids_of, kinds_of
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.http.settings import Shared
from uma_trio.service.embedding import EUCLID, Input, VectorRows, normalised

_NUMBERS: Final = 8_192
"""Numbers that are written while the GIL is held: about a millisecond."""
_DECIMALS: Final = 9  # of a number of at most 1: what a float32 holds
_BARE: Final = "/embeddings"  # llama-server's own API there, and OpenAI's behind /v1
_NS: Final = 1e9

_TRUNCATE: Final = honoured(
    "truncate",
    Flag(),
    "cuts the end of an input that is too long, instead of refusing it",
    default="false",
)
_INPUT: Final = (
    "a text, a list of token ids (texts may be among them), an object with `prompt_string` or with `content` "
    "of text parts, or a list of these"
)
EMBEDDINGS: tuple[Field, ...] = (
    MODEL,
    honoured("input", Anything(_INPUT), "up to 16,384 texts", required=True),
    honoured(
        "encoding_format",
        OneOf(("float", "base64")),
        "base64: the float32 of each vector, little-endian",
        default="float",
    ),
    honoured(
        "dimensions",
        Integer(1, MAX_INT32),
        "keeps the first numbers of each vector, normalised again: for models that were trained for it",
        default="all",
    ),
    _TRUNCATE,
    *KEEP_ALIVE,
    *ignored("user", note="who asks is known by other means"),
)
EMBEDDING: tuple[Field, ...] = (
    MODEL,
    honoured("content", Anything(_INPUT), "up to 16,384 texts"),
    honoured("input", Anything(_INPUT), "another name of content"),
    honoured(
        "embd_normalize",
        Integer(-1, MAX_INT32),
        "-1: not; 0: the largest number is 32,760; p: by the p-norm",
        default="2",
    ),
    _TRUNCATE,
)
OLLAMA: tuple[Field, ...] = (
    MODEL,
    honoured("input", Anything("a text or a list of texts"), "what /api/embed is asked for"),
    honoured("prompt", Anything("a text"), "what /api/embeddings is asked for"),
    honoured("truncate", Flag(), "cuts the end of an input that is too long", default="true"),
    honoured("dimensions", Integer(1, MAX_INT32), "as in OpenAI's API", default="all"),
    *KEEP_ALIVE,
    *ignored("options", note="how the model is loaded is a setting of the daemon"),
)


async def embeddings(exchange: Exchange, shared: Shared) -> Reply:
    """Return a vector of each text or list of token ids."""
    refuse_without(shared, "vectors")
    bare = exchange.head.path == _BARE

    def read(found: Mapping[str, Any]) -> tuple[Body, list[Input], bool]:
        native = bare and ("model" not in found or "content" in found)
        fields = EMBEDDING if native else EMBEDDINGS
        body = decode(fields, found, strict=shared.settings.strict)
        return body, _inputs(body, "content" if "content" in found else "input"), native

    return await _answer(exchange, shared, read)


async def embedding(exchange: Exchange, shared: Shared) -> Reply:
    """Return a vector of each text or list of token ids, as llama-server does."""
    refuse_without(shared, "vectors")

    def read(found: Mapping[str, Any]) -> tuple[Body, list[Input], bool]:
        body = decode(EMBEDDING, found, strict=shared.settings.strict)
        return body, _inputs(body, "content" if "content" in found else "input"), True

    return await _answer(exchange, shared, read)


async def ollama_embed(exchange: Exchange, shared: Shared) -> Reply:
    """Return a vector of each text, as Ollama does."""
    return await _ollama(exchange, shared, "input")


async def ollama_embeddings(exchange: Exchange, shared: Shared) -> Reply:
    """Return the vector of a text, as Ollama did before /api/embed."""
    return await _ollama(exchange, shared, "prompt")


def as_text(value: Any, path: str) -> str:
    """Return a text that is not empty. Raises :class:`Fault`."""
    if not isinstance(value, str) or not value:
        raise invalid(path, "must be a text that is not empty")
    return value


async def _answer(
    exchange: Exchange,
    shared: Shared,
    read: Callable[[Mapping[str, Any]], tuple[Body, list[Input], bool]],
) -> Reply:
    taken = await take(exchange, shared, read, shared.limits(with_ids=True))
    body, inputs, native = taken.value
    async with encoder_for(exchange, shared, body, "vectors") as by:
        width = width_of(body, by.embedder, shared)
        truncate = body.get("truncate", False)
        found = await by.embedder.vectors(inputs, by.request, truncate=truncate)

    def write() -> bytes:
        if native:
            return _native(normalised(found.values, body.get("embd_normalize", EUCLID)))
        vectors = normalised(found.values[:, :width])
        return _openai(vectors, found, by.model, as_text=body.get("encoding_format") != "base64")

    return Reply(200, await shared.run_blocking(write), headers=by.headers(body))


async def _ollama(exchange: Exchange, shared: Shared, name: str) -> Reply:
    refuse_without(shared, "vectors")
    clock = shared.service.clock
    began = clock()

    def read(found: Mapping[str, Any]) -> tuple[Body, list[Input]]:
        body = decode(OLLAMA, found, strict=shared.settings.strict)
        return body, [] if body.get(name) in ("", []) else _inputs(body, name)

    body, inputs = (await take(exchange, shared, read)).value
    async with encoder_for(exchange, shared, body, "vectors") as by:
        width = width_of(body, by.embedder, shared)
        truncate = body.get("truncate", True)
        if not inputs:  # the model is loaded, and that is all
            nothing = (
                {"embedding": []} if name == "prompt" else {"model": by.model, "embeddings": []}
            )
            return Reply(200, msgspec.json.encode(nothing), headers=by.headers(body))
        found = await by.embedder.vectors(inputs, by.request, truncate=truncate)

    def write() -> bytes:
        vectors = normalised(found.values[:, :width])
        if name == "prompt":
            return b'{"embedding":%b}' % b"".join(_written(vectors))
        rest = {
            "total_duration": int((clock() - began) * _NS),
            "load_duration": int((by.ready_at - by.request.arrived) * _NS),
            "prompt_eval_count": found.n_tokens,
        }
        head = b'{"model":%b,"embeddings":[' % msgspec.json.encode(by.model)
        return head + b",".join(_written(vectors)) + b"]," + msgspec.json.encode(rest)[1:]

    return Reply(200, await shared.run_blocking(write), headers=by.headers(body))


def _inputs(body: Body, name: str) -> list[Input]:
    """Return the texts and lists of token ids that are given. Raises :class:`Fault`."""
    value = body.get(name)
    if value is None:
        raise invalid(name, f"is missing: {_INPUT}", code="missing_parameter")
    if isinstance(value, list) and int not in kinds_of(value):
        return [_input(each, f"{name}[{at}]") for at, each in enumerate(value)]
    return [_input(value, name)]


def _input(value: Any, path: str) -> Input:
    """Return one text, or its tokens, or both by turns. Raises :class:`Fault`."""
    if isinstance(value, dict):
        return _said(value, path)
    if not isinstance(value, list):
        return as_text(value, path)
    if not kinds_of(value) >= {int, str}:
        return ids_of(value, path)
    found: list[str | NDArray[np.int32]] = []
    at = 0
    for is_text, run in groupby(value, lambda part: isinstance(part, str)):
        parts = list(run)
        found += parts if is_text else [ids_of(parts, f"{path}[{at}:]")]
        at += len(parts)
    return tuple(found)


def _said(value: Mapping[str, Any], path: str) -> str:
    """Return the text of an object, as llama-server takes it. Raises :class:`Fault`."""
    if "prompt_string" in value:
        return as_text(value["prompt_string"], f"{path}.prompt_string")
    parts = value.get("content")
    if not isinstance(parts, list) or not parts:
        raise invalid(path, "must be a text, or have prompt_string or a list of content")
    for at, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise invalid(f"{path}.content[{at}]", "must have the type text: others are not taken")
    texts = [as_text(part.get("text"), f"{path}.content[{at}]") for at, part in enumerate(parts)]
    return "".join(texts)


def _written(vectors: NDArray[np.float32]) -> Sequence[bytes]:
    """Return each vector as JSON."""
    rows: list[bytes] = []
    at_once = max(1, _NUMBERS // vectors.shape[1])
    small = len(vectors) > 0 and float(np.abs(vectors).max()) <= 1
    for at in range(0, len(vectors), at_once):
        part = vectors[at : at + at_once].astype(np.float64)
        if small:
            part = part.round(_DECIMALS)
        rows += [msgspec.json.encode(row) for row in part.tolist()]
    return rows


def _openai(vectors: NDArray[np.float32], found: VectorRows, model: str, *, as_text: bool) -> bytes:
    if as_text:
        rows: Sequence[bytes] = _written(vectors)
    else:
        little = vectors.astype("<f4")
        rows = [b'"%b"' % b64encode(row.tobytes()) for row in little]
    items = (
        b'{"object":"embedding","index":%d,"embedding":%b}' % (at, row)
        for at, row in enumerate(rows)
    )
    used = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
    rest = msgspec.json.encode({"model": model, "usage": used})[1:]
    return b'{"object":"list","data":[' + b",".join(items) + b"]," + rest


def _native(vectors: NDArray[np.float32]) -> bytes:
    rows = enumerate(_written(vectors))
    return b"[" + b",".join(b'{"index":%d,"embedding":[%b]}' % each for each in rows) + b"]"
