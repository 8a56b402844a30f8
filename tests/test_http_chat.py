"""Text over HTTP: what the clients of OpenAI's API and of llama-server send and get back."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from http_kit import Answer, HttpHouse, http_house
from net_kit import TICK_S
from reply_kit import THINKING_TEMPLATE
from trio.testing import MockClock

from uma_trio.api import bodies as intake
from uma_trio.api.accounts import timings
from uma_trio.api.bodies import document_of
from uma_trio.engine.messages import Finished
from uma_trio.http.pieces import JsonLimits
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost
from uma_trio_sim.scripted import ScriptedBackend

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 8,
}
TEXT: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 8}


def texts(events: list[Any], n: int = 1) -> list[str]:
    """Return the text of each answer in a stream of chat chunks."""
    found = [""] * n
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            found[choice["index"]] += choice["delta"].get("content", "")
    return found


async def refused(daemon: HttpHouse, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Return the error that a body is answered with."""
    answer = await daemon.ask("POST", path, body)
    assert answer.status == status, answer.body
    return answer.error


# --- chats ---


async def test_a_chat_is_answered_whole(autojump_clock: MockClock) -> None:
    """The text, why it ended, what it took; any name of a model is served and repeated."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", CHAT, HELLO)
        (choice,) = answer.json["choices"]
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == "length"
        assert answer.json["usage"]["completion_tokens"] == 8
        assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert (answer.json["object"], answer.json["model"]) == ("chat.completion", "any")
        assert answer.headers["x-request-id"].startswith("test-")


async def test_a_chat_is_streamed(autojump_clock: MockClock) -> None:
    """The role first, then the text, an empty delta with the reason, and [DONE]."""
    async with http_house() as daemon:
        whole = await daemon.ask("POST", CHAT, HELLO)
        answer = await daemon.ask("POST", CHAT, {**HELLO, "stream": True})
        assert answer.headers["content-type"] == "text/event-stream"
        first, *_, last, done = answer.events
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert texts(answer.events) == [whole.json["choices"][0]["message"]["content"]]
        assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}]
        assert last["timings"]["predicted_n"] == 8
        assert done == "[DONE]"


async def test_the_usage_comes_in_a_chunk_of_its_own(autojump_clock: MockClock) -> None:
    """Only where it was asked for; it has no choice."""
    async with http_house() as daemon:
        asked = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
        *_, last, done = (await daemon.ask("POST", CHAT, asked)).events
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
        assert last["timings"]["prompt_n"] == last["usage"]["prompt_tokens"]
        assert done == "[DONE]"


async def test_several_answers_differ_by_their_seeds(autojump_clock: MockClock) -> None:
    """The first is what the seed gives alone, whole or streamed; the prompt counts once."""
    async with http_house() as daemon:
        asked = {**HELLO, "temperature": 5, "seed": 7, "max_tokens": 20, "ignore_eos": True}
        alone = [
            (await daemon.ask("POST", CHAT, {**asked, "seed": 7 + i})).json["choices"][0]["message"]
            for i in range(3)
        ]
        together = await daemon.ask("POST", CHAT, {**asked, "n": 3})
        messages = [choice["message"] for choice in together.json["choices"]]
        assert messages[0] == alone[0]
        assert len({message["content"] for message in [*messages, *alone]}) == 5
        usage = together.json["usage"]
        assert usage["completion_tokens"] == 60
        assert usage["prompt_tokens"] < 60
        streamed = await daemon.ask("POST", CHAT, {**asked, "n": 3, "stream": True})
        assert texts(streamed.events, 3) == [message["content"] for message in messages]
        assert streamed.events[-1] == "[DONE]"


async def test_an_empty_stop_string_stops_nothing(autojump_clock: MockClock) -> None:
    """As for llama-server, in every API; the others beside it count."""
    async with http_house() as daemon:
        for path, name, asked in (
            (CHAT, "stop", HELLO),
            ("/v1/completions", "stop", TEXT),
            ("/completion", "stop", {"prompt": "hello", "temperature": 0, "n_predict": 8}),
            ("/v1/responses", "stop", {"input": "hello", "temperature": 0, "max_output_tokens": 8}),
            ("/v1/messages", "stop_sequences", HELLO),
        ):
            free = await daemon.ask("POST", path, asked)
            for stops in ("", [""], ["", "\x00never"]):
                found = await daemon.ask("POST", path, {**asked, name: stops})
                assert found.status == 200, found.body
                assert said(found.json) == said(free.json)


def said(document: dict[str, Any]) -> Any:
    """Return what an answer says, in any API."""
    for name in ("choices", "content", "output"):
        if name in document:
            whole = document[name]
            break
    return [
        {k: v for k, v in part.items() if k != "id"} if isinstance(part, dict) else part
        for part in whole
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_several_answers_cost_one_prompt(autojump_clock: MockClock, stream: bool) -> None:
    """But for its last token, whose logits each of them needs."""
    async with http_house(prefix_bytes=1 << 22) as daemon:
        asked = {**HELLO, "temperature": 1, "max_tokens": 20, "ignore_eos": True, "n": 4}
        alone = await daemon.ask("POST", CHAT, {**HELLO, "cache_salt": "other", "max_tokens": 1})
        n_prompt = alone.json["usage"]["prompt_tokens"]
        computed = daemon.inner.backend.computed
        before = sum(computed.values())
        await daemon.ask("POST", CHAT, {**asked, "stream": stream})
        assert sum(computed.values()) - before == n_prompt + 3 + 4 * 19


async def test_a_prompt_may_be_computed_apart_from_all_others(autojump_clock: MockClock) -> None:
    """cache_prompt false finds nothing, not its own like either; others find what others left."""
    async with http_house(prefix_bytes=1 << 22) as daemon:
        asked = {**TEXT, "prompt": "hello there " * 20}
        found = []
        for apart in (False, True, True, False):
            body = {**asked, "cache_prompt": not apart}
            answer = await daemon.ask("POST", "/v1/completions", body)
            assert "x-uma-ignored" not in answer.headers
            found.append(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert found == [False, False, False, True]


async def test_probabilities_come_with_each_token(autojump_clock: MockClock) -> None:
    """In the API's own form; the likeliest alternative of a greedy answer is the token itself."""
    async with http_house() as daemon:
        asked = {**HELLO, "logprobs": True, "top_logprobs": 2}
        (choice,) = (await daemon.ask("POST", CHAT, asked)).json["choices"]
        assert len(choice["logprobs"]["content"]) == 8
        for token in choice["logprobs"]["content"]:
            assert len(token["top_logprobs"]) == 2
            assert token["top_logprobs"][0]["id"] == token["id"]
            assert token["logprob"] <= 0
        streamed = (await daemon.ask("POST", CHAT, {**asked, "stream": True})).events
        found = [e["choices"][0]["logprobs"]["content"][0] for e in streamed[1:-2]]
        assert found == choice["logprobs"]["content"]


