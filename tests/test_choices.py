"""Several answers to one request, from the field `n` to what each of them costs."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from client_kit import client_of, works
from http_kit import http_house
from hypothesis import given, settings
from hypothesis import strategies as st
from net_kit import TICK_S, House, house, slowly
from trio.testing import MockClock

from uma_protocol import (
    Cancel,
    End,
    Eos,
    Error,
    Event,
    Explain,
    Explanation,
    ListSessions,
    Ok,
    Sessions,
    SetPriority,
    Token,
)
from uma_trio.cli.printer import Printer
from uma_trio.client import ServerError
from uma_trio.engine.messages import Finished, SamplingParams
from uma_trio.observe.sentences import sentences
from uma_trio.service.answers import combined_end
from uma_trio.service.ask import Ask, of_choice
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost

MIB = 1 << 20
LONG = "Once upon a time there was a fox who had a lantern. " * 4
SAMPLED = {"temperature": 5.0, "seed": 7, "ignore_eos": True}


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a short path for a socket."""
    with tempfile.TemporaryDirectory(prefix="uma") as folder:
        yield Path(folder) / "s"


def texts(events: list[Event], n: int) -> list[str]:
    """Return the text of each choice."""
    said = [""] * n
    for event in events:
        if isinstance(event, Token | End):
            said[event.choice] += event.text or ""
    return said


async def asked(daemon: House, **fields: Any) -> list[Event]:
    """Return all events of one request on a connection of its own."""
    client = daemon.connect()
    await client.ask(**{"max_tokens": 12, **fields})
    await client.until(Eos)
    client.close()
    return client.events


# --- on the wire ---


async def test_each_choice_has_its_tokens_and_its_end(autojump_clock: MockClock) -> None:
    """Then comes the one terminal event, which counts the prompt once and all tokens."""
    async with house() as daemon:
        events = await asked(daemon, n=3, **SAMPLED)
        *_, eos = events
        ends = [event for event in events if isinstance(event, End)]
        assert sorted(end.choice for end in ends) == [0, 1, 2]
        assert {end.completion_tokens for end in ends} == {12}
        assert len({end.request for end in ends}) == 3
        assert len(set(texts(events, 3))) == 3
        assert isinstance(eos, Eos)
        assert (eos.reason, eos.text) == ("length", None)
        assert (eos.usage.prompt_tokens, eos.usage.completion_tokens) == (6, 36)
        assert eos.request == min(end.request for end in ends)


async def test_several_answers_are_sampled_unless_told_otherwise(
    autojump_clock: MockClock,
) -> None:
    """At temperature 0 all would be equal: by the request's, else by the model's own, else by 0.8."""
    several = {"n": 3, "seed": 7}
    async with house() as daemon:
        assert len(set(texts(await asked(daemon, **several), 3))) > 1
        assert len(set(texts(await asked(daemon, **several, temperature=0.0), 3))) == 1
        daemon.served.defaults = {"temperature": 0.0}
        assert len(set(texts(await asked(daemon, **several), 3))) == 1


async def test_a_front_end_has_a_default_temperature(autojump_clock: MockClock) -> None:
    """The model's own value precedes it, and the request's precedes both."""
    one = {"seed": 7, "max_tokens": 12}
    async with house() as daemon:
        greedy = texts(await asked(daemon, **one), 1)
        sampled = texts(await asked(daemon, **one, default_temperature=0.8), 1)
        assert sampled == texts(await asked(daemon, **one, temperature=0.8), 1) != greedy
        said = {"temperature": 0.0, "default_temperature": 0.8}
        assert texts(await asked(daemon, **one, **said), 1) == greedy
        daemon.served.defaults = {"temperature": 0.0}
        assert texts(await asked(daemon, **one, default_temperature=0.8), 1) == greedy


