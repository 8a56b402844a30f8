"""``POST /completion``: llama-server's own way to ask, which editors and older tools use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from attrs import evolve

from uma_protocol.rules import MAX_INT32, Flag, Integer
from uma_trio.engine.messages import Finished, SamplingParams, TokenOut
from uma_trio.http import sse
from uma_trio.http.accounts import timings
from uma_trio.http.asking import (
    CACHE,
    MODEL,
    NO_MATTER,
    NOT_HERE,
    SAMPLING,
    URGENCY,
    Anything,
    lane_of,
    model_of,
    origin_of,
    sampling_of,
    stops_of,
    targets_of,
)
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.fields import Body, Field, decode, document_of, honoured, ignored, ignored_header
from uma_trio.http.logprobs import chat_logprobs
from uma_trio.http.message import Exchange, Reply, Request
from uma_trio.http.openai_completions import prompts_of
from uma_trio.http.settings import Shared
from uma_trio.http.shapes import FIELDS as SHAPES
from uma_trio.http.shapes import shape_of
from uma_trio.http.streams import Encoder, started, stream, whole
from uma_trio.service.ask import Ask

FIELDS: tuple[Field, ...] = (
    MODEL,
    honoured("prompt", Anything("a text or tokens"), "one", required=True),
    honoured(
        "n_predict",
        Integer(-2, MAX_INT32),
        "below 0: the room in the context",
        default="--max-tokens",
    ),
    honoured("max_tokens", Integer(-2, MAX_INT32), "another name of n_predict"),
    honoured("stream", Flag(), "server-sent events", default="false"),
    honoured(
        "n_probs", Integer(0, 20), "each token's probability and so many alternatives'", default="0"
    ),
    *SAMPLING,
    *URGENCY,
    CACHE,
    *SHAPES,
    *NOT_HERE,
    *NO_MATTER,
    *ignored("samplers", "n_keep", "n_indent", "t_max_predict_ms", note="of llama-server alone"),
    *ignored("timings_per_token", "return_progress", "return_tokens", note="of llama-server alone"),
    *ignored("post_sampling_probs", "response_fields", "lora", note="of llama-server alone"),
)
# What llama-server takes where nothing is said.
DEFAULTS = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


async def completion(exchange: Exchange, shared: Shared) -> Reply | None:
    """Continue a text, whole or as a stream."""
    request = exchange.request
    body = decode(FIELDS, document_of(request.body), strict=shared.settings.strict)
    ask = _ask(body, request, shared)
    name = f"completion-{shared.name}-{request.number}"
    model = model_of(body, shared)[0]
    headers = ignored_header(body)
    async with started(shared, [ask], origin_of(request, shared, name)) as generations:
        if body.get("stream", False):
            await stream(exchange, shared, generations, _Chunks(shared, model), headers)
            return None
        ((tokens, end),) = await whole(shared, generations)
    text = "".join([*(token.text for token in tokens), end.text])
    document = _last(text, [token.token_id for token in tokens], end, model)
    found = chat_logprobs(tokens, shared.service)
    if found is not None:
        document["completion_probabilities"] = found["content"]
    return Reply(200, msgspec.json.encode(document), headers=headers)


def _ask(body: Body, request: Request, shared: Shared) -> Ask:
    prompts = prompts_of(body.get("prompt"), shared)
    if len(prompts) != 1:
        raise invalid("prompt", "must be one text or one list of tokens")
    asked: int | None = body.get("n_predict", body.get("max_tokens"))
    if asked is not None and asked < 0:
        asked = shared.service.bounds.n_ctx_seq
    if asked == 0:
        raise invalid("n_predict", "must be 1 or more, or -1")
    return Ask(
        prompt=prompts[0],
        sampling=evolve(sampling_of(body, DEFAULTS), logprobs=body.get("n_probs") or None),
        max_tokens=asked,
        clamp=True,
        stop=stops_of(body),
        lane=lane_of(body, request.head),
        targets=targets_of(request.head),
        model=model_of(body, shared)[1],
        cache=body.get("cache_salt"),
        shape=shape_of(body),
        streamed=body.get("stream", False),
    )


class _Chunks(Encoder):
    """Chunks as llama-server writes them; the last one says all about the answer."""

    def __init__(self, shared: Shared, model: str) -> None:
        self._service = shared.service
        self._model = model
        self._n = 0

    def token(self, index: int, item: TokenOut) -> bytes:
        self._n += 1
        chunk: dict[str, Any] = {
            "index": 0,
            "content": item.text,
            "tokens": [item.token_id],
            "stop": False,
            "tokens_predicted": self._n,
        }
        found = chat_logprobs([item], self._service)
        if found is not None:
            chunk["completion_probabilities"] = found["content"]
        return sse.event(chunk)

    def end(self, index: int, finished: Finished) -> bytes:
        return sse.event(_last(finished.text, [], finished, self._model))

    def failure(self, fault: Fault, finished: Finished) -> bytes:
        return b"error: " + fault.body(native=True) + b"\n\n"


def _last(text: str, tokens: Sequence[int], end: Finished, model: str) -> dict[str, Any]:
    return {
        "index": 0,
        "content": text,
        "tokens": tokens,
        "stop": True,
        "model": model,
        "tokens_predicted": end.completion_tokens,
        "tokens_evaluated": end.prompt_tokens,
        "tokens_cached": end.cached_tokens,
        "truncated": False,
        "stop_type": "limit" if end.reason == "length" else "eos",
        "stopping_word": "",
        "timings": timings(end),
    }
