"""The model of a request: who waits for its loading is told how far that is; `keep_alive` says how long it stays.

The stream is opened when the loading has lasted for :data:`SHOWN_AFTER_S`. What fails then cannot have a status of its own any
more, and is told as an event, as far as no part of an answer is out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio
from attrs import evolve, frozen

from uma_trio.api.context import Context, fault_of_refusal
from uma_trio.http import sse
from uma_trio.http.errors import Fault, fault_of
from uma_trio.http.exchange import Exchange
from uma_trio.models.loaded import LoadedModel
from uma_trio.models.model import Model
from uma_trio.service.ask import Origin, Refusal
from uma_trio.service.directory import WaitsForModel
from uma_trio.service.service import Service
from uma_trio.sockets.principal import Principal
from uma_trio.words import Lane


def keeps_loaded(seconds: float | None, service: Service, by: Principal, name: str | None) -> bool:
    """Keep a model for as long as `keep_alive` says; False if the client may not decide that."""
    if seconds is None:
        return True
    return by.is_operator and service.models.keep(name, seconds)


SHOWN_AFTER_S: Final = 1.0
"""What fails at once still has a status: a file is tried before its loading begins."""
_AGAIN_S: Final = 1.0
_STATE: Final = "X-UMA-Model-State"


class ToldInStream(Exception):
    """The client was told in its stream why there is no answer."""


@frozen
class LoadTelling:
    """How an API writes, in a stream of type `content_type`, that its model is loaded, and that there is no answer.

    `failure` gets the id of the request, too.
    """

    content_type: str
    loading: Callable[[Model], bytes]
    failure: Callable[[Fault, str], bytes]


def comment(model: Model) -> bytes:
    """Return how far the loading is as a comment, which every client of server-sent events skips."""
    return b": %b\n\n" % " ".join(model.wait_reason.split()).encode()


def as_data(model: Model) -> bytes:
    """Return how far the loading is as an event, for who asked for progress."""
    told = {
        "model": model.names[0],
        "state": model.wait_reason,
        "progress": round(model.progress, 3),
    }
    return comment(model) + sse.event({"choices": [], "load_progress": told})


def _failed(fault: Fault, _request_id: str) -> bytes:
    return sse.event(fault.member())


EVENTS: Final = LoadTelling(sse.CONTENT_TYPE, comment, _failed)
"""As OpenAI's API writes streams, and most others."""


@asynccontextmanager
async def model_for(
    exchange: Exchange,
    context: Context,
    name: str | None,
    origin: Origin,
    lane: Lane,
    telling: LoadTelling | None,
) -> AsyncIterator[Context]:
    """Return `context` for the model of this name once that is loaded; it stays so until the block ends.

    With a `telling` the client is told meanwhile. Where it was, and there is no model, or the block raises before an
    answer has begun, the stream ends with the fault.

    Raises:
        Refusal: there is none of this name, or it cannot be loaded.
        Fault: the request was ended while it waited.
        ToldInStream: one of these was told in the stream.
    """
    try:
        served, end = await _loaded(exchange, context, name, origin, lane, telling)
        try:
            yield evolve(context, named=served)
        finally:
            end()
    except (Fault, Refusal) as error:
        if telling is None or not exchange.opened:
            raise
        fault = fault_of_refusal(error) if isinstance(error, Refusal) else error
        await exchange.close(telling.failure(fault, origin.name or ""))
        raise ToldInStream from error


async def _loaded(
    exchange: Exchange,
    context: Context,
    name: str | None,
    origin: Origin,
    lane: Lane,
    telling: LoadTelling | None,
) -> tuple[LoadedModel, Callable[[], None]]:
    """Return the model once it is loaded, and what ends the use of it. Raises as :func:`model_for`."""
    service = context.service
    model = service.models.resolve(name, "text")
    if not model.wait_reason:
        served = await service.ready(name, kind="text")
        return served, served.uses.begin()
    waiting = WaitsForModel(service.new_handle(), origin, lane, model, service.clock())
    service.directory.add(waiting)
    refused: Refusal | None = None
    uses: list[Callable[[], None]] = []
    try:
        with waiting.scope:
            async with trio.open_nursery() as nursery:
                if telling is None and not exchange.is_late:
                    exchange.expect_document()
                elif telling is not None and not exchange.is_late:
                    nursery.start_soon(_tell, exchange, model, telling)
                try:
                    payer = origin.principal.counts_as
                    served = await service.ready(name, payer=payer, kind="text")
                    uses.append(served.uses.begin())
                except Refusal as refusal:
                    refused = refusal
                nursery.cancel_scope.cancel()
    except BaseException:
        for end in uses:  # the client left in the moment in which the model was loaded
            end()
        raise
    finally:
        service.directory.remove(waiting)
    if waiting.ended is not None:
        for end in uses:
            end()
        raise fault_of_end(*waiting.ended)
    if refused is not None:
        raise refused
    return served, uses[0]


def fault_of_end(code: str | None, message: str | None) -> Fault:
    """Return how a request is answered that somebody ended."""
    if code is None:
        return Fault(499, "the request was cancelled", code="cancelled", kind="server_error")
    return fault_of(code, message or "the request failed")


async def _tell(exchange: Exchange, model: Model, telling: LoadTelling) -> None:
    """Say how far it is, each time that it has changed."""
    await trio.sleep(SHOWN_AFTER_S)
    told = ""
    while True:
        if model.is_checked and model.wait_reason != told:
            told, data = model.wait_reason, telling.loading(model)
            if not exchange.opened:
                headers = (("Content-Type", telling.content_type), (_STATE, "loading"))
                exchange.open(headers, lambda: telling.loading(model), data)
            elif not exchange.send(data):
                await exchange.sent()
        await trio.sleep(_AGAIN_S)
