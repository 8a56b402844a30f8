"""For every body that is accepted, on each endpoint, no step of the work is larger than its bound."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from encoder_kit import FakeEncoder, info_of
from http_kit import http_house
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from meter_kit import Document, Meter, Work
from net_kit import TICK_S
from trio.testing import MockClock

from uma_trio.api.routes import ROUTES
from uma_trio.http.pieces import PIECE_BYTES, PIECE_MARKS
from uma_trio_sim.fake import FakeBackend, linear_cost

_FILE = "def f(x):\n    return x + 1\n" * 8000  # 200 KiB
_TEXTS = [f"message {number} " * 20 for number in range(299)]
_SAID = [
    {"role": "assistant" if number % 2 else "user", "content": text}
    for number, text in enumerate(_TEXTS)
]
_CONVERSATION = [*_SAID, {"role": "user", "content": _FILE}]
_SCHEMA = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "description": "of use " * 4} for n in range(10)},
}
_TOOLS = [{"name": f"tool_{n}", "description": "does it " * 20} for n in range(100)]
FUNCTIONS = [{"type": "function", "function": {**t, "parameters": _SCHEMA}} for t in _TOOLS]
FLAT = [{"type": "function", **tool, "parameters": _SCHEMA} for tool in _TOOLS]
ANTHROPIC = [{**tool, "input_schema": _SCHEMA} for tool in _TOOLS]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/input_tokens", {"messages": _CONVERSATION, "tools": FUNCTIONS}),
        ("/v1/messages/count_tokens", {"messages": _CONVERSATION, "tools": ANTHROPIC}),
        ("/v1/responses/input_tokens", {"input": _CONVERSATION, "tools": FLAT}),
        ("/apply-template", {"messages": _CONVERSATION, "tools": FUNCTIONS}),
    ],
)
async def test_an_agents_long_conversation_is_accepted(
    autojump_clock: MockClock, path: str, body: dict[str, Any]
) -> None:
    """300 messages, one of them a file of 200 KiB, with 100 tools."""
    async with http_house() as daemon:
        answer = await daemon.connect(by_socket=True).ask("POST", path, {"model": "m", **body})
        assert answer.status == 200, answer.body[:200]


ON_LOOP = Work(calls=8_000, characters=65_536, read=32_768, marks=4_096, written=32_768)
IN_HELPER = Work(
    calls=0, characters=65_536 + 6, read=PIECE_BYTES + 2, marks=PIECE_MARKS + 2, written=98_304 + 2
)
"""Of one slice. A character takes up to six bytes in JSON, so 16,384 may be written as 98,304."""

_CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
_OLLAMA = {"options": {"num_predict": 3}}
_PLAIN = {"prompt": "hi", "max_tokens": 3}
#: Every path that takes a body, and a body that it accepts.
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/chat/completions": _CHAT,
    "/chat/completions/input_tokens": _CHAT,
    "/completions": {"model": "m", **_PLAIN},
    "/completion": _PLAIN,
    "/responses": {"input": "hi", "max_output_tokens": 3},
    "/responses/input_tokens": {"input": "hi"},
    "/responses/compact": {"model": "m", "input": "hi", "max_output_tokens": 3},
    "/messages": {"model": "m", **_CHAT},
    "/messages/count_tokens": {"model": "m", **_CHAT},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [65]},
    "/apply-template": _CHAT,
    "/generate": _PLAIN,
    "/priority": {"id": "r", "priority": "background"},
    "/api/chat": {"messages": _CHAT["messages"], **_OLLAMA},
    "/api/generate": {"prompt": "hi", **_OLLAMA},
    "/api/show": {"model": "m"},
    **{key: {"model": "m"} for key in ("/load", "/unload", "/models/load", "/models/unload")},
    "/embeddings": {"model": "m", "input": ["hi", "you"]},
    "/embedding": {"content": "hi"},
    "/rerank": {"query": "hi", "documents": ["you", {"text": "me"}], "return_documents": True},
    "/reranking": {"query": "hi", "documents": ["you"]},
    "/api/embed": {"model": "m", "input": "hi"},
    "/api/embeddings": {"model": "m", "prompt": "hi"},
}
#: Paths that answer without reading what is in a body.
_READ_NONE = {
    "/responses/",
    *("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"),
}


def test_every_endpoint_has_its_bounds_and_this_meter() -> None:
    """Whoever adds a path that takes a body adds it here and to the table of bounds."""
    taking = {route.path for route in ROUTES if route.method not in ("GET", "HEAD")}
    assert taking == {*ENDPOINTS, *_READ_NONE}
    document = Path(__file__, "../../docs/reference/http.md").resolve().read_text()
    table = document.partition("<!-- bounds -->")[2].partition("<!-- end bounds -->")[0]
    assert set(re.findall(r"`(/[a-z/_-]+)`", table)) == set(ENDPOINTS)


def _deep(levels: int) -> Any:
    value: Any = "x"
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


_UNITS = ["a", "word ", "é", "\U0001f600", '"', "\\", "\u2028", " ", "\n", "<|im_end|>", "[],"]
_MANY: list[Callable[[int], Any]] = [
    lambda n: [1] * n,
    lambda n: [[] for _ in range(n)],
    lambda n: [{} for _ in range(n)],
    lambda n: ["text"] * n,
    lambda n: [-1.5e-7] * n,
    lambda n: [10**300] * (n // 300),
    lambda n: {f"n{i}": i for i in range(n)},
    lambda n: {f"n{i}": {"type": "string"} for i in range(n // 2)},
    lambda n: [{"role": "user", "content": "a"}] * (n // 3),
    lambda n: [{"role": "user", "content": [{"type": "text", "text": "a"}] * (n // 3)}],
    lambda n: [[f"word{i}" * 20, 1] for i in range(min(n // 3, 1024))],
]
_TEXTS = st.builds(
    lambda unit, n: unit * (n // len(unit)), st.sampled_from(_UNITS), st.integers(0, 200_000)
)
_LISTS = st.builds(lambda make, n: make(n), st.sampled_from(_MANY), st.integers(0, 40_000))
_ANY = _TEXTS | _LISTS | st.integers(0, 100).map(_deep)


def _messages(n: int, text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i in range(n)]


def _called(text: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": text}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]


def _tool(n: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}}
    return {"name": f"t{n}", "description": "does it " * 9, "parameters": parameters}


_SOME_TOOLS = st.lists(st.integers(0, 200), max_size=100, unique=True).map(
    lambda sizes: [_tool(n) for n in sizes]
)
#: What an endpoint may accept, so that the work behind reading a body is done, too.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.builds(_messages, st.integers(1, 400), st.text(max_size=500))
    | st.builds(_called, _TEXTS | _LISTS.map(json.dumps)),
    "prompt": _TEXTS | st.integers(1, 3000).map(lambda n: [65] * n),
    "input": _TEXTS | st.builds(_messages, st.integers(1, 400), st.text(max_size=500)),
    "content": _TEXTS,
    "tokens": st.integers(1, 32_000).map(lambda n: [65] * n),
    "tools": _SOME_TOOLS.map(
        lambda tools: [{"type": "function", **tool, "function": tool} for tool in tools]
    ),
    "logit_bias": st.integers(1, 1024).map(lambda n: [[f"word{i}" * 20, 1] for i in range(n)]),
    "json_schema": st.integers(1, 300).map(lambda n: _tool(n)["parameters"]),
    "instructions": _TEXTS,
    "metadata": st.integers(0, 16_000).map(lambda n: {"a": "x" * n}),
    "stop": st.lists(st.text(max_size=200), max_size=16),
    "response_fields": st.just(["content", "prompt"]),
    **dict.fromkeys(
        ("echo", "verbose", "with_pieces", "stream", "return_progress"), st.just(value=True)
    ),
    "logprobs": st.sampled_from([True, 20]),
    "top_logprobs": st.just(20),
    "n_probs": st.just(20),
    "n": st.just(3),
    **dict.fromkeys(("max_tokens", "max_output_tokens"), st.integers(1, 300)),
    "unknown": _ANY,
    "options": _ANY
    | st.integers(1, 300).map(lambda n: {"num_predict": n, **{f"o{i}": i for i in range(n)}}),
    "system": _TEXTS,
    "format": st.integers(1, 300).map(lambda n: _tool(n)["parameters"]),
    **dict.fromkeys(("raw", "think"), st.just(value=True)),
    "chat_template_kwargs": st.builds(lambda value: {"a": value}, _ANY),
}
_BODIES = (
    st.dictionaries(st.sampled_from([*FIELDS]), st.just(None), max_size=5).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] | _ANY for name in names})
    )
).map(Document)


async def _ask(path: str, bodies: list[dict[str, Any]]) -> Meter:
    """Ask with every body; return the work of the largest slices."""
    meter = Meter(others=("run_inline", "run_encoder_inline", "_ask"))
    cost = linear_cost(TICK_S, 0.0)
    backend = FakeBackend(n_ctx=32_768, n_batch=32_768, cost=cost)
    encoders = {"embed": FakeEncoder(), "rank": FakeEncoder(info_of("rank"))}
    async with http_house(
        backend=backend, run_blocking=meter.run_blocking, encoders=encoders
    ) as daemon:
        client = daemon.connect(by_socket=True)
        with pytest.MonkeyPatch.context() as patched, meter.installed(patched):
            for body in bodies:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = await client.ask("POST", path, data)
                assert answer.status < 500, answer.body[:200]
    return meter


def _check(meter: Meter) -> None:
    for name in attrs.fields_dict(Work):
        for work, most in ((meter.on_loop, ON_LOOP), (meter.in_helper, IN_HELPER)):
            if name != "calls" or work is meter.on_loop:
                assert getattr(work, name) <= getattr(most, name), (name, work, meter.where)


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # bodies of megabytes take long to shrink
)
@given(body=_BODIES)
def test_no_slice_of_the_work_on_a_body_is_larger_than_its_bound(path: str, body: Document) -> None:
    """From its decoding to its answer, on trio's thread and in helper threads, whatever is in it."""
    accepted = ENDPOINTS[path]
    clock = MockClock(autojump_threshold=0)
    _check(trio.run(_ask, path, [accepted | body.value, body.value], clock=clock))


