"""Ollama's API: what is asked of the model, and what comes back, whole and line by line."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from attrs import evolve
from http_kit import http_house
from net_kit import TICK_S
from reply_kit import THINKING_TEMPLATE
from trio.testing import MockClock

from uma_trio.api.ollama.messages import goes_on, messages_of
from uma_trio.api.ollama.models import details_of, figures_of
from uma_trio.http.errors import Fault as Wrong
from uma_trio.service.ask import Call, Chat, Message
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost
from uma_trio_sim.scripted import ScriptedBackend

CHAT, GENERATE = "/api/chat", "/api/generate"
SAID = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "repeat_penalty": 1, "num_predict": 8}
HELLO: dict[str, Any] = {"model": "any", "messages": SAID, "options": GREEDY}
PROMPT: dict[str, Any] = {"model": "any", "prompt": "hello", "options": GREEDY}
CALL = '{"name": "look", "arguments": {"x": "a\u2028b", "n": [1, {"y": null}]}}'
SAYS = f"<think>\nI look first.\n</think>\n\nLet me look.<tool_call>\n{CALL}\n</tool_call>"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def scripted(*says: str) -> Any:
    """Run a daemon whose model thinks, speaks and calls."""
    backend = ScriptedBackend(
        [list(each.encode()) for each in says],
        n_ctx=8192,
        n_batch=512,
        chat_template=THINKING_TEMPLATE,
        cost=linear_cost(TICK_S, 0.0),
    )
    return http_house(backend=backend)


# --- answers ---


async def test_every_byte_of_a_stream(autojump_clock: MockClock) -> None:
    """A document a line, and a last one with the reason and the times in nanoseconds."""
    async with scripted("Hi\n") as daemon:
        options = {"num_predict": 9, "temperature": 0}
        answer = await daemon.ask("POST", CHAT, {**HELLO, "options": options})
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        (since,) = set(re.findall(rb'"created_at":"([^"]*)"', answer.body))
        assert re.fullmatch(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", since)
        about = b'{"model":"any","created_at":"%b","message":{"role":"assistant","content":' % since
        n = (await daemon.ask("POST", CHAT, {**HELLO, "stream": False})).json["prompt_eval_count"]
        tick = round(TICK_S * 1e9)
        assert answer.body == (
            b"".join(about + text + b'},"done":false}\n' for text in (b'"H"', b'"i"', b'"\\n"'))
            + about
            + b'""},"done":true,"done_reason":"stop","total_duration":%d,"load_duration":0,'
            % (4 * tick)
            + b'"prompt_eval_count":%d,"prompt_eval_duration":%d,' % (n, tick)
            + b'"eval_count":3,"eval_duration":%d}\n' % (3 * tick)
        )


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (GENERATE, PROMPT)])
async def test_a_stream_says_what_a_whole_answer_says(
    autojump_clock: MockClock, path: str, body: dict[str, Any]
) -> None:
    """And as much of its end; the text is that of a chat of OpenAI's."""

    def text(document: dict[str, Any]) -> str:
        said = document["message"]["content"] if path == CHAT else document["response"]
        return str(said)

    async with http_house() as daemon:
        whole = (await daemon.ask("POST", path, {**body, "stream": False})).json
        *parts, last = (await daemon.ask("POST", path, body)).lines
        plain = {"messages": SAID, "temperature": 0, "max_tokens": 8}
        chat = (await daemon.ask("POST", "/v1/chat/completions", plain)).json["choices"][0]
        assert text(whole) == "".join(map(text, parts)) == chat["message"]["content"]
        assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 8)
        assert {part["done"] for part in parts} == {False}
        counts = ("done", "done_reason", "prompt_eval_count", "eval_count")
        assert [last[name] for name in counts] == [whole[name] for name in counts]


async def test_thoughts_words_and_calls_are_apart(autojump_clock: MockClock) -> None:
    """A call comes whole, its arguments as an object; the line ends of Unicode in it split no line."""
    async with scripted(SAYS) as daemon:
        asked = {**HELLO, "tools": [LOOK], "think": True, "options": {"temperature": 0}}
        whole = (await daemon.ask("POST", CHAT, {**asked, "stream": False})).json
        message = whole["message"]
        assert message["thinking"] == "I look first."
        assert message["content"] == "Let me look."
        (call,) = message["tool_calls"]
        wanted = {"index": 0, **json.loads(CALL)}
        assert call == {"id": call["id"], "function": wanted}
        assert whole["done_reason"] == "stop"
        answer = await daemon.ask("POST", CHAT, asked)
        assert len(answer.body.decode().splitlines()) == len(answer.lines)
        parts = [line["message"] for line in answer.lines]
        for name in ("thinking", "content"):
            assert "".join(part.get(name, "") for part in parts) == message[name]
        ((streamed,),) = [part["tool_calls"] for part in parts if "tool_calls" in part]
        assert streamed["function"] == wanted


