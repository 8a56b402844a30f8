"""States and plans as lines of JSON, and back, exactly.

Every float comes back as the float it was: finite ones are written with as many digits as that
takes, the others, which JSON does not have, as words. A field that is not known is refused, since
a plan made from half a state would not be the same plan.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec
from attrs import field, frozen
from cattrs import BaseValidationError, Converter, transform_error

from uma_trio.policy.plan import Plan
from uma_trio.policy.state import Contract, SchedulerState

FORMAT = 2


class TraceError(Exception):
    """A line is no part of a trace that this version can read; the message says what is wrong."""


@frozen
class Header:
    """The first line: what made the trace."""

    version: str
    model: str
    policy: str
    contract: Contract = field(factory=Contract)
    format: int = FORMAT


@frozen
class TracedTick:
    """A line for each tick: what the policy saw, what it answered, what came of it."""

    state: SchedulerState
    plan: Plan
    decode_s: float
    host_s: float
    status: int


@frozen
class Footer:
    """The last line of a trace that was closed in order: how many ticks it has, and has not."""

    written: int
    dropped: int


Line = Header | TracedTick | Footer
_KINDS: dict[str, type] = {"header": Header, "tick": TracedTick, "footer": Footer}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_T = TypeVar("_T")


def encode(line: Line) -> bytes:
    """Return the line, with the newline that ends it.

    Raises:
        TypeError: a policy left something in its plan that is no plain value.
    """
    return msgspec.json.encode({_NAMES[type(line)]: _converter.unstructure(line)}) + b"\n"


def decode(text: bytes) -> Line:
    """Return what a line says.

    Raises:
        TraceError: it is no line of a trace, or of another version's.
    """
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"it is not JSON: {error}"
        raise TraceError(message) from None
    if not isinstance(document, dict) or len(document) != 1:
        message = "it is not a line of a trace"
        raise TraceError(message)
    ((name, body),) = document.items()
    if name not in _KINDS:
        message = f"it is not a line of a trace, which has {', '.join(_KINDS)}"
        raise TraceError(message)
    if name == "header" and isinstance(body, dict) and body.get("format") != FORMAT:
        message = f"its format is {body.get('format')}, this version reads {FORMAT}"
        raise TraceError(message)
    line: Line = structured(body, _KINDS[name])
    return line


def plain(value: Any) -> Any:
    """Return an attrs value as what JSON has."""
    return _converter.unstructure(value)


def structured(document: Any, kind: type[_T]) -> _T:
    """Return the value that :func:`plain` was given. Raises :class:`TraceError`."""
    try:
        return _converter.structure(document, kind)
    except (BaseValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems = "; ".join(transform_error(error, path="line"))
        message = f"it does not fit this version: {problems}"
        raise TraceError(message) from None


def _float(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


_converter = Converter(forbid_extra_keys=True)
_converter.register_unstructure_hook(float, _float)
