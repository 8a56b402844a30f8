"""``POST /v1/rerank``: documents by how well they fit a query, as Jina's, Cohere's and TEI's APIs have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from uma_protocol.requests import MAX_INT32, about, limits, text
from uma_trio.api.bodies import BodySpec, Decoded, KeepAlive, Model, decode, free, take
from uma_trio.api.context import Context
from uma_trio.api.embeddings import as_text
from uma_trio.api.encoding import encoder_for, refuse_without
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply

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
        results = _written(found.best(body.top_n), documents, body)
        if body.is_tei:
            return b"[" + b",".join(results) + b"]"
        used = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
        head = msgspec.json.encode({"model": by.model, "object": "list", "usage": used})[:-1]
        return head + b',"results":[' + b",".join(results) + b"]}"

    return Reply(200, await context.run_blocking(write), headers=by.headers(decoded))


def _written(
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