async def test_a_text_in_parts_and_a_developer_are_understood(autojump_clock: MockClock) -> None:
    """A developer is the system to a template; parts are lines."""
    async with http_house() as daemon:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        chat = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
        answer = await daemon.ask("POST", "/apply-template", {"messages": chat})
        assert "system\nx" in answer.json["prompt"]
        assert "user\na\nb" in answer.json["prompt"]


async def test_an_answer_goes_on_with_the_last_message(autojump_clock: MockClock) -> None:
    """Where it is the assistant's, and that was asked for."""
    async with http_house() as daemon:
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It was"}]
        asked = {"messages": chat, "continue_final_message": True}
        answer = await daemon.ask("POST", "/apply-template", asked)
        assert answer.json["prompt"].endswith("It was")
        assert (await daemon.ask("POST", CHAT, {**HELLO, **asked})).status == 200


async def test_a_prompt_may_end_behind_the_last_message(autojump_clock: MockClock) -> None:
    """Whoever says it: no answer is begun then, as templates of transformers do."""
    async with http_house() as daemon:
        asked = {**HELLO, "add_generation_prompt": False}
        ends = (await daemon.ask("POST", "/apply-template", asked)).json["prompt"]
        begins = (await daemon.ask("POST", "/apply-template", HELLO)).json["prompt"]
        assert begins == ends + "<|im_start|>assistant\n"
        assert (await daemon.ask("POST", CHAT, {**asked, "max_tokens": 3})).status == 200


@pytest.mark.parametrize("how", [True, "reasoning_content"])
async def test_reasoning_that_was_cut_off_goes_on(autojump_clock: MockClock, how: Any) -> None:
    """Where the last message has nothing but reasoning; the answer begins inside of it."""
    backend = ScriptedBackend(
        [list(b" that.</think>Yes.")], n_ctx=4096, n_batch=512, chat_template=THINKING_TEMPLATE
    )
    chat = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "reasoning_content": "I think"},
    ]
    asked = {"messages": chat, "continue_final_message": how, "temperature": 0}
    async with http_house(backend=backend) as daemon:
        answer = await daemon.ask("POST", "/apply-template", asked)
        assert answer.json["prompt"].endswith("<|im_start|>assistant\n<think>\nI think")
        message = (await daemon.ask("POST", CHAT, asked)).json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (" that.", "Yes.")
    async with http_house() as daemon:
        error = await refused(daemon, CHAT, asked)
        assert "no reasoning that could be continued" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x"] * 129}, "stop"),
        ({"logit_bias": {"x": "1"}}, "logit_bias.text"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"logit_bias": [[1, -1], [2]]}, "logit_bias[1]"),
        ({"logit_bias": [[-1, -1]]}, "logit_bias[0]"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"4000000": 1}}, "logit_bias"),
        ({"stop_token_ids": [4_000_000]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": {}}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"reasoning_budget": -2}, "reasoning_budget"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"priority": "high"}, "priority"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"speculation": "on"}, "speculation"),
        ({"pace": "slow"}, "pace"),
        ({"continue_final_message": "all"}, "continue_final_message"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
        ),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"model": "\n"}, "model"),
    ],
)
async def test_a_field_that_cannot_be_honoured_is_named(
    autojump_clock: MockClock, body: dict[str, Any], param: str
) -> None:
    """With 400, and nothing runs."""
    async with http_house() as daemon:
        error = await refused(daemon, CHAT, {**HELLO, **body})
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert error["message"]


async def test_values_that_ask_for_nothing_are_no_reason_to_refuse(
    autojump_clock: MockClock,
) -> None:
    """Clients send every field they know with its default; whole numbers may have a point."""
    async with http_house() as daemon:
        idle = {"tools": [], "response_format": {"type": "text"}, "best_of": 1, "functions": None}
        answer = await daemon.ask("POST", CHAT, {**HELLO, **idle, "max_tokens": 8.0, "top_k": -1})
        assert answer.status == 200, answer.body
        assert "x-uma-ignored" not in answer.headers


