"""Answers and events against the types of the APIs' own packages, strictly, as far as they are installed.

The packages accept more than clients in languages with strict types do. So the members that may be
null, but that the types of the packages for Node always have, are listed here.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from http_kit import HttpHouse, events_of, http_house
from net_kit import TICK_S
from reply_kit import THINKING_TEMPLATE
from trio.testing import MockClock

from uma_trio_sim.fake import linear_cost
from uma_trio_sim.scripted import ScriptedBackend

SAYS = (
    "<think>\nI look first.\n</think>\n\nLet me look."
    '<tool_call>\n{"name": "look", "arguments": {"x": "1"}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
HELLO = [{"role": "user", "content": "hello"}]
RESPONSE: dict[str, Any] = {
    "input": "hello",
    "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
    "max_output_tokens": 400,
    "temperature": 0,
}
MESSAGE: dict[str, Any] = {
    "messages": HELLO,
    "tools": [{"name": "look", "input_schema": SCHEMA}],
    "thinking": {"type": "adaptive"},
    "max_tokens": 400,
    "temperature": 0,
}
CHAT: dict[str, Any] = {
    "messages": HELLO,
    "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
    "max_tokens": 400,
    "temperature": 0,
}


def house(says: str = SAYS) -> Any:
    """Run a daemon whose model thinks, speaks and calls."""
    backend = ScriptedBackend(
        [list(says.encode())],
        n_ctx=4096,
        n_batch=512,
        chat_template=THINKING_TEMPLATE,
        cost=linear_cost(TICK_S, 0.0),
    )
    return http_house(backend=backend)


def by_type(union: Any) -> dict[str, Any]:
    """Return the models of a union of events by the type that they name."""
    (found, *_) = typing.get_args(union)  # inside Annotated
    return {
        typing.get_args(model.model_fields["type"].annotation)[0]: model
        for model in typing.get_args(found)
    }


def fits(model: Any, document: Any) -> None:
    """Check a document as JSON: no text is taken for a number."""
    model.model_validate_json(json.dumps(document), strict=True)


async def told(daemon: HttpHouse, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return an answer whole, and the events of it."""
    whole = await daemon.ask("POST", path, body)
    assert whole.status == 200, whole.body
    streamed = await daemon.ask("POST", path, {**body, "stream": True})
    assert streamed.status == 200, streamed.body
    return whole.json, [event for event in events_of(streamed.body) if event != "[DONE]"]


