"""``POST /v1/embeddings`` as OpenAI has it, llama-server's ``/embedding``, and Ollama's ``/api/embed``."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from uma_protocol.requests import MAX_INT32, about, limits
from uma_trio.api.bodies import BodySpec, Decoded, KeepAlive, Model, decode, free, take
from uma_trio.api.context import Context
from uma_trio.api.encoding import encoder_for, refuse_without, width_of
from uma_trio.api.tokens import ids_of, kinds_of
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.service.embedding import EUCLID, Input, VectorRows, normalised

_NUMBERS: Final = 8_192
"""Numbers that are written while the GIL is held: about a millisecond."""
_DECIMALS: Final = 9  # of a number of at most 1: what a float32 holds
_BARE: Final = "/embeddings"  # llama-server's own API there, and OpenAI's behind /v1
_NS: Final = 1e9

_INPUT: Final = (
    "a text, a list of token ids (texts may be among them), an object with `prompt_string` or with `content` "
    "of text parts, or a list of these"
)
Truncate = Annotated[
    bool, about("cuts the end of an input that is too long, instead of refusing it")
]
Dimensions = (
    Annotated[
        int,
        limits(
            "keeps the first numbers of each vector, normalised again: for models that were trained for it; default all",
            1,
            MAX_INT32,
        ),
    ]
    | None
)


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request for vectors in OpenAI's API."""

    model: Model = None
    input: Annotated[Any, free("up to 16,384 texts", _INPUT, aliases=("content",))] = None
    encoding_format: Annotated[
        Literal["float", "base64"],
        about("base64: the float32 of each vector, little-endian; default float"),
    ] = "float"
    dimensions: Dimensions = None
    truncate: Truncate = False
    keep_alive: KeepAlive = None


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request for vectors in llama-server's API."""

    model: Model = None
    content: Annotated[Any, free("up to 16,384 texts", _INPUT, aliases=("input",))] = None
    embd_normalize: Annotated[
        int,
        limits(
            "-1: not; 0: the largest number is 32,760; p: by the p-norm; default 2", -1, MAX_INT32
        ),
    ] = EUCLID
    truncate: Truncate = False


class OllamaEmbedBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request for vectors in Ollama's APIs; without texts the model is loaded."""

    model: Model = None
    input: Annotated[Any, free("the texts for /api/embed", "a text or a list of texts")] = None
    prompt: Annotated[Any, free("the text for /api/embeddings", "a text")] = None
    dimensions: Dimensions = None
    truncate: Truncate = True
    keep_alive: KeepAlive = None


EMBEDDINGS: Final = BodySpec(EmbeddingsBody, ignored=("user",))
EMBEDDING: Final = BodySpec(EmbeddingBody)
OLLAMA_EMBED: Final = BodySpec(OllamaEmbedBody, ignored=("options",))


async def embeddings(exchange: Exchange, context: Context) -> Reply:
    """Return a vector of each text or list of token ids."""
    refuse_without(context, "vectors")
    bare = exchange.head.path == _BARE

    def read(found: Mapping[str, Any]) -> tuple[Decoded[Any], list[Input]]:
        is_native = bare and ("model" not in found or "content" in found)
        return _decoded(EMBEDDING if is_native else EMBEDDINGS, found, context)

    return await _answer(exchange, context, read)


async def embedding(exchange: Exchange, context: Context) -> Reply:
    """Return a vector of each text or list of token ids, as llama-server does."""
    refuse_without(context, "vectors")
    return await _answer(exchange, context, lambda found: _decoded(EMBEDDING, found, context))


def _decoded(
    spec: BodySpec[Any], found: Mapping[str, Any], context: Context
) -> tuple[Decoded[Any], list[Input]]:
    decoded = decode(spec, found, strict=context.settings.strict)
    name = "content" if "content" in found else "input"
    own = "content" if spec is EMBEDDING else "input"
    return decoded, _inputs(getattr(decoded.body, own), name)


async def ollama_embed(exchange: Exchange, context: Context) -> Reply:
    """Return a vector of each text, as Ollama does."""
    return await _ollama(exchange, context, "input")


async def ollama_embeddings(exchange: Exchange, context: Context) -> Reply:
    """Return the vector of a text, as Ollama did before /api/embed."""
    return await _ollama(exchange, context, "prompt")


def as_text(value: Any, path: str) -> str:
    """Return a text that is not empty. Raises :class:`Fault`."""
    if not isinstance(value, str) or not value:
        raise invalid(path, "must be a text that is not empty")
    return value


async def _answer(
    exchange: Exchange,
    context: Context,
    read: Callable[[Mapping[str, Any]], tuple[Decoded[Any], list[Input]]],
) -> Reply:
    taken = await take(exchange, context, read, context.limits(with_ids=True))
    decoded, inputs = taken.value
    body: EmbeddingsBody | EmbeddingBody = decoded.body
    async with encoder_for(exchange, context, decoded, "vectors") as by:
        width = width_of(getattr(body, "dimensions", None), by.embedder, context)
        found = await by.embedder.vectors(inputs, by.request, truncate=body.truncate)

    def write() -> bytes:
        if isinstance(body, EmbeddingBody):
            return _native(normalised(found.values, body.embd_normalize))
        vectors = normalised(found.values[:, :width])
        return _openai(vectors, found, by.model, as_text=body.encoding_format != "base64")

    return Reply(200, await context.run_blocking(write), headers=by.headers(decoded))


async def _ollama(exchange: Exchange, context: Context, name: str) -> Reply:
    refuse_without(context, "vectors")
    clock = context.service.clock
    began = clock()

    def read(found: Mapping[str, Any]) -> tuple[Decoded[OllamaEmbedBody], list[Input]]:
        decoded = decode(OLLAMA_EMBED, found, strict=context.settings.strict)
        value = getattr(decoded.body, name)
        return decoded, [] if value in ("", []) else _inputs(value, name)

    decoded, inputs = (await take(exchange, context, read)).value
    body = decoded.body
    async with encoder_for(exchange, context, decoded, "vectors") as by:
        width = width_of(body.dimensions, by.embedder, context)
        if not inputs:  # only the model is loaded
            nothing = (
                {"embedding": []} if name == "prompt" else {"model": by.model, "embeddings": []}
            )
            return Reply(200, msgspec.json.encode(nothing), headers=by.headers(decoded))
        found = await by.embedder.vectors(inputs, by.request, truncate=body.truncate)

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

    return Reply(200, await context.run_blocking(write), headers=by.headers(decoded))


def _inputs(value: Any, name: str) -> list[Input]:
    """Return the texts and lists of token ids in a field. Raises :class:`Fault`."""
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