async def test_what_is_ignored_is_named_in_a_header(autojump_clock: MockClock) -> None:
    """Fields that change nothing here and fields that nobody knows; a strict daemon refuses them."""
    async with http_house() as daemon:
        asked = {**HELLO, "user": "me", "new_field": 1}
        assert (await daemon.ask("POST", CHAT, asked)).headers["x-uma-ignored"] == "user, new_field"
    async with http_house(strict=True) as daemon:
        assert (await refused(daemon, CHAT, {**HELLO, "model": "fake", "user": "me"}))[
            "param"
        ] == "user"
        assert (await refused(daemon, CHAT, HELLO, 404))["code"] == "model_not_found"


async def test_a_prompt_beyond_the_context_is_told_with_both_numbers(
    autojump_clock: MockClock,
) -> None:
    """As OpenAI calls it and as llama-server counts it."""
    async with http_house(backend=FakeBackend(n_ctx=64, cost=linear_cost(TICK_S, 0))) as daemon:
        long = {"messages": [{"role": "user", "content": "x" * 90}]}
        error = await refused(daemon, CHAT, {**HELLO, **long})
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "exceed_context_size_error"
        assert error["n_prompt_tokens"] > error["n_ctx"] == 64


async def test_more_tokens_than_fit_are_trimmed(autojump_clock: MockClock) -> None:
    """The answer ends with `length` where the context does."""
    async with http_house(backend=FakeBackend(n_ctx=64, cost=linear_cost(TICK_S, 0))) as daemon:
        answer = await daemon.ask("POST", "/v1/completions", {**TEXT, "max_tokens": 9999})
        assert answer.json["usage"]["total_tokens"] == 64
        assert answer.json["choices"][0]["finish_reason"] == "length"


async def test_a_full_queue_says_when_to_come_back(autojump_clock: MockClock) -> None:
    """429, as clients that try again expect it."""
    async with http_house(
        backend=FakeBackend(n_slots=1, cost=linear_cost(TICK_S, 0)), max_waiting=1
    ) as daemon:
        clients = [daemon.connect() for _ in range(3)]
        for client in clients:
            await client.send("POST", CHAT, {**HELLO, "max_tokens": 100})
        answers = [await client.answer() for client in clients]
        refusal = next(answer for answer in answers if answer.status == 429)
        assert refusal.error["code"] == "queue_full"
        assert int(refusal.headers["retry-after"]) >= 1


async def test_a_failure_in_mid_stream_is_an_event(autojump_clock: MockClock) -> None:
    """The status is out; the SDKs raise what the event says. Whole answers get the status."""
    backend = FakeBackend(
        cost=linear_cost(TICK_S, 0), faults={n: InjectedFault(status=-3) for n in (5, 6)}
    )
    async with http_house(backend=backend) as daemon:
        answer = await daemon.ask("POST", CHAT, {**HELLO, "stream": True, "max_tokens": 50})
        assert answer.status == 200
        assert answer.events[-1]["error"]["uma_code"].startswith("E_RUNTIME")
        assert answer.events[-1]["error"]["code"] == "decode_failed"


# --- texts ---


async def test_a_text_is_continued(autojump_clock: MockClock) -> None:
    """What the model gives, whole and streamed."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", "/v1/completions", TEXT)
        text = daemon.inner.expected("hello", 8)
        assert answer.json["choices"][0]["text"] == text
        assert answer.json["object"] == "text_completion"
        streamed = await daemon.ask("POST", "/v1/completions", {**TEXT, "stream": True})
        assert "".join(e["choices"][0]["text"] for e in streamed.events[:-1]) == text
        assert streamed.events[-2]["choices"][0]["finish_reason"] == "length"


async def test_several_prompts_are_continued_each(autojump_clock: MockClock) -> None:
    """Texts or tokens; the usage is that of all."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", "/v1/completions", {**TEXT, "prompt": ["one", "two"]})
        found = [choice["text"] for choice in answer.json["choices"]]
        assert found == [daemon.inner.expected(prompt, 8) for prompt in ("one", "two")]
        assert answer.json["usage"]["prompt_tokens"] == 8
        tokens = daemon.inner.backend.vocabulary.tokenize(
            "one", add_special=True, parse_special=False
        )
        answer = await daemon.ask("POST", "/v1/completions", {**TEXT, "prompt": tokens.tolist()})
        assert answer.json["choices"][0]["text"] == found[0]


async def test_the_prompt_is_echoed_where_that_was_asked_for(autojump_clock: MockClock) -> None:
    """Before the answer, also in a stream."""
    async with http_house() as daemon:
        asked = {**TEXT, "echo": True}
        whole = (await daemon.ask("POST", "/v1/completions", asked)).json["choices"][0]["text"]
        assert whole.startswith("hello")
        streamed = (await daemon.ask("POST", "/v1/completions", {**asked, "stream": True})).events
        assert "".join(e["choices"][0]["text"] for e in streamed[:-1]) == whole


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", 1.5]}, "prompt[1]"),
        ({"prompt": [[1], "a", {}]}, "prompt[2]"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": ["a"] * 99}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 2}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
    ],
)
async def test_a_text_that_cannot_be_continued_is_refused(
    autojump_clock: MockClock, body: dict[str, Any], param: str
) -> None:
    """By the field at fault."""
    async with http_house(backend=FakeBackend(n_slots=4, cost=linear_cost(TICK_S, 0))) as daemon:
        assert (await refused(daemon, "/v1/completions", {**TEXT, **body}))["param"] == param


