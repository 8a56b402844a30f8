"""``/v1/responses``: what is asked of the model, and what comes back, whole and as events."""

from __future__ import annotations

from typing import Any

import pytest
from http_kit import HttpHouse, events_of, http_house
from net_kit import TICK_S
from trio.testing import MockClock

from uma_trio.api.chats import UNSEEN
from uma_trio.api.responses import messages as responses_input
from uma_trio.api.responses.messages import choice_of, messages_of, tools_of
from uma_trio.service.ask import Call, Chat, Message, ToolChoice
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"input": "hello", "temperature": 0, "max_output_tokens": 8}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}


async def events(daemon: HttpHouse, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream; each is called by its type and numbered."""
    answer = await daemon.ask("POST", PATH, {**body, "stream": True})
    assert answer.status == 200, answer.body
    blocks = [block for block in answer.body.decode().split("\n\n") if block]
    names = [block.splitlines()[0].removeprefix("event: ") for block in blocks]
    found = events_of(answer.body)
    assert [event["type"] for event in found] == names
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def read(items: Any, instructions: str | None = None) -> tuple[list[Message], list[str]]:
    """Return the messages that items say, and what was set aside."""
    aside: list[str] = []
    return list(messages_of(instructions, items, aside.append)), aside


# --- answers ---


async def test_a_response_is_a_list_of_items(autojump_clock: MockClock) -> None:
    """One message here, with its text; nothing is kept."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", PATH, {**HELLO, "metadata": {"a": "b"}, "store": True})
        found = answer.json
        (item,) = found["output"]
        assert (item["type"], item["role"]) == ("message", "assistant")
        assert item["content"][0]["type"] == "output_text"
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        plain = await daemon.ask("POST", "/v1/chat/completions", {**chat, "temperature": 0})
        assert item["content"][0]["text"] == plain.json["choices"][0]["message"]["content"]
        assert found["usage"]["output_tokens"] == 8
        assert found["usage"]["input_tokens"] == plain.json["usage"]["prompt_tokens"]
        assert (found["object"], found["store"], found["metadata"]) == (
            "response",
            False,
            {"a": "b"},
        )
        assert found["id"].startswith("resp_")


async def test_an_answer_that_is_cut_off_is_incomplete(autojump_clock: MockClock) -> None:
    """The response says why, and so does its last item; what ends by itself is complete."""
    async with http_house() as daemon:
        cut = (await daemon.ask("POST", PATH, HELLO)).json
        assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")
        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
        asked = {**HELLO, "stop": ["e", " "], "max_output_tokens": 99}
        whole = (await daemon.ask("POST", PATH, asked)).json
        assert (whole["status"], whole["incomplete_details"]) == ("completed", None)


async def test_a_response_is_streamed_as_it_grows(autojump_clock: MockClock) -> None:
    """Every item opens, grows and closes; the last event holds what a whole answer is."""
    async with http_house() as daemon:
        found = await events(daemon, {**HELLO, "stop": ["q"], "max_output_tokens": 30})
        kinds = [event["type"].removeprefix("response.") for event in found]
        deltas = [event for event in found if event["type"].endswith("output_text.delta")]
        assert kinds == [
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *["output_text.delta"] * len(deltas),
            *("output_text.done", "content_part.done", "output_item.done"),
            found[-1]["response"]["status"],
        ]
        assert found[0]["response"]["output"] == []
        text = "".join(event["delta"] for event in deltas)
        (item,) = found[-1]["response"]["output"]
        assert found[-2]["item"] == item
        assert item["content"][0]["text"] == text == found[-4]["text"]
        at = {(event["item_id"], event["output_index"], event["content_index"]) for event in deltas}
        assert at == {(item["id"], 0, 0)}
        whole = await daemon.ask("POST", PATH, {**HELLO, "stop": ["q"], "max_output_tokens": 30})
        assert whole.json["output"][0]["content"] == item["content"]


async def test_each_delta_of_a_response_may_have_the_timings(autojump_clock: MockClock) -> None:
    """Beside the delta, as the last event and a whole response always have them."""
    async with http_house() as daemon:
        plain = await events(daemon, HELLO)
        timed = await events(daemon, {**HELLO, "timings_per_token": True, "return_progress": True})
        assert ["timings" in event for event in plain] == [False] * (len(plain) - 1) + [True]
        deltas = [event for event in timed if event["type"] == "response.output_text.delta"]
        counts = [event["timings"]["predicted_n"] for event in deltas]
        assert counts == sorted(set(counts))
        assert counts[-1] <= 8 == timed[-1]["timings"]["predicted_n"]
        progress = [event for event in timed if "prompt_progress" in event]
        assert progress
        assert {event["timings"]["predicted_n"] for event in progress} == {0}
        bare = [event["delta"] for event in plain if event["type"] == deltas[0]["type"]]
        assert [event["delta"] for event in deltas] == bare
        whole = (await daemon.ask("POST", PATH, HELLO)).json
        assert whole["timings"]["predicted_n"] == 8