async def test_the_first_choice_is_what_the_seed_gives_alone(autojump_clock: MockClock) -> None:
    """And all of them are the same each time; no choice is one of the next seed's."""
    async with house() as daemon:
        (alone,) = texts([*await asked(daemon, **SAMPLED)], 1)
        one, two = [texts(await asked(daemon, n=3, **SAMPLED), 3) for _ in range(2)]
        assert one == two
        assert one[0] == alone
        other = texts(await asked(daemon, n=3, **{**SAMPLED, "seed": 8}), 3)
        assert not set(one) & set(other)


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_cost_one_prompt(autojump_clock: MockClock, stream: bool) -> None:
    """But for its last token, whose logits each of them needs; `cached_tokens` counts none of that."""
    async with house(prefix_bytes=MIB) as daemon:
        events = await asked(daemon, prompt=LONG, n=4, stream=stream, **SAMPLED)
        (eos,) = [event for event in events if isinstance(event, Eos)]
        n_prompt = eos.usage.prompt_tokens
        assert sum(daemon.backend.computed.values()) == n_prompt + 3 + 4 * 11
        assert eos.usage.cached_tokens == 0
        (*_, eos) = await asked(daemon, prompt=LONG, n=4, stream=stream, **SAMPLED)
        assert isinstance(eos, Eos)
        assert eos.usage.cached_tokens == n_prompt - 1


async def test_choices_without_the_cache_cost_one_prompt(autojump_clock: MockClock) -> None:
    """Nothing of it is kept, so the same request costs the same again."""
    async with http_house(prefix_bytes=MIB) as daemon:
        backend, prefix = daemon.inner.backend, daemon.inner.bench.engine.cells.prefix
        body = {"prompt": LONG, "n": 4, "max_tokens": 12, "cache_prompt": False, **SAMPLED}
        for _ in range(2):
            before = sum(backend.computed.values())
            answer = await daemon.ask("POST", "/v1/completions", body)
            usage = answer.json["usage"]
            assert sum(backend.computed.values()) - before == usage["prompt_tokens"] + 3 + 4 * 11
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert (len(prefix.leaves), prefix.store.n_bytes, backend.kv_used()) == (0, 0, 0)


async def test_whole_answers_come_in_their_ends(autojump_clock: MockClock) -> None:
    """Without streaming there is no token, and the same text."""
    async with house() as daemon:
        streamed = texts(await asked(daemon, n=2, **SAMPLED), 2)
        events = await asked(daemon, n=2, stream=False, **SAMPLED)
        assert [type(event) for event in events] == [End, End, Eos]
        assert texts(events, 2) == streamed


async def test_a_choice_that_fails_leaves_the_others_alone(autojump_clock: MockClock) -> None:
    """Its end is told when it comes; the last event says that not all is well."""
    backend = FakeBackend(cost=linear_cost(TICK_S, 0), faults={5: InjectedFault(bad_rows=(1,))})
    async with house(backend) as daemon:
        client = daemon.connect()
        await client.ask(n=3, max_tokens=20, **SAMPLED)
        first = await client.until(End)
        assert (first.reason, first.code) == ("error", "E_RUNTIME_003")
        eos = await client.until(Eos)
        reasons = [event.reason for event in client.events if isinstance(event, End)]
        assert reasons == ["error", "length", "length"]
        assert (eos.reason, eos.code) == ("error", "E_RUNTIME_003")
        assert daemon.recorder.errors == ["E_RUNTIME_003"]
        await client.ask(max_tokens=3)
        assert (await client.until(Eos)).reason == "length"


@pytest.mark.parametrize("after", ["nothing", "a second", "a token", "an end"])
async def test_a_cancel_ends_every_choice(autojump_clock: MockClock, after: str) -> None:
    """Wherever they are; each has its end, and the connection is good for another request."""
    async with house(run_blocking=slowly(5)) as daemon:
        client = daemon.connect()
        stop = ("e", "t", "a") if after == "an end" else ()
        await client.ask(n=3, max_tokens=900, stop=stop, **SAMPLED)
        if after == "a second":
            await trio.sleep(1)
        elif after != "nothing":
            await client.until(Token if after == "a token" else End)
        await client.send(Cancel("r"))
        eos = await client.until(Eos)
        ends = [event for event in client.events if isinstance(event, End)]
        assert sorted(end.choice for end in ends) == [0, 1, 2]
        assert eos.reason == "cancelled"
        await client.ask(id="again", max_tokens=3)
        assert (await client.until(Eos)).reason == "length"


