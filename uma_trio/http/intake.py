"""The body of a request, read within its bounds and away from trio's thread if it is not small.

A small body takes less than a millisecond or two from its bytes to what is asked, so it is read where it is. Any
other is read in a helper thread, and in pieces, so that no step holds the GIL for longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from attrs import frozen

from uma_trio.http.fields import Body, Field, decode, document_of
from uma_trio.http.wire.message import Exchange
from uma_trio.http.wire.settings import Shared
from uma_trio.text.pieces import JsonLimits, is_small

T = TypeVar("T")


@frozen
class Taken(Generic[T]):
    """What was made of a body. `apart` is whether more work on it belongs in a helper thread."""

    value: T
    apart: bool


async def take(
    exchange: Exchange,
    shared: Shared,
    read: Callable[[dict[str, Any]], T],
    limits: JsonLimits | None = None,
) -> Taken[T]:
    """Return what `read` makes of the JSON object in the body. The body is given back then.

    `read` may run in a helper thread. `limits` are the endpoint's, if they are not the usual ones.

    Raises:
        Fault: it is no JSON object, exceeds a limit, or `read` raises it.
    """
    within = shared.limits() if limits is None else limits
    with exchange.body() as body:
        small = is_small(body)
        if small:
            return Taken(read(document_of(body, within)), apart=False)
        holder = [body]
        del body

        def work() -> T:
            return read(document_of(holder.pop(), within))

        return Taken(await shared.run_blocking(work), apart=True)


async def fields_of(
    exchange: Exchange,
    shared: Shared,
    fields: tuple[Field, ...],
    limits: JsonLimits | None = None,
) -> Body:
    """Return the fields of a body.

    Raises:
        Fault: as :func:`take` and :func:`decode` say.
    """
    strict = shared.settings.strict
    taken = await take(exchange, shared, lambda found: decode(fields, found, strict=strict), limits)
    return taken.value


async def aside(shared: Shared, work: Callable[[], T], *, apart: bool) -> T:
    """Return what `work` returns: in a helper thread if it is `apart`, else here."""
    return await shared.run_blocking(work) if apart else work()
