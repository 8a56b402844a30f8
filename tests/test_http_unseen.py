"""Parts of a tool's result that are no text: the model reads a sentence instead, in every API."""

from __future__ import annotations

from typing import Any

import pytest
from http_kit import http_house
from net_kit import TICK_S
from reply_kit import HERMES_TEMPLATE
from trio.testing import MockClock

from uma_trio.api.chats import UNSEEN
from uma_trio_sim.fake import FakeBackend, linear_cost

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "f"}}
TEXT = {"type": "text", "text": "done"}
FUNCTION = {"name": "look", "arguments": "{}"}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
USER: dict[str, Any] = {"role": "user", "content": "x"}


def house(**settings: Any) -> Any:
    backend = FakeBackend(
        chat_template=HERMES_TEMPLATE, n_ctx=4096, n_batch=512, cost=linear_cost(TICK_S, 0.0)
    )
    return http_house(backend=backend, **settings)


def chat(*parts: Any) -> dict[str, Any]:
    result = {"role": "tool", "tool_call_id": "c1", "content": [*parts]}
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return {"messages": [USER, calls, result]}


def responses(*parts: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c1", **FUNCTION}
    output = {"type": "function_call_output", "call_id": "c1", "output": [*parts]}
    return {"input": [USER, call, output]}


def messages(*parts: Any) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [*parts]}
    said = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"messages": said, "max_tokens": 4}


def ollama(*parts: Any) -> dict[str, Any]:
    return {**chat(*parts), "stream": False}


CASES = {
    "/v1/chat/completions": (chat(TEXT, IMAGE), chat(AUDIO), chat(FILE, TEXT)),
    "/v1/responses": (
        responses(TEXT, {"type": "input_image", "image_url": "x"}),
        responses(AUDIO),
        responses({"type": "input_file", "file_id": "f"}),
    ),
    "/v1/messages": (
        messages(TEXT, {"type": "image", "source": {"type": "url", "url": "x"}}),
        messages({"type": "audio"}),
        messages({"type": "document", "source": {"type": "base64", "data": "AA=="}}),
    ),
    "/api/chat": (ollama(TEXT, IMAGE), ollama(AUDIO)),
    "/apply-template": (chat(TEXT, IMAGE), chat(AUDIO)),
}


@pytest.mark.parametrize("path", CASES)
async def test_a_result_with_other_than_text_is_taken_and_named(
    path: str, autojump_clock: MockClock
) -> None:
    async with house() as here:
        for body in CASES[path]:
            answer = await here.ask("POST", path, body)
            assert answer.status == 200, answer.body
            assert "[" in answer.headers["x-uma-ignored"]


async def test_the_model_reads_a_sentence_beside_the_text(autojump_clock: MockClock) -> None:
    async with house() as here:
        answer = await here.ask("POST", "/apply-template", chat(TEXT, IMAGE))
        assert f"done\n{UNSEEN}" in answer.json["prompt"]


async def test_images_beside_a_result_of_ollama_are_taken(autojump_clock: MockClock) -> None:
    async with house() as here:
        body = ollama(TEXT)
        body["messages"][-1]["images"] = ["iVBORw0KGgo="]
        answer = await here.ask("POST", "/api/chat", body)
        assert (answer.status, answer.headers["x-uma-ignored"]) == (200, "messages[2].images")


async def test_an_image_of_the_user_is_refused(autojump_clock: MockClock) -> None:
    async with house() as here:
        body = {"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}
        answer = await here.ask("POST", "/v1/chat/completions", body)
        assert (answer.status, answer.error["param"]) == (400, "messages[0].content[1]")


async def test_a_strict_daemon_refuses_what_it_would_replace(autojump_clock: MockClock) -> None:
    async with house(strict=True) as here:
        for path in ("/v1/chat/completions", "/apply-template"):
            assert (await here.ask("POST", path, chat(IMAGE))).status == 400