async def test_probabilities_of_a_text_stand_beside_its_tokens(autojump_clock: MockClock) -> None:
    """In the older form: four lists of one length."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", "/v1/completions", {**TEXT, "logprobs": 1})
        found = answer.json["choices"][0]["logprobs"]
        assert {len(values) for values in found.values()} == {8}
        assert found["text_offset"][0] == 0


async def test_a_prompt_is_scored_as_evaluation_harnesses_ask(autojump_clock: MockClock) -> None:
    """Tokens in, with echo and logprobs: each has its place in four lists, nothing is known of the first.

    The same is said again of a prompt that was computed before, and of the token that follows.
    """
    async with http_house(prefix_bytes=1 << 22) as daemon:
        prompts = [[104, 101, 108, 108, 111], list(b"another " * 12)]
        asked = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        answer = await daemon.ask("POST", "/v1/completions", asked)
        for prompt, choice in zip(prompts, answer.json["choices"], strict=True):
            found, n = choice["logprobs"], len(prompt)
            assert {len(values) for values in found.values()} == {n + 1}
            assert "".join(found["tokens"]) == choice["text"]
            assert found["text_offset"] == list(range(n + 1))
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            assert all(value < 0 for value in found["token_logprobs"][1:])
            begun = {"prompt": prompt[:-1], "max_tokens": 1, "temperature": 0, "logprobs": 20}
            behind = await daemon.ask("POST", "/v1/completions", begun)
            (expected,) = behind.json["choices"][0]["logprobs"]["top_logprobs"]
            unlikely = min(expected.values())  # all that are not among the likeliest are as likely
            assert found["token_logprobs"][n - 1] == expected.get(found["tokens"][n - 1], unlikely)
            ((likeliest, _),) = found["top_logprobs"][n - 1].items()
            assert likeliest == behind.json["choices"][0]["text"]
        again = await daemon.ask("POST", "/v1/completions", asked)
        assert again.json["choices"] == answer.json["choices"]
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_scored_prompt_may_be_streamed_and_have_no_answer(
    autojump_clock: MockClock,
) -> None:
    """With max_tokens 0 there are the prompt, its logprobs and no token."""
    async with http_house() as daemon:
        asked = {**TEXT, "max_tokens": 0, "logprobs": 2, "echo": True}
        whole = (await daemon.ask("POST", "/v1/completions", asked)).json
        (choice,) = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
        assert whole["usage"]["completion_tokens"] == 0
        assert len(choice["logprobs"]["tokens"]) == whole["usage"]["prompt_tokens"]
        streams = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        events = (await daemon.ask("POST", "/v1/completions", streams)).events
        assert events.pop() == "[DONE]"
        assert events.pop()["usage"]["completion_tokens"] == 0
        first, last = [event["choices"][0] for event in events]
        assert (first["text"], first["logprobs"]) == ("hello", choice["logprobs"])
        assert (last["text"], last["finish_reason"]) == ("", "length")


# --- llama-server's own ---


@pytest.mark.parametrize(
    ("path", "more", "native"),
    [
        ("/completions", {}, True),
        ("/completions", {"model": "m", "n_predict": 2}, True),
        ("/completions", {"model": "m"}, False),
        ("/v1/completions", {}, False),
    ],
    ids=str,
)
async def test_completions_without_a_version_are_whose_the_body_is(
    autojump_clock: MockClock, path: str, more: dict[str, Any], native: bool
) -> None:
    """OpenAI's clients name a model; llama-server's do not, or say n_predict."""
    async with http_house() as daemon:
        answer = (await daemon.ask("POST", path, {"prompt": "hello", "max_tokens": 2, **more})).json
        assert (("content" in answer), ("choices" in answer)) == (native, not native)


@pytest.mark.parametrize("more", [{}, {"model": "m"}], ids=["llama-server's", "OpenAI's"])
async def test_a_body_is_decoded_once_whoever_it_is_for(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """A prompt may have megabytes, and nothing else runs while it is decoded."""
    decoded: list[bytes] = []

    def counting(body: bytes, limits: JsonLimits) -> dict[str, Any]:
        decoded.append(body)
        return document_of(body, limits)

    monkeypatch.setattr(intake, "document_of", counting)
    async with http_house() as daemon:
        await daemon.ask("POST", "/completions", {**TEXT, **more})
    assert len(decoded) == 1


async def test_a_chat_tells_how_it_was_understood_if_that_is_wanted(
    autojump_clock: MockClock,
) -> None:
    """The prompt as the model reads it, whole or at the end of a stream; nobody else hears of it."""
    async with http_house() as daemon:
        asked = {**HELLO, "verbose": True, "seed": 5}
        whole = (await daemon.ask("POST", CHAT, asked)).json
        told = whole["__verbose"]
        assert told["prompt"].startswith("<|im_start|>user\n")
        assert told["tokens_evaluated"] == whole["usage"]["prompt_tokens"]
        assert told["generation_settings"]["seed"] == 5
        events = (await daemon.ask("POST", CHAT, {**asked, "stream": True})).events
        *others, last = [event for event in events if event != "[DONE]"]
        assert last["__verbose"]["prompt"] == told["prompt"]
        assert not any("__verbose" in event for event in others)
        assert "__verbose" not in (await daemon.ask("POST", CHAT, HELLO)).json


async def test_llama_servers_completion_says_all_in_its_last_chunk(
    autojump_clock: MockClock,
) -> None:
    """Text and tokens before it; no [DONE]."""
    async with http_house() as daemon:
        asked = {"prompt": "hello", "n_predict": 8, "temperature": 0}
        whole = (await daemon.ask("POST", "/completion", asked)).json
        assert whole["content"] == daemon.inner.expected("hello", 8)
        assert (whole["stop_type"], whole["tokens_predicted"]) == ("limit", 8)
        *chunks, last = (await daemon.ask("POST", "/completion", {**asked, "stream": True})).events
        assert "".join(c["content"] for c in [*chunks, last]) == whole["content"]
        assert [c["stop"] for c in [*chunks, last]] == [False] * 8 + [True]
        assert last["timings"]["predicted_n"] == 8


@pytest.mark.parametrize("as_pairs", [False, True])
@pytest.mark.parametrize("by_text", [False, True])
async def test_a_bias_may_be_by_token_or_by_text(
    autojump_clock: MockClock, by_text: bool, as_pairs: bool
) -> None:
    """As an object or as pairs; false is a ban. What would have come first does not come at all."""
    async with http_house() as daemon:
        asked = {"prompt": "hello", "n_predict": 8, "temperature": 0, "return_tokens": True}
        plain = (await daemon.ask("POST", "/completion", asked)).json
        banned = plain["content"][0] if by_text else plain["tokens"][0]
        bias = [[banned, False]] if as_pairs else {str(banned): -100}
        other = (await daemon.ask("POST", "/completion", {**asked, "logit_bias": bias})).json
        assert plain["tokens"][0] not in other["tokens"]


async def test_biases_of_one_token_are_added_up(autojump_clock: MockClock) -> None:
    """A text and an id may mean the same token."""
    async with http_house() as daemon:
        asked = {"prompt": "hello", "n_predict": 8, "temperature": 0, "return_tokens": True}
        plain = (await daemon.ask("POST", "/completion", asked)).json
        text, token = plain["content"][0], plain["tokens"][0]
        both = [[token, -100], [text, 100]]
        other = (await daemon.ask("POST", "/completion", {**asked, "logit_bias": both})).json
        assert other["content"] == plain["content"]


async def test_llama_servers_answer_tells_how_it_was_computed(autojump_clock: MockClock) -> None:
    """Whole and streamed alike; with ignore_eos each end token is banned. Tokens only if wanted."""
    async with http_house() as daemon:
        asked = {"prompt": "hello", "n_predict": 8, "seed": 7, "stop": "zz", "ignore_eos": True}
        whole = (await daemon.ask("POST", "/completion", asked)).json
        settings = whole["generation_settings"]
        assert (settings["n_predict"], settings["seed"], settings["stop"]) == (8, 7, ["zz"])
        assert (settings["temperature"], settings["top_k"]) == (0.8, 40)
        ends = [{"token": t, "bias": None} for t in sorted(daemon.inner.served.end_tokens)]
        assert ends
        assert settings["logit_bias"] == ends
        assert (whole["tokens"], whole["has_new_line"]) == ([], "\n" in whole["content"])
        last = (await daemon.ask("POST", "/completion", {**asked, "stream": True})).events[-1]
        assert last["generation_settings"] == {**settings, "stream": True}
        more = (await daemon.ask("POST", "/completion", {**asked, "return_tokens": True})).json
        assert len(more["tokens"]) == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_llama_servers_answer_has_only_the_fields_that_are_wanted(
    autojump_clock: MockClock, stream: bool
) -> None:
    """By their paths, the prompt among them; what is not there is left out."""
    async with http_house() as daemon:
        wanted = ["prompt", "generation_settings/n_predict", "timings/none", "stop/x"]
        asked = {"prompt": "hello", "n_predict": 3, "response_fields": wanted, "stream": stream}
        answer = await daemon.ask("POST", "/completion", asked)
        last = answer.events[-1] if stream else answer.json
        assert last == {"prompt": "hello", "generation_settings/n_predict": 3}
        error = await refused(daemon, "/completion", {**asked, "response_fields": "content"})
        assert error["param"] == "response_fields"


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_means_that_the_prompt_is_computed_for_later(
    autojump_clock: MockClock, stream: bool
) -> None:
    """The next request with it finds it."""
    async with http_house(prefix_bytes=1 << 22) as daemon:
        asked = {"prompt": "hello there " * 20, "n_predict": 0, "return_tokens": True}
        answer = await daemon.ask("POST", "/completion", {**asked, "stream": stream})
        (last,) = answer.events if stream else [answer.json]
        assert (last["content"], last["tokens"], last["tokens_predicted"]) == ("", [], 0)
        assert (last["stop_type"], last["timings"]["predicted_n"]) == ("limit", 0)
        later = (await daemon.ask("POST", "/completion", {**asked, "n_predict": 2})).json
        assert later["timings"]["cache_n"] > 0


async def test_each_chunk_of_llama_servers_may_have_the_timings(autojump_clock: MockClock) -> None:
    """They grow with the answer, and its end says the same."""
    async with http_house() as daemon:
        asked = {"prompt": "hello", "n_predict": 8, "stream": True, "ignore_eos": True}
        plain = (await daemon.ask("POST", "/completion", asked)).events
        assert not any("timings" in chunk for chunk in plain[:-1])
        asked = {**asked, "timings_per_token": True}
        *chunks, last = (await daemon.ask("POST", "/completion", asked)).events
        found = [chunk["timings"] for chunk in chunks]
        assert [one["predicted_n"] for one in found] == [1, 2, 3, 4, 5, 6, 7, 8]
        spent = [one["predicted_ms"] for one in found]
        assert spent == sorted(spent)
        assert spent[-1] > 0
        same = ("cache_n", "prompt_n", "prompt_ms", "queue_ms")
        assert [found[0][k] for k in same] == [last["timings"][k] for k in same]


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"n": 2}], ids=str)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_each_chunk_of_openais_may_have_the_timings(
    autojump_clock: MockClock, path: str, more: dict[str, Any]
) -> None:
    """Every chunk with text has those of its own answer, and the choices are the same."""
    async with http_house() as daemon:
        asked = {**(HELLO if path == CHAT else TEXT), "stream": True, "ignore_eos": True, **more}
        if path != CHAT and "logprobs" in more:
            asked["logprobs"] = 1
        plain = (await daemon.ask("POST", path, asked)).events[:-1]
        timed = (await daemon.ask("POST", path, {**asked, "timings_per_token": True})).events[:-1]
        assert not any("timings" in chunk for chunk in plain[:-1])
        for index in range(more.get("n", 1)):
            own = [c for c in timed if c["choices"][0]["index"] == index]
            tokens = [c for c in own if c["choices"][0]["finish_reason"] is None]
            counts = [c["timings"]["predicted_n"] for c in tokens if "timings" in c]
            assert len(counts) >= 4  # a token may end inside a character
            assert counts == sorted(set(counts))
            assert counts[-1] == 8
            choices = [c["choices"] for c in plain if c["choices"][0]["index"] == index]
            assert [c["choices"] for c in own] == choices


async def test_an_answer_that_fills_the_context_is_truncated(autojump_clock: MockClock) -> None:
    """As llama-server says it; one that its own limit ends is not."""
    async with http_house(backend=FakeBackend(n_ctx=64)) as daemon:
        asked = {"prompt": "hello", "ignore_eos": True}
        for n_predict, truncated in ((20, False), (-1, True)):
            answer = await daemon.ask("POST", "/completion", {**asked, "n_predict": n_predict})
            assert answer.json["truncated"] is truncated
        assert answer.json["tokens_predicted"] == 64 - answer.json["tokens_evaluated"]


async def test_llama_servers_errors_have_a_number_for_a_code(autojump_clock: MockClock) -> None:
    """As its clients expect it."""
    async with http_house() as daemon:
        error = await refused(daemon, "/completion", {"prompt": {"prompt_string": 1}})
        assert (error["code"], error["param"]) == (400, "prompt.prompt_string")


async def test_llama_servers_completion_answers_several_prompts(autojump_clock: MockClock) -> None:
    """A list of answers in their order, or chunks that say whose they are; in any form of a prompt."""
    async with http_house() as daemon:
        text = {"content": "hello", "add_special": True}
        tokens = (await daemon.ask("POST", "/tokenize", text)).json["tokens"]
        prompts = ["bye", tokens, {"prompt_string": "hello"}]
        asked = {"prompt": prompts, "n_predict": 6, "temperature": 0}
        whole = (await daemon.ask("POST", "/completion", asked)).json
        texts = [daemon.inner.expected(text, 6) for text in ("bye", "hello", "hello")]
        assert [one["content"] for one in whole] == texts
        assert [one["index"] for one in whole] == [0, 1, 2]
        chunks = (await daemon.ask("POST", "/completion", {**asked, "stream": True})).events
        for index, text in enumerate(texts):
            own = [chunk for chunk in chunks if chunk["index"] == index]
            assert "".join(chunk["content"] for chunk in own) == text
            assert [chunk["tokens_predicted"] for chunk in own] == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
async def test_tokens_and_texts_mixed_are_one_prompt(autojump_clock: MockClock, path: str) -> None:
    """The texts become tokens where they stand; beside it in a list stand other prompts."""
    async with http_house() as daemon:
        text = {"content": "hello there", "add_special": True}
        tokens = (await daemon.ask("POST", "/tokenize", text)).json["tokens"]
        cut = len(tokens) - len(" there")  # the fake vocabulary has one token for each byte
        mixed = [*tokens[:cut], " the", *tokens[cut + 4 : -1], "e"]
        sizes = {"n_predict": 6} if path == "/completion" else {"max_tokens": 6}
        asked = {"prompt": [mixed, "bye", ["hello", *tokens[cut:]]], "temperature": 0, **sizes}
        found = (await daemon.ask("POST", path, asked)).json
        told = found if path == "/completion" else found["choices"]
        texts = [one["content"] if "content" in one else one["text"] for one in told]
        expected = [daemon.inner.expected(text, 6) for text in ("hello there", "bye")]
        assert texts == [expected[0], expected[1], expected[0]]
        one = (await daemon.ask("POST", path, {**asked, "prompt": mixed})).json
        assert one["content" if path == "/completion" else "choices"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([1, "a", None], "prompt"),
        ([1, "a", 2.5], "prompt"),
        ([1, "a", [2]], "prompt"),
        (["a", True, 1], "prompt"),
        (["a", 1 << 70], "prompt"),
        (["a", -1], "prompt"),
        (["x", [1, "a", -(1 << 40)]], "prompt[1]"),
        (["a", *[1] * 5000], "prompt"),
        (["a" * 1_500_000, "b" * 1_500_000, 1], "prompt"),
    ],
)
async def test_a_mixed_prompt_at_fault_is_named(
    autojump_clock: MockClock, prompt: list[Any], param: str
) -> None:
    """What is neither text nor token, no token of the model's, or too long."""
    async with http_house(backend=FakeBackend(n_ctx=4096)) as daemon:
        error = await refused(daemon, "/v1/completions", {"prompt": prompt})
        assert error["param"] == param


