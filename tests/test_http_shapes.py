"""Structured output over HTTP, in every spelling that clients use."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from http_kit import http_house
from llguidance import LLMatcher
from trio.testing import MockClock

from uma_trio.text.schemas import FORMATS

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 400,
}
TEXT: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 400}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
JSON = r'\{\s*"kind"\s*:\s*"(cat|dog)"\s*\}'


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True},
                }
            },
            JSON,
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JSON),
        ({"json_schema": SCHEMA}, JSON),
        ({"grammar": 'root ::= "a" [xy]'}, "a[xy]"),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"], "json": None}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "b"'}}, "b"),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": json.dumps(SCHEMA)}, JSON),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "c"'}, "c"),
    ],
    ids=str,
)
async def test_every_spelling_is_kept_to(
    autojump_clock: MockClock, fields: dict[str, Any], pattern: str
) -> None:
    """In chats and in completions; the answer ends by itself when it is whole."""
    async with http_house() as daemon:
        chat = await daemon.ask("POST", CHAT, {**HELLO, **fields})
        assert chat.status == 200, chat.body
        (choice,) = chat.json["choices"]
        assert re.fullmatch(pattern, choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
        text = await daemon.ask("POST", "/v1/completions", {**TEXT, **fields})
        assert re.fullmatch(pattern, text.json["choices"][0]["text"])
        native = await daemon.ask("POST", "/completion", {**TEXT, **fields})
        assert re.fullmatch(pattern, native.json["content"])


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
    ids=str,
)
async def test_any_object_is_one(autojump_clock: MockClock, fields: dict[str, Any]) -> None:
    """Whatever the model says, it begins as a JSON object."""
    async with http_house() as daemon:
        asked = {**HELLO, **fields, "max_tokens": 40}
        answer = await daemon.ask("POST", CHAT, asked)
        assert answer.json["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"json_schema": {}},
        {"grammar": ""},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "regex": None}},
        {"guided_json": ""},
    ],
    ids=str,
)
async def test_a_shape_that_says_nothing_changes_nothing(
    autojump_clock: MockClock, fields: dict[str, Any]
) -> None:
    """Clients send what they know with its default."""
    async with http_house() as daemon:
        plain = await daemon.ask("POST", CHAT, {**HELLO, "max_tokens": 8})
        answer = await daemon.ask("POST", CHAT, {**HELLO, **fields, "max_tokens": 8})
        assert answer.json["choices"] == plain.json["choices"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "must be an object of type"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be an object of type"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "must have a json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            '"not", which cannot be enforced',
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"strict": True, "schema": {"uniqueItems": True}},
                }
            },
            "response_format",
            '"uniqueItems"',
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"strict": True, "schema": {"format": "password"}},
                }
            },
            "response_format",
            "password",
        ),
        ({"json_schema": 5}, "json_schema", "an object"),
        ({"json_schema": "{"}, "json_schema", "is not usable"),
        ({"grammar": "root ::= ("}, "grammar", "is not usable"),
        ({"structured_outputs": []}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "must be one of"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "one thing"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "must be a string"),
        ({"guided_choice": []}, "guided_choice", "a list of 1 to 256"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar", "cannot be combined with"),
    ],
    ids=str,
)
async def test_a_shape_that_cannot_be_kept_to_is_refused(
    autojump_clock: MockClock, fields: dict[str, Any], param: str, words: str
) -> None:
    """With 400, the field and the keyword or the reason; nothing is loosened."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", CHAT, {**HELLO, **fields})
        assert answer.status == 400
        assert answer.error["param"] == param
        assert words in answer.error["message"]


