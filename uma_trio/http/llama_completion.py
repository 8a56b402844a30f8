"""``POST /completion``: llama-server's own way to ask, which editors and older tools use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from uma_protocol.rules import MAX_INT32, Flag, Integer
from uma_trio.engine.messages import Finished, SamplingParams, TokenOut
from uma_trio.http import sse
from uma_trio.http.accounts import timings
from uma_trio.http.api import Api, answered
from uma_trio.http.asking import (
    CACHE,
    MODEL,
    NO_MATTER,
    NO_TOOLS,
    NOT_HERE,
    PACE,
    SAMPLING,
    SPECULATION,
    URGENCY,
    Anything,
)
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.fields import honoured, ignored
from uma_trio.http.logprobs import chat_logprobs
from uma_trio.http.message import Exchange, Reply
from uma_trio.http.openai_completions import prompts_of
from uma_trio.http.settings import Shared
from uma_trio.http.shapes import FIELDS as SHAPES
from uma_trio.http.streams import Answer, Encoder
from uma_trio.service.ask import Ask
from uma_trio.service.generation import Generation


async def completion(exchange: Exchange, shared: Shared) -> Reply | None:
    """Continue a text, whole or as a stream."""
    return await answered(Completion, exchange, shared)


class Completion(Api):
    """A text that is continued."""

    prefix = "completion-"
    # What llama-server takes where nothing is said.
    defaults = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    fields = (
        MODEL,
        honoured(
            "prompt",
            Anything("a text, tokens, or a list of these"),
            "each is answered",
            required=True,
        ),
        honoured(
            "n_predict",
            Integer(-2, MAX_INT32),
            "below 0: the room in the context",
            default="--max-tokens",
        ),
        honoured("max_tokens", Integer(-2, MAX_INT32), "another name of n_predict"),
        honoured("stream", Flag(), "server-sent events", default="false"),
        honoured(
            "n_probs",
            Integer(0, 20),
            "each token's probability and so many alternatives'",
            default="0",
        ),
        *SAMPLING,
        *URGENCY,
        CACHE,
        SPECULATION,
        PACE,
        *SHAPES,
        *NO_TOOLS,
        *NOT_HERE,
        *NO_MATTER,
        *ignored("samplers", "n_keep", "n_indent", "t_max_predict_ms", note="llama-server's"),
        *ignored("timings_per_token", "return_progress", "return_tokens", note="llama-server's"),
        *ignored("post_sampling_probs", "response_fields", "lora", note="llama-server's"),
    )

    def asks(self) -> list[Ask]:
        """Return what is asked, once for each prompt."""
        body, shared = self.body, self.shared
        prompts = prompts_of(body.get("prompt"), shared)
        asked: int | None = body.get("n_predict", body.get("max_tokens"))
        if asked is not None and asked < 0:
            asked = shared.service.bounds.n_ctx_seq
        if asked == 0:
            raise invalid("n_predict", "must be 1 or more, or -1")
        n_probs = body.get("n_probs") or None
        return [self.ask(prompt, max_tokens=asked, logprobs=n_probs) for prompt in prompts]

    def encoder(self, generations: Sequence[Generation]) -> Encoder:
        """Return what writes the text in parts."""
        return _Chunks(self, len(generations))

    def document(
        self, generations: Sequence[Generation], answers: Sequence[Answer]
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the whole text, and all about it; a list of these where there were several."""
        documents = [self._document(index, answer) for index, answer in enumerate(answers)]
        return documents[0] if len(documents) == 1 else documents

    def _document(self, index: int, answer: Answer) -> dict[str, Any]:
        tokens = [token.token_id for token in answer.tokens]
        document = _last(index, answer.text, tokens, answer.end, self.model)
        found = chat_logprobs(answer.tokens, self.shared.service)
        if found is not None:
            document["completion_probabilities"] = found["content"]
        return document


class _Chunk(msgspec.Struct, omit_defaults=True):
    """A token, in llama-server's order of fields."""

    index: int
    content: str
    tokens: tuple[int, ...]
    stop: bool
    tokens_predicted: int
    completion_probabilities: list[Any] | None = None


class _Chunks(Encoder):
    """Chunks as llama-server writes them; the last one says all about the answer."""

    def __init__(self, api: Completion, n: int) -> None:
        self._service = api.shared.service
        self._model = api.model
        self._n = [0] * n

    def token(self, index: int, item: TokenOut) -> bytes:
        self._n[index] += 1
        chunk = _Chunk(index, item.text, (item.token_id,), False, self._n[index])
        if (found := chat_logprobs([item], self._service)) is not None:
            chunk.completion_probabilities = found["content"]
        return sse.event(chunk)

    def end(self, index: int, finished: Finished) -> bytes:
        return sse.event(_last(index, finished.text, [], finished, self._model))

    def failure(self, fault: Fault, finished: Finished) -> bytes:
        return b"error: " + fault.body(native=True) + b"\n\n"


def _last(
    index: int, text: str, tokens: Sequence[int], end: Finished, model: str
) -> dict[str, Any]:
    return {
        "index": index,
        "content": text,
        "tokens": tokens,
        "stop": True,
        "model": model,
        "tokens_predicted": end.completion_tokens,
        "tokens_evaluated": end.prompt_tokens,
        "tokens_cached": end.cached_tokens,
        "truncated": False,
        "stop_type": _stop_type(end),
        "stopping_word": end.stop or "",
        "timings": timings(end),
    }


def _stop_type(end: Finished) -> str:
    if end.stop is not None:
        return "word"
    return "limit" if end.reason == "length" else "eos"
