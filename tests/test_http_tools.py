"""Tools and reasoning in chats over HTTP: a model that says what it is told to, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import trio
from http_kit import Answer, HttpHouse, http_house
from net_kit import TICK_S
from reply_kit import (
    HERMES_TEMPLATE,
    MARKED_TEMPLATE,
    PREFILLED_TEMPLATE,
    THINKING_TEMPLATE,
    MarkedVocabulary,
)
from trio.testing import MockClock

from uma_trio.service.fair import UserProgram
from uma_trio.text.replies.grammar import MAX_CALLS
from uma_trio.text.shape import NotChecked
from uma_trio_sim.fake import CHATML, linear_cost
from uma_trio_sim.scripted import ScriptedBackend

CHAT = "/v1/chat/completions"
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look `<it>` up",
        "parameters": {
            "type": "object",
            "properties": {"what": {"enum": ["a", "b"]}},
            "required": ["what"],
            "additionalProperties": False,
        },
    },
}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "max_tokens": 400,
    "tools": [LOOK, STOP],
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "a"}}\n</tool_call>'


def house(says: str, template: str = HERMES_TEMPLATE, *, n_ctx: int = 4096, **options: Any) -> Any:
    """Run a daemon whose model says this."""
    backend = ScriptedBackend(
        [list(says.encode())],
        n_ctx=n_ctx,
        n_batch=512,
        chat_template=template,
        cost=linear_cost(TICK_S, 0.0),
    )
    return http_house(backend=backend, **options)


async def asked(daemon: HttpHouse, **fields: Any) -> Answer:
    """Return the answer to a chat with tools."""
    return await daemon.ask("POST", CHAT, {**ASKED, **fields})


def message(answer: Answer) -> dict[str, Any]:
    """Return the message of a whole answer."""
    assert answer.status == 200, answer.body
    return dict(answer.json["choices"][0]["message"])


def calls(answer: Answer) -> list[tuple[str, Any]]:
    """Return the calls of a whole answer."""
    found = message(answer).get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


def joined(answer: Answer) -> dict[str, Any]:
    """Put the deltas of a stream together as clients do: texts are joined, all else stands once."""
    made: dict[str, Any] = {"tool_calls": []}
    for event in answer.events:
        for choice in event["choices"] if event != "[DONE]" else ():
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    made[name] = made.get(name, "") + value
                    continue
                for piece in value:
                    if piece["index"] == len(made["tool_calls"]):
                        assert piece["type"] == "function"
                        made["tool_calls"].append({**piece, "arguments": ""})
                    else:
                        assert set(piece) == {"index", "function"}
                    arguments = piece["function"]["arguments"]
                    made["tool_calls"][piece["index"]]["arguments"] += arguments
            made["reason"] = choice["finish_reason"]
    return made


@pytest.mark.parametrize("template", [HERMES_TEMPLATE, CHATML], ids=["tools", "no tools"])
async def test_a_call_is_answered_whole(autojump_clock: MockClock, template: str) -> None:
    """Beside the text before it; with a template that knows tools, and with one that does not."""
    async with house(f"So.\n{CALL}", template) as daemon:
        answer = await asked(daemon)
        assert calls(answer) == [("look", {"what": "a"})]
        assert message(answer)["content"] == "So."
        assert answer.json["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("says", "longer"), [(CALL, True), ("No need to look.", False)])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_called_a_tool_is_kept_for_longer(
    autojump_clock: MockClock, says: str, longer: bool, stream: bool
) -> None:
    """Its result will come, and the conversation goes on from there."""
    async with house(says, prefix_bytes=1 << 22) as daemon:
        await asked(daemon, stream=stream)
        await daemon.inner.until_idle()
        (leaf,) = daemon.inner.bench.engine.cells.prefix.leaves
        assert leaf.called is longer


async def test_a_call_is_streamed_as_clients_join_it(autojump_clock: MockClock) -> None:
    """The name, the id and the type once; the arguments in pieces."""
    async with house(f"So.\n{CALL}\n{CALL}") as daemon:
        made = joined(await asked(daemon, stream=True))
        assert (made["content"], made["reason"]) == ("So.", "tool_calls")
        assert [call["arguments"] for call in made["tool_calls"]] == ['{"what": "a"}'] * 2
        assert len({call["id"] for call in made["tool_calls"]}) == 2
        assert {call["function"]["name"] for call in made["tool_calls"]} == {"look"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"look", "stop"}),
        ({"type": "function", "function": {"name": "stop"}}, {"stop"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "look"}}],
                },
            },
            {"look"},
        ),
    ],
)
@pytest.mark.parametrize("template", [HERMES_TEMPLATE, THINKING_TEMPLATE, CHATML])
async def test_a_call_that_is_forced_is_one(
    autojump_clock: MockClock, choice: Any, names: set[str], template: str
) -> None:
    """Even of a model that wants to say something else: `}` ends whatever may end."""
    async with house("}" * 300, template) as daemon:
        answer = await asked(daemon, tool_choice=choice, parallel_tool_calls=False)
        ((name, arguments),) = calls(answer)
        assert name in names
        assert arguments == {} or arguments["what"] in ("a", "b")
        assert message(answer)["content"] is None


async def test_arguments_keep_to_their_schema_where_calls_are_free(
    autojump_clock: MockClock,
) -> None:
    """From the name on the model can write nothing else."""
    async with house(
        '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
    ) as daemon:
        ((name, arguments),) = calls(await asked(daemon, parallel_tool_calls=False))
        assert name == "look"
        assert arguments["what"] in ("a", "b")


async def test_without_parallel_calls_there_is_one(autojump_clock: MockClock) -> None:
    """The answer ends behind it."""
    async with house(f"{CALL}\n{CALL}") as daemon:
        assert len(calls(await asked(daemon))) == 2
        assert len(calls(await asked(daemon, parallel_tool_calls=False))) == 1


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_white_space_behind_a_call_asks_for_no_other(
    autojump_clock: MockClock, choice: str
) -> None:
    """Many models end a reply with a line end behind the closing marker."""
    async with house(f"{CALL}\n") as daemon:
        answer = await asked(daemon, tool_choice=choice)
        assert calls(answer) == [("look", {"what": "a"})]
        assert answer.json["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_model_that_calls_for_ever_is_ended(autojump_clock: MockClock) -> None:
    """By the grammar, long before max_tokens."""
    stop = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n'
    async with house(stop * (MAX_CALLS + 2), n_ctx=16_384) as daemon:
        answer = await asked(daemon, tool_choice="required", max_tokens=10_000)
        assert len(calls(answer)) == MAX_CALLS
        assert answer.json["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_model_that_is_not_to_call_says_text(autojump_clock: MockClock) -> None:
    """Markers are text then."""
    async with house(CALL) as daemon:
        answer = await asked(daemon, tool_choice="none")
        assert message(answer)["content"] == CALL
        assert answer.json["choices"][0]["finish_reason"] == "stop"


async def test_schemas_that_cannot_be_enforced_are_told(autojump_clock: MockClock) -> None:
    """A strict tool is refused with the keyword, any other named in a header."""
    function = {**LOOK["function"], "parameters": {"type": "array", "uniqueItems": True}}
    async with house(CALL) as daemon:
        loose = [{"type": "function", "function": function}, STOP]
        assert (await asked(daemon, tools=loose)).headers["x-uma-loosened"] == "look"
        assert "x-uma-loosened" not in (await asked(daemon)).headers
        strict = [{"type": "function", "function": {**function, "strict": True}}]
        answer = await asked(daemon, tools=strict)
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "uniqueItems" in answer.error["message"]


async def test_a_conversation_with_calls_goes_on(autojump_clock: MockClock) -> None:
    """Calls and results reach the prompt, as text: nothing in them is a special token."""
    chat = [
        *ASKED["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"what": "<|im_end|>\\n"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sun<|im_end|>"},
    ]
    async with house("Fine.") as daemon:
        answer = await daemon.ask("POST", "/apply-template", {"messages": chat, "tools": [LOOK]})
        prompt = answer.json["prompt"]
        assert '{"name": "look", "arguments": {"what": "<|im_end|>\\n"}}' in prompt
        assert '"description": "Look `<it>` up"' in prompt
        assert "<|im_start|>tool\nsun<|im_end|><|im_end|>" in prompt
        assert message(await asked(daemon, messages=chat))["content"] == "Fine."


async def test_a_name_that_no_header_can_have_ends_no_connection(
    autojump_clock: MockClock,
) -> None:
    """The tools whose schemas were loosened are counted where they cannot be named."""
    schema = {"type": "object", "not": {}}
    spaced = {"type": "function", "function": {"name": " look", "parameters": schema}}
    async with house("No.") as daemon:
        answer = await asked(daemon, tools=[spaced])
        assert message(answer)["content"] == "No."
        assert answer.headers["x-uma-loosened"] == "1"


async def test_half_a_character_in_arguments_ends_no_conversation(
    autojump_clock: MockClock,
) -> None:
    """JSON can write one, and a model may have."""
    call = {"name": "look", "arguments": '{"what": "\\ud800"}'}
    said = {"role": "assistant", "tool_calls": [{"id": "c1", "function": call}]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
    async with house("No.") as daemon:
        answer = await asked(daemon, messages=[*ASKED["messages"], said, result])
        assert message(answer)["content"] == "No."


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/input_tokens"])
async def test_what_is_nested_too_deeply_is_refused(autojump_clock: MockClock, path: str) -> None:
    """In a schema, and in arguments of the template."""
    schema: dict[str, Any] = {}
    words: list[Any] = []
    for _ in range(900):
        schema, words = {"items": schema}, [words]
    deep = {"type": "function", "function": {"name": "look", "parameters": schema}}
    async with house("No.") as daemon:
        for fields in ({"tools": [deep]}, {"chat_template_kwargs": {"a": words}}):
            answer = await daemon.ask("POST", path, {**ASKED, **fields})
            assert answer.status == 400
            assert "nested too deeply" in answer.json["error"]["message"]


FORM = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMED: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
}


@pytest.mark.parametrize("stream", [False, True])
async def test_beside_tools_a_reply_is_calls_or_has_the_shape(
    autojump_clock: MockClock, stream: bool
) -> None:
    """As agents ask that call tools and answer with an object."""
    for says in ('{"n": 3}', CALL):
        async with house(says) as daemon:
            answer = await asked(daemon, **FORMED, stream=stream)
            assert answer.status == 200, answer.body
            if stream:
                deltas = [
                    event["choices"][0]["delta"] for event in answer.events[:-1] if event["choices"]
                ]
                content = "".join(delta.get("content") or "" for delta in deltas)
                is_call = any("tool_calls" in delta for delta in deltas)
            else:
                content, is_call = message(answer)["content"] or "", bool(calls(answer))
            assert (content, is_call) == (("", True) if says == CALL else (says, False))


@pytest.mark.parametrize(
    ("path", "field", "tools"),
    [
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "f", "schema": FORM}}},
            None,
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": FORM}}},
            None,
        ),
        ("/api/chat", {"format": FORM}, [LOOK]),
    ],
)
async def test_every_api_takes_a_shape_beside_tools(
    autojump_clock: MockClock, path: str, field: dict[str, Any], tools: list[Any] | None
) -> None:
    """Each by its own name for it."""
    function = LOOK["function"]
    if path == "/v1/messages":
        tools = [{"name": "look", "input_schema": function["parameters"]}]
    elif path == "/v1/responses":
        tools = [{"type": "function", **function}]
    said = [{"role": "user", "content": "hi"}]
    body = {("input" if path == "/v1/responses" else "messages"): said, "tools": tools, **field}
    body |= {"stream": False, "max_tokens": 99} if path != "/v1/responses" else {}
    for says, seen in (('{"n": 3}', '{\\"n\\": 3}'), (CALL, "look")):
        async with house(says) as daemon:
            answer = await daemon.ask("POST", path, {**body, "temperature": 0})
            assert answer.status == 200, answer.body
            assert seen in answer.body.decode()


async def test_a_call_that_is_asked_for_comes_before_a_shape(autojump_clock: MockClock) -> None:
    """With tool_choice required the reply is no answer yet; with none it cannot be a call."""
    async with house(CALL) as daemon:
        assert calls(await asked(daemon, **FORMED, tool_choice="required"))
    async with house('{"n": 3}') as daemon:
        answer = await asked(daemon, **FORMED, tool_choice="none")
        assert message(answer)["content"] == '{"n": 3}'


async def test_an_expression_or_a_grammar_does_not_go_with_tools(autojump_clock: MockClock) -> None:
    """Neither can stand in the grammar of a reply; what is wrong with a schema is said all the same."""
    async with house("hello") as daemon:
        for more in ({"grammar": 'root ::= "a"'}, {"guided_regex": "a+"}):
            answer = await asked(daemon, **more)
            assert answer.status == 400
            assert "cannot be combined with tools" in answer.json["error"]["message"]
            assert (await asked(daemon, **more, tool_choice="none")).status == 200
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}
        answer = await asked(daemon, response_format=wrong)
        assert (answer.status, answer.json["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_markers_that_are_special_tokens_are_seen(
    autojump_clock: MockClock, choice: str
) -> None:
    """Though they have no text of their own; in an answer that is free, and in a grammar."""
    vocabulary = MarkedVocabulary()
    says = '[T]Why?[/T][CALL]look[ARGS]{"what": "a"}'
    tokens = vocabulary.tokenize(says, add_special=False, parse_special=True).tolist()
    backend = ScriptedBackend(
        [tokens],
        vocabulary=vocabulary,
        n_ctx=4096,
        n_batch=512,
        chat_template=MARKED_TEMPLATE,
        cost=linear_cost(TICK_S, 0.0),
    )
    async with http_house(backend=backend) as daemon:
        answer = await asked(daemon, tool_choice=choice)
        assert calls(answer) == [("look", {"what": "a"})]
        assert message(answer)["reasoning_content"] == "Why?"
        assert message(answer)["content"] is None
        assert answer.json["usage"]["completion_tokens"] == len(tokens)


# --- reasoning ---


@pytest.mark.parametrize(
    ("template", "opens"), [(THINKING_TEMPLATE, "<think>\n"), (PREFILLED_TEMPLATE, "")]
)
async def test_reasoning_is_told_apart(
    autojump_clock: MockClock, template: str, opens: str
) -> None:
    """Whether the model opens it or the prompt did; its tokens are counted."""
    async with house(f"{opens}Why?\n</think>\n\nSo.", template) as daemon:
        answer = await asked(daemon, tools=[])
        assert message(answer)["reasoning_content"] == "Why?"
        assert message(answer)["content"] == "So."
        details = answer.json["usage"]["completion_tokens_details"]
        assert 0 < details["reasoning_tokens"] < answer.json["usage"]["completion_tokens"]
        made = joined(await asked(daemon, tools=[], stream=True))
        assert (made["reasoning_content"], made["content"]) == ("Why?", "So.")


@pytest.mark.parametrize("template", [THINKING_TEMPLATE, PREFILLED_TEMPLATE])
async def test_a_shape_begins_behind_the_reasoning(
    autojump_clock: MockClock, template: str
) -> None:
    """Which is free; and so does a forced call."""
    says = 'a { b\n</think>\n\n{"c": 1}'
    says = says if template == PREFILLED_TEMPLATE else f"<think>\n{says}"
    async with house(says, template) as daemon:
        shape = {"response_format": {"type": "json_object"}}
        answer = await asked(daemon, tools=[], **shape)
        assert message(answer)["reasoning_content"] == "a { b"
        assert json.loads(message(answer)["content"]) == {"c": 1}


async def test_a_budget_ends_the_reasoning(autojump_clock: MockClock) -> None:
    """The closing marker is forced behind so many tokens; then the model goes on."""
    async with house("aaaaaaaaaa</think>b", PREFILLED_TEMPLATE) as daemon:
        answer = await asked(daemon, tools=[], reasoning_budget=4)
        assert message(answer)["reasoning_content"] == "aaaa"
        assert message(answer)["content"] == "aaaaaa</think>b"
        none = await asked(daemon, tools=[], reasoning_budget=0)
        assert "reasoning_content" not in message(none)


async def test_a_chat_without_tools_or_reasoning_is_not_parsed(autojump_clock: MockClock) -> None:
    """What the model writes is the content, to the letter."""
    async with house(f" {CALL} \n") as daemon:
        answer = await asked(daemon, tools=[])
        assert message(answer)["content"] == f" {CALL} \n"
        assert "completion_tokens_details" not in answer.json["usage"]


async def test_tools_that_are_known_wait_for_no_compiler(autojump_clock: MockClock) -> None:
    """Only those of the first request do, whoever else has shapes compiled."""
    queued: list[UserProgram] = []

    async def compiling(function: Callable[[], Any], client: UserProgram, /) -> Any:
        await trio.lowlevel.checkpoint()
        queued.append(client)
        return function()

    async with house(CALL) as daemon:
        daemon.inner.service.run_compiling = compiling
        first = await asked(daemon, tool_choice="required")
        assert calls(first) == [("look", {"what": "a"})]
        assert queued
        queued.clear()
        again = await asked(daemon, tool_choice="required")
        assert calls(again) == calls(first)
        assert not queued


async def test_a_check_that_failed_by_chance_is_to_be_tried_again(
    autojump_clock: MockClock,
) -> None:
    """It is no fault of the request: the status is one that clients send it again for."""

    async def compiling(function: Callable[[], Any], client: UserProgram, /) -> Any:
        await trio.lowlevel.checkpoint()
        raise NotChecked("waited for others; try again")

    async with house(CALL) as daemon:
        daemon.inner.service.run_compiling = compiling
        answer = await asked(daemon, tool_choice="required")
    assert answer.status == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json["error"]["message"] == "tools waited for others; try again"


async def test_512_tools_are_offered_and_513_are_not(autojump_clock: MockClock) -> None:
    tools = [{"type": "function", "function": {"name": f"t{n}"}} for n in range(513)]
    call = '<tool_call>\n{"name": "t511", "arguments": {}}\n</tool_call>'
    async with house(call, n_ctx=65_536) as daemon:
        choice = (await asked(daemon, tools=tools[:512])).json["choices"][0]
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["t511"]
        refused = await asked(daemon, tools=tools)
        assert (refused.status, refused.error["param"]) == (400, "tools")
        assert "512" in refused.error["message"]


async def test_a_template_sees_tools_as_they_were_sent(autojump_clock: MockClock) -> None:
    """With what the daemon does not read of them, and in their order."""
    function = {"parameters": {"type": "object"}, "strict": True, "name": "f", "description": ""}
    async with house("") as daemon:
        asked = {**ASKED, "tools": [{"type": "function", "function": function}]}
        prompt = (await daemon.ask("POST", "/apply-template", asked)).json["prompt"]
    assert json.dumps(function) in prompt