async def test_the_tokens_of_a_chat_are_counted_without_an_answer(
    autojump_clock: MockClock,
) -> None:
    """As many as the answer's usage says; nothing is computed."""
    async with http_house() as daemon:
        asked = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 2}
        counted = await daemon.ask("POST", "/v1/chat/completions/input_tokens", asked)
        assert counted.status == 200
        assert not daemon.inner.backend.decodes
        answer = await daemon.ask("POST", "/v1/chat/completions", asked)
        assert counted.json["input_tokens"] == answer.json["usage"]["prompt_tokens"]
        error = await refused(daemon, "/v1/chat/completions/input_tokens", {"messages": 1})
        assert error["param"] == "messages"


def test_the_first_token_is_no_step_of_decoding() -> None:
    """One token has no rate; n tokens have that of n - 1."""
    end = Finished("length", "", 4, 1, 0, queue_s=0.5, ttft_s=1.0, total_s=1.0)
    assert timings(end)["predicted_per_second"] == timings(end)["predicted_per_token_ms"] == 0
    assert "draft_n" not in timings(end)
    drafted = timings(evolve(end, drafted_tokens=5, accepted_tokens=3))
    assert (drafted["draft_n"], drafted["draft_n_accepted"]) == (5, 3)
    found = timings(evolve(end, completion_tokens=11, total_s=3.0))
    assert (found["predicted_n"], found["predicted_ms"]) == (11, 2000)
    assert (found["predicted_per_second"], found["predicted_per_token_ms"]) == (5, 200)