async def test_no_choice_uses_up_the_credit_of_another(autojump_clock: MockClock) -> None:
    """Behind a reader that stops each gets as far as one alone would, and all go on from there."""
    async with house(credit=4, send_buffer_bytes=2048) as daemon:
        client = daemon.connect()
        await client.ask(n=3, max_tokens=200, **SAMPLED)
        await trio.sleep(20)
        reports = daemon.bench.snapshot().requests
        assert [report.state for report in reports] == ["parked"] * 3
        computed = [report.completion_tokens for report in reports]
        assert max(computed) - min(computed) <= 4
        assert (await client.until(Eos)).usage.completion_tokens == 600


async def test_more_choices_than_are_computed_at_once_are_refused(
    autojump_clock: MockClock,
) -> None:
    """With the field and the bound; nothing of it was begun, and one answer was listed for all of them."""
    async with house() as daemon:
        listed: list[object] = []
        add = daemon.service.directory.add

        def noted(request: Any) -> None:
            listed.append(request)
            add(request)

        daemon.service.directory.add = noted  # type: ignore[method-assign]
        client = daemon.connect()
        await client.ask(n=daemon.served.slots + 1)
        error = await client.until(Error)
        assert error.code == "E_PROTO_003"
        assert error.message.startswith("n asks for 9 answers, but this daemon computes 8")
        assert len(listed) == 1
        assert not daemon.backend.computed


async def test_choices_are_queued_all_or_none(autojump_clock: MockClock) -> None:
    """A queue with room for one of them takes none, and an empty one takes all."""
    backend = FakeBackend(n_slots=2, cost=linear_cost(TICK_S, 0))
    async with house(backend, max_waiting=2) as daemon:
        first, second, third = [daemon.connect() for _ in range(3)]
        await first.ask(n=2, max_tokens=60, **SAMPLED)
        await first.until(Token)
        await second.ask(max_tokens=5)
        await daemon.until_idle()
        await third.ask(n=2, max_tokens=5)
        assert (await third.until(Error)).code == "E_LIMIT_003"
        assert daemon.bench.inbox.waiting == 1
        await first.until(Eos)
        await second.until(Eos)
        await first.ask(n=2, max_tokens=5)
        assert (await first.until(Eos)).reason == "length"


async def test_a_request_is_moved_as_a_whole_and_its_choices_are_listed(
    autojump_clock: MockClock,
) -> None:
    """By its id all of it moves; a handle names one choice. `explain` tells each apart."""
    async with house() as daemon:
        client, other = daemon.connect(), daemon.connect()
        await client.ask(n=3, max_tokens=400, **SAMPLED)
        await client.until(Token)
        await client.send(SetPriority(id="r", priority="background"))
        await client.until(Ok)
        await other.send(ListSessions())
        listed = (await other.until(Sessions)).sessions
        assert [info.choice for info in listed] == [0, 1, 2]
        assert {info.lane for info in listed} == {"background"}
        await other.send(SetPriority(request=listed[1].request, priority="interactive"))
        await other.until(Ok)
        await other.send(ListSessions())
        listed = (await other.until(Sessions)).sessions
        assert [info.lane for info in listed] == ["background", "interactive", "background"]
        await client.send(Cancel("r"))
        await client.until(Eos)
        await other.send(Explain())
        stories = (await other.until(Explanation)).requests
        assert [(story.id, story.choice) for story in stories] == [("r", 0), ("r", 1), ("r", 2)]
        assert "choice 1" in sentences(stories[1])[0]
        assert "choice" not in sentences(stories[0])[0]