async def test_a_silent_stream_says_where_it_is(autojump_clock: MockClock) -> None:
    """Clients count events: a comment would not keep them waiting."""
    backend = FakeBackend(cost=linear_cost(12.0, 0))
    async with http_house(backend=backend, keep_alive_s=5.0) as daemon:
        found = await events(daemon, {**HELLO, "max_output_tokens": 2})
        states = [event for event in found if event["type"] == "response.in_progress"]
        assert len(states) >= 5
        assert states[-1]["response"]["status"] == "in_progress"
        assert found[-1]["type"] == "response.incomplete"


async def test_a_failure_in_mid_stream_is_a_failed_response(autojump_clock: MockClock) -> None:
    """With a code, and what was said so far."""
    backend = FakeBackend(
        cost=linear_cost(TICK_S, 0), faults={n: InjectedFault(status=-3) for n in (5, 6)}
    )
    async with http_house(backend=backend) as daemon:
        found = await events(daemon, {**HELLO, "max_output_tokens": 50})
        last = found[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"


async def test_probabilities_come_where_they_are_asked_for(autojump_clock: MockClock) -> None:
    """In the part of a whole answer, and in each delta of a stream."""
    async with http_house() as daemon:
        asked = {**HELLO, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        part = (await daemon.ask("POST", PATH, asked)).json["output"][0]["content"][0]
        assert len(part["logprobs"]) == 8
        assert all(len(token["top_logprobs"]) == 2 for token in part["logprobs"])
        deltas = [e for e in await events(daemon, asked) if e["type"].endswith("text.delta")]
        assert [token for event in deltas for token in event["logprobs"]] == part["logprobs"]


async def test_a_format_is_kept_to(autojump_clock: MockClock) -> None:
    """A schema, or any object."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schema["additionalProperties"] = False
    async with http_house() as daemon:
        asked = {**HELLO, "max_output_tokens": 300}
        wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        answer = await daemon.ask("POST", PATH, {**asked, "text": wanted})
        text = answer.json["output"][0]["content"][0]["text"]
        assert "".join(text.split()) == '{"a":1}'
        assert answer.json["text"] == wanted
        wanted["format"]["schema"] = {"not": {}}
        error = (await daemon.ask("POST", PATH, {**asked, "text": wanted})).error
        assert error["param"] == "text.format"


async def test_an_answer_may_take_all_the_room_there_is(autojump_clock: MockClock) -> None:
    """Where nothing is said, as the API has it: an agent's answer is not cut off at some default."""
    async with http_house(backend=FakeBackend(n_ctx=600, cost=linear_cost(TICK_S, 0))) as daemon:
        for path, asked in (
            (PATH, {"input": "hello"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ):
            answer = await daemon.ask("POST", path, {**asked, "ignore_eos": True})
            usage = answer.json["usage"]
            asked_, answered = (
                usage.get(f"{a}_tokens", usage.get(f"{b}_tokens"))
                for a, b in (("input", "prompt"), ("output", "completion"))
            )
            assert asked_ + answered == 600


async def test_how_much_is_thought_and_whose_turn_it_is(autojump_clock: MockClock) -> None:
    """Reach the service: effort, budget, and the name of the conversation."""
    async with http_house() as daemon:
        client = daemon.connect()
        asked = {"reasoning": {"effort": "max"}, "reasoning_budget": 64, "prompt_cache_key": "c"}
        await client.send("POST", PATH, {**HELLO, **asked, "stream": True})
        await client.head()
        (running,) = daemon.inner.service.directory
        ask = running.ask
        assert isinstance(ask.prompt, Chat)
        assert (ask.prompt.manner.effort, ask.reasoning_budget, ask.session) == ("xhigh", 64, "c")
        client.close()


# --- what is refused ---


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**FUNCTION, "parameters": "x"}]}, "tools[0].parameters"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [FUNCTION]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": "x"}, "text"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_by_name(
    autojump_clock: MockClock, body: dict[str, Any], param: str
) -> None:
    """With 400, before anything runs."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", PATH, {**HELLO, **body})
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_an_input_beyond_the_context_is_refused_by_its_name(
    autojump_clock: MockClock,
) -> None:
    """Before the head of a stream, too."""
    async with http_house(backend=FakeBackend(n_ctx=64, cost=linear_cost(TICK_S, 0))) as daemon:
        answer = await daemon.ask("POST", PATH, {**HELLO, "input": "x" * 90, "stream": True})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == "input"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/resp_1"), ("DELETE", "/resp_1"), ("POST", "/resp_1/cancel"), ("GET", "/r/input")],
)
async def test_no_response_is_kept(autojump_clock: MockClock, method: str, path: str) -> None:
    """404, with what to do instead."""
    async with http_house() as daemon:
        body = {} if method == "POST" else None
        answer = await daemon.ask(method, f"{PATH}{path}", body)
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
        assert "whole input" in answer.error["message"]


async def test_what_only_openai_can_do_is_set_aside(autojump_clock: MockClock) -> None:
    """Agents send it whether it is there or not; a header names it, a strict daemon refuses it."""
    tools = [{"type": "web_search"}, {"type": "custom", "name": "x"}, {"type": "local\r\nX: y"}]
    asked = {**HELLO, "tools": tools, "truncation": "auto"}
    async with http_house() as daemon:
        answer = await daemon.ask("POST", PATH, asked)
        assert answer.status == 200
        named = answer.headers["x-uma-ignored"]
        assert named.startswith("truncation, tools[0] web_search, tools[1] custom, tools[2] (a")
        assert "x" not in answer.headers
    async with http_house(strict=True) as daemon:
        answer = await daemon.ask("POST", PATH, {**HELLO, "model": "fake", "tools": tools})
        assert answer.error["param"] == "tools[0] web_search"


async def test_the_tokens_of_an_input_are_counted(autojump_clock: MockClock) -> None:
    """As many as an answer would have taken."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", f"{PATH}/input_tokens", {"input": "hello"})
        used = (await daemon.ask("POST", PATH, HELLO)).json["usage"]["input_tokens"]
        assert answer.json == {"object": "response.input_tokens", "input_tokens": used}


