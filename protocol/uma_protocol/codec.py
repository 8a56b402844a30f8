"""JSON documents to events and back.

Requests come from any process that can open the socket, so they are read strictly. Before a
document is parsed, a scan with `bytes` methods limits what the parser can be made to build. Then
the declaration of each field (`requests`) is checked. Events come from the daemon that the client
chose, one for each token, so they are read fast: types are checked and unknown fields are skipped.

No error message of this module repeats a string value of a document.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn, cast, get_args

import msgspec

from .errors import Code, LocalProtocolError, RemoteProtocolError
from .events import End, Eos, Error, Event, Loading, Ok, Scores, Token, Vectors
from .requests import BY_TYPE, Generate, Request
from .rules import nearest, shown
from .scan import scan
from .schema import check_request, is_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MAX_NAMED_BYTES = (
    262_144  # a larger document is not parsed again to find the name that occurs twice
)

# The seeds spell two of the requests with `event` in place of `type`.
_TYPES_BY_EVENT = ("cancel", "metrics")

_encode = msgspec.json.Encoder().encode
_decode_any = msgspec.json.Decoder().decode
_decode_event: Callable[[bytes], Event] = msgspec.json.Decoder(Event).decode


class _Kind(msgspec.Struct, frozen=True):
    event: str


_decode_kind = msgspec.json.Decoder(_Kind).decode
_KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(Event))

_LAST_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]{0,5}\Z")
_BOMS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


# --- requests -----------------------------------------------------------------------------------


def encode_request(request: Request) -> bytes:
    """Return a request as JSON: `type`, then the other fields in their order, without defaults.

    `decode_request` accepts every result of this function and returns an equal request.

    Raises:
        LocalProtocolError: a value is out of bounds; `field` names it. Nothing is changed.
    """
    try:
        document = msgspec.to_builtins(request)
        payload = _encode(request)
    except UnicodeEncodeError:
        raise LocalProtocolError(
            Code.E_PROTO_003, "the request contains half a surrogate pair, which no text may"
        ) from None
    except (TypeError, ValueError, RecursionError) as exc:
        raise _not_writable(exc) from None
    fault = check_request(document.pop("type"), document)
    if fault is not None:
        raise LocalProtocolError(
            Code.E_PROTO_003, f"{fault.field} {fault.problem}", field=fault.field
        )
    problem = scan(payload).problem()
    if problem is not None:
        raise LocalProtocolError(Code.E_PROTO_001, problem)
    return payload


def generate_request(fields: Mapping[str, Any]) -> Generate:
    """Return a `generate` request from Python values; None counts as absent.

    Parts such as messages and tools may be instances of their classes or dicts.

    Raises:
        LocalProtocolError: a value is out of bounds; `field` names it.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        document = msgspec.to_builtins(given, str_keys=True)
    except (TypeError, ValueError, RecursionError) as exc:
        raise _not_writable(exc) from None
    fault = check_request("generate", document)
    if fault is not None:
        raise LocalProtocolError(
            Code.E_PROTO_003, f"{fault.field} {fault.problem}", field=fault.field
        )
    request = msgspec.convert(document, Generate, str_keys=True)
    encode_request(request)
    return request


def _not_writable(exc: Exception) -> LocalProtocolError:
    return LocalProtocolError(
        Code.E_PROTO_003, f"the request cannot be written as JSON ({type(exc).__name__})"
    )


def decode_request(payload: bytes) -> Request:
    """Read one request, strictly.

    Raises:
        RemoteProtocolError: `E_PROTO_001` if the document is not acceptable JSON, `E_PROTO_003` if it
            is not a valid request, `E_PROTO_007` if its type is unknown. `request_id` is set if the
            document has a valid id. `fatal` is false; the connection decides whether it is fatal.
    """
    return request_of(_parse(payload))


