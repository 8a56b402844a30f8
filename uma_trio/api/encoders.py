"""Vectors and scores: OpenAI's ``/v1/embeddings``, llama-server's ``/embedding``, Ollama's ``/api/embed``, ``/v1/rerank`` of Jina, Cohere and TEI."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from uma_protocol.requests import MAX_INT32, about, limits, text
from uma_trio.api.bodies import (
    BodySpec,
    Decoded,
    KeepAlive,
    Model,
    decode,
    free,
    ignored_header,
    take,
    would_be_ignored,
)
from uma_trio.api.context import Context
from uma_trio.api.headers import origin_of
from uma_trio.api.loading import fault_of_end, keeps_loaded
from uma_trio.api.prompts import ids_of, kinds_of
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Headers, Reply
from uma_trio.service.ask import Refusal
from uma_trio.service.embedding import (
    EUCLID,
    Embedder,
    EncodeRequest,
    Input,
    RequestEnded,
    VectorRows,
    normalised,
)
from uma_trio.words import Gives

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


@frozen
class EncoderInUse:
    """The model of one request: what it is called in the answer, and when it was loaded, on the engines' clock."""

    embedder: Embedder
    request: EncodeRequest
    model: str
    ready_at: float
    set_aside: list[str] = field(factory=list)

    def headers(self, decoded: Decoded[Any]) -> Headers:
        """Headers of the answer."""
        return ignored_header([*decoded.ignored, *self.set_aside])


def refuse_without(context: Context, gives: Gives) -> None:
    """Refuse a request for what no model of this daemon gives, before its body is read. Raises :class:`Fault`."""
    try:
        context.service.models.require(gives)
    except Refusal as refusal:
        why = refusal.message
        raise Fault(400, why, code="not_supported") from None


@asynccontextmanager
async def encoder_for(
    exchange: Exchange, context: Context, decoded: Decoded[Any], gives: Gives
) -> AsyncIterator[EncoderInUse]:
    """Return the model that a body names, once it is loaded; until the block ends it stays so, and the request is listed.

    A daemon that is not strict takes any name for that of the only model which gives this.

    Raises:
        Fault: the request was ended meanwhile.
        Refusal: there is none, or it cannot be loaded.
    """
    service, strict, name = context.service, context.settings.strict, decoded.body.model
    origin = origin_of(exchange, context, f"{gives}-{context.name}-{exchange.number}")
    request = EncodeRequest(service, origin)
    request.on_wait = exchange.expect_document
    try:
        async with request.encoder(gives, name, exact=strict) as embedder:
            found = EncoderInUse(embedder, request, name or embedder.name, service.clock())
            _keep_loaded(found, context, decoded.body)
            request.on_accept = lambda: exchange.expect_document(found.headers(decoded))
            yield found
    except RequestEnded as ended:
        raise fault_of_end(ended.code, ended.message) from None


def width_of(asked: int | None, embedder: Embedder, context: Context) -> int:
    """Return how many numbers of a vector are asked for; a strict daemon keeps all.

    Raises:
        Fault: it does not make so many.
    """
    most = embedder.info.width
    if asked is not None and (asked > most or (context.settings.strict and asked != most)):
        raise invalid("dimensions", f"must be {most} for this model, or left out")
    return embedder.width(asked)


def _keep_loaded(found: EncoderInUse, context: Context, body: Any) -> None:
    """Keep the model for as long as the request says, where that is for its client to say."""
    keep_alive = getattr(body, "keep_alive", None)
    if keeps_loaded(
        keep_alive, context.service, found.request.origin.principal, found.request.model
    ):
        return
    if context.settings.strict:
        raise would_be_ignored("keep_alive")
    found.set_aside.append("keep_alive")


_SLICE: Final = 1024
_DOCUMENTS: Final = "a list of texts, or of objects with a `text`"


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request for scores. With `texts` it is answered as Hugging Face's text-embeddings-inference (TEI) does."""

    model: Model = None
    query: Annotated[str, text("what documents are compared with")]
    documents: Annotated[Any, free("up to 16,384 documents", _DOCUMENTS)] = None
    texts: Annotated[Any, free("documents, answered as TEI does", "a list of texts")] = None
    top_n: (
        Annotated[int, limits("how many to return, best first; default all", 1, MAX_INT32)] | None
    ) = None
    return_documents: Annotated[bool, about("returns the texts, too")] = False
    return_text: Annotated[bool, about("the same for `texts`")] | None = None
    truncate: Annotated[bool, about("cuts the end of a document that is too long")] = False
    keep_alive: KeepAlive = None

    @property
    def is_tei(self) -> bool:
        """Whether it is answered as TEI does."""
        return self.texts is not None and self.documents is None


RERANK: Final = BodySpec(RerankBody, ignored=("max_tokens_per_doc", "rank_fields"))


async def rerank(exchange: Exchange, context: Context) -> Reply:
    """Return documents by their score for a query, best first."""
    refuse_without(context, "scores")

    def read(found: dict[str, Any]) -> tuple[Decoded[RerankBody], list[str]]:
        decoded = decode(RERANK, found, strict=context.settings.strict)
        return decoded, _documents(decoded.body)

    decoded, documents = (await take(exchange, context, read)).value
    body = decoded.body
    async with encoder_for(exchange, context, decoded, "scores") as by:
        found = await by.embedder.scores(body.query, documents, by.request, truncate=body.truncate)

    def write() -> bytes:
        results = _results(found.best(body.top_n), documents, body)
        if body.is_tei:
            return b"[" + b",".join(results) + b"]"
        used = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
        head = msgspec.json.encode({"model": by.model, "object": "list", "usage": used})[:-1]
        return head + b',"results":[' + b",".join(results) + b"]}"

    return Reply(200, await context.run_blocking(write), headers=by.headers(decoded))


def _results(
    best: Sequence[tuple[int, float]], documents: Sequence[str], body: RerankBody
) -> list[bytes]:
    """Return the results as JSON, the best first."""
    named, result = body.return_documents, _result
    if body.is_tei:
        named = named if body.return_text is None else body.return_text
        result = _tei_result
    results: list[bytes] = []
    for at in range(0, len(best), _SLICE):
        results += [
            msgspec.json.encode(result(index, score, documents[index] if named else None))
            for index, score in best[at : at + _SLICE]
        ]
    return results


def _result(index: int, score: float, text: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "relevance_score": score}
    return found if text is None else {**found, "document": {"text": text}}


def _tei_result(index: int, score: float, text: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "score": score}
    return found if text is None else {**found, "text": text}


def _documents(body: RerankBody) -> list[str]:
    """Return the texts of the documents. Raises :class:`uma_trio.http.errors.Fault`."""
    name = "texts" if body.is_tei else "documents"
    value = getattr(body, name)
    if not isinstance(value, list):
        raise invalid(name, f"must be {_DOCUMENTS}")
    return [
        as_text(each.get("text") if isinstance(each, dict) else each, f"{name}[{at}]")
        for at, each in enumerate(value)
    ]