async def test_each_choice_keeps_to_its_own_shape(autojump_clock: MockClock) -> None:
    """A grammar is walked by one answer at a time, so that each has its own walk."""
    async with house() as daemon:
        fields = {"regex": "[a-f]{3,9}!", "max_tokens": 40, "temperature": 5.0, "seed": 3}
        said = texts(await asked(daemon, n=3, **fields), 3)
        assert all(re.fullmatch("[a-f]{3,9}!", text) for text in said)
        assert len(set(said)) > 1


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 12),
    st.booleans(),
    st.one_of(st.none(), st.floats(0, 0.5)),
    st.booleans(),
)
def test_whatever_happens_each_choice_ends_once_and_the_request_behind_them(
    n: int, max_tokens: int, stream: bool, cancel_s: float | None, cached: bool
) -> None:
    """With any number of choices, streamed or not, cancelled at any time, with a cache or without."""

    async def main() -> None:
        async with house(prefix_bytes=MIB if cached else 0) as daemon:
            client = daemon.connect()
            fields = {"n": n, "max_tokens": max_tokens, "stream": stream}
            await client.ask(prompt=LONG, **fields, **SAMPLED)
            if cancel_s is not None:
                await trio.sleep(cancel_s)
                await client.send(Cancel("r"))
            eos = await client.until(Eos)
            ends = [event for event in client.events if isinstance(event, End)]
            assert sorted(end.choice for end in ends) == ([] if n == 1 else list(range(n)))
            tokens = sum(isinstance(event, Token) for event in client.events)
            if stream:
                assert tokens == eos.usage.completion_tokens
            if n > 1:
                total = sum(end.completion_tokens for end in ends)
                assert total == eos.usage.completion_tokens
            assert eos.usage.completion_tokens <= n * max_tokens

    trio.run(main, clock=MockClock(autojump_threshold=0))


# --- what they are told as one ---


def finished(**fields: Any) -> Finished:
    """Return the end of an answer."""
    plain = {
        "reason": "stop",
        "text": "",
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "cached_tokens": 99,
        "queue_s": 0.1,
        "ttft_s": 0.5,
        "total_s": 2.0,
    }
    return Finished(**{**plain, **fields})


def test_the_answer_that_computed_the_prompt_says_what_was_cached() -> None:
    """Whichever of them that was; one that computed nothing says nothing."""
    ends = [finished(), finished(cached_tokens=30, ttft_s=0.2), finished(total_s=3.0)]
    never = finished(reason="cancelled", cached_tokens=0, ttft_s=None, completion_tokens=0)
    told = combined_end([*ends, never])
    assert (told.cached_tokens, told.prompt_tokens, told.completion_tokens) == (30, 100, 15)
    assert (told.ttft_s, told.total_s, told.reason) == (0.2, 3.0, "cancelled")


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        (["stop", "stop"], "stop"),
        (["stop", "length"], "length"),
        (["cancelled", "length"], "cancelled"),
        (["error", "cancelled", "stop"], "error"),
    ],
)
def test_the_worst_end_is_that_of_the_request(reasons: list[str], told: str) -> None:
    """So that nobody takes a part for the whole."""
    assert combined_end([finished(reason=reason) for reason in reasons]).reason == told


@given(st.integers(0, 2**63 - 1), st.integers(1, 127))
def test_every_choice_has_a_seed_of_its_own(seed: int, choice: int) -> None:
    """The first has the request's; the others' are in the range of seeds, and always the same."""
    ask = Ask(prompt="x", sampling=SamplingParams(seed=seed))
    assert of_choice(ask, 0) is ask
    found = of_choice(ask, choice).sampling.seed
    assert 0 <= found < 2**63
    assert found == of_choice(ask, choice).sampling.seed
    assert found not in (seed, of_choice(ask, choice + 1).sampling.seed)


# --- clients ---


async def test_a_client_gets_the_text_of_each_choice(autojump_clock: MockClock, path: Path) -> None:
    """Token by token with its choice, or collected; `ends` says how each ended."""
    async with client_of(path) as (client, daemon):
        told = texts(await asked(daemon, n=3, **SAMPLED), 3)
        fields: Any = {"n": 3, "max_tokens": 12, **SAMPLED}
        said = [""] * 3
        generation = client.generate("hello", **fields)
        async for token in generation:
            said[token.choice] += token.text
        assert said == told
        assert [end.choice for end in generation.ends] == [0, 1, 2]
        assert await client.generate("hello", **fields).texts() == told
        assert await client.generate("hello", stream=False, **fields).texts() == told


async def test_one_text_of_several_is_a_mistake(autojump_clock: MockClock, path: Path) -> None:
    """The error names what to use; with one answer both are the same."""
    async with client_of(path) as (client, daemon):
        generation = client.generate("hello", n=2, max_tokens=3)
        with pytest.raises(ValueError, match=r"2 answers to this request; use texts\(\)"):
            await generation.text()
        with pytest.raises(ValueError, match="2 answers"):
            await generation.calls()
        assert await client.generate("hello", max_tokens=3).texts() == [daemon.expected("hello", 3)]