def request_of(document: dict[str, Any]) -> Request:
    """Return the request in a document that was parsed elsewhere. The document is used up.

    Its depth, its number of values and names that occur twice are the caller's business.

    Raises:
        RemoteProtocolError: as :func:`decode_request` does of what is not a valid request.
    """
    kind = _take_type(document)
    fault = check_request(kind, document)
    if fault is not None:
        _refuse(document, Code.E_PROTO_003, f"{fault.field} {fault.problem}", fault.field)
    return cast("Request", msgspec.convert(document, BY_TYPE[kind], str_keys=True))


def _take_type(document: dict[str, Any]) -> str:
    """Remove what says which request this is, and return it."""
    if "event" in document and "type" not in document:
        kind = document.pop("event")
        if kind not in _TYPES_BY_EVENT:
            _refuse(
                document,
                Code.E_PROTO_003,
                "event is not a field of requests, except to say cancel or metrics: use type",
                "event",
            )
        return cast("str", kind)
    kind = document.pop("type", "generate")
    if not isinstance(kind, str):
        _refuse(document, Code.E_PROTO_003, f"type must be one of {', '.join(BY_TYPE)}", "type")
    if kind not in BY_TYPE:
        message = f"no request of type {shown(kind)} is known here{nearest(kind, BY_TYPE)}"
        _refuse(document, Code.E_PROTO_007, message, "type")
    return kind


def _refuse(document: dict[str, Any], code: Code, message: str, field: str) -> NoReturn:
    """Raise a refusal that carries the document's id if it has a usable one."""
    found = document.get("id")
    raise RemoteProtocolError(
        code, message, field=field, request_id=found if is_id(found) else None
    )


# --- the JSON underneath ------------------------------------------------------------------------


def _parse(payload: bytes) -> dict[str, Any]:
    """Parse an object that is acceptable JSON.

    Raises:
        RemoteProtocolError: `E_PROTO_001`, or `E_PROTO_003` when it is JSON but not an object.
    """
    if payload.startswith(_BOMS):
        raise _not_json("the document starts with a byte order mark: send plain UTF-8 without one")
    found = scan(payload)
    problem = found.problem()
    if problem is not None:
        raise _not_json(problem)
    try:
        document = _decode_any(payload)
    except UnicodeDecodeError:
        raise _not_json("the document is not valid UTF-8") from None
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise _not_json(_explain(payload, exc)) from None
    if not isinstance(document, dict):
        raise RemoteProtocolError(Code.E_PROTO_003, "a request must be a JSON object")
    if _members(document) != found.members:
        _refuse_duplicate(payload, document)
    return document


def _not_json(message: str) -> RemoteProtocolError:
    return RemoteProtocolError(Code.E_PROTO_001, message)


def _explain(payload: bytes, exc: Exception) -> str:
    """Why the parser refused a document, in words that lead to the fix."""
    if b"\x00" in payload[:4]:
        return "the document looks like UTF-16 or UTF-32: send UTF-8"
    detail = str(exc)
    if "out of range" in detail:
        return "the document contains a number that is too large"
    if "truncated" in detail:
        # The parser also looks in vain for the second half of a surrogate pair.
        half = _LAST_SURROGATE.search(payload[-16:]) is not None
        detail = "half a surrogate pair" if half else "it ends too early"
    return f"the document is not valid JSON: {detail.removeprefix('JSON is malformed: ')}"


def _members(value: Any) -> int:
    """How many members the objects of a parsed document have, all together."""
    if type(value) is dict:
        return len(value) + sum(map(_members, value.values()))
    if type(value) is list:
        return sum(map(_members, value))
    return 0


def _refuse_duplicate(payload: bytes, document: dict[str, Any]) -> NoReturn:
    """Raise for a document in which some object names a member twice, and say which."""
    if len(payload) > _MAX_NAMED_BYTES:
        raise _not_json(
            "a name is given twice in one object: which of them counts is anyone's guess"
        )
    twice: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                twice.append(name)
            seen.add(name)

    json.loads(payload, object_pairs_hook=look)
    name = twice[0]
    found = None if "id" in twice else document.get("id")
    raise RemoteProtocolError(
        Code.E_PROTO_001,
        f"{shown(name)} is named twice in one object: which of them counts is anyone's guess",
        field=shown(name),
        request_id=found if is_id(found) else None,
    )