async def test_texts_and_tokens_are_turned_into_each_other(autojump_clock: MockClock) -> None:
    """With pieces, too."""
    async with http_house() as daemon:
        tokens = (await daemon.ask("POST", "/tokenize", {"content": "héllo"})).json["tokens"]
        back = await daemon.ask("POST", "/detokenize", {"tokens": tokens})
        assert back.json == {"content": "héllo"}
        asked = {"content": "é", "with_pieces": True}
        pieces = (await daemon.ask("POST", "/tokenize", asked)).json["tokens"]
        assert [p["piece"] for p in pieces] == [[0xC3], [0xA9]]
        assert (await refused(daemon, "/detokenize", {"tokens": [-1]}))["param"] == "tokens[0]"


async def test_the_model_is_described_to_all_who_ask(autojump_clock: MockClock) -> None:
    """Under every name that a client looks for; nothing of this machine is told."""
    async with http_house() as daemon:
        (model,) = (await daemon.ask("GET", "/v1/models")).json["data"]
        assert model["meta"]["n_ctx"] == model["max_model_len"] == 1024
        assert (await daemon.ask("GET", "/v1/models/org/name")).json["id"] == "org/name"
        props = (await daemon.ask("GET", "/props")).json
        assert props["default_generation_settings"]["n_ctx"] == 1024
        params = props["default_generation_settings"]["params"]
        assert (params["temperature"], params["top_k"], params["seed"]) == (0.8, 40, 0xFFFFFFFF)
        assert "/" not in props["model_path"]


