"""``POST /generate``: our own protocol over HTTP, the same request and the same events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from attrs import evolve

from uma_protocol import (
    MAX_DEPTH,
    Generate,
    RemoteProtocolError,
    encode_event,
    request_of,
)
from uma_trio.api.bodies import run, take
from uma_trio.api.context import Context
from uma_trio.api.headers import origin_of
from uma_trio.api.loading import EVENTS, ToldInStream, model_for
from uma_trio.api.streams import MUCH, Encoder, WholeAnswer, stream, whole
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.http import sse
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.service.answers import Answers, combined_end
from uma_trio.service.ask import Ask, Origin
from uma_trio.uds.wire import AnswerEvents, ask_of, eos_event


async def generate(exchange: Exchange, context: Context) -> Reply | None:
    """Answer a `generate` request of the protocol; it streams by default."""
    limits = evolve(context.limits(), depth=MAX_DEPTH)
    name = f"generate-{context.name}-{exchange.number}"
    taken = await take(exchange, context, lambda found: _asked(found, name), limits)
    asked, ask = taken.value
    origin = origin_of(exchange, context, asked.id)
    if asked.app is not None:
        origin = evolve(origin, app=asked.app)
    encoder = EVENTS if asked.stream else None
    model = context.service.models.with_adapters(asked.model, ask.lora)
    try:
        async with model_for(exchange, context, model, origin, asked.priority, encoder) as found:
            return await _answered(asked, ask, origin, exchange, found)
    except ToldInStream:
        return None


async def _answered(
    asked: Generate, ask: Ask, origin: Origin, exchange: Exchange, context: Context
) -> Reply | None:
    async with Answers(context.service, [ask], origin, context.served) as answers:
        if asked.stream:
            await stream(exchange, context, answers, _Events(asked, answers, context), ())
            return None
        exchange.expect_document()
        every = await whole(context, answers)
    encoders = [AnswerEvents(asked, generation) for generation in answers.generations]

    def write() -> bytes:
        return sse.unsplit(_document(asked, answers, encoders, every))

    much = sum(answer.weight for answer in every) > MUCH
    return Reply(200, await run(context, write, in_thread=much))


def _document(
    asked: Generate,
    answers: Answers,
    encoders: Sequence[AnswerEvents],
    every: Sequence[WholeAnswer],
) -> bytes:
    """Return whole answers as one document: the last event, with the ends of several in it."""
    ends: list[bytes] = []
    for encoder, answer in zip(encoders, every, strict=True):
        for token in answer.tokens:
            encoder.keep(token)
        ends.append(encode_event(encoder.last(answer.end, encoder.end(answer.end))))
    if asked.n == 1:
        return ends[0]
    whole_ = combined_end([answer.end for answer in every])
    last = encode_event(eos_event(asked, answers.handle, whole_, None))
    document = msgspec.json.decode(last) | {"choices": list(map(msgspec.Raw, ends))}
    return msgspec.json.encode(document)


def _asked(document: dict[str, Any], name: str) -> tuple[Generate, Ask]:
    """Return the request in a document, which is called `name` if it has no id of its own."""
    try:
        asked = request_of({"id": name, **document})
    except RemoteProtocolError as error:
        raise invalid(None, error.message) from None
    if not isinstance(asked, Generate):
        raise invalid("type", "must be generate, or omitted")
    return asked, ask_of(asked)


class _Events(Encoder):
    """The events of the protocol, each as it stands in a frame."""

    def __init__(self, asked: Generate, answers: Answers, context: Context) -> None:
        self._asked = asked
        self._handle = answers.handle
        self._encoders = [AnswerEvents(asked, generation) for generation in answers.generations]
        self._text_of = context.served.text_of

    def token(self, index: int, item: TokenOut) -> bytes:
        return _event(encode_event(self._encoders[index].token(item, self._text_of)))

    def end(self, index: int, finished: Finished) -> bytes:
        encoder = self._encoders[index]
        return _event(encode_event(encoder.last(finished, encoder.end(finished))))

    def failure(self, index: int, fault: Fault, finished: Finished) -> bytes:
        return self.end(index, finished)

    def closing(self, every: Sequence[Finished]) -> bytes:
        if self._asked.n == 1:
            return b""
        return _event(encode_event(eos_event(self._asked, self._handle, combined_end(every), None)))


def _event(payload: bytes) -> bytes:
    return b"data: " + sse.unsplit(payload) + b"\n\n"