async def test_leaving_early_ends_every_choice(autojump_clock: MockClock, path: Path) -> None:
    """The daemon is told once, and the connection is good for another."""
    async with client_of(path) as (client, daemon):
        async with client.generate("hello", n=3, max_tokens=900, **SAMPLED) as generation:
            await anext(generation)
        assert generation.eos is not None
        assert {end.reason for end in generation.ends} == {"cancelled"}
        assert await works(client, daemon)


async def test_a_failed_choice_is_an_error_and_the_others_are_there(
    autojump_clock: MockClock, path: Path
) -> None:
    """Their tokens came, and `ends` tells them apart."""
    backend = FakeBackend(cost=linear_cost(TICK_S, 0), faults={5: InjectedFault(bad_rows=(1,))})
    async with client_of(path, backend) as (client, _):
        generation = client.generate("hello", n=2, max_tokens=20, **SAMPLED)
        with pytest.raises(ServerError, match="E_RUNTIME_003"):
            await generation.texts()
        assert sorted(end.reason for end in generation.ends) == ["error", "length"]


def test_answers_are_printed_one_behind_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    """The first one as it comes; what comes of the others meanwhile waits for its turn."""
    printer = Printer(as_json=False, n=3)

    def say(choice: int, text: str, *over: int) -> str:
        printer.token(Token("r", text, 1, choice=choice))
        printer.over([End("r", "stop", 1, 1, choice=other) for other in over])
        return capfd.readouterr().out

    assert say(0, "a") == "--- 1 of 3 ---\na"
    assert say(2, "x", 2) == ""
    assert say(0, "b", 0, 2) == "b\n--- 2 of 3 ---\n"
    assert say(1, "z\n", 0, 2) == "z\n"
    printer.finish(None)
    assert capfd.readouterr().out == "--- 3 of 3 ---\nx"


def test_answers_are_one_object_for_scripts(capfd: pytest.CaptureFixture[str]) -> None:
    """Each with its text and how it ended."""
    printer = Printer(as_json=True, n=2)
    for choice, text in ((1, "x"), (0, "a"), (1, "y")):
        printer.token(Token("r", text, 1, choice=choice))
    printer.finish(None, [End("r", "stop", 2, 8, choice=1)])
    found = json.loads(capfd.readouterr().out)
    assert [choice["text"] for choice in found["choices"]] == ["a", "xy"]
    assert found["choices"][1]["reason"] == "stop"


# --- over HTTP ---


async def test_our_own_protocol_over_http_has_choices(autojump_clock: MockClock) -> None:
    """The same events; a whole answer has the ends of all in one document."""
    async with http_house() as daemon:
        told = texts(await asked(daemon.inner, n=2, **SAMPLED), 2)
        body = {"prompt": "hello", "max_tokens": 12, "n": 2, **SAMPLED}
        events = (await daemon.ask("POST", "/generate", body)).events
        said = [""] * 2
        for event in events[:-1]:
            said[event.get("choice", 0)] += event.get("text") or ""
        assert said == told
        assert [event["event"] for event in events[-2:]] == ["end", "eos"]
        assert events[-1]["usage"]["completion_tokens"] == 24
        answer = (await daemon.ask("POST", "/generate", {**body, "stream": False})).json
        assert answer["event"] == "eos"
        assert [choice["text"] for choice in answer["choices"]] == told


def failing(*rows: int) -> FakeBackend:
    """Return a model that gives no number in these rows of its fifth batch."""
    return FakeBackend(cost=linear_cost(TICK_S, 0), faults={5: InjectedFault(bad_rows=rows)})


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_choice_that_fails_over_http_leaves_the_others_alone(
    autojump_clock: MockClock, streamed: bool
) -> None:
    """Whole or streamed, each choice has its own end."""
    async with http_house(backend=failing(1)) as daemon:
        body = {"prompt": "hello", "max_tokens": 20, "n": 3, "stream": streamed, **SAMPLED}
        answer = await daemon.ask("POST", "/generate", body)
        assert answer.status == 200
        if streamed:
            ends = [event for event in answer.events if event["event"] == "end"]
        else:
            ends = answer.json["choices"]
            assert (answer.json["reason"], answer.json["code"]) == ("error", "E_RUNTIME_003")
        assert sorted(end["reason"] for end in ends) == ["error", "length", "length"]
        assert daemon.inner.recorder.errors == ["E_RUNTIME_003"]


