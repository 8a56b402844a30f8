"""Halves of surrogate pairs in bodies, which clients send that cut texts in UTF-16: each becomes U+FFFD."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_kit import http_house
from hypothesis import given
from hypothesis import strategies as st
from net_kit import TICK_S
from reply_kit import FORMATS, HERMES_TEMPLATE, parsed
from trio.testing import MockClock

from uma_trio.http.pieces import USUAL, NotJson, decoded
from uma_trio.text.replies import collect
from uma_trio.text.slices import in_utf8
from uma_trio_sim.fake import FakeBackend, linear_cost

# Contents, names, keys, stop strings, results, arguments in a string, schemas, labels.
BODIES = [
    (
        "/v1/chat/completions",
        r'{"messages":[{"role":"user","content":"a\ud83d b"}],"max_tokens":3,"stop":["\ud83dx"],"user":"\udc00"}',
    ),
    (
        "/v1/chat/completions",
        r'{"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":[{"id":"\ud83d","type":"function","function":{"name":"f\ud83d","arguments":"{\"a\": \"\\ud83d\", \"\\udc00\": 1}"}}]},{"role":"tool","tool_call_id":"\ud83d","content":"x\ud83d"}],"max_tokens":3}',
    ),
    (
        "/v1/chat/completions",
        r'{"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f\ud83d","description":"\ud83d","parameters":{"type":"object","properties":{"\ud83d":{"type":"string"}}}}}],"max_tokens":3}',
    ),
    ("/v1/completions", r'{"prompt":"a\ud83d","max_tokens":3}'),
    ("/completion", r'{"prompt":["a\ud83d", 5],"n_predict":3}'),
    (
        "/v1/responses",
        r'{"input":[{"role":"user","content":"\ud83d"},{"type":"function_call","call_id":"c","name":"f","arguments":"{\"\\ud83d\":1}"},{"type":"function_call_output","call_id":"c","output":"\ud83d"}],"max_output_tokens":3,"instructions":"\ud83d","metadata":{"\ud83d":"\ud83d"}}',
    ),
    (
        "/v1/messages",
        r'{"messages":[{"role":"user","content":"\ud83d"},{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"\ud83d":"\ud83d"}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"\ud83d"}]}],"max_tokens":3,"stop_sequences":["\ud83d"],"system":"\ud83d"}',
    ),
    (
        "/api/chat",
        r'{"model":"x\ud83d","messages":[{"role":"user","content":"\ud83d"},{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{"\ud83d":"\ud83d"}}}]},{"role":"tool","content":"\ud83d"}],"stream":false,"options":{"num_predict":3,"stop":["\ud83d"]}}',
    ),
    (
        "/api/generate",
        r'{"model":"x","prompt":"\ud83d","stream":false,"options":{"num_predict":3}}',
    ),
    ("/apply-template", r'{"messages":[{"role":"user","content":"\ud83d"}]}'),
    ("/tokenize", r'{"content":"\ud83d"}'),
    (
        "/v1/chat/completions",
        r'{"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object","properties":{"\ud83d":{"enum":["\udc00"]}},"required":["\ud83d"]}}},"max_tokens":3}',
    ),
    (
        "/v1/chat/completions",
        r'{"messages":[{"role":"user","content":"a"}],"logit_bias":{"\ud83d":1},"guided_choice":["\ud83d"],"max_tokens":3}',
    ),
    (
        "/v1/chat/completions",
        r'{"messages":[{"role":"user","content":"a"}],"guided_regex":"a\ud83d","max_tokens":3}',
    ),
    (
        "/v1/chat/completions",
        r'{"\ud83d":1,"messages":[{"role":"user","content":"a"}],"cache_salt":"\ud83d","model":"\ud83d","max_tokens":3,"stream":true}',
    ),
]


def house() -> Any:
    cost = linear_cost(TICK_S, 0.0)
    backend = FakeBackend(chat_template=HERMES_TEMPLATE, n_ctx=4096, n_batch=512, cost=cost)
    return http_house(backend=backend)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_lone_surrogate_is_taken_wherever_it_stands(
    path: str, body: str, autojump_clock: MockClock
) -> None:
    async with house() as here:
        answer = await here.ask("POST", path, body.encode())
        assert answer.status == 200, answer.body


async def test_the_model_reads_a_replacement_character(autojump_clock: MockClock) -> None:
    body = rb'{"messages":[{"role":"user","content":"a\ud83d\ud83d\ude00b\\ud83d"}]}'
    async with house() as here:
        prompt = (await here.ask("POST", "/apply-template", body)).json["prompt"]
        assert "a\ufffd\U0001f600b\\ud83d" in prompt


async def test_arguments_in_a_string_are_mended_too(autojump_clock: MockClock) -> None:
    arguments = r'{"a": "\ud83d", "\udc00": 1}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    async with house() as here:
        answer = await here.ask("POST", "/apply-template", {"messages": messages})
        assert '\\ufffd": 1' in answer.json["prompt"].replace("\ufffd", "\\ufffd")


_PARTS = [r"\ud83d", r"\ude00", r"\uD83D\uDE00", r"\\", r"\n", "a", "ud83d", "é", r"\""]


@given(st.lists(st.sampled_from(_PARTS), max_size=12))
def test_pairs_stay_and_halves_become_replacements(parts: list[str]) -> None:
    """Whatever is escaped before them, as Python's decoder reads them."""
    document = f'["{"".join(parts)}"]'
    assert decoded(document.encode(), USUAL) == [in_utf8(json.loads(document)[0])]


@given(st.lists(st.sampled_from(_PARTS), min_size=1, max_size=12))
def test_halves_are_replaced_in_every_piece(parts: list[str]) -> None:
    """A long text is decoded in pieces, of which none may end between two halves."""
    text = "".join(parts)
    document = f'["{"x" * (65_536 - len(text) // 2)}{text}"]'
    assert decoded(document.encode(), USUAL) == [in_utf8(json.loads(document)[0])]


@pytest.mark.parametrize("document", [rb'"\ud83', rb'"\ud83d', rb'"\ud83g"', rb'{"\ud83d"}'])
def test_what_is_not_json_is_refused(document: bytes) -> None:
    with pytest.raises(NotJson):
        decoded(document, USUAL)


@pytest.mark.parametrize("name", FORMATS)
def test_no_call_of_the_model_has_half_a_character(name: str) -> None:
    """A stream could not write it: UTF-8 has no such thing."""
    for reply in (
        '<tool_call>\n{"name": "look\\ud83d", "arguments": {"what": "\\ud83d"}}\n</tool_call>',
        "<|tool_call_start|>[look(what=['\\ud83d'])]<|tool_call_end|>",
        "```tool_code\nlook(what='\\ud83d')\n```",
        "<tool_call>\n<function=look>\n<parameter=n>\n['\\ud83d']\n</parameter>\n</function>\n</tool_call>",
    ):
        said = collect(parsed(FORMATS[name], [reply]))
        for text in (said.content, *(t for c in said.calls for t in (c.name, c.arguments))):
            text.encode()