def inside(document: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Yield every object of a type in a document."""
    if isinstance(document, dict):
        if document.get("type") == kind:
            yield document
        document = [*document.values()]
    for inner in document if isinstance(document, list) else ():
        yield from inside(inner, kind)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"max_output_tokens": 12},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"tools": [], "text": {"verbosity": "low"}, "metadata": {"a": "b"}, "instructions": "x"},
        {"tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": False},
        {"return_progress": True, "timings_per_token": True},
    ],
    ids=str,
)
async def test_responses_are_of_the_packages_types(
    autojump_clock: MockClock, more: dict[str, Any]
) -> None:
    """The whole response, and each event by its own type."""
    types = pytest.importorskip("openai.types.responses")
    events = by_type(types.ResponseStreamEvent)
    async with house() as daemon:
        whole, streamed = await told(daemon, "/v1/responses", {**RESPONSE, **more})
        fits(types.Response, whole)
        assert len(streamed) > 4
        for event in streamed:
            fits(events[event["type"]], event)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"thinking": {"type": "disabled"}, "tools": []},
        {"max_tokens": 12},
        {"stop_sequences": ["me"]},
    ],
    ids=str,
)
async def test_messages_are_of_the_packages_types(
    autojump_clock: MockClock, more: dict[str, Any]
) -> None:
    """The whole message, and each event by its own type; also the list of models, and a count."""
    types = pytest.importorskip("anthropic.types")
    events = by_type(types.RawMessageStreamEvent)
    async with house() as daemon:
        whole, streamed = await told(daemon, "/v1/messages", {**MESSAGE, **more})
        fits(types.Message, whole)
        assert len(streamed) > 4
        for event in streamed:
            if event["type"] != "ping":
                fits(events[event["type"]], event)
        count = {"messages": MESSAGE["messages"], "tools": MESSAGE["tools"]}
        counted = await daemon.ask("POST", "/v1/messages/count_tokens", count)
        fits(types.MessageTokensCount, counted.json)
        models = await daemon.ask("GET", "/v1/models", anthropic_version="2023-06-01")
        for model in models.json["data"]:
            fits(types.ModelInfo, model)


@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 12}, {"tools": [], "n": 2}],
    ids=str,
)
async def test_chats_are_of_the_packages_types(
    autojump_clock: MockClock, more: dict[str, Any]
) -> None:
    """The whole completion, and each chunk; also the list of models."""
    types = pytest.importorskip("openai.types")
    async with house() as daemon:
        asked = {**CHAT, **more}
        whole = await daemon.ask("POST", "/v1/chat/completions", asked)
        fits(types.chat.ChatCompletion, whole.json)
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        asked |= {"timings_per_token": True, "return_progress": True}
        chunks = (await daemon.ask("POST", "/v1/chat/completions", asked)).events[:-1]
        assert len(chunks) > 4
        for chunk in chunks:
            fits(types.chat.ChatCompletionChunk, chunk)
        for model in (await daemon.ask("GET", "/v1/models")).json["data"]:
            fits(types.Model, model)


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True, "n": 2}], ids=str)
async def test_texts_are_of_the_packages_types(
    autojump_clock: MockClock, more: dict[str, Any]
) -> None:
    """The whole completion, and each chunk, apart from the reason that only the last one has."""
    types = pytest.importorskip("openai.types")
    async with house() as daemon:
        asked = {"prompt": "hello", "max_tokens": 8, **more}
        whole, streamed = await told(daemon, "/v1/completions", asked)
        fits(types.Completion, whole)
        for chunk in streamed:
            reasons = [choice.pop("finish_reason") for choice in chunk["choices"]]
            choices = [{**choice, "finish_reason": "stop"} for choice in chunk["choices"]]
            fits(types.Completion, {**chunk, "choices": choices})
            assert {*reasons} <= {None, "length", "stop"}


async def test_what_may_be_null_in_a_response_is_there(autojump_clock: MockClock) -> None:
    """Clients with strict types refuse a document without such a member."""
    always = {
        *("access_programs", "error", "incomplete_details", "instructions", "metadata"),
        *("parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p", "usage"),
        *("presence_penalty", "frequency_penalty", "top_logprobs", "truncation", "service_tier"),
        *("max_output_tokens", "max_tool_calls", "previous_response_id", "completed_at"),
    }
    async with house() as daemon:
        whole, streamed = await told(daemon, "/v1/responses", RESPONSE)
        for response in (whole, streamed[0]["response"], streamed[-1]["response"]):
            assert response.keys() >= always
            (tool,) = response["tools"]
            assert tool.keys() >= {"description", "name", "parameters", "strict", "type"}


async def test_what_may_be_null_in_a_message_is_there(autojump_clock: MockClock) -> None:
    """Clients with strict types refuse a document without such a member."""
    ends = {"container", "stop_details", "stop_reason", "stop_sequence"}
    counts = {
        *("cache_creation_input_tokens", "cache_read_input_tokens", "input_tokens"),
        *("output_tokens", "output_tokens_details", "server_tool_use"),
    }
    places = {"cache_creation", "inference_geo", "service_tier", "speed"}
    async with house() as daemon:
        whole, streamed = await told(daemon, "/v1/messages", MESSAGE)
        for message in (whole, streamed[0]["message"]):
            assert message.keys() >= {*ends, "diagnostics"}
            assert message["usage"].keys() >= counts | places
        (delta,) = inside(streamed, "message_delta")
        assert delta["delta"].keys() >= ends
        assert delta["usage"].keys() >= counts
        assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        uses = [*inside(whole, "tool_use"), *inside(streamed, "tool_use")]
        assert [use["caller"] for use in uses] == [{"type": "direct"}] * 2


async def test_a_message_may_be_sent_back_as_it_came(autojump_clock: MockClock) -> None:
    """With every member that its blocks have."""
    async with house() as daemon:
        whole = (await daemon.ask("POST", "/v1/messages", MESSAGE)).json
        (use,) = inside(whole, "tool_use")
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "found"}
        history = [
            *HELLO,
            {"role": "assistant", "content": whole["content"]},
            {"role": "user", "content": [result]},
        ]
        answer = await daemon.ask("POST", "/v1/messages", {**MESSAGE, "messages": history})
        assert answer.status == 200, answer.body