async def test_a_long_call_is_told_in_one_line(autojump_clock: MockClock) -> None:
    """It is written in a helper thread; what follows comes behind it."""
    long = json.dumps({"name": "look", "arguments": {"x": "y" * 5000}})
    async with scripted(f"<tool_call>\n{long}\n</tool_call>") as daemon:
        asked = {**HELLO, "tools": [LOOK], "options": {"temperature": 0}}
        *_, called, last = (await daemon.ask("POST", CHAT, asked)).lines
        (call,) = called["message"]["tool_calls"]
        assert call["function"]["arguments"] == {"x": "y" * 5000}
        assert last["done"]


async def test_a_call_that_is_cut_off_is_left_out(autojump_clock: MockClock) -> None:
    """Nobody may make it; the words before it stay."""
    async with scripted(SAYS) as daemon:
        options = {"temperature": 0, "num_predict": len(SAYS) - 30}
        asked = {**HELLO, "tools": [LOOK], "options": options}
        whole = (await daemon.ask("POST", CHAT, {**asked, "stream": False})).json
        assert whole["message"]["content"] == "Let me look."
        assert whole["done_reason"] == "length"
        lines = (await daemon.ask("POST", CHAT, asked)).lines
        assert lines[-1]["done_reason"] == "length"
        for message in (whole["message"], *(line["message"] for line in lines)):
            assert "tool_calls" not in message


async def test_probabilities_stand_beside_their_tokens(autojump_clock: MockClock) -> None:
    """A line has those of its token; a whole answer has all of them."""
    async with http_house() as daemon:
        asked = {**HELLO, "logprobs": True, "top_logprobs": 2}
        whole = (await daemon.ask("POST", CHAT, {**asked, "stream": False})).json
        assert [len(each["top_logprobs"]) for each in whole["logprobs"]] == [2] * 8
        lines = (await daemon.ask("POST", CHAT, asked)).lines
        found = [each for line in lines for each in line.get("logprobs", ())]
        assert found == whole["logprobs"]
        text = "".join(line["message"]["content"] for line in lines)
        assert text == whole["message"]["content"]


async def test_a_silent_stream_is_kept_alive_by_white_space(autojump_clock: MockClock) -> None:
    """Clients decode every line, so it stands before a document, and makes no line."""
    backend = FakeBackend(cost=linear_cost(12.0, 0))
    async with http_house(backend=backend, keep_alive_s=5.0) as daemon:
        options = {"num_predict": 2}
        answer = await daemon.ask("POST", CHAT, {**HELLO, "options": options})
        assert answer.body.startswith(b"  {")
        assert answer.lines[-1]["done"]


async def test_a_failure_in_mid_stream_is_a_line(autojump_clock: MockClock) -> None:
    """With `error`, which clients raise; no document says that the answer is done."""
    backend = FakeBackend(
        cost=linear_cost(TICK_S, 0), faults={n: InjectedFault(status=-3) for n in (5, 6)}
    )
    async with http_house(backend=backend) as daemon:
        asked = {**HELLO, "options": {"num_predict": 50}}
        lines = (await daemon.ask("POST", CHAT, asked)).lines
        assert [line.get("done") for line in lines[:-1]] == [False] * (len(lines) - 1)
        assert isinstance(lines[-1]["error"], str)
        assert (await daemon.ask("POST", CHAT, HELLO)).lines[-1]["done"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {}, {"message": {"role": "assistant", "content": ""}}),
        (CHAT, {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        (GENERATE, {"keep_alive": -1}, {"response": ""}),
        (GENERATE, {"prompt": "", "stream": False}, {"response": ""}),
    ],
)
async def test_a_request_without_a_prompt_is_told_that_the_model_is_loaded(
    autojump_clock: MockClock, path: str, body: dict[str, Any], said: dict[str, Any]
) -> None:
    """In one document; nothing runs."""
    async with http_house() as daemon:
        found = (await daemon.ask("POST", path, {"model": "any", **body})).json
        assert found.pop("created_at")
        assert found == {"model": "any", **said, "done": True, "done_reason": "load"}
        assert daemon.inner.backend.decodes == 0


# --- what is asked ---


