"""Faults as Ollama's API writes them: a sentence as `error`, and 503 where it is full."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from uma_trio.http.errors import Fault
from uma_trio.http.message import Reply

_BUSY: Final = 503


def error_of(fault: Fault) -> dict[str, Any]:
    """Return the document of a fault; the field at fault and our codes, which Ollama lacks, stand beside it."""
    more = {"code": fault.code, "param": fault.param, **fault.more}
    return {"error": fault.message, **{k: v for k, v in more.items() if v is not None}}


def reply_to(fault: Fault, request_id: str) -> Reply:
    """Return the whole answer to a request with a fault."""
    status = _BUSY if fault.status == 429 else fault.status
    return Reply(status, msgspec.json.encode(error_of(fault)), headers=fault.headers)
