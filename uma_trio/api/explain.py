"""`GET /explain`: how a request spent its time and why it waits, for a page or a program."""

from __future__ import annotations

from typing import Any

import msgspec

from uma_protocol import Explain
from uma_trio.api.context import Context
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head, Reply
from uma_trio.observe.explain import explanation, ticks_for
from uma_trio.observe.sentences import sentences

MOST_TICKS = 256
_DIGITS = 18


async def explain(exchange: Exchange, context: Context) -> Reply:
    """Return how the latest requests spent their time, or one of them (`?request=`), and why it waits."""
    head = exchange.head
    handle = _number(head, "request")
    ticks = _number(head, "ticks", MOST_TICKS)
    observer, principal = context.service.observer, exchange.principal
    found = await explanation(
        await observer.explain(handle, ticks_for(Explain(request=handle, ticks=ticks))),
        observer.viewer(principal),
        one=handle is not None,
        text=observer.text_of(principal),
    )
    if found is None:
        raise Fault(404, "no record of that request is kept", code="request_not_found")
    document: dict[str, Any] = msgspec.to_builtins(found)
    document.pop("event", None)
    if handle is not None:
        document["told"] = sentences(found.requests[0], found.ticks)
    return Reply(200, msgspec.json.encode(document))


def _number(head: Head, name: str, most: int | None = None) -> int | None:
    """Return a number of the query; None where there is none.

    Raises:
        Fault: it is no whole number, or larger than `most`.
    """
    text = head.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise invalid(name, "must be a whole number")
    if most is not None and int(text) > most:
        raise invalid(name, f"must be at most {most}")
    return int(text)