_OPENAI = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/completions", {"prompt": "hello"}),
]


def said_of(choice: dict[str, Any]) -> str:
    """Return what a choice of OpenAI's says, or a part of one."""
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


@pytest.mark.parametrize(("path_", "asks"), _OPENAI, ids=["chat", "text"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_failed_choice_of_openais_has_its_error_and_the_others_are_whole(
    autojump_clock: MockClock, path_: str, asks: dict[str, Any], streamed: bool
) -> None:
    """What it said before is there; no event is an error, since the SDKs would read no further."""
    async with http_house(backend=failing(1)) as daemon:
        body = {**asks, "max_tokens": 20, "n": 3, **SAMPLED}
        more = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        answer = await daemon.ask("POST", path_, body | more)
        assert answer.status == 200
        events = [e for e in answer.events if e != "[DONE]"] if streamed else [answer.json]
        assert not any("error" in event for event in events)
        choices = [choice for event in events for choice in event["choices"]]
        ends = {c["index"]: c for c in choices if c["finish_reason"]}
        assert [ends[i]["finish_reason"] for i in range(3)] == ["length", "error", "length"]
        assert ends[1]["error"]["uma_code"] == "E_RUNTIME_003"
        assert all("error" not in ends[i] for i in (0, 2))
        assert all(any(said_of(c) for c in choices if c["index"] == i) for i in range(3))
        assert events[-1]["usage"]["completion_tokens"] > 40
        if streamed:
            assert answer.events[-1] == "[DONE]"


@pytest.mark.parametrize(("path_", "asks"), _OPENAI, ids=["chat", "text"])
async def test_an_answer_of_which_every_choice_failed_is_the_error(
    autojump_clock: MockClock, path_: str, asks: dict[str, Any]
) -> None:
    """With its status; behind the head of a stream as the last event, which the SDKs raise."""
    body = {**asks, "max_tokens": 20, "n": 3, **SAMPLED}
    async with http_house(backend=failing(0, 1, 2)) as daemon:
        answer = await daemon.ask("POST", path_, body)
        assert (answer.status, answer.error["uma_code"]) == (500, "E_RUNTIME_003")
        assert answer.headers["x-should-retry"] == "false"
    async with http_house(backend=failing(0, 1, 2)) as daemon:
        events = (await daemon.ask("POST", path_, {**body, "stream": True})).events
        assert events[-1]["error"]["uma_code"] == "E_RUNTIME_003"
        assert sum("error" in event for event in events) == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_failed_prompt_of_llama_servers_has_its_error_and_the_others_are_whole(
    autojump_clock: MockClock, streamed: bool
) -> None:
    """Whatever members were asked for; with a number for a code, as its clients expect."""
    async with http_house(backend=failing(1)) as daemon:
        body = {"prompt": ["hello"] * 3, "n_predict": 20, "stream": streamed, **SAMPLED}
        answer = await daemon.ask("POST", "/completion", {**body, "response_fields": ["stop_type"]})
        assert answer.status == 200
        events = answer.events if streamed else answer.json
        ends = [event for event in events if "stop_type" in event]
        assert sorted(end["stop_type"] for end in ends) == ["limit", "limit", "none"]
        (found,) = [end["error"] for end in ends if "error" in end]
        assert (found["code"], found["uma_code"]) == (500, "E_RUNTIME_003")
    async with http_house(backend=failing(0, 1, 2)) as daemon:
        answer = await daemon.ask("POST", "/completion", body)
        if streamed:
            assert answer.body.count(b"\nerror: ") == 1
        else:
            assert answer.status == 500


async def test_more_than_are_computed_at_once_are_refused_over_http(
    autojump_clock: MockClock,
) -> None:
    """By the same rule, whichever API asks."""
    async with http_house() as daemon:
        for where, body in (
            ("/v1/completions", {"prompt": ["a"] * 5, "n": 2}),
            ("/generate", {"prompt": "a", "n": 9}),
        ):
            answer = await daemon.ask("POST", where, body)
            assert (answer.status, answer.error["param"]) == (400, "n")
