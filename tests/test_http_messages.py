"""``/v1/messages``: what is asked of the model, and what comes back, whole and as events."""

from __future__ import annotations

from typing import Any

import pytest
from http_kit import HttpHouse, events_of, http_house
from net_kit import TICK_S
from trio.testing import MockClock

from uma_trio.api.anthropic.messages import choice_of, goes_on, messages_of, tools_of
from uma_trio.api.chats import UNSEEN
from uma_trio.service.ask import Call, Chat, Message, Tool, ToolChoice
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost

PATH = "/v1/messages"
SAID = [{"role": "user", "content": "hello"}]
HELLO: dict[str, Any] = {"model": "any", "messages": SAID, "temperature": 0, "max_tokens": 8}


async def events(daemon: HttpHouse, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream; each is called by its type."""
    answer = await daemon.ask("POST", PATH, {**body, "stream": True})
    assert answer.status == 200, answer.body
    blocks = [block for block in answer.body.decode().split("\n\n") if block]
    names = [block.splitlines()[0].removeprefix("event: ") for block in blocks]
    found = events_of(answer.body)
    assert [event["type"] for event in found] == names
    return found


def read(messages: Any, system: Any = None) -> tuple[list[Message], list[str]]:
    """Return the neutral messages, and what was set aside."""
    aside: list[str] = []
    return list(messages_of(system, messages, aside.append)), aside


# --- answers ---


async def test_a_message_is_a_list_of_blocks(autojump_clock: MockClock) -> None:
    """The text, why it ended, what it took; any name of a model is served and repeated."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", PATH, HELLO, anthropic_version="2023-06-01")
        plain = await daemon.ask("POST", "/v1/chat/completions", HELLO)
        found = answer.json
        (block,) = found["content"]
        assert (block["type"], block["text"]) == (
            "text",
            plain.json["choices"][0]["message"]["content"],
        )
        assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "any")
        assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
        assert found["usage"]["output_tokens"] == 8
        assert answer.headers["request-id"] == found["id"]


async def test_a_message_is_streamed_as_it_grows(autojump_clock: MockClock) -> None:
    """Its block opens, grows and closes; the end says why, and what it took."""
    async with http_house() as daemon:
        whole = (await daemon.ask("POST", PATH, HELLO)).json
        start, begun, *deltas, stop, delta, end = await events(daemon, HELLO)
        assert start["message"]["content"] == []
        assert start["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert begun["content_block"]["type"] == "text"
        assert "".join(e["delta"]["text"] for e in deltas) == whole["content"][0]["text"]
        assert {e["index"] for e in [begun, *deltas, stop]} == {0}
        said = {key: value for key, value in delta["delta"].items() if value is not None}
        assert said == {"stop_reason": "max_tokens"}
        assert delta["usage"].items() <= whole["usage"].items()
        assert end == {"type": "message_stop"}


async def test_a_stop_sequence_is_told(autojump_clock: MockClock) -> None:
    """Which of them it was; it is not in the text."""
    async with http_house() as daemon:
        asked = {**HELLO, "max_tokens": 99, "stop_sequences": ["zzz", "e"]}
        found = (await daemon.ask("POST", PATH, asked)).json
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "e")
        assert "e" not in found["content"][0]["text"]


async def test_a_silent_stream_pings(autojump_clock: MockClock) -> None:
    """As the API does."""
    backend = FakeBackend(cost=linear_cost(12.0, 0))
    async with http_house(backend=backend, keep_alive_s=5.0) as daemon:
        found = await events(daemon, {**HELLO, "max_tokens": 2})
        assert [event["type"] for event in found].count("ping") >= 4