# --- events -------------------------------------------------------------------------------------


def encode_event(event: Event) -> bytes:
    """Return an event as JSON: `id` (if any), `event`, then its fields without those that are None.

    Raises:
        LocalProtocolError: a value cannot be expressed in JSON. Nothing is changed.
    """
    try:
        shape = _SHAPES.get(type(event))
        return _encode(event if shape is None else shape(event))
    except (TypeError, ValueError, RecursionError) as exc:
        raise LocalProtocolError(
            Code.E_RUNTIME_004, f"the event cannot be written as JSON ({type(exc).__name__})"
        ) from None


def decode_event(payload: bytes) -> Event:
    """Read one event. Unknown fields are skipped.

    Raises:
        RemoteProtocolError: `E_PROTO_001` if the document is not JSON, `E_PROTO_003` if it is not a
            known event.
    """
    try:
        return _decode_event(payload)
    except msgspec.ValidationError:
        raise RemoteProtocolError(
            Code.E_PROTO_003, "the daemon sent something that is not an event known here"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _not_json("the daemon sent something that is not JSON") from None


def is_of_unknown_kind(payload: bytes) -> bool:
    """Whether a document is an event of a kind that is not known here, which a client skips."""
    try:
        return _decode_kind(payload).event not in _KINDS
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


# The fields of an event that has an `id` begin with it on the wire, which is not where msgspec writes
# the tag of a struct. A dict keeps the order that it is built in. Other events go as they are.


def _token(event: Token) -> dict[str, Any]:
    shape = {"id": event.id, "event": "token", "text": event.text, "token_id": event.token_id}
    if event.logprobs is not None:
        shape["logprobs"] = event.logprobs
    if event.reasoning is not None:
        shape["reasoning"] = event.reasoning
    if event.calls:
        shape["calls"] = event.calls
    if event.choice:
        shape["choice"] = event.choice
    return shape


def _end(event: End) -> dict[str, Any]:
    return _present(
        id=event.id,
        event="end",
        choice=event.choice or None,
        reason=event.reason,
        text=event.text,
        completion_tokens=event.completion_tokens,
        request=event.request,
        code=event.code,
        message=event.message,
        reasoning=event.reasoning,
        calls=event.calls or None,
    )


def _eos(event: Eos) -> dict[str, Any]:
    return _present(
        id=event.id,
        event="eos",
        reason=event.reason,
        text=event.text,
        usage=event.usage,
        timings=event.timings,
        request=event.request,
        code=event.code,
        message=event.message,
        metadata=event.metadata,
        reasoning=event.reasoning,
        calls=event.calls or None,
    )


def _error(event: Error) -> dict[str, Any]:
    return _present(
        id=event.id,
        event="error",
        code=event.code,
        message=event.message,
        fatal=event.fatal,
        retryable=event.retryable,
        retry_after_ms=event.retry_after_ms,
    )


def _present(**fields: Any) -> dict[str, Any]:
    """The fields that have a value, in the order given."""
    return {name: value for name, value in fields.items() if value is not None}


_SHAPES: dict[type, Callable[[Any], dict[str, Any]]] = {
    Token: _token,
    End: _end,
    Eos: _eos,
    Error: _error,
    Loading: lambda event: _present(
        id=event.id,
        event="loading",
        model=event.model,
        state=event.state,
        progress=event.progress,
    ),
    Vectors: lambda event: _present(
        id=event.id, event="vectors", first=event.first, vectors=event.vectors
    ),
    Scores: lambda event: _present(id=event.id, event="scores", scores=event.scores),
    Ok: lambda event: _present(id=event.id, event="ok"),
}
