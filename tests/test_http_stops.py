"""Stop strings over HTTP: they end the content, not the reasoning, and not what calls are written in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_kit import http_house
from net_kit import TICK_S
from reply_kit import HERMES_TEMPLATE, PREFILLED_TEMPLATE, THINKING_TEMPLATE
from trio.testing import MockClock

from uma_trio.text.stream import StopStrings
from uma_trio_sim.fake import linear_cost
from uma_trio_sim.scripted import ScriptedBackend

CHAT, RESPONSES, MESSAGES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)
THOUGHT = "Now END it, or look"
CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "the END of it"}}\n</tool_call>'
FUNCTION = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
}
USER = [{"role": "user", "content": "hi"}]


def house(says: str, template: str = PREFILLED_TEMPLATE) -> Any:
    backend = ScriptedBackend(
        [list(says.encode())],
        n_ctx=4096,
        n_batch=512,
        chat_template=template,
        cost=linear_cost(TICK_S, 0.0),
    )
    return http_house(backend=backend)


def body(path: str, stop: list[str], *, tools: bool = False, stream: bool = False) -> Any:
    if path == OLLAMA:
        options = {"stop": stop, "temperature": 0, "num_predict": 400, "repeat_penalty": 1}
        asked: dict[str, Any] = {"messages": USER, "options": options, "think": True}
    elif path == MESSAGES:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        asked = {"messages": USER, "stop_sequences": stop, "max_tokens": 2048, "temperature": 0}
        asked["thinking"] = thinking
    elif path == RESPONSES:
        asked = {"input": USER, "stop": stop, "max_output_tokens": 400, "temperature": 0}
    else:
        asked = {"messages": USER, "stop": stop, "max_tokens": 400, "temperature": 0}
    if tools:
        asked["tools"] = [{"type": "function", "function": FUNCTION}]
        if path == RESPONSES:
            asked["tools"] = [{"type": "function", **FUNCTION}]
        elif path == MESSAGES:
            asked["tools"] = [{"name": "look", "input_schema": FUNCTION["parameters"]}]
    return {**asked, "stream": stream}


def read(path: str, document: Any) -> tuple[str, str, str]:
    """Return the reasoning and the content of an answer, and how it ended."""
    if path == OLLAMA:
        message = document["message"]
        return message.get("thinking", ""), message["content"], document["done_reason"]
    if path == CHAT:
        choice = document["choices"][0]
        message = choice["message"]
        return message["reasoning_content"], message["content"] or "", choice["finish_reason"]
    if path == MESSAGES:
        blocks = document["content"]
        thoughts = "".join(block.get("thinking", "") for block in blocks)
        text = "".join(block.get("text", "") for block in blocks)
        return thoughts, text, document["stop_reason"]
    parts = {item["type"]: item.get("content", []) for item in document["output"]}
    texts = {
        kind: "".join(part["text"] for part in parts.get(kind, []))
        for kind in ("reasoning", "message")
    }
    return texts["reasoning"], texts["message"], document["status"]


ENDS = {CHAT: "stop", RESPONSES: "completed", MESSAGES: "stop_sequence", OLLAMA: "stop"}


@pytest.mark.parametrize("tools", [False, True], ids=["chat", "tools"])
@pytest.mark.parametrize("path", ENDS)
async def test_a_stop_string_cuts_the_content_and_not_the_reasoning(
    path: str, tools: bool, autojump_clock: MockClock
) -> None:
    async with house(f"{THOUGHT}\n</think>\n\nHello END there") as here:
        answer = await here.connect().ask("POST", path, body(path, ["END"], tools=tools))
        assert answer.status == 200, answer.body
        assert read(path, answer.json) == (THOUGHT, "Hello ", ENDS[path])


@pytest.mark.parametrize("tools", [False, True], ids=["chat", "tools"])
async def test_a_stream_holds_back_what_may_be_a_stop_string(
    tools: bool, autojump_clock: MockClock
) -> None:
    async with house(f"{THOUGHT}\n</think>\n\nHello EN END there") as here:
        asked = body(CHAT, ["END"], tools=tools, stream=True)
        answer = await here.connect().ask("POST", CHAT, asked)
        choices = [event["choices"][0] for event in answer.events[:-1] if event["choices"]]
        deltas = [choice["delta"] for choice in choices]
        assert "".join(d.get("reasoning_content") or "" for d in deltas) == THOUGHT
        assert "".join(d.get("content") or "" for d in deltas) == "Hello EN "
        assert choices[-1]["finish_reason"] == "stop"


async def test_a_stop_string_in_a_call_does_not_end_it(autojump_clock: MockClock) -> None:
    """Neither in the arguments, nor in the marker."""
    async with house(f"{THOUGHT}\n</think>\n\n{CALL}") as here:
        asked = body(CHAT, ["END", "tool_call"], tools=True)
        choice = (await here.connect().ask("POST", CHAT, asked)).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"what": "the END of it"}


async def test_what_was_held_back_comes_before_a_call(autojump_clock: MockClock) -> None:
    async with house(f"say EN{CALL}", THINKING_TEMPLATE) as here:
        asked = {**body(CHAT, ["END"], tools=True), "parallel_tool_calls": False}
        choice = (await here.connect().ask("POST", CHAT, asked)).json["choices"][0]
        assert choice["message"]["content"] == "say EN"
        assert len(choice["message"]["tool_calls"]) == 1


async def test_usage_ends_with_the_stop_string(autojump_clock: MockClock) -> None:
    """What the engine computes before it hears of the stop string is not part of the answer."""
    said = f"{THOUGHT}\n</think>\n\nHello END"
    async with house(said + " and so on" * 20) as here:
        answer = await here.connect().ask("POST", CHAT, body(CHAT, ["END"]))
        assert answer.json["usage"]["completion_tokens"] == len(said)


async def test_the_engine_stops_computing_soon_after_a_stop_string(
    autojump_clock: MockClock,
) -> None:
    said = f"{THOUGHT}\n</think>\n\nHello END"
    async with house(said + " and so on" * 30) as here:
        await here.connect().ask("POST", CHAT, body(CHAT, ["END"]))
        await here.inner.until_idle()
        assert len(said) <= here.inner.backend.decodes <= len(said) + 4


async def test_white_space_is_a_stop_string_once_it_is_content(autojump_clock: MockClock) -> None:
    """At the end of an answer, too, where it is held back because a call may follow."""
    for rest in ("\nmore", "\n"):
        async with house(f"{THOUGHT}\n</think>\n\nHello{rest}") as here:
            answer = await here.connect().ask("POST", CHAT, body(CHAT, ["\n"], tools=True))
            assert read(CHAT, answer.json) == (THOUGHT, "Hello", "stop")


async def test_each_of_several_answers_ends_at_its_own_stop_string(
    autojump_clock: MockClock,
) -> None:
    async with house(f"{THOUGHT}\n</think>\n\nHello END there") as here:
        answer = await here.connect().ask("POST", CHAT, {**body(CHAT, ["END"]), "n": 2})
        contents = [choice["message"]["content"] for choice in answer.json["choices"]]
        assert contents == ["Hello ", "Hello "]


async def test_a_raw_completion_ends_in_what_would_be_reasoning(autojump_clock: MockClock) -> None:
    async with house(f"<think>\n{THOUGHT}\n</think>\n\nHello") as here:
        for path in ("/v1/completions", "/completion"):
            asked = {"prompt": "hi", "stop": ["END"], "max_tokens": 90, "temperature": 0}
            answer = (await here.connect().ask("POST", path, asked)).json
            text = answer["choices"][0]["text"] if "choices" in answer else answer["content"]
            assert text == "<think>\nNow "


async def test_128_stop_strings_are_taken_and_129_are_not(autojump_clock: MockClock) -> None:
    async with house(f"{THOUGHT}\n</think>\n\nHello END there") as here:
        client = here.connect()
        many = [f"{number:03}" * 60 for number in range(127)]
        answer = await client.ask("POST", CHAT, body(CHAT, [*many, "END"]))
        assert read(CHAT, answer.json) == (THOUGHT, "Hello ", "stop")
        for path, named in ((CHAT, "stop"), (MESSAGES, "stop_sequences")):
            answer = await client.ask("POST", path, body(path, [*many, "END", "x"]))
            assert answer.status == 400
            assert named in answer.body.decode()
            assert "128" in answer.body.decode()


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 60}])
async def test_an_answer_with_tools_goes_on_where_its_end_is_excluded(
    field: dict[str, Any], autojump_clock: MockClock
) -> None:
    """A client that measures a server asks for answers of one length, with tools or without."""
    async with house("Hello", THINKING_TEMPLATE) as here:
        for temperature in (0, 1):
            more = {**field, "max_tokens": 60, "temperature": temperature, "seed": 1}
            asked = {**body(CHAT, [], tools=True), **more}
            answer = await here.connect().ask("POST", CHAT, asked)
            assert answer.status == 200, answer.body
            assert answer.json["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 300}])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_constraint_that_leaves_nothing_but_the_end_ends_the_answer(
    field: dict[str, Any], temperature: int, autojump_clock: MockClock
) -> None:
    async with house(CALL, HERMES_TEMPLATE) as here:
        more = {**field, "parallel_tool_calls": False, "temperature": temperature, "seed": 1}
        asked = {**body(CHAT, [], tools=True), **more, "tool_choice": "required"}
        choice = (await here.connect().ask("POST", CHAT, asked)).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert len(choice["message"]["tool_calls"]) == 1
        shaped = {**body(CHAT, []), **field, "guided_choice": ["yes", "no"], "seed": 1}
        choice = (await here.connect().ask("POST", CHAT, shaped)).json["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_in_reading_one_answer_ends_that_one_only(
    stream: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """It is found where the items of all requests are delivered."""
    push = StopStrings.push

    def broken(stops: StopStrings, text: str) -> str:
        if "o" in text:
            raise RuntimeError("a fault of ours")
        return push(stops, text)

    async with house(f"{THOUGHT}\n</think>\n\nHello END there") as here:
        other, mine = here.connect(), here.connect()
        await other.send("POST", CHAT, body(CHAT, []))
        with monkeypatch.context() as patch:
            patch.setattr(StopStrings, "push", broken)
            answer = await mine.ask("POST", CHAT, body(CHAT, ["END"], stream=stream))
        said = answer.events[-1] if stream else answer.json
        assert "error" in said, answer.body
        assert len(here.inner.log.faults) == 1
        here.inner.log.faults.clear()
        assert read(CHAT, (await other.answer()).json)[1] == "Hello END there"
        assert read(CHAT, (await here.ask("POST", CHAT, body(CHAT, ["END"]))).json)[1] == "Hello "


async def test_the_protocol_of_the_socket_has_the_same_stop_strings(
    autojump_clock: MockClock,
) -> None:
    asked = {"messages": USER, "stop": ["END"], "max_tokens": 400, "temperature": 0}
    async with house(f"{THOUGHT}\n</think>\n\nHello END there") as here:
        eos = (await here.ask("POST", "/generate", {**asked, "stream": False})).json
        assert (eos["reasoning"], eos["text"], eos["reason"]) == (THOUGHT, "Hello ", "stop")
        events = (await here.ask("POST", "/generate", asked)).events
        tokens = [event for event in events if event["event"] == "token"]
        text = "".join(token["text"] for token in tokens) + (events[-1].get("text") or "")
        assert (text, events[-1]["reason"]) == ("Hello ", "stop")
        assert "".join(token.get("reasoning") or "" for token in tokens) == THOUGHT
