"""Replies of many families that `max_tokens` cuts, as the clients of the four APIs get them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from cut_kit import REPLIES, Reply
from http_kit import http_house
from net_kit import TICK_S
from reply_kit import chatml
from trio.testing import MockClock

from uma_trio_sim.fake import linear_cost
from uma_trio_sim.scripted import ScriptedBackend

# Every character is cut in tests/test_cut_replies.py; here each reply is cut at a few, others in each API.
CUTS = 4
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA = "/api/chat"
PARAMETERS = {
    "bash": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
        "required": ["command"],
    },
    "stop": {"type": "object", "properties": {}},
}
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in PARAMETERS.items()]
ASKED = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED, "tools": [{"type": "function", "function": f} for f in FUNCTIONS]},
    RESPONSES: {"input": "hi", "tools": [{"type": "function", **f} for f in FUNCTIONS]},
    MESSAGES: {
        "messages": ASKED,
        "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
        "thinking": {"type": "adaptive"},
    },
    OLLAMA: {"messages": ASKED, "tools": [{"type": "function", "function": f} for f in FUNCTIONS]},
}
Heard = tuple[str, list[tuple[str, str]]]


def house(reply: Reply) -> Any:
    """Run a daemon whose model gives this reply."""
    thought = reply.format.thought
    opened = thought.open if reply.thinking and thought is not None else ""
    prompt = f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opened}{{% endif %}}"
    backend = ScriptedBackend(
        [list(reply.text.encode())],
        n_ctx=4096,
        n_batch=512,
        chat_template=chatml("{{ m.content }}", prompt=prompt),
        cost=linear_cost(TICK_S, 0.0),
    )
    return http_house(backend=backend, reply_format=reply.format)


def limited(path: str, n_tokens: int) -> dict[str, Any]:
    """Return what asks for the likeliest answer of so many tokens."""
    if path == OLLAMA:
        options = {"num_predict": n_tokens, "temperature": 0, "repeat_penalty": 1}
        return {"options": options, "stream": False}
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return {most: n_tokens, "temperature": 0}


def heard(path: str, document: Any) -> Heard:
    """Return the text of a whole answer, and its calls."""
    if path == OLLAMA:
        message = document["message"]
        made = [call["function"] for call in message.get("tool_calls", [])]
        return message["content"], [(f["name"], json.dumps(f["arguments"])) for f in made]
    if path == CHAT:
        message = document["choices"][0]["message"]
        made = [call["function"] for call in message.get("tool_calls", [])]
        return message["content"] or "", [(call["name"], call["arguments"]) for call in made]
    if path == RESPONSES:
        items = document["output"]
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        calls = [item for item in items if item["type"] == "function_call"]
        for call in calls:
            assert (call["status"] == "incomplete") == (not is_whole(call["arguments"]))
        text = "".join(part["text"] for part in parts)
        return text, [(call["name"], call["arguments"]) for call in calls]
    blocks = document["content"]
    text = "".join(block.get("text", "") for block in blocks)
    return text, [(b["name"], input_of(b["input"])) for b in blocks if b["type"] == "tool_use"]


def input_of(value: dict[str, Any]) -> str:
    """Return the arguments of a use of a tool: JSON, or the text of those that are not whole."""
    text = value.get("arguments")
    return text if isinstance(text, str) else json.dumps(value)


def streamed(path: str, events: Sequence[Any]) -> Heard:
    """Return the same of a stream, as clients join it."""
    if path == RESPONSES:
        return heard(path, events[-1]["response"])
    if path == OLLAMA:
        parts = [heard(path, event) for event in events]
        return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]
    calls: dict[int, list[str]] = {}
    text = ""
    if path == MESSAGES:
        for event in events:
            block, delta = event.get("content_block", {}), event.get("delta", {})
            if block.get("type") == "tool_use":
                calls[event["index"]] = [block["name"], ""]
            if "partial_json" in delta:
                calls[event["index"]][1] += delta["partial_json"]
            text += delta.get("text", "")
    else:
        for choice in [c for event in events if event != "[DONE]" for c in event["choices"]]:
            text += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", []):
                call = calls.setdefault(piece["index"], ["", ""])
                call[0] += piece["function"].get("name") or ""
                call[1] += piece["function"]["arguments"]
    return text, [(name, arguments) for name, arguments in calls.values()]


def is_whole(arguments: str) -> bool:
    """Whether a client could decode the arguments of a call."""
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True


def check(reply: Reply, said: Heard, where: str) -> None:
    """Check that a cut answer says nothing but what the whole reply says."""
    text, calls = said
    assert reply.content.startswith(text.rstrip()), where
    assert len(calls) <= len(reply.calls), where
    for (name, arguments), (called, meant) in zip(calls, reply.calls, strict=False):
        assert name == called, where
        assert not is_whole(arguments) or json.loads(arguments) == json.loads(meant), where


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", REPLIES)
async def test_a_cut_reply_of_any_family_says_nothing_that_it_did_not_mean(
    autojump_clock: MockClock, path: str, name: str
) -> None:
    """Streamed or not: no half marker is text, no name is made up, no call is whole before its end."""
    reply = REPLIES[name]
    n_tokens = len(reply.text.encode())
    async with house(reply) as daemon:
        for number in range(CUTS):
            at = (number * len(BODIES) + 1 + [*BODIES].index(path)) * n_tokens
            at //= CUTS * len(BODIES)
            stream = number % 2 == 1
            body = {**BODIES[path], **limited(path, at), "stream": stream}
            answer = await daemon.ask("POST", path, body)
            events = answer.lines if path == OLLAMA and stream else answer.events
            said = streamed(path, events) if stream else heard(path, answer.json)
            check(reply, said, f"{at} of {reply.text[:at]!r}: {said}")


@pytest.mark.parametrize("path", BODIES)
async def test_half_a_character_of_a_marker_is_no_text(
    autojump_clock: MockClock, path: str
) -> None:
    """Where a marker's characters are several tokens, as DeepSeek's bars are to some vocabularies."""
    reply = REPLIES["deepseek"]
    begins = reply.text.index("I look.") + len("I look.<")
    async with house(reply) as daemon:
        for at in (begins, begins + 1, begins + 2, begins + 3):
            body = {**BODIES[path], **limited(path, at)}
            assert heard(path, (await daemon.ask("POST", path, body)).json) == ("I look.", [])
