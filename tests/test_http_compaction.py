"""Compaction over HTTP: one opaque item stands for a conversation, and is read back."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from http_kit import http_house
from net_kit import TICK_S
from reply_kit import HERMES_TEMPLATE, PREFILLED_TEMPLATE
from trio.testing import MockClock

from uma_trio.api.responses.messages import messages_of, seal_summary
from uma_trio_sim.fake import linear_cost
from uma_trio_sim.scripted import ScriptedBackend

PATH, COMPACT = "/v1/responses", "/v1/responses/compact"
USER = {"role": "user", "content": "Paint the shed, é\U0001f600."}
TRIGGER = {"type": "compaction_trigger"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
SUMMARY = "The shed is blue now. \u2028 Next: the fence."


def house(says: str = SUMMARY, template: str = HERMES_TEMPLATE) -> Any:
    backend = ScriptedBackend(
        [list(says.encode())],
        n_ctx=4096,
        n_batch=512,
        chat_template=template,
        cost=linear_cost(TICK_S, 0.0),
    )
    return http_house(backend=backend)


def asked(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"input": [USER, *items], "temperature": 0, **fields}


def heard(item: dict[str, Any]) -> str:
    """Return what the model reads of an item that is sent back."""
    found = messages_of(None, [item, {"role": "user", "content": "Go on."}], [].append)
    return "\n".join(message.content for message in found)


async def test_a_trigger_is_answered_with_one_item(autojump_clock: MockClock) -> None:
    async with house() as here:
        body = asked(TRIGGER, tools=[TOOL], text={"format": {"type": "json_object"}})
        response = (await here.ask("POST", PATH, body)).json
        (item,) = response["output"]
        assert set(item) == {"type", "id", "encrypted_content"}
        assert (item["type"], response["status"]) == ("compaction", "completed")
        assert SUMMARY in heard(item)
        assert response["usage"]["output_tokens"] == len(SUMMARY.encode())


@pytest.mark.parametrize("given", [[USER], USER["content"], [USER, TRIGGER]])
async def test_the_endpoint_of_compaction_does_the_same(
    given: Any, autojump_clock: MockClock
) -> None:
    async with house() as here:
        body = {"model": "x", "input": given, "temperature": 0, "tools": [TOOL]}
        answer = await here.ask("POST", COMPACT, body)
        assert (answer.status, answer.json["object"]) == (200, "response.compaction")
        (item,) = answer.json["output"]
        assert item["type"] == "compaction"
        assert SUMMARY in heard(item)
        assert answer.json["usage"]["total_tokens"] > 0


async def test_a_stream_has_one_item(autojump_clock: MockClock) -> None:
    async with house() as here:
        events = (await here.ask("POST", PATH, asked(TRIGGER, stream=True))).events
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:2] + kinds[-3:] == [
            *("created", "in_progress", "output_item.added", "output_item.done", "completed")
        ]
        (item,) = events[-1]["response"]["output"]
        assert item == events[-2]["item"]
        assert item["id"] == events[-3]["item"]["id"]
        assert SUMMARY in heard(item)
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))


async def test_reasoning_is_no_part_of_a_summary(autojump_clock: MockClock) -> None:
    async with house(f"Hm.\n</think>\n\n{SUMMARY}", PREFILLED_TEMPLATE) as here:
        body = asked(TRIGGER, reasoning={"effort": "high"})
        (item,) = (await here.ask("POST", PATH, body)).json["output"]
        assert "Hm." not in heard(item)
        assert SUMMARY in heard(item)


async def test_no_summary_is_an_error(autojump_clock: MockClock) -> None:
    """An empty item would lose the conversation."""
    async with house(" ") as here:
        for path, body in ((PATH, asked(TRIGGER)), (COMPACT, asked())):
            answer = await here.ask("POST", path, body)
            assert (answer.status, answer.error["code"]) == (500, "no_summary")
        last = (await here.ask("POST", PATH, asked(TRIGGER, stream=True))).events[-1]
        assert (last["type"], last["response"]["output"]) == ("response.failed", [])


async def test_a_summary_that_is_cut_off_is_incomplete(autojump_clock: MockClock) -> None:
    async with house() as here:
        response = (await here.ask("POST", PATH, asked(TRIGGER, max_output_tokens=6))).json
        assert response["status"] == "incomplete"
        assert [item["type"] for item in response["output"]] == ["compaction"]


async def test_the_summary_is_the_past_of_what_follows(autojump_clock: MockClock) -> None:
    async with house() as here:
        (item,) = (await here.ask("POST", COMPACT, asked())).json["output"]
        long = {"type": "compaction", "encrypted_content": seal_summary("é" * 40_000)}
        for body in (asked(item, USER), {"input": [item, USER]}, asked(item, TRIGGER)):
            assert (await here.ask("POST", PATH, body)).status == 200
        assert "é" * 40_000 in heard(long)


@pytest.mark.parametrize(
    "content",
    [
        "abc",
        None,
        7,
        "uma-compaction1:",
        "uma-compaction1:%%%",
        "uma-compaction1:é",
        "uma-compaction1:" + base64.b64encode(b"[1]").decode(),
        "uma-compaction1:" + base64.b64encode(b'{"summary":1}').decode(),
        "uma-compaction1:" + base64.b64encode(b"[" * 5000).decode(),
        "uma1:" + base64.b64encode(b"a thought").decode(),
    ],
)
async def test_an_item_of_another_server_is_refused(
    content: Any, autojump_clock: MockClock
) -> None:
    """Dropping it would lose the memory of the session without a word."""
    async with house() as here:
        body = asked({"type": "compaction", "encrypted_content": content})
        answer = await here.ask("POST", PATH, body)
        assert (answer.status, answer.error["param"]) == (400, "input[1].encrypted_content")


async def test_a_trigger_comes_last(autojump_clock: MockClock) -> None:
    async with house() as here:
        answer = await here.ask("POST", PATH, asked(TRIGGER, USER))
        assert (answer.status, answer.error["param"]) == (400, "input[1]")


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [(COMPACT, [], "input"), (COMPACT, [TRIGGER], "input[0]"), (PATH, [TRIGGER], "input[0]")],
)
async def test_there_is_no_summary_of_nothing(
    path: str, given: list[Any], param: str, autojump_clock: MockClock
) -> None:
    async with house() as here:
        answer = await here.ask("POST", path, {"input": given})
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_an_item_of_unknown_type_is_refused_by_name(autojump_clock: MockClock) -> None:
    async with house() as here:
        for item in ({"type": "hologram"}, {"type": "configuration_update"}, {"type": 7}):
            answer = await here.ask("POST", PATH, asked(item))
            assert (answer.status, answer.error["param"]) == (400, "input[1].type")
            assert str(item["type"]) in answer.error["message"]


async def test_a_record_of_a_server_is_ignored_and_named(autojump_clock: MockClock) -> None:
    async with house() as here:
        answer = await here.ask("POST", PATH, asked({"type": "web_search_call", "id": "ws"}))
        assert (answer.status, answer.headers["x-uma-ignored"]) == (200, "input[1] web_search_call")


def test_calls_of_built_in_tools_are_calls() -> None:
    """What they brought is what the conversation is about."""
    items = [
        USER,
        {"type": "shell_call", "id": "i", "call_id": "c", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "shed"}]},
        {"type": "local_shell_call", "call_id": "d", "action": {"command": ["pwd"]}},
        {"type": "local_shell_call_output", "id": "d", "output": "/home"},
        {"type": "mcp_call", "id": "m", "name": "paint", "arguments": "{}", "output": "blue"},
        {"type": "computer_call", "call_id": "e", "action": {"type": "screenshot"}},
        {
            "type": "computer_call_output",
            "call_id": "e",
            "output": {"type": "computer_screenshot", "image_url": "data:"},
        },
    ]
    unused: list[str] = []
    messages = messages_of(None, items, unused.append)
    calls = [(call.name, call.arguments) for message in messages for call in message.calls]
    assert calls == [
        ("shell", '{"action": {"commands": ["ls"]}}'),
        ("local_shell", '{"action": {"command": ["pwd"]}}'),
        ("paint", "{}"),
        ("computer", '{"action": {"type": "screenshot"}}'),
    ]
    results = [message.content for message in messages if message.role == "tool"]
    assert results[:3] == ['[{"stdout": "shed"}]', "/home", "blue"]
    assert "data:" not in results[3]
    assert unused == ["input[7].output computer_screenshot"]


async def test_tools_may_be_added_by_an_item(autojump_clock: MockClock) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    async with house(call) as here:
        more = {"type": "additional_tools", "role": "developer", "tools": [TOOL]}
        response = (await here.ask("POST", PATH, asked(more))).json
        assert next(item["type"] for item in response["output"]) == "function_call"


async def test_blocks_of_messages_are_read_known_or_refused(autojump_clock: MockClock) -> None:
    """Messages has a compaction block, too, with the summary in the open."""

    def said(*blocks: Any) -> dict[str, Any]:
        turns = [{"role": "assistant", "content": [*blocks]}, USER]
        return {"messages": [USER, *turns], "max_tokens": 4}

    async with house() as here:
        path = "/v1/messages"
        block = {"type": "compaction", "content": SUMMARY}
        plain = (await here.ask("POST", f"{path}/count_tokens", said())).json["input_tokens"]
        more = (await here.ask("POST", f"{path}/count_tokens", said(block))).json["input_tokens"]
        assert more > plain + len(SUMMARY)
        failed = {"type": "compaction", "content": None}
        assert (await here.ask("POST", path, said(failed))).status == 200
        use = {"type": "mcp_tool_use", "id": "m", "name": "f", "input": {}, "server_name": "s"}
        result = {"type": "mcp_tool_result", "tool_use_id": "m", "content": "blue"}
        answer = await here.ask("POST", path, said(use, result))
        assert (answer.status, answer.headers.get("x-uma-ignored")) == (200, None)
        answer = await here.ask("POST", path, said({"type": "server_tool_use", "id": "s"}))
        assert "server_tool_use" in answer.headers["x-uma-ignored"]
        answer = await here.ask("POST", path, said({"type": "hologram"}))
        assert (answer.status, answer.error["param"]) == (400, "messages[1].content[0].type")
        assert "hologram" in answer.error["message"]
