"""The body of a request: what it may contain, declared once, and how it is read.

A field is *honoured*, *refused* with 400 and its name, or *ignored* and named in the header
``X-UMA-Ignored``. Fields that nobody declared are ignored as well. The decoder, the tables of
docs/HTTP.md and the tests all come from these declarations.

A small body takes less than a millisecond or two from its bytes to what is asked, so it is read where it is. Any
other is read in a helper thread, and in pieces, so that no step holds the GIL for longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from attrs import frozen

from uma_protocol.rules import Rule, shown
from uma_trio.http.errors import Fault, invalid
from uma_trio.http.exchange import Exchange
from uma_trio.http.pieces import (
    USUAL,
    Excessive,
    JsonLimits,
    NotJson,
    TooDeep,
    TooLong,
    TooManyDigits,
    decoded,
    is_blank,
    is_small,
)
from uma_trio.http.settings import Shared

T = TypeVar("T")
Treatment = Literal["honoured", "refused", "ignored"]

_MAX_NAMED = 16


@frozen
class Field:
    """One field of a body. `null` always counts as left out.

    A refused field is accepted at the values `harmless`, which ask for nothing. `default` is for
    people; what is left out is not in what :func:`decode` returns.
    """

    name: str
    treatment: Treatment
    note: str
    rule: Rule | None = None
    default: str = ""
    harmless: tuple[Any, ...] = ()
    required: bool = False


@frozen
class Body:
    """A decoded body: the honoured fields that were given, and the names of those ignored."""

    given: Mapping[str, Any]
    ignored: tuple[str, ...]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or `default` if it was left out."""
        return self.given.get(name, default)


def honoured(
    name: str, rule: Rule, note: str, *, default: str = "", required: bool = False
) -> Field:
    """Declare a field that does what it says."""
    return Field(name, "honoured", note, rule, default, required=required)


def refused(name: str, note: str, *harmless: Any) -> Field:
    """Declare a field that is answered with 400, unless it asks for nothing."""
    return Field(name, "refused", note, harmless=harmless)


def ignored(*names: str, note: str) -> tuple[Field, ...]:
    """Declare fields that change nothing here."""
    return tuple(Field(name, "ignored", note) for name in names)


def document_of(body: bytes, limits: JsonLimits = USUAL) -> dict[str, Any]:
    """Return the JSON object in a body, decoded in pieces.

    Raises:
        Fault: it is no JSON, or no object, or exceeds `limits` or the digits of a number.
    """
    if is_blank(body):
        raise invalid(None, "the body is empty; send a JSON object", code="invalid_json")
    try:
        document = decoded(body, limits)
    except NotJson as error:
        raise invalid(None, f"the body is not JSON: {error}", code="invalid_json") from None
    except (TooDeep, TooManyDigits) as error:
        raise invalid(None, f"the body {error}; simplify it", code="invalid_json") from None
    except TooLong as error:
        why = f"the body {error}; shorten it, or raise the daemon's --http-max-prompt-bytes"
        raise Fault(413, why, code="prompt_too_large") from None
    except Excessive as error:
        raise Fault(413, f"the body {error}; send less at once", code="body_too_large") from None
    if not isinstance(document, dict):
        raise invalid(None, "the body must be a JSON object", code="invalid_json")
    return document


def decode(fields: Sequence[Field], document: Mapping[str, Any], *, strict: bool) -> Body:
    """Sort a document into what is honoured and what is not.

    Raises:
        Fault: a field is wrong, refused or missing; with `strict`, one would be ignored.
    """
    known = {field.name: field for field in fields}
    given: dict[str, Any] = {}
    unused: list[str] = []
    for name, value in document.items():
        field = known.get(name)
        if value is None:
            continue
        if field is None or field.treatment == "ignored":
            unused.append(shown(name))
        elif field.treatment == "refused":
            if not any(value == fine and type(value) is type(fine) for fine in field.harmless):
                raise invalid(name, f"is not supported: {field.note}", code="unsupported_parameter")
        else:
            given[name] = _checked(field, value)
    for field in fields:
        if field.required and field.name not in given:
            needed = field.note if field.rule is None else field.rule.text
            raise invalid(field.name, f"is missing: {needed}", code="missing_parameter")
    if strict and unused:
        raise would_be_ignored(unused[0])
    return Body(given, tuple(unused))


def would_be_ignored(name: str) -> Fault:
    """Return the answer of a strict daemon to what changes nothing."""
    return invalid(
        name,
        "would be ignored; this daemon refuses such fields (--http-strict)",
        code="unsupported_parameter",
    )


def ignored_header(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the header that names what was ignored, as far as it stays short."""
    return (("X-UMA-Ignored", ", ".join(names[:_MAX_NAMED])),) if names else ()


def _checked(field: Field, value: Any) -> Any:
    if field.rule is None:
        return value
    # JavaScript and Lua write whole numbers as they like.
    if type(value) is float and value.is_integer() and math.isfinite(value):
        whole = int(value)
        if field.rule.check(field.name, value) is not None:
            value = whole
    fault = field.rule.check(field.name, value)
    if fault is not None:
        raise invalid(fault.field, fault.problem)
    return value


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
