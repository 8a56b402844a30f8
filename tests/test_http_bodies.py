"""For every body that is accepted, on each endpoint, no step of the work is larger than its bound."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
import pytest
from http_kit import http_house
from net_kit import at_once
from trio.testing import MockClock

from uma_trio.http import fields
from uma_trio.text.pieces import PIECE_BYTES, PIECE_MARKS, decoded

_FILE = "def f(x):\n    return x + 1\n" * 8000  # 200 KiB
_TEXTS = [f"message {number} " * 20 for number in range(299)]
_SAID = [
    {"role": "assistant" if number % 2 else "user", "content": text}
    for number, text in enumerate(_TEXTS)
]
_CONVERSATION = [*_SAID, {"role": "user", "content": _FILE}]
_SCHEMA = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "description": "of use " * 4} for n in range(10)},
}
_TOOLS = [{"name": f"tool_{n}", "description": "does it " * 20} for n in range(100)]
_FUNCTIONS = [{"type": "function", "function": {**t, "parameters": _SCHEMA}} for t in _TOOLS]
_FLAT = [{"type": "function", **tool, "parameters": _SCHEMA} for tool in _TOOLS]
_ANTHROPIC = [{**tool, "input_schema": _SCHEMA} for tool in _TOOLS]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/input_tokens", {"messages": _CONVERSATION, "tools": _FUNCTIONS}),
        ("/v1/messages/count_tokens", {"messages": _CONVERSATION, "tools": _ANTHROPIC}),
        ("/v1/responses/input_tokens", {"input": _CONVERSATION, "tools": _FLAT}),
        ("/apply-template", {"messages": _CONVERSATION, "tools": _FUNCTIONS}),
    ],
)
async def test_an_agents_long_conversation_is_accepted(
    autojump_clock: MockClock, path: str, body: dict[str, Any]
) -> None:
    """300 messages, one of them a file of 200 KiB, with 100 tools."""
    async with http_house() as daemon:
        answer = await daemon.connect(by_socket=True).ask("POST", path, {"model": "m", **body})
        assert answer.status == 200, answer.body[:200]


class Meter:
    """Notes how much was decoded at once: on trio's thread, and in helper threads."""

    def __init__(self) -> None:
        self.aside = False
        self.on_loop = [0]
        self.in_helper = [0]
        self.marks = [0]

    async def run_blocking(self, function: Any) -> Any:
        """Run a function as a helper thread does."""

        def apart() -> Any:
            self.aside = True
            try:
                return function()
            finally:
                self.aside = False

        return await at_once(apart)

    def load(self, piece: bytes) -> Any:
        """Decode a piece."""
        (self.in_helper if self.aside else self.on_loop).append(len(piece))
        self.marks.append(sum(map(piece.count, (b",", b":", b"[", b"]", b"{", b"}"))))
        return msgspec.json.decode(piece)


_ENDPOINTS = [
    ("/v1/chat/completions", "messages"),
    ("/v1/chat/completions/input_tokens", "messages"),
    ("/v1/completions", "prompt"),
    ("/completion", "prompt"),
    ("/completions", "prompt"),
    ("/v1/responses", "input"),
    ("/v1/responses/input_tokens", "input"),
    ("/v1/messages", "messages"),
    ("/v1/messages/count_tokens", "messages"),
    ("/tokenize", "content"),
    ("/detokenize", "tokens"),
    ("/apply-template", "messages"),
    ("/generate", "prompt"),
    ("/priority", "id"),
]
_WORST = {
    "numbers": [1] * 30_000,
    "lists": [[] for _ in range(14_000)],
    "names": {f"n{number}": number for number in range(30_000)},
    "escapes": "\U0001f600" * 60_000,
    "texts": ["x" * 500] * 2000,
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2000}],
    "messages": [{"role": "user", "content": "a"}] * 5000,
}


@pytest.mark.parametrize(("path", "field"), _ENDPOINTS, ids=[path for path, _ in _ENDPOINTS])
async def test_no_step_of_reading_a_body_is_larger_than_its_bound(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """Whether the field takes the value or not, or nobody knows the field: on trio's thread 32 KiB."""
    meter = Meter()
    monkeypatch.setattr(fields, "decoded", partial(decoded, load=meter.load))
    async with http_house(run_blocking=meter.run_blocking) as daemon:
        client = daemon.connect(by_socket=True)
        for value in _WORST.values():
            for name in (field, "unknown"):
                body = json.dumps({field: "hi", "max_tokens": 1, name: value}).encode()
                answer = await client.ask("POST", path, body)
                assert answer.status < 500, answer.body[:200]
    assert max(meter.on_loop) <= 32_768
    assert 0 < max(meter.in_helper) <= PIECE_BYTES + 2
    assert max(meter.marks) <= PIECE_MARKS + 2