async def test_the_model_goes_by_every_name_that_it_was_given(autojump_clock: MockClock) -> None:
    """Each is listed; a strict daemon takes them, and that of the file, and no other."""
    async with http_house(
        model="first", aliases=("second", "file"), from_file=("file",), strict=True
    ) as daemon:
        listed = (await daemon.ask("GET", "/v1/models")).json["data"]
        assert [(model["id"], model["aliases"]) for model in listed] == [
            ("first", ["second", "file"]),
            ("second", ["first", "file"]),
        ]
        entries = await daemon.ask("GET", "/v1/models", **{"anthropic-version": "2023-06-01"})
        assert [model["id"] for model in entries.json["data"]] == ["first", "second"]
        for name in ("first", "second", "file"):
            assert (await daemon.ask("GET", f"/v1/models/{name}")).json["id"] == name
            answer = await daemon.ask("POST", CHAT, {**HELLO, "model": name})
            assert (answer.status, answer.json["model"]) == (200, name)
        unnamed = {key: value for key, value in HELLO.items() if key != "model"}
        assert (await daemon.ask("POST", CHAT, unnamed)).json["model"] == "first"
        assert (await daemon.ask("POST", CHAT, {**HELLO, "model": "other"})).status == 404
        assert (await daemon.ask("GET", "/v1/models/other")).status == 404


async def test_slots_tell_who_is_computed(autojump_clock: MockClock) -> None:
    """Without a word of what anybody wrote."""
    async with http_house() as daemon:
        busy = daemon.connect()
        await busy.send("POST", CHAT, {**HELLO, "stream": True, "max_tokens": 400})
        await busy.head()
        await busy.piece()
        await busy.piece()
        answer = await daemon.ask("GET", "/slots")
        first, *others = answer.json
        assert first["is_processing"]
        assert not any(slot["is_processing"] for slot in others)
        assert len(answer.json) == daemon.inner.served.slots
        assert b"hello" not in answer.body
        busy.close()


# --- our own ---


async def test_generate_speaks_the_protocol_of_the_socket(autojump_clock: MockClock) -> None:
    """The same request, the same events, as server-sent events."""
    async with http_house() as daemon:
        asked = {"id": "mine", "prompt": "hello", "max_tokens": 5}
        *tokens, eos = (await daemon.ask("POST", "/generate", asked)).events
        assert [event["event"] for event in tokens] == ["token"] * 5
        assert "".join(event["text"] for event in tokens) == daemon.inner.expected("hello", 5)
        assert (eos["event"], eos["id"], eos["reason"]) == ("eos", "mine", "length")
        whole = await daemon.ask("POST", "/generate", {**asked, "stream": False})
        assert whole.json["text"] == daemon.inner.expected("hello", 5)
        error = await refused(daemon, "/generate", {"prompt": "x", "temprature": 1})
        assert "temperature" in error["message"]


