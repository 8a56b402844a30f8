"""``POST /v1/rerank``: documents by how well they fit a query, as Jina's, Cohere's and TEI's APIs have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from uma_protocol.rules import MAX_INT32, Flag, Integer, Text
from uma_trio.api.asking import MODEL, Anything
from uma_trio.api.embeddings import as_text
from uma_trio.api.encoding import encoder_for, refuse_without
from uma_trio.api.fields import Body, Field, decode, honoured, ignored, take
from uma_trio.api.loading import KEEP_ALIVE
from uma_trio.http.errors import invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.http.settings import Shared

_SLICE: Final = 1024
_DOCUMENTS: Final = "a list of texts, or of objects with a `text`"
RERANK: tuple[Field, ...] = (
    MODEL,
    honoured("query", Text(1), "what documents are compared with", required=True),
    honoured("documents", Anything(_DOCUMENTS), "up to 16,384"),
    honoured("texts", Anything("a list of texts"), "documents, answered as TEI does"),
    honoured("top_n", Integer(1, MAX_INT32), "how many to return, best first", default="all"),
    honoured("return_documents", Flag(), "returns the texts, too", default="false"),
    honoured("return_text", Flag(), "the same for `texts`", default="false"),
    honoured("truncate", Flag(), "cuts the end of a document that is too long", default="false"),
    *KEEP_ALIVE,
    *ignored("max_tokens_per_doc", "rank_fields", note="see truncate"),
)


async def rerank(exchange: Exchange, shared: Shared) -> Reply:
    """Return documents by their score for a query, best first."""
    refuse_without(shared, "scores")

    def read(found: dict[str, Any]) -> tuple[Body, list[str]]:
        body = decode(RERANK, found, strict=shared.settings.strict)
        return body, _documents(body)

    body, documents = (await take(exchange, shared, read)).value
    async with encoder_for(exchange, shared, body, "scores") as by:
        query, truncate = body.get("query"), body.get("truncate", False)
        found = await by.embedder.scores(query, documents, by.request, truncate=truncate)

    def write() -> bytes:
        results = _written(found.best(body.get("top_n")), documents, body)
        if _is_tei(body):
            return b"[" + b",".join(results) + b"]"
        used = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
        head = msgspec.json.encode({"model": by.model, "object": "list", "usage": used})[:-1]
        return head + b',"results":[' + b",".join(results) + b"]}"

    return Reply(200, await shared.run_blocking(write), headers=by.headers(body))


def _written(
    best: Sequence[tuple[int, float]], documents: Sequence[str], body: Body
) -> list[bytes]:
    """Return the results as JSON, the best first."""
    named = body.get("return_documents", False)
    result = _result
    if _is_tei(body):
        named, result = body.get("return_text", named), _tei_result
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


def _is_tei(body: Body) -> bool:
    """Whether it is asked for as Hugging Face's text-embeddings-inference has it."""
    return "texts" in body.given and "documents" not in body.given


def _documents(body: Body) -> list[str]:
    """Return the texts of the documents. Raises :class:`uma_trio.http.errors.Fault`."""
    name = "texts" if _is_tei(body) else "documents"
    value = body.get(name)
    if not isinstance(value, list):
        raise invalid(name, f"must be {_DOCUMENTS}")
    return [
        as_text(each.get("text") if isinstance(each, dict) else each, f"{name}[{at}]")
        for at, each in enumerate(value)
    ]
