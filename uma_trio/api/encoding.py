"""The model that makes vectors or scores for a request over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from attrs import field, frozen

from uma_trio.api.bodies import Decoded, ignored_header, would_be_ignored
from uma_trio.api.context import Context
from uma_trio.api.headers import origin_of
from uma_trio.api.loading import fault_of_end, keeps_loaded
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Headers
from uma_trio.service.ask import Refusal
from uma_trio.service.embedding import Embedder
from uma_trio.service.encode_request import EncodeRequest, RequestEnded
from uma_trio.words import Gives


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
        context.service.require(gives)
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