async def manner_of(body: dict[str, Any]) -> Any:
    """Return what is asked of the service."""
    async with http_house() as daemon:
        client = daemon.connect()
        await client.send("POST", body.pop("path", CHAT), body)
        await client.head()
        (running,) = daemon.inner.service.directory
        client.close()
        return running.ask


async def test_the_options_are_honoured(autojump_clock: MockClock) -> None:
    """Each under its name; what is left out is as Ollama has it."""
    ask = await manner_of({**HELLO, "options": {}})
    chosen = ask.sampling
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p) == (0.8, 40, 0.9, 0)
    assert (chosen.repeat_penalty, chosen.repeat_last_n) == (1.1, 64)
    assert (ask.max_tokens, ask.stop) == (1024, ())
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.4,
        "min_p": 0.1,
        "seed": 3,
        "repeat_penalty": 1.5,
        "repeat_last_n": 5,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "stop": ["zz", "qq"],
        "num_predict": 77,
    }
    ask = await manner_of({**HELLO, "options": options})
    assert (ask.max_tokens, ask.stop) == (77, ("zz", "qq"))
    names = [name for name in options if name not in ("stop", "num_predict")]
    assert [getattr(ask.sampling, name) for name in names] == [options[name] for name in names]


@pytest.mark.parametrize(
    ("think", "thinks", "effort"),
    [(None, None, None), (True, True, None), (False, False, None), ("low", True, "low")],
)
async def test_how_much_is_thought(
    autojump_clock: MockClock, think: Any, thinks: bool | None, effort: str | None
) -> None:
    """As true, false or a level; where nobody says the template decides."""
    for body in (HELLO, {**PROMPT, "path": GENERATE}):
        ask = await manner_of({**body, "think": think})
        assert isinstance(ask.prompt, Chat)
        assert (ask.prompt.manner.thinks, ask.prompt.manner.effort) == (thinks, effort)


async def test_a_prompt_is_a_chat_unless_it_is_raw(autojump_clock: MockClock) -> None:
    """With the system message before it."""
    ask = await manner_of({**PROMPT, "system": "be kind", "path": GENERATE})
    assert ask.prompt.messages == (Message("system", "be kind"), Message("user", "hello"))
    ask = await manner_of({**PROMPT, "raw": True, "path": GENERATE})
    assert ask.prompt == "hello"


async def test_a_format_is_kept_to(autojump_clock: MockClock) -> None:
    """A schema; the word json for any object; an empty one says nothing."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    async with http_house() as daemon:
        asked = {**HELLO, "stream": False, "options": {**GREEDY, "num_predict": 300}}
        strict = {**schema, "additionalProperties": False}
        found = (await daemon.ask("POST", CHAT, {**asked, "format": strict})).json
        assert "".join(found["message"]["content"].split()) == '{"a":1}'
        found = (await daemon.ask("POST", CHAT, {**asked, "format": "json"})).json
        assert found["message"]["content"].lstrip().startswith("{")
        asked["options"]["num_predict"] = 8
        plain = (await daemon.ask("POST", CHAT, asked)).json
        found = (await daemon.ask("POST", CHAT, {**asked, "format": ""})).json
        assert found["message"] == plain["message"]


async def test_the_last_word_of_the_assistant_is_gone_on_with(autojump_clock: MockClock) -> None:
    """A prefill is not repeated."""
    async with http_house() as daemon:
        prefill = [*SAID, {"role": "assistant", "content": "It was"}]
        found = (
            await daemon.ask("POST", CHAT, {**HELLO, "messages": prefill, "stream": False})
        ).json
        goes = {"messages": prefill, "continue_final_message": True}
        asked = {**goes, "temperature": 0, "max_tokens": 8}
        plain = (await daemon.ask("POST", "/v1/chat/completions", asked)).json
        assert found["message"]["content"] == plain["choices"][0]["message"]["content"]


async def test_what_changes_nothing_is_named(autojump_clock: MockClock) -> None:
    """In the header, options by their path; a strict daemon refuses it."""
    body = {**HELLO, "keep_alive": "5m", "options": {**GREEDY, "num_ctx": 9, "odd": 1}}
    async with http_house() as daemon:
        answer = await daemon.ask("POST", CHAT, body)
        assert answer.headers["x-uma-ignored"] == "options.num_ctx, options.odd, keep_alive"
    async with http_house(strict=True) as daemon:
        body = {**HELLO, "model": "fake", "options": {"num_ctx": 9}}
        answer = await daemon.ask("POST", CHAT, body)
        assert (answer.status, answer.json["param"]) == (400, "options.num_ctx")


def test_results_find_their_calls() -> None:
    """By id, by the tool's name, by their order; a call without an id gets one."""
    made = [{"function": {"name": name, "arguments": {"é": 1}}} for name in ("f", "g", "f")]
    made.append({"id": "mine", "function": {"name": "h", "arguments": "{}"}})
    results = [
        {"role": "tool", "tool_name": "g", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "tool_call_id": "mine", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "tool", "tool_name": "f", "content": "5"},
    ]
    turn = {"role": "assistant", "thinking": "t", "tool_calls": made}
    unseen: list[str] = []
    user = {"role": "user", "content": "x", "images": []}
    found = messages_of([user, turn, *results], unseen.append)
    calls = (
        *(Call(f"call_{n}", name, '{"é": 1}') for n, name in ((1, "f"), (2, "g"), (3, "f"))),
        Call("mine", "h", "{}"),
    )
    assert found[1] == Message("assistant", "", calls, reasoning="t")
    ids = [message.call_id for message in found[2:]]
    assert ids == ["call_2", "call_1", "mine", "call_3", None]


