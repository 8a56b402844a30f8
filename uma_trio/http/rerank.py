"""``POST /v1/rerank``: documents by how well they fit a query, as Jina's and Cohere's APIs have it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from uma_protocol.rules import MAX_INT32, Flag, Integer, Text
from uma_trio.http.asking import MODEL, Anything
from uma_trio.http.embeddings import as_text, check_model, embedder_of
from uma_trio.http.fields import Body, Field, decode, honoured, ignored, ignored_header
from uma_trio.http.intake import take
from uma_trio.http.wire.errors import invalid
from uma_trio.http.wire.message import Exchange, Reply
from uma_trio.http.wire.settings import Shared

_SLICE: Final = 1024
_DOCUMENTS: Final = "a list of texts, or of objects with a `text`"
RERANK: tuple[Field, ...] = (
    MODEL,
    honoured("query", Text(1), "what documents are compared with", required=True),
    honoured("documents", Anything(_DOCUMENTS), "up to 16,384"),
    honoured("texts", Anything("a list of texts"), "another name of documents"),
    honoured("top_n", Integer(1, MAX_INT32), "how many to return, best first", default="all"),
    honoured("return_documents", Flag(), "returns the texts, too", default="false"),
    honoured("truncate", Flag(), "cuts the end of a document that is too long", default="false"),
    *ignored("max_tokens_per_doc", "rank_fields", note="see truncate"),
)


async def rerank(exchange: Exchange, shared: Shared) -> Reply:
    """Return documents by their score for a query, best first."""
    ranker = embedder_of(shared, "rank", "--rerank-model")

    def read(found: dict[str, Any]) -> tuple[Body, list[str]]:
        body = decode(RERANK, found, strict=shared.settings.strict)
        return body, _documents(body)

    body, documents = (await take(exchange, shared, read)).value
    model = check_model(body, ranker, shared)
    found = await ranker.scores(
        body.get("query"),
        documents,
        exchange.request.caller.principal,
        truncate=body.get("truncate", False),
    )

    def write() -> bytes:
        scores = found.values[:, 0]
        best = np.argsort(-scores, kind="stable")[: body.get("top_n", len(documents))].tolist()
        results: list[bytes] = []
        for at in range(0, len(best), _SLICE):
            part = [_result(index, float(scores[index])) for index in best[at : at + _SLICE]]
            if body.get("return_documents", False):
                for one in part:
                    one["document"] = {"text": documents[one["index"]]}
            results += [msgspec.json.encode(one) for one in part]
        used = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
        head = msgspec.json.encode({"model": model, "object": "list", "usage": used})[:-1]
        return head + b',"results":[' + b",".join(results) + b"]}"

    content = await shared.run_blocking(write)
    return Reply(200, content, headers=ignored_header(body.ignored))


def _result(index: int, score: float) -> dict[str, Any]:
    return {"index": index, "relevance_score": score}


def _documents(body: Body) -> list[str]:
    """Return the texts of the documents. Raises :class:`uma_trio.http.wire.errors.Fault`."""
    name = "documents" if "documents" in body.given else "texts"
    value = body.get(name)
    if not isinstance(value, list):
        raise invalid(name, f"must be {_DOCUMENTS}")
    return [
        as_text(each.get("text") if isinstance(each, dict) else each, f"{name}[{at}]")
        for at, each in enumerate(value)
    ]