# --- what the model reads ---


def test_instructions_and_first_words_are_one_system_message() -> None:
    """Templates take one; what an application says later comes from the user, where it stands."""
    items = [
        {"role": "developer", "content": "b"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "c"}]},
        {"role": "user", "content": "d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "f"}]},
        {"role": "developer", "content": "g"},
    ]
    assert read(items, "a")[0] == [
        Message("system", "a\n\nb\n\nc"),
        Message("user", "d\n\ne"),
        Message("assistant", "f"),
        Message("user", "g"),
    ]


def test_thoughts_words_and_calls_of_one_turn_are_one_message() -> None:
    """Results follow, with the name of what was called."""
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": "w"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "é"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {
            "type": "custom_tool_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "s"}],
        },
        {"type": "web_search_call", "id": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in vain"}]},
    ]
    calls = (Call("1", "f", "{}"), Call("2", "g", '{"input": "é"}'))
    messages, aside = read(items)
    assert messages == [
        Message("user", "go"),
        Message("assistant", "w", calls=calls, reasoning="t"),
        Message("tool", "r", call_id="1", name="f"),
        Message("tool", "s", call_id="2", name="g"),
    ]
    assert aside == ["input[7] web_search_call"]


def test_a_picture_that_a_tool_brought_is_told_of() -> None:
    """Refused, it would end the session of an agent, which sends it with each turn."""
    image = {"type": "input_image", "image_url": "data:"}
    parts = [{"type": "input_text", "text": "a"}, image]
    output = {"type": "function_call_output", "call_id": "1", "output": parts}
    messages, aside = read([output])
    assert messages == [Message("tool", f"a\n{UNSEEN}", call_id="1")]
    assert aside == ["input[0].output[1] input_image"]


def test_a_sealed_thought_comes_back() -> None:
    """Codex carries no thoughts in the open; what others sealed is not read."""
    sealed = responses_input.seal("hm é")
    for given, wanted in ((sealed, "hm é"), ("gAAAAB", ""), (sealed[:-3], ""), (None, "")):
        items = [
            {"type": "reasoning", "summary": [], "encrypted_content": given},
            {"role": "assistant", "content": "x"},
        ]
        assert read(items)[0] == [Message("assistant", "x", reasoning=wanted)]


def test_functions_in_namespaces_have_one_name_for_the_model() -> None:
    """A call of one is answered with both parts of its name."""
    space = {"type": "namespace", "name": "mcp__fs", "tools": [FUNCTION, {"type": "custom"}]}
    aside: list[str] = []
    tools = tools_of([FUNCTION, space], aside.append)
    assert [tool.name for tool in tools.functions] == ["look", "mcp__fs__look"]
    assert tools.place("mcp__fs__look") == {"namespace": "mcp__fs", "name": "look"}
    assert tools.place("look") == {"name": "look"}
    assert aside == ["tools[1].tools[1]"]
    named = {"type": "function", "name": "look", "namespace": "mcp__fs"}
    assert choice_of(named, parallel=True).names == ("mcp__fs__look",)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, ToolChoice("auto")),
        ("required", ToolChoice("required")),
        ("none", ToolChoice("none")),
        ({"type": "function", "name": "f"}, ToolChoice("required", ("f",))),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
            },
            ToolChoice("auto", ("f",)),
        ),
    ],
    ids=str,
)
def test_every_form_of_a_choice_is_read(value: Any, wanted: ToolChoice) -> None:
    """Among functions."""
    assert choice_of(value, parallel=True) == wanted
