"""Faults as the Messages API writes them: its own object, its own words, 529 where it is full."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from uma_trio.http.errors import Fault
from uma_trio.http.message import Reply

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_OVERLOADED: Final = 529


def error_of(fault: Fault, request_id: str) -> dict[str, Any]:
    """Return the document of a fault."""
    default = "invalid_request_error" if fault.status < 500 else "api_error"
    error = {"type": _TYPES.get(fault.status, default), "message": _message(fault)}
    return {"type": "error", "error": {**error, **_more(fault)}, "request_id": request_id}


def reply_to(fault: Fault, request_id: str) -> Reply:
    """Return the whole answer to a request with a fault."""
    status = _OVERLOADED if fault.status == 503 else fault.status
    body = msgspec.json.encode(error_of(fault, request_id))
    return Reply(status, body, headers=(*fault.headers, ("request-id", request_id)))


def _message(fault: Fault) -> str:
    """Return what is wrong. Clients look for the API's own words where the prompt is too long."""
    prompt, context = fault.more.get("n_prompt_tokens"), fault.more.get("n_ctx")
    if prompt is None or context is None:
        return fault.message
    return f"prompt is too long: {prompt} tokens > {context} maximum"


def _more(fault: Fault) -> dict[str, Any]:
    """Return what the API does not have: the field at fault, and our own code."""
    found = {"param": fault.param, "code": fault.code, **fault.more}
    return {name: value for name, value in found.items() if value is not None}
