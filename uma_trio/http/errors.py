"""What goes wrong, in the words of the APIs: status, body, and whether to try again.

The daemon has codes of its own (:mod:`uma_protocol.errors`); how each of them looks over HTTP is
declared here once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from attrs import field, frozen

from uma_protocol.errors import Code
from uma_trio.http.message import Headers, Reply

_INVALID = "invalid_request_error"
_SERVER = "server_error"


class Fault(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        message: one sentence: what is wrong, the bound, what to do.
        code: a word for programs.
        param: the field at fault, as a path.
        kind: OpenAI's word for the sort of error.
        more: further members of the error object.
        headers: to be sent along.
        closes: whether the connection ends after the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = _INVALID,
        more: Mapping[str, Any] | None = None,
        headers: Headers = (),
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.more = more or {}
        self.headers = headers
        self.closes = closes

    def member(self, *, native: bool = False) -> dict[str, Any]:
        """Return the error as a member: as OpenAI writes it, or with `native` as llama-server does."""
        code: object = self.status if native else self.code
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": code}
        return {"error": {**error, **self.more}}

    def body(self, *, native: bool = False) -> bytes:
        """Return a document that is the error alone."""
        return msgspec.json.encode(self.member(native=native))


ErrorForm = Callable[[Fault, str], Reply]
"""How an API writes a fault, given the id of the request."""


def openai_error(fault: Fault, request_id: str) -> Reply:
    """Return the whole answer as OpenAI writes it."""
    return Reply(fault.status, fault.body(), headers=fault.headers)


def native_error(fault: Fault, request_id: str) -> Reply:
    """Return the whole answer as llama-server writes it."""
    return Reply(fault.status, fault.body(native=True), headers=fault.headers)


@frozen
class _Shown:
    """How one of the daemon's codes looks over HTTP."""

    status: int
    code: str
    kind: str = _INVALID
    retry_after_s: float | None = None
    headers: Headers = field(default=())


# A client that gets a 5xx sends the request again, unless it is told not to.
_NEVER_AGAIN: Headers = (("X-Should-Retry", "false"),)
_SOON_S = 5.0

_SHOWN: Mapping[Code, _Shown] = MappingProxyType(
    {
        Code.E_PROTO_003: _Shown(400, "invalid_value"),
        Code.E_AUTH_002: _Shown(403, "forbidden", "permission_error"),
        Code.E_LIMIT_001: _Shown(413, "prompt_too_large"),
        Code.E_LIMIT_003: _Shown(429, "queue_full", "rate_limit_error", 1.0),
        # OpenAI's clients look for the code, llama-server's for the type.
        Code.E_LIMIT_004: _Shown(400, "context_length_exceeded", "exceed_context_size_error"),
        Code.E_LIMIT_007: _Shown(400, "constraint_too_costly"),
        Code.E_MODEL_001: _Shown(503, "model_not_loaded", _SERVER, 1.0),
        Code.E_MODEL_002: _Shown(400, "unsupported_value"),
        Code.E_MODEL_003: _Shown(400, "model_in_use"),
        Code.E_RUNTIME_001: _Shown(500, "decode_failed", _SERVER),
        Code.E_RUNTIME_002: _Shown(503, "no_memory", _SERVER, 1.0),
        Code.E_RUNTIME_003: _Shown(500, "not_finite", _SERVER, headers=_NEVER_AGAIN),
        Code.E_RUNTIME_004: _Shown(503, "engine_stopped", _SERVER, headers=_NEVER_AGAIN),
        Code.E_RUNTIME_005: _Shown(500, "no_token_fits", _SERVER, headers=_NEVER_AGAIN),
        Code.E_RUNTIME_006: _Shown(500, "internal_error", _SERVER, headers=_NEVER_AGAIN),
        Code.E_LIFECYCLE_001: _Shown(503, "shutting_down", _SERVER, _SOON_S),
    }
)
_UNKNOWN = _Shown(500, "internal_error", _SERVER)


def fault_of(
    code: Code | str | None,
    message: str,
    *,
    param: str | None = None,
    retry_after_s: float | None = None,
    more: Mapping[str, Any] | None = None,
) -> Fault:
    """Return how a code of the daemon is answered."""
    shown = _SHOWN.get(Code(code), _UNKNOWN) if code in set(Code) else _UNKNOWN
    wait = shown.retry_after_s if retry_after_s is None else retry_after_s
    headers = shown.headers
    if wait is not None:
        headers = (*headers, ("Retry-After", str(max(1, math.ceil(wait)))))
    return Fault(
        shown.status,
        message,
        code=shown.code,
        param=param,
        kind=shown.kind,
        more={**(more or {}), "uma_code": str(code)} if code else more,
        headers=headers,
    )


def invalid(param: str | None, problem: str, *, code: str = "invalid_value") -> Fault:
    """Return the answer to a field that is wrong."""
    message = problem if param is None else f"{param} {problem}"
    return Fault(400, message, code=code, param=param)


def not_found() -> Fault:
    """Return the answer to a path that leads nowhere. The path, which is the client's, is not in it."""
    return Fault(
        404, "there is nothing at this path; /openapi.json lists what is", code="not_found"
    )