async def test_a_request_is_moved_to_another_lane(autojump_clock: MockClock) -> None:
    """By an operator, by the id that the answer began with."""
    async with http_house(keys=(b"secret",)) as daemon:
        busy = daemon.connect()
        key = {"Authorization": "Bearer secret"}
        await busy.send("POST", CHAT, {**HELLO, "stream": True, "max_tokens": 400}, key)
        await busy.head()
        id_ = daemon_id(await busy.piece())
        move = {"id": id_, "priority": "background"}
        answer = await daemon.ask("POST", "/priority", move, **key)
        assert answer.json == {"ok": True, "moved": 1}
        (running,) = (await daemon.inner.service.observer.state()).requests
        assert running.record.lane == "background"
        answer = await daemon.ask("POST", "/priority", {**move, "id": "other"}, **key)
        assert answer.status == 404
        assert answer.json["error"]["message"].endswith("GET /slots lists those that are")
        busy.close()


def daemon_id(piece: bytes) -> str:
    """Return the id in the first chunk of a stream."""
    answer = Answer(200, {}, piece)
    return str(answer.events[0]["id"])


@pytest.mark.parametrize(
    ("body", "headers", "lane"),
    [
        ({}, {}, "interactive"),
        ({"priority": "background"}, {}, "background"),
        ({"priority": 5}, {}, "background"),
        ({"priority": 0}, {}, "interactive"),
        ({"service_tier": "flex"}, {}, "background"),
        ({"service_tier": "flex", "priority": "interactive"}, {}, "interactive"),
        ({"priority": "background"}, {"X-UMA-Priority": "interactive"}, "interactive"),
    ],
)
async def test_the_lane_is_chosen_by_header_priority_or_tier(
    autojump_clock: MockClock, body: dict[str, Any], headers: dict[str, str], lane: str
) -> None:
    """In this order; who says nothing is interactive."""
    async with http_house() as daemon:
        client = daemon.connect()
        asked = {**HELLO, **body, "stream": True, "max_tokens": 400}
        await client.send("POST", CHAT, asked, {"X-UMA-App": "editor", **headers})
        await client.head()
        (running,) = (await daemon.inner.service.observer.state()).requests
        assert (running.record.lane, running.named.app) == (lane, "editor")
        client.close()


async def test_a_header_says_what_is_waited_for(autojump_clock: MockClock) -> None:
    """It goes before the body; a word that there is not is refused by its name."""
    async with http_house() as daemon:
        client = daemon.connect()
        asked = {**HELLO, "awaits": "nothing", "stream": True, "max_tokens": 400}
        await client.send("POST", CHAT, asked, {"X-UMA-Awaits": "tokens"})
        await client.head()
        (running,) = (await daemon.inner.service.observer.state()).requests
        assert running.record.awaits == "tokens"
        client.close()
        answer = await daemon.ask("POST", CHAT, HELLO, **{"X-UMA-Awaits": "words"})
        assert answer.status == 400
        assert b"X-UMA-Awaits" in answer.body


@pytest.mark.parametrize(
    ("path", "accept", "kind"),
    [
        ("/metrics", "*/*", "text/plain"),
        ("/metrics", "", "text/plain"),
        ("/metrics", "application/json", "application/json"),
        ("/metrics", "application/openmetrics-text;q=1", "text/plain"),
        ("/metrics", "text/plain", "text/plain"),
        ("/v1/metrics?format=prometheus", "*/*", "text/plain"),
        ("/metrics?format=json", "text/plain", "application/json"),
    ],
)
async def test_metrics_come_as_json_or_for_prometheus(
    autojump_clock: MockClock, path: str, accept: str, kind: str
) -> None:
    """By what the client accepts, or by name; routers and scrapers that say nothing get text."""
    async with http_house() as daemon:
        answer = await daemon.ask("GET", path, **({"Accept": accept} if accept else {}))
        assert answer.status == 200
        assert answer.headers["content-type"].startswith(kind)
        assert ("process-start-time-unix" in answer.headers) is (kind == "text/plain")


@pytest.mark.parametrize("path", ["/unload", "/models/unload"])
async def test_the_only_model_stays_loaded(autojump_clock: MockClock, path: str) -> None:
    """Loading it again changes nothing."""
    async with http_house(keys=(b"u",), admin_keys=(b"k",)) as daemon:
        asked = {"model": "fake"}
        assert (await daemon.ask("POST", "/load", asked, Authorization="Bearer k")).status == 200
        answer = await daemon.ask("POST", path, asked, Authorization="Bearer k")
        assert answer.status == 400
        assert "stays loaded" in answer.error["message"]


@pytest.mark.parametrize("path", ["/load", "/unload"])
async def test_the_only_model_is_loaded_and_unloaded_by_its_name_alone(
    autojump_clock: MockClock, path: str
) -> None:
    """Requests may name any model, but an operator who names another one means another one."""
    async with http_house(admin_keys=(b"k",)) as daemon:
        answer = await daemon.ask("POST", path, {"model": "faek"}, Authorization="Bearer k")
        assert answer.status == 404
        assert "did you mean fake?" in answer.error["message"]