_WORST = [
    {"unknown": value}
    for value in (*(make(30_000) for make in _MANY), _deep(100), *(u * 60_000 for u in _UNITS))
]


def test_a_long_message_of_white_space_is_cut_like_any_other() -> None:
    """A short one is left in the prompt as it is, where templates ask whether there is any text."""
    body = ENDPOINTS["/api/generate"] | {"system": "\u2028" * 70_000}
    _check(trio.run(_ask, "/api/generate", [body], clock=MockClock(autojump_threshold=0)))


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_slice_of_reading_what_nobody_knows_is_larger_than_its_bound(path: str) -> None:
    """However many values it has, and of which kind."""
    bodies = [ENDPOINTS[path] | body for body in _WORST]
    meter = trio.run(_ask, path, bodies, clock=MockClock(autojump_threshold=0))
    assert meter.in_helper.marks > 16_000
    _check(meter)


_LONG = {
    "/chat/completions": {"messages": _messages(1500, "text " * 4), "tools": FUNCTIONS, "verbose": True,
                          "stop": ["a" * n for n in range(129, 257)]},
    "/completions": {"prompt": [65] * 3000, "echo": True, "logprobs": 20, "verbose": True},
    "/completion": {"prompt": [34] * 32_000, "response_fields": ["prompt", "content"], "n_probs": 20},
    "/responses": {"input": "hi", "tools": FLAT, "instructions": "be good " * 900,
                   "include": ["message.output_text.logprobs"], "top_logprobs": 20},
    "/messages": {"messages": _messages(1500, "text " * 4), "tools": ANTHROPIC},
    "/api/chat": {"messages": _messages(1500, "text " * 4), "tools": FUNCTIONS, "logprobs": True,
                  "top_logprobs": 20, "options": {"num_predict": 300}},
    "/api/generate": {"prompt": "hi", "logprobs": True, "options": {"num_predict": 300}},
    "/generate": {"prompt": "hi", "schema": {"enum": ["x" * 60, *range(2000)]}},
    "/embeddings": {"input": ["hi"] * 5000},
    "/rerank": {"documents": ["hi there"] * 5000, "return_documents": True},
}  # fmt: skip


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", _LONG)
def test_no_slice_of_writing_a_long_answer_is_larger_than_its_bound(
    path: str, streams: bool
) -> None:
    """Repeated prompts and tools, and probabilities, are written in a helper thread, in pieces."""
    most = {"max_tokens": 300, "max_output_tokens": 300}
    body = ENDPOINTS[path] | most | _LONG[path] | {"stream": streams}
    _check(trio.run(_ask, path, [body], clock=MockClock(autojump_threshold=0)))
