"""A message as a document and as events: blocks of text, of thought, and uses of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from attrs import evolve, frozen

from uma_trio.api.blocks import (
    Block,
    Blocks,
    Change,
    Closed,
    Grown,
    Opened,
    arguments_of,
)
from uma_trio.api.loading import EVENTS
from uma_trio.api.streams import Encoder
from uma_trio.engine.messages import Finished, TokenOut
from uma_trio.http import sse
from uma_trio.http.errors import Fault
from uma_trio.http.message import Reply
from uma_trio.service.reading import Reading

_PING: Final = sse.named({"type": "ping"})
TELLING: Final = evolve(EVENTS, failure=lambda fault, name: sse.named(error_of(fault, name)))
"""How a stream tells that its model is loaded, or cannot be."""
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Clients send a thought back only if it is signed. It is not secret here, and nothing is checked.
_SIGNATURE: Final = "dW1hLXRyaW8="
# What a hosted service says of a message's usage, and clients with strict types read.
_NOWHERE: Final = {"cache_creation": None, "inference_geo": None, "speed": "standard"}


@frozen
class Form:
    """Writes one message; `prompt_tokens` is how long its prompt is."""

    id: str
    model: str
    prompt_tokens: int

    def begun(self) -> dict[str, Any]:
        """Return the message before anything is said."""
        usage = {**_usage(self.prompt_tokens, 0, 0, None), **_NOWHERE}
        return {**self._message([]), **_ending(None), "usage": usage}

    def whole(self, done: Sequence[Closed], end: Finished, reading: Reading) -> dict[str, Any]:
        """Return the message when its answer is at its end."""
        content = [_block(block) for block in done]
        usage = {**usage_of(end, reading), **_NOWHERE}
        return {**self._message(content), **ending(end, reading), "usage": usage}

    def _message(self, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "diagnostics": None,
        }


def ending(end: Finished, reading: Reading) -> dict[str, Any]:
    """Return why an answer ended."""
    if end.stop is not None:
        return _ending("stop_sequence", end.stop)
    return _ending(_REASONS[reading.reason(end)])


def _ending(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    # Clients with strict types read these members, also where they are null.
    return {
        "stop_reason": reason,
        "stop_sequence": sequence,
        "stop_details": None,
        "container": None,
    }


def usage_of(end: Finished, reading: Reading) -> dict[str, Any]:
    """Return what an answer took."""
    thinking = reading.reasoning_tokens
    return _usage(end.prompt_tokens, end.cached_tokens, end.completion_tokens, thinking)


def _usage(prompt: int, cached: int, output: int, thinking: int | None) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,  # the API counts what was cached apart
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "output_tokens_details": None if thinking is None else {"thinking_tokens": thinking},
        "server_tool_use": None,
        "service_tier": "standard",
    }


def _block(closed: Closed) -> dict[str, Any]:
    block = closed.block
    if block.kind == "text":
        return {"type": "text", "text": closed.text, "citations": None}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": closed.text, "signature": _SIGNATURE}
    return {**_use(block), "input": arguments_of(closed)}


def _use(block: Block) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": block.call_id,
        "name": block.name,
        "input": {},
        "caller": {"type": "direct"},
    }


class Events(Encoder):
    """Writes one message as events."""

    def __init__(self, form: Form, reading: Reading) -> None:
        self._form = form
        self._reading = reading
        self._blocks = Blocks(reading)
        self._deltas = sse.Frame({"type": "ping"}, sse.named)

    def opening(self) -> bytes:
        return sse.named({"type": "message_start", "message": self._form.begun()})

    def token(self, index: int, item: TokenOut) -> bytes:
        return b"".join([self._changed(change) for change in self._blocks.token(item)])

    def end(self, index: int, finished: Finished) -> bytes:
        last = [self._changed(change) for change in self._blocks.end(finished)]
        delta = {
            "type": "message_delta",
            "delta": ending(finished, self._reading),
            "usage": usage_of(finished, self._reading),
        }
        return b"".join([*last, sse.named(delta), sse.named({"type": "message_stop"})])

    def failure(self, index: int, fault: Fault, finished: Finished) -> bytes:
        """Return the error as an event, which the SDKs raise."""
        return sse.named(error_of(fault, self._form.id))

    def keep_alive(self) -> bytes:
        return _PING

    def _changed(self, change: Change) -> bytes:
        if isinstance(change, Grown):
            return self._deltas.fill(change.text)
        if isinstance(change, Opened):
            return self._opened(change.block)
        at = {"index": change.block.number}
        signed = b""
        if change.block.kind == "thought":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            signed = sse.named({"type": "content_block_delta", **at, "delta": delta})
        return signed + sse.named({"type": "content_block_stop", **at})

    def _opened(self, block: Block) -> bytes:
        at = {"index": block.number}
        kind, name, begun = {
            "text": ("text_delta", "text", {"type": "text", "text": "", "citations": None}),
            "thought": (
                "thinking_delta",
                "thinking",
                {"type": "thinking", "thinking": "", "signature": ""},
            ),
            "call": ("input_json_delta", "partial_json", _use(block)),
        }[block.kind]
        delta = {"type": kind, name: sse.HOLE}
        document = {"type": "content_block_delta", **at, "delta": delta}
        self._deltas = sse.Frame(document, sse.named)
        return sse.named({"type": "content_block_start", **at, "content_block": begun})


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
    prompt, context = fault.more.get("n_prompt_tokens"), fault.more.get("n_ctx")
    if prompt is None or context is None:
        return fault.message
    return f"prompt is too long: {prompt} tokens > {context} maximum"


def _more(fault: Fault) -> dict[str, Any]:
    """Return what the API does not have: the field at fault, and our own code."""
    found = {"param": fault.param, "code": fault.code, **fault.more}
    return {name: value for name, value in found.items() if value is not None}