async def test_a_constrained_answer_is_streamed(autojump_clock: MockClock) -> None:
    """Chunk by chunk, with logprobs and penalties beside it."""
    async with http_house() as daemon:
        asked = {**HELLO, "guided_json": SCHEMA, "presence_penalty": 1.0}
        asked |= {"stream": True, "logprobs": True, "top_logprobs": 2}
        answer = await daemon.ask("POST", CHAT, asked)
        choices = [c for event in answer.events if event != "[DONE]" for c in event["choices"]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert re.fullmatch(JSON, text)
        assert choices[-1]["finish_reason"] == "stop"


async def test_a_schema_nested_beyond_reason_is_refused(autojump_clock: MockClock) -> None:
    """Wherever it is found out."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    async with http_house() as daemon:
        answer = await daemon.ask("POST", CHAT, {**HELLO, "json_schema": deep})
        assert answer.status == 400


JSON_OBJECT = {"type": "json_object"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/completion": {"prompt": "x", "n_predict": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/api/chat": {
        "messages": [{"role": "user", "content": "x"}],
        "stream": False,
        "options": {"num_predict": 4},
    },
    "/api/generate": {"prompt": "x", "stream": False, "options": {"num_predict": 4}},
}
SISTERS: dict[str, Any] = {
    "response_format": JSON_OBJECT,
    "json_schema": {"type": "object"},
    "grammar": 'root ::= "a"',
    "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "format": "json",
    "text": {"format": JSON_OBJECT},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "extra_body": {"guided_regex": "a"},
    "nvext": {"guided_json": {"type": "object"}},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_shape_by_the_name_of_another_api_is_never_ignored(
    path: str, autojump_clock: MockClock
) -> None:
    async with http_house() as daemon:
        for name, value in SISTERS.items():
            answer = await daemon.ask("POST", path, {**BODIES[path], name: value})
            if answer.status == 200:
                assert name not in answer.headers.get("x-uma-ignored", "")
            else:
                assert answer.status == 400
                assert name in answer.body.decode()


@pytest.mark.parametrize("path", BODIES)
async def test_what_asks_for_no_shape_is_not_refused(path: str, autojump_clock: MockClock) -> None:
    """Some clients send the fields of several APIs with the values that change nothing."""
    nothing = {
        "response_format": {"type": "text"},
        "format": "",
        "text": {"verbosity": "low"},
        "output_config": {},
        "grammar": "",
        "guided_choice": None,
        "extra_body": {"top_k": 1},
    }
    async with http_house() as daemon:
        answer = await daemon.ask("POST", path, {**BODIES[path], **nothing})
        assert answer.status == 200, answer.body


async def test_the_name_of_this_api_is_told(autojump_clock: MockClock) -> None:
    async with http_house() as daemon:
        body = {**BODIES["/v1/responses"], "response_format": JSON_OBJECT}
        error = (await daemon.ask("POST", "/v1/responses", body)).error
        assert (error["param"], "text.format" in error["message"]) == ("response_format", True)


ACCOUNT = {
    "type": "object",
    "properties": {
        "password": {"type": "string", "format": "password", "maxLength": 4},
        "amount": {"type": "string", "format": "decimal", "maxLength": 4},
        "id": {"type": "integer", "format": "int64", "minimum": 0, "maximum": 9},
        "day": {"type": "string", "format": "date"},
        "format": {"enum": [{"format": "binary"}]},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "b"]},
            "maxItems": 2,
            "uniqueItems": True,
        },
        "more": {"type": "array", "maxItems": 0, "uniqueItems": False},
    },
    "required": ["password", "amount", "id", "day", "format", "tags", "more"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": ACCOUNT}}}),
        (CHAT, {"guided_json": json.dumps(ACCOUNT)}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": ACCOUNT}}}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": ACCOUNT}}),
        ("/api/chat", {"format": ACCOUNT}),
    ],
    ids=str,
)
async def test_what_only_annotates_is_left_out_and_named(
    path: str, fields: dict[str, Any], autojump_clock: MockClock
) -> None:
    """What pydantic and OpenAPI write of passwords, files and sets; all else is enforced."""
    async with http_house() as daemon:
        body = {**BODIES[path], **fields}
        body.update({"options": {"num_predict": 400}} if path.startswith("/api") else {})
        for most in {"max_tokens", "max_output_tokens"} & body.keys():
            body[most] = 400
        answer = await daemon.ask("POST", path, body)
        assert answer.status == 200, answer.body
        named = answer.headers["x-uma-loosened"]
        assert named == "format:password, format:decimal, uniqueItems"
        if path == CHAT:
            said = json.loads(answer.json["choices"][0]["message"]["content"])
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", said["day"])
            assert said["format"] == {"format": "binary"}


def test_formats_that_are_enforced_are_known() -> None:
    for name in sorted(FORMATS):
        grammar = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
        assert not LLMatcher.validate_grammar(grammar), name
