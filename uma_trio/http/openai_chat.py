"""``POST /v1/chat/completions``: a chat, as the clients of OpenAI send and expect it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from attrs import evolve

from uma_protocol.rules import MAX_INT32, Flag, Integer
from uma_trio.engine.messages import Finished, SamplingParams, TokenOut
from uma_trio.http import sse
from uma_trio.http.accounts import timings, usage
from uma_trio.http.asking import (
    CACHE,
    MODEL,
    NO_MATTER,
    NOT_HERE,
    SAMPLING,
    STREAM,
    TEMPLATE,
    URGENCY,
    Anything,
    answers_of,
    lane_of,
    model_of,
    origin_of,
    sampling_of,
    stops_of,
    targets_of,
    wants_usage,
)
from uma_trio.http.chats import messages_of
from uma_trio.http.errors import invalid
from uma_trio.http.fields import Body, Field, decode, document_of, honoured, ignored_header
from uma_trio.http.logprobs import chat_logprobs
from uma_trio.http.message import Exchange, Reply, Request
from uma_trio.http.openai import Chunks, Shown, max_tokens_of, numbered
from uma_trio.http.settings import Shared
from uma_trio.http.shapes import FIELDS as SHAPES
from uma_trio.http.shapes import shape_of
from uma_trio.http.streams import started, stream, whole
from uma_trio.service.ask import Ask, Chat, Manner

FIELDS: tuple[Field, ...] = (
    MODEL,
    honoured("messages", Anything("a list of messages"), "text parts only", required=True),
    honoured("max_completion_tokens", Integer(1, MAX_INT32), "trimmed to the room in the context"),
    honoured("max_tokens", Integer(-1, MAX_INT32), "the same, by its older name; -1: the room"),
    *STREAM,
    *SAMPLING,
    honoured("logprobs", Flag(), "each token's probability, of the model's own distribution"),
    honoured("top_logprobs", Integer(0, 20), "and of so many alternatives; only with logprobs"),
    *TEMPLATE,
    *URGENCY,
    CACHE,
    *SHAPES,
    *NOT_HERE,
    *NO_MATTER,
)
DEFAULTS = SamplingParams(temperature=1.0)


async def chat_completions(exchange: Exchange, shared: Shared) -> Reply | None:
    """Answer a chat, whole or as a stream."""
    request = exchange.request
    body = decode(FIELDS, document_of(request.body), strict=shared.settings.strict)
    includes_usage = wants_usage(body)
    asks = asks_of(body, request, shared)
    shown = Shown(
        id=f"chatcmpl-{shared.name}-{request.number}",
        created=int(time.time()),
        model=model_of(body, shared)[0],
    )
    headers = ignored_header(body)
    async with started(shared, asks, origin_of(request, shared, shown.id)) as generations:
        if body.get("stream", False):
            encoder = _Chunks(shown, shared, len(asks), includes_usage=includes_usage)
            await stream(exchange, shared, generations, encoder, headers)
            return None
        answers = await whole(shared, generations)
    return Reply(200, _completion(shown, answers, shared), headers=headers)


def asks_of(body: Body, request: Request, shared: Shared) -> list[Ask]:
    """Return what is asked, once for each answer that is wanted; they differ by their seeds."""
    n = answers_of(body, shared)
    first = Ask(
        prompt=Chat(messages_of(body.get("messages")), manner_of(body)),
        sampling=evolve(sampling_of(body, DEFAULTS), logprobs=logprobs_of(body)),
        max_tokens=max_tokens_of(body, shared),
        clamp=True,
        stop=stops_of(body),
        lane=lane_of(body, request.head),
        targets=targets_of(request.head),
        model=model_of(body, shared)[1],
        cache=body.get("cache_salt"),
        shape=shape_of(body),
        streamed=body.get("stream", False),
    )
    return numbered(first, n)


def manner_of(body: Body) -> Manner:
    """Return how a chat is rendered."""
    manner = Manner(
        continue_final=body.get("continue_final_message", False),
        arguments=body.get("chat_template_kwargs", {}),
        effort=body.get("reasoning_effort"),
    )
    if not body.get("add_generation_prompt", True) and not manner.continue_final:
        raise invalid("add_generation_prompt", "may be false only with continue_final_message")
    return manner


def logprobs_of(body: Body) -> int | None:
    """Return how many alternatives each token comes with; None for no probabilities."""
    if body.get("logprobs", False):
        top: int = body.get("top_logprobs", 0)
        return top
    if body.get("top_logprobs"):
        raise invalid("top_logprobs", "goes with logprobs true only")
    return None


class _Chunks(Chunks):
    """Chunks of a chat. The first of each answer names the role, the last only its end."""

    kind = "chat.completion.chunk"

    def __init__(self, shown: Shown, shared: Shared, n: int, *, includes_usage: bool) -> None:
        super().__init__(shown, n, includes_usage=includes_usage)
        self._service = shared.service
        self._frames = [sse.Frame(self._chunk(i, {"content": sse.HOLE})) for i in range(n)]

    def opening(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(sse.event(self._chunk(i, role)) for i in range(len(self._frames)))

    def token(self, index: int, item: TokenOut) -> bytes:
        if item.logprobs is not None:
            found = chat_logprobs([item], self._service)
            return sse.event(self._chunk(index, {"content": item.text}, None, found))
        return self._frames[index].fill(item.text) if item.text else b""

    def end(self, index: int, finished: Finished) -> bytes:
        rest = self._frames[index].fill(finished.text) if finished.text else b""
        return rest + sse.event(self.last(self._chunk(index, {}, finished.reason), finished))

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self.shown.document(self.kind, [choice])


def _completion(
    shown: Shown, answers: Sequence[tuple[list[TokenOut], Finished]], shared: Shared
) -> bytes:
    choices = [
        {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join([*(token.text for token in tokens), end.text]),
                "refusal": None,
            },
            "logprobs": chat_logprobs(tokens, shared.service),
            "finish_reason": end.reason,
        }
        for index, (tokens, end) in enumerate(answers)
    ]
    every = [end for _, end in answers]
    document = shown.document("chat.completion", choices)
    document |= {"usage": usage(every), "timings": timings(every[0])}
    return msgspec.json.encode(document)