async def test_a_failure_in_mid_stream_is_an_error_event(autojump_clock: MockClock) -> None:
    """In the API's own form."""
    backend = FakeBackend(
        cost=linear_cost(TICK_S, 0), faults={n: InjectedFault(status=-3) for n in (5, 6)}
    )
    async with http_house(backend=backend) as daemon:
        last = (await events(daemon, {**HELLO, "max_tokens": 50}))[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")


async def test_a_format_is_kept_to(autojump_clock: MockClock) -> None:
    """By its name of today, and by the older one."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    async with http_house() as daemon:
        for asked in ({"output_config": {"format": form}}, {"output_format": form}):
            found = (await daemon.ask("POST", PATH, {**HELLO, "max_tokens": 300, **asked})).json
            assert "".join(found["content"][0]["text"].split()) == '{"a":1}'
            assert found["stop_reason"] == "end_turn"


async def test_the_last_word_of_the_assistant_is_gone_on_with(autojump_clock: MockClock) -> None:
    """A prefill is not repeated."""
    async with http_house() as daemon:
        prefill = [*SAID, {"role": "assistant", "content": "It was"}]
        found = (await daemon.ask("POST", PATH, {**HELLO, "messages": prefill})).json
        goes = {"messages": prefill, "continue_final_message": True}
        plain = await daemon.ask("POST", "/v1/chat/completions", {**HELLO, **goes})
        assert found["content"][0]["text"] == plain.json["choices"][0]["message"]["content"]


async def test_the_tokens_of_a_conversation_are_counted(autojump_clock: MockClock) -> None:
    """As many as an answer would have taken; nothing runs."""
    async with http_house() as daemon:
        asked = {"model": "any", "messages": SAID, "system": "x"}
        counted = (await daemon.ask("POST", f"{PATH}/count_tokens", asked)).json
        used = (await daemon.ask("POST", PATH, {**HELLO, **asked})).json["usage"]
        assert counted == {"input_tokens": used["input_tokens"]}


# --- errors ---


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "x", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_in_the_apis_own_form(
    autojump_clock: MockClock, body: dict[str, Any], param: str
) -> None:
    """With the field, and the id of the request."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", PATH, {**HELLO, **body})
        assert answer.status == 400
        assert (answer.json["type"], answer.error["type"]) == ("error", "invalid_request_error")
        assert answer.error["param"] == param
        assert answer.json["request_id"] == answer.headers["request-id"]


async def test_a_prompt_beyond_the_context_is_told_in_words_that_clients_know(
    autojump_clock: MockClock,
) -> None:
    """They shorten their conversation when they read them."""
    async with http_house(backend=FakeBackend(n_ctx=64, cost=linear_cost(TICK_S, 0))) as daemon:
        long = [{"role": "user", "content": "x" * 90}]
        answer = await daemon.ask("POST", PATH, {**HELLO, "messages": long})
        assert answer.status == 400
        assert answer.error["message"].startswith("prompt is too long: ")
        assert "tokens > 64 maximum" in answer.error["message"]


async def test_a_full_or_stopping_daemon_is_overloaded(autojump_clock: MockClock) -> None:
    """529 as the API has it, 429 for the queue, 401 for a key; each says its type."""
    async with http_house() as daemon:
        daemon.inner.service.stop_taking()
        answer = await daemon.ask("POST", PATH, HELLO)
        assert (answer.status, answer.error["type"]) == (529, "overloaded_error")
        assert int(answer.headers["retry-after"]) >= 1
    async with http_house(keys=(b"secret",)) as daemon:
        answer = await daemon.ask("POST", PATH, HELLO)
        assert (answer.status, answer.error["type"]) == (401, "authentication_error")
        assert (await daemon.ask("POST", PATH, HELLO, x_api_key="secret")).status == 200
        bearer = {"authorization": "Bearer secret"}
        assert (await daemon.ask("POST", PATH, HELLO, **bearer)).status == 200


async def test_telemetry_finds_nothing(autojump_clock: MockClock) -> None:
    """A plain 404."""
    async with http_house() as daemon:
        assert (await daemon.ask("POST", "/api/event_logging/batch", {})).status == 404


