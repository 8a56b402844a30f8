"""``POST /generate``: our own protocol over HTTP, the same request and the same events."""

from __future__ import annotations

import msgspec
from attrs import evolve

from uma_protocol import (
    Generate,
    RemoteProtocolError,
    decode_request,
    encode_event,
)
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.http import sse
from uma_trio.http.asking import origin_of
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.fields import document_of
from uma_trio.http.message import Exchange, Reply, Request
from uma_trio.http.settings import Shared
from uma_trio.http.streams import Encoder, started, stream, whole
from uma_trio.service.generation import Generation
from uma_trio.wire import Telling, ask_of, eos_event


async def generate(exchange: Exchange, shared: Shared) -> Reply | None:
    """Answer a `generate` request; it streams unless it says otherwise."""
    request = exchange.request
    asked = _asked(request, shared)
    origin = origin_of(request, shared, asked.id)
    if asked.app is not None:
        origin = evolve(origin, app=asked.app)
    async with started(shared, [ask_of(asked)], origin) as generations:
        (generation,) = generations
        if asked.stream:
            await stream(exchange, shared, generations, _Events(asked, generation, shared), ())
            return None
        (answer,) = await whole(shared, generations)
    telling = Telling(asked, generation.reading)
    for token in answer.tokens:
        telling.keep(token)
    event = eos_event(asked, generation.handle, answer.end, telling.end(answer.end))
    return Reply(200, sse.unsplit(encode_event(event)))


def _asked(request: Request, shared: Shared) -> Generate:
    document = document_of(request.body)
    document.setdefault("id", f"generate-{shared.name}-{request.number}")
    try:
        asked = decode_request(msgspec.json.encode(document))
    except RemoteProtocolError as error:
        raise invalid(None, error.message) from None
    if not isinstance(asked, Generate):
        raise invalid("type", "must be generate, or left out")
    return asked


class _Events(Encoder):
    """The events of the protocol, each as it stands in a frame."""

    def __init__(self, asked: Generate, generation: Generation, shared: Shared) -> None:
        self._asked = asked
        self._handle = generation.handle
        self._telling = Telling(asked, generation.reading)
        self._text_of = shared.service.text_of

    def token(self, index: int, item: TokenOut) -> bytes:
        return _event(encode_event(self._telling.token(item, self._text_of)))

    def end(self, index: int, finished: Finished) -> bytes:
        event = eos_event(self._asked, self._handle, finished, self._telling.end(finished))
        return _event(encode_event(event))

    def failure(self, fault: Fault, finished: Finished) -> bytes:
        return self.end(0, finished)


def _event(payload: bytes) -> bytes:
    return b"data: " + sse.unsplit(payload) + b"\n\n"
