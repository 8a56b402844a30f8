"""``POST /v1/completions``: text that goes on, from text or tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from attrs import evolve

from uma_protocol.rules import MAX_INT32, Flag, Integer, ListOf
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
from uma_trio.http.errors import invalid
from uma_trio.http.fields import Body, Field, decode, document_of, honoured, ignored_header, refused
from uma_trio.http.logprobs import text_logprobs
from uma_trio.http.message import Exchange, Reply, Request
from uma_trio.http.openai import Chunks, Shown, max_tokens_of, numbered
from uma_trio.http.settings import Shared
from uma_trio.http.shapes import FIELDS as SHAPES
from uma_trio.http.shapes import shape_of
from uma_trio.http.streams import started, stream, whole
from uma_trio.service.ask import Ask, Prompt

FIELDS: tuple[Field, ...] = (
    MODEL,
    honoured(
        "prompt", Anything("a text, tokens, or a list of these"), "each is answered", required=True
    ),
    honoured("max_tokens", Integer(-1, MAX_INT32), "-1: the room in the context", default="16"),
    *STREAM,
    *SAMPLING,
    honoured("logprobs", Integer(0, 20), "each token's probability and so many alternatives'"),
    honoured(
        "echo", Flag(), "the prompt goes before the answer; not with logprobs", default="false"
    ),
    refused("suffix", "text is only continued, not filled in", ""),
    *URGENCY,
    CACHE,
    *SHAPES,
    *NOT_HERE,
    *NO_MATTER,
)
DEFAULTS = SamplingParams(temperature=1.0)
_DEFAULT_TOKENS = 16  # the API's own
_TOKENS = ListOf(1, 1 << 24, Integer(0, MAX_INT32), "token ids")
_KIND = "text_completion"


async def completions(exchange: Exchange, shared: Shared) -> Reply | None:
    """Continue texts, whole or as a stream."""
    request = exchange.request
    body = decode(FIELDS, document_of(request.body), strict=shared.settings.strict)
    includes_usage = wants_usage(body)
    prompts = prompts_of(body.get("prompt"), shared)
    asks = _asks(body, prompts, request, shared)
    shown = Shown(
        id=f"cmpl-{shared.name}-{request.number}",
        created=int(time.time()),
        model=model_of(body, shared)[0],
    )
    heads = [_echo(prompt, shared) if body.get("echo", False) else "" for prompt in prompts]
    per_prompt = len(asks) // len(prompts)
    echoes = [head for head in heads for _ in range(per_prompt)]
    headers = ignored_header(body)
    async with started(shared, asks, origin_of(request, shared, shown.id)) as generations:
        if body.get("stream", False):
            encoder = _Chunks(shown, shared, echoes, len(prompts), includes_usage=includes_usage)
            await stream(exchange, shared, generations, encoder, headers)
            return None
        answers = await whole(shared, generations)
    choices = [
        _choice(
            index,
            "".join([echo, *(token.text for token in tokens), end.text]),
            end.reason,
            text_logprobs(tokens, shared.service, len(echo)),
        )
        for index, (echo, (tokens, end)) in enumerate(zip(echoes, answers, strict=True))
    ]
    every = [end for _, end in answers]
    document = shown.document(_KIND, choices)
    document |= {"usage": usage(every, len(prompts)), "timings": timings(every[0])}
    return Reply(200, msgspec.json.encode(document), headers=headers)


def prompts_of(value: Any, shared: Shared) -> list[Prompt]:
    """Return each prompt: texts as they are, tokens as an array.

    Raises:
        Fault: it is neither, or more prompts than are computed at once.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    most = shared.service.slots
    if not isinstance(value, list) or not 0 < len(value) <= most:
        raise invalid(
            "prompt", f"must be a text, a list of tokens, or a list of 1 to {most} of these"
        )
    several = len(value) > 1
    return [_prompt(item, f"prompt[{i}]" if several else "prompt") for i, item in enumerate(value)]


def _prompt(value: Any, path: str) -> Prompt:
    if isinstance(value, str):
        return value
    fault = _TOKENS.check(path, value)
    if fault is not None:
        raise invalid(fault.field, fault.problem)
    return np.array(value, np.int32)


def _asks(body: Body, prompts: Sequence[Prompt], request: Request, shared: Shared) -> list[Ask]:
    n = answers_of(body, shared)
    if n * len(prompts) > shared.service.slots:
        raise invalid("n", f"times the prompts must be at most {shared.service.slots}")
    if body.get("echo", False) and body.get("logprobs") is not None:
        raise invalid("echo", "does not go with logprobs: the prompt's are not computed")
    max_tokens = max_tokens_of(body, shared)
    first = Ask(
        prompt="",
        sampling=evolve(sampling_of(body, DEFAULTS), logprobs=body.get("logprobs")),
        max_tokens=_DEFAULT_TOKENS if max_tokens is None else max_tokens,
        clamp=True,
        stop=stops_of(body),
        lane=lane_of(body, request.head),
        targets=targets_of(request.head),
        model=model_of(body, shared)[1],
        cache=body.get("cache_salt"),
        shape=shape_of(body),
        streamed=body.get("stream", False),
    )
    return [ask for prompt in prompts for ask in numbered(evolve(first, prompt=prompt), n)]


def _echo(prompt: Prompt, shared: Shared) -> str:
    if isinstance(prompt, str):
        return prompt
    return shared.service.detokenize(np.asarray(prompt).tolist()).decode("utf-8", "replace")


class _Chunks(Chunks):
    """Chunks of a text."""

    kind = _KIND

    def __init__(
        self,
        shown: Shown,
        shared: Shared,
        echoes: Sequence[str],
        n_prompts: int,
        *,
        includes_usage: bool,
    ) -> None:
        super().__init__(shown, len(echoes), includes_usage=includes_usage, n_prompts=n_prompts)
        self._service = shared.service
        self._echoes = echoes
        self._frames = [sse.Frame(self._chunk(i, sse.HOLE)) for i in range(len(echoes))]
        self._offsets = [len(echo) for echo in echoes]

    def opening(self) -> bytes:
        return b"".join(
            frame.fill(echo) for frame, echo in zip(self._frames, self._echoes, strict=True) if echo
        )

    def token(self, index: int, item: TokenOut) -> bytes:
        if item.logprobs is not None:
            found = text_logprobs([item], self._service, self._offsets[index])
            self._offsets[index] += len(item.text)
            return sse.event(self._chunk(index, item.text, logprobs=found))
        return self._frames[index].fill(item.text) if item.text else b""

    def end(self, index: int, finished: Finished) -> bytes:
        return sse.event(self.last(self._chunk(index, finished.text, finished.reason), finished))

    def _chunk(
        self, index: int, text: str, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        return self.shown.document(_KIND, [_choice(index, text, reason, logprobs)])


def _choice(index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