async def test_models_are_listed_as_the_caller_knows_them(autojump_clock: MockClock) -> None:
    """By the header that only Anthropic's clients send."""
    async with http_house() as daemon:
        listed = (await daemon.ask("GET", "/v1/models", anthropic_version="2023-06-01")).json
        (model,) = listed["data"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (
            *(model["id"],) * 2,
            False,
        )
        assert (model["type"], model["max_input_tokens"]) == ("model", 1024)
        one = await daemon.ask("GET", "/v1/models/x", anthropic_version="2023-06-01")
        assert (one.json["id"], one.json["type"]) == ("x", "model")
        assert (await daemon.ask("GET", "/v1/models")).json["object"] == "list"


# --- what the model reads ---


def test_blocks_of_one_side_are_one_message() -> None:
    """Thoughts, words and uses of a turn together; results with the name of what was used."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "w"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"é": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "r"}],
                },
                {"type": "text", "text": "c"},
            ],
        },
        {"role": "system", "content": "d"},
    ]
    found, aside = read(messages, [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}])
    assert found == [
        Message("system", "s1\ns2"),
        Message("user", "a\n\nb"),
        Message("assistant", "w", calls=(Call("1", "f", '{"é": 1}'),), reasoning="t"),
        Message("tool", "r", call_id="1", name="f"),
        Message("user", "c\n\nd"),
    ]
    assert aside == ["messages[1].content[1] redacted_thinking"]


def test_documents_of_text_are_read() -> None:
    """With their title; others are refused."""
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "title": "T", "source": source}
    parts = {"type": "content", "content": [{"type": "text", "text": "x"}]}
    content = [document, {"type": "document", "source": parts}]
    assert read([{"role": "user", "content": content}])[0] == [Message("user", "T\nbody\n\nx")]


def test_a_picture_that_a_tool_brought_is_told_of() -> None:
    """Refused, it would end the session of an agent, which sends it with each turn."""
    use = {"type": "tool_use", "id": "1", "name": "Read", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "data": "x"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image, *text_block("seen")]}
    found, aside = read(
        [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    )
    assert found[-1].content == f"{UNSEEN}\nseen"
    assert aside == ["messages[1].content[0].content[0] image"]


def text_block(said: str) -> list[dict[str, str]]:
    """Return a content of one block."""
    return [{"type": "text", "text": said}]


def test_a_checksum_of_the_request_does_not_reach_the_prompt() -> None:
    """It differs in each request; the rest of its line stays, and so does all other text."""
    line = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
    one, other = (
        [{"type": "text", "text": line.format(checksum)}] for checksum in ("fa690", "1c8b4")
    )
    (said,) = read(SAID, one)[0][:1]
    assert said == read(SAID, other)[0][0]
    assert "cc_version=2.1.37.0d9; cc_entrypoint=cli;" in said.content
    assert read(SAID, "cch=fa690;")[0][0].content == "cch=fa690;"


def test_only_words_at_the_end_are_gone_on_with() -> None:
    """Not a use of a tool, nor an empty text."""
    said = {"role": "assistant", "content": "x"}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}
    assert goes_on([said])
    assert goes_on([{**said, "content": [{"type": "text", "text": "x"}]}])
    assert not any(map(goes_on, ([used], SAID, [{**said, "content": " "}], [])))


def test_tools_of_the_client_are_read() -> None:
    """Those of Anthropic's machines are set aside."""
    aside: list[str] = []
    tools = [
        {"name": "f", "description": "d", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "custom", "name": "g", "input_schema": {}, "strict": True},
    ]
    assert tools_of(tools, aside.append) == (
        Tool("f", "d", {"type": "object"}),
        Tool("g", strict=True),
    )
    assert aside == ["tools[1] web_search_20250305"]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", (), False)),
        ({"type": "tool", "name": "f"}, ToolChoice("required", ("f",))),
    ],
    ids=str,
)
def test_every_form_of_a_choice_is_read(value: Any, wanted: ToolChoice) -> None:
    """And whether several are called at once."""
    assert choice_of(value) == wanted


@pytest.mark.parametrize(
    ("body", "effort", "budget"),
    [
        ({}, "none", None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none", None),
        ({"thinking": {"type": "adaptive"}}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, None, 2000),
        ({"output_config": {"effort": "max"}}, "xhigh", None),
    ],
    ids=str,
)
async def test_how_much_is_thought(
    autojump_clock: MockClock, body: dict[str, Any], effort: str | None, budget: int | None
) -> None:
    """Where nobody says there are no thoughts, as the API has it."""
    async with http_house() as daemon:
        client = daemon.connect()
        await client.send("POST", PATH, {**HELLO, **body, "stream": True})
        await client.head()
        (running,) = daemon.inner.service.directory
        assert isinstance(running.ask.prompt, Chat)
        assert (running.ask.prompt.manner.effort, running.ask.reasoning_budget) == (effort, budget)
        client.close()
