"""Answers over HTTP that end inside a call: nobody may take it for whole, in any API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_kit import HttpHouse, http_house
from net_kit import TICK_S
from reply_kit import chatml
from trio.testing import MockClock

from uma_trio_sim.fake import linear_cost
from uma_trio_sim.scripted import ScriptedBackend

TEMPLATE = chatml(
    "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
SAYS = (
    "<tool_call>\n<function=bash>\n<parameter=command>\nrm -rf /tmp/build.sh\n</parameter>\n"
    "</function>\n</tool_call>"
)
#: Behind a marker, in a name, in a key, in the value, behind the value, in the last marker.
CUTS = [
    SAYS.index(mark) + len(mark)
    for mark in (
        "<tool_",
        "=ba",
        "=bash>\n",
        "=comm",
        "rm -rf /",
        "build.sh\n",
        "</parameter>",
        "</fun",
    )
]
FUNCTION = {"name": "bash", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "bash", "input_schema": SCHEMA}],
    },
}


def house() -> Any:
    """Run a daemon whose model calls a tool."""
    backend = ScriptedBackend(
        [list(SAYS.encode())],
        n_ctx=4096,
        n_batch=512,
        chat_template=TEMPLATE,
        cost=linear_cost(TICK_S, 0.0),
    )
    return http_house(backend=backend)


def texts(path: str, document: Any) -> tuple[str, list[Any], str]:
    """Return the text of a whole answer, the arguments of its calls, and what it says of its end."""
    if path.endswith("completions"):
        choice = document["choices"][0]
        made = choice["message"].get("tool_calls", [])
        arguments = [call["function"]["arguments"] for call in made]
        return choice["message"]["content"] or "", arguments, choice["finish_reason"]
    if path.endswith("responses"):
        text = "".join(
            part["text"]
            for i in document["output"]
            if i["type"] == "message"
            for part in i["content"]
        )
        found = [i for i in document["output"] if i["type"] == "function_call"]
        assert all(item["status"] == "incomplete" for item in found)
        return text, [item["arguments"] for item in found], document["status"]
    text = "".join(block.get("text", "") for block in document["content"])
    inputs = [block["input"] for block in document["content"] if block["type"] == "tool_use"]
    assert all(set(each) == {"arguments"} for each in inputs)
    return text, [each["arguments"] for each in inputs], document["stop_reason"]


def streamed(path: str, events: list[Any]) -> tuple[str, list[Any], str]:
    """Return the same of a stream, as clients join it."""
    if path.endswith("responses"):
        last = events[-1]
        assert last["type"] == "response.incomplete"
        pieces = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
        text, arguments, status = texts(path, last["response"])
        assert "".join(pieces) == "".join(arguments)
        return text, arguments, status
    if path.endswith("messages"):
        deltas = [event.get("delta", {}) for event in events]
        text = "".join(delta.get("text", "") for delta in deltas)
        arguments = "".join(delta.get("partial_json", "") for delta in deltas)
        (reason,) = [d["stop_reason"] for d in deltas if "stop_reason" in d]
        called = any(e.get("content_block", {}).get("type") == "tool_use" for e in events)
        return text, [arguments] if called else [], reason
    choices = [c for event in events if event != "[DONE]" for c in event["choices"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    calls = [piece for c in choices for piece in c["delta"].get("tool_calls", [])]
    arguments = "".join(piece["function"]["arguments"] for piece in calls)
    return text, [arguments] if calls else [], choices[-1]["finish_reason"]


async def cut(daemon: HttpHouse, path: str, at: int, *, stream: bool) -> tuple[str, list[Any], str]:
    """Return what an answer of so many tokens says; a token is a character."""
    most = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {**BODIES[path], most: at, "stream": stream, "temperature": 0}
    answer = await daemon.ask("POST", path, body)
    assert answer.status == 200, answer.body
    return streamed(path, answer.events) if stream else texts(path, answer.json)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_max_tokens_cut_is_no_whole_json(
    autojump_clock: MockClock, path: str, stream: bool
) -> None:
    """Its arguments stay open, no part of it is text, and the end is said to be the bound."""
    async with house() as daemon:
        for at in CUTS:
            text, calls, reason = await cut(daemon, path, at, stream=stream)
            assert (text, reason) == (
                "",
                {"/v1/chat/completions": "length", "/v1/responses": "incomplete"}.get(
                    path, "max_tokens"
                ),
            )
            for arguments in calls:
                assert '{"command": "rm -rf /tmp/build.sh"'.startswith(arguments)
                with pytest.raises(json.JSONDecodeError):
                    json.loads(arguments)
            assert len(calls) == (at > SAYS.index("<param"))