def test_only_words_at_the_end_are_gone_on_with() -> None:
    """Not a call, nor an empty text."""
    said = Message("assistant", "x")
    assert goes_on((said,))
    blank, called = evolve(said, content=" "), evolve(said, calls=(Call("1", "f", "{}"),))
    assert not any(goes_on((each,)) for each in (blank, called, Message("user", "x")))


# --- errors ---


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": 5}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": [], "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{**SAID[0], "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {"messages": [{**SAID[0], "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (CHAT, {"tools": [{"function": {}}]}, "tools[0].function.name"),
        (CHAT, {"format": "yaml"}, "format"),
        (CHAT, {"format": 5}, "format"),
        (CHAT, {"think": "much"}, "think"),
        (CHAT, {"think": []}, "think"),
        (CHAT, {"options": []}, "options"),
        (CHAT, {"options": {"temperature": "hot"}}, "options.temperature"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (GENERATE, {"images": ["aGk="]}, "images"),
        (GENERATE, {"suffix": "}"}, "suffix"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"raw": True, "system": "x"}, "system"),
        (GENERATE, {"prompt": "x" * 3000}, "prompt"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_in_the_apis_own_form(
    autojump_clock: MockClock, path: str, body: dict[str, Any], param: str
) -> None:
    """A sentence as `error`, with the field beside it; streamed or not."""
    async with http_house() as daemon:
        for stream in (True, False):
            base = HELLO if path == CHAT else PROMPT
            answer = await daemon.ask("POST", path, {**base, "stream": stream, **body})
            assert answer.status == 400
            assert answer.headers["content-type"] == "application/json"
            assert isinstance(answer.json["error"], str)
            assert answer.json["param"] == param


async def test_options_that_ask_for_nothing_are_taken(autojump_clock: MockClock) -> None:
    """As clients that send every option do."""
    options = {"mirostat": 0, "tfs_z": 1, "typical_p": 1.0, "num_predict": 1, "num_thread": 4}
    async with http_house() as daemon:
        answer = await daemon.ask("POST", GENERATE, {**PROMPT, "suffix": "", "options": options})
        assert answer.lines[-1]["done"]


async def test_the_documented_example_of_all_options_is_taken(
    autojump_clock: MockClock,
) -> None:
    """As in Ollama's API documentation, "Generate request (With options)"; what has no effect is named."""
    options = {
        "num_keep": 5, "seed": 42, "num_predict": 10, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7,
        "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0,
        "penalize_newline": True, "stop": ["user:"], "numa": False, "num_ctx": 1024, "num_batch": 2,
        "num_gpu": 1, "main_gpu": 0, "use_mmap": True, "num_thread": 8,
    }  # fmt: skip
    async with http_house() as daemon:
        body = {**PROMPT, "stream": False, "options": options}
        answer = await daemon.ask("POST", GENERATE, body)
        assert answer.status == 200
        assert "options.typical_p" in answer.headers["x-uma-ignored"]


async def test_a_key_and_a_stopping_daemon_are_told_of(autojump_clock: MockClock) -> None:
    """401 and 503, as a sentence."""
    async with http_house(keys=(b"secret",)) as daemon:
        answer = await daemon.ask("POST", CHAT, HELLO)
        assert (answer.status, type(answer.json["error"])) == (401, str)
        answer = await daemon.ask("POST", CHAT, HELLO, authorization="Bearer secret")
        assert answer.status == 200
    async with http_house() as daemon:
        daemon.inner.service.stop_taking()
        answer = await daemon.ask("POST", CHAT, HELLO)
        assert (answer.status, type(answer.json["error"])) == (503, str)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", f"/api/{name}") for name in ("embed", "embeddings", "pull", "push", "create")),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
    ],
)
async def test_what_is_not_served_says_so(
    autojump_clock: MockClock, method: str, path: str
) -> None:
    """400, and why: no retry can help."""
    async with http_house() as daemon:
        answer = await daemon.ask(method, path, {"model": "any"})
        assert (answer.status, type(answer.json["error"])) == (400, str)


# --- models ---


async def test_a_strict_daemon_knows_its_model_with_and_without_a_tag(
    autojump_clock: MockClock,
) -> None:
    """Any other is not found, also where nothing would run."""
    async with http_house(strict=True) as daemon:
        for path, body in ((CHAT, HELLO), (GENERATE, PROMPT), (CHAT, {}), ("/api/show", {})):
            for name, status in (("fake", 200), ("fake:latest", 200), ("fake:7b", 404)):
                answer = await daemon.ask("POST", path, {**body, "model": name})
                assert answer.status == status, answer.body
        assert answer.json["error"].startswith("model 'fake:7b' not found")
        older = await daemon.ask("POST", "/api/show", {"name": "fake:7b"})
        assert older.status == 404


async def test_the_model_is_listed_described_and_running(autojump_clock: MockClock) -> None:
    """Under its name with a tag; the context is that of a request."""
    async with http_house() as daemon:
        (model,) = (await daemon.ask("GET", "/api/tags")).json["models"]
        assert (model["name"], model["model"]) == ("fake:latest", "fake:latest")
        assert re.fullmatch(r"[0-9a-f]{64}", model["digest"])
        (running,) = (await daemon.ask("GET", "/api/ps")).json["models"]
        assert model.items() <= running.items()
        assert running["context_length"] == 1024
        shown = (await daemon.ask("POST", "/api/show", {"model": "any"})).json
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == 1024
        assert shown["capabilities"] == ["completion", "tools"]
        assert "messages" in shown["template"]
    async with scripted("x") as daemon:
        shown = (await daemon.ask("POST", "/api/show", {"model": "any"})).json
        assert shown["capabilities"] == ["completion", "tools", "thinking"]


def test_the_figures_of_a_model_are_those_of_its_file() -> None:
    """Numbers as numbers; nothing long, and nothing of another kind of key."""
    metadata = {
        "general.architecture": "qwen2",
        "general.name": "7",
        "general.file_type": "15",
        "general.tags": "x" * 300,
        "qwen2.block_count": "24",
        "qwen2.rope.freq_base": "1000000.000000",
        "tokenizer.ggml.model": "gpt2",
    }
    assert details_of(metadata, "qwen2 1B Q4_K - Medium", 494_032_768) == {
        "parent_model": "",
        "format": "gguf",
        "family": "qwen2",
        "families": ["qwen2"],
        "parameter_size": "494.03M",
        "quantization_level": "Q4_K_M",
    }
    assert figures_of(metadata, "qwen2") == {
        "general.architecture": "qwen2",
        "general.name": "7",
        "general.file_type": 15,
        "qwen2.block_count": 24,
        "qwen2.rope.freq_base": 1000000.0,
    }
    kinds = {"llama 7B Q8_0": "Q8_0", "llama 8B all F32": "F32", "gemma3 1B BF16": "BF16"}
    for description, kind in {**kinds, "x IQ3_S mix - 3.66 bpw": "IQ3_S", "odd": ""}.items():
        found = details_of(metadata, description, 7_615_616_512)
        assert (found["quantization_level"], found["parameter_size"]) == (kind, "7.6B")


async def test_programs_that_ask_whether_it_runs_are_told(autojump_clock: MockClock) -> None:
    """Also without a key; the version is one that clients accept."""
    async with http_house(keys=(b"secret",)) as daemon:
        for method in ("GET", "HEAD"):
            answer = await daemon.ask(method, "/")
            assert answer.status == 200
        assert (await daemon.ask("GET", "/api/version")).status == 401
    async with http_house() as daemon:
        found = (await daemon.ask("GET", "/api/version")).json
        assert re.fullmatch(r"\d+\.\d+\.\d+", found["version"])


def test_images_are_refused_wherever_they_stand() -> None:
    """In any message but the result of a tool."""
    with pytest.raises(Wrong):
        messages_of([*SAID, {"role": "assistant", "content": "x", "images": ["aGk="]}], [].append)
