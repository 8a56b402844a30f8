"""Penalties, bias, ends and logprobs by the way they really go: from the wire to the wire."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from constraint_kit import Constraining, IdArray
from engine_kit import KINDS, Bench
from net_kit import house, slowly
from trio.testing import MockClock

from uma_protocol import Eos, Error, Generate, Message, Token
from uma_trio.service.fair import COMPILE_S
from uma_trio_sim.fake import EOS, FakeBackend

PENALTIES: dict[str, Any] = {
    "presence_penalty": 2.0,
    "frequency_penalty": 1.0,
    "repeat_penalty": 3.0,
}


# --- in the engine ---


@pytest.mark.parametrize("kind", KINDS)
def test_penalties_follow_the_answer_of_each_request(kind: type[FakeBackend]) -> None:
    """The same with company as alone, and with decodes that overlap: history is committed first."""
    alone = Bench(kind())
    _, one = alone.submit("hello", 60, **PENALTIES)
    alone.run()
    bench = Bench(kind())
    _, same = bench.submit("hello", 60, **PENALTIES)
    _, plain = bench.submit("other", 60)
    _, unlike = bench.submit("hello", 60, presence_penalty=-2.0)
    bench.run()
    assert same.tokens == one.tokens
    assert plain.tokens == bench.expected("other", 60)
    assert len({tuple(sink.tokens) for sink in (one, plain, unlike)}) == 3


def test_a_preempted_request_is_penalised_as_if_it_had_not_been() -> None:
    """What was generated is computed again, and is neither forgotten nor counted twice."""
    whole = Bench(FakeBackend(n_ctx=1000, n_batch=64))
    _, expected = whole.submit("preempted", 30, **PENALTIES)
    whole.run()
    bench = Bench(FakeBackend(n_ctx=60, n_batch=64))
    bench.submit("first", 30, lane="background")
    _, sink = bench.submit("preempted", 30, lane="background", **PENALTIES)
    bench.run()
    assert bench.metrics.snapshot()["preemptions_total"] >= 1
    assert sink.tokens == expected.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_of_the_token_they_come_with(kind: type[FakeBackend]) -> None:
    """For those who ask, whoever else is in the tick; a decode that overlaps changes nothing."""
    bench = Bench(kind())
    _, silent = bench.submit("a", 20)
    _, asking = bench.submit("b", 20, logprobs=3)
    bench.run()
    assert all(item.logprobs is None for item in silent.items if hasattr(item, "token_id"))
    said = [(item.token_id, item.logprobs) for item in asking.items if hasattr(item, "token_id")]
    assert [token for token, _ in said] == bench.expected("b", 20)
    for token, logprobs in said:
        assert logprobs is not None
        assert (logprobs.top[0][0], len(logprobs.top)) == (token, 3)
        assert logprobs.top[0][1] == logprobs.logprob


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_ends_at_its_own_stop_tokens(kind: type[FakeBackend]) -> None:
    """The token is not part of the answer; another request goes on behind it."""
    bench = Bench(kind())
    expected = bench.expected("hello", 30)
    stop = expected[12]
    first = expected.index(stop)
    _, sink = bench.submit("hello", 30, stop_token_ids=(stop,))
    _, other = bench.submit("hello", 30)
    bench.run()
    assert (sink.tokens, sink.end.reason) == (expected[:first], "stop")
    assert other.tokens == expected


def test_the_model_does_not_end_before_min_tokens() -> None:
    """Its end is masked so long, and believed afterwards."""
    bench = Bench(FakeBackend(end_after=2))
    _, short = bench.submit("hello", 40)
    _, long = bench.submit("hello", 40, min_tokens=20)
    bench.run()
    assert len(short.tokens) < 20 <= len(long.tokens)


class Cycle(Constraining):
    """Allows "abc" over and over, until it has been told enough; then nothing, or an end."""

    def __init__(self, last: tuple[int, ...] = (EOS,), n: int = 9) -> None:
        super().__init__()
        self._last, self._n = last, n

    def allowed(self) -> IdArray:
        """Return what comes next."""
        n = len(self.told)
        return np.array(self._last if n >= self._n else (ord("abc"[n % 3]),), np.intp)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constrained_answer_keeps_to_it_and_ends(
    kind: type[FakeBackend], temperature: float
) -> None:
    """Beside others, which get their own tokens; also with decodes that overlap."""
    bench = Bench(kind())
    _, free = bench.submit("other", 30)
    _, sink = bench.submit("hello", 30, temperature=temperature, constraint=Cycle())
    bench.run()
    assert (sink.text, sink.end.reason) == ("abcabcabc", "stop")
    assert free.tokens == bench.expected("other", 30)


def test_a_preempted_answer_is_constrained_where_it_was() -> None:
    """Its constraint has not moved while its cells were away."""
    bench = Bench(FakeBackend(n_ctx=60, n_batch=64))
    bench.submit("first", 30, lane="background")
    _, sink = bench.submit("preempted", 30, lane="background", constraint=Cycle(n=24))
    bench.run()
    assert bench.metrics.snapshot()["preemptions_total"] >= 1
    assert sink.text == "abc" * 8


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_a_way_on_ends_with_its_code(kind: type[FakeBackend]) -> None:
    """What it had is sent; nobody else ends."""
    bench = Bench(kind())
    _, free = bench.submit("other", 30)
    _, sink = bench.submit("hello", 30, constraint=Cycle(last=()))
    bench.run()
    assert (sink.text, sink.end.reason, sink.end.code) == ("abcabcabc", "error", "E_RUNTIME_005")
    assert free.tokens == bench.expected("other", 30)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_a_limit_leaves_no_way_on_says_which(kind: type[FakeBackend]) -> None:
    """It is no fault of the daemon, and its sender can do something about it."""

    class Limited(Cycle):
        problem = "The grammar takes too long."

    bench = Bench(kind())
    _, sink = bench.submit("hello", 30, constraint=Limited(last=()))
    bench.run()
    assert (sink.end.code, sink.end.message) == ("E_LIMIT_007", "The grammar takes too long.")


# --- over the socket ---


async def test_logprobs_come_with_each_token(autojump_clock: MockClock) -> None:
    """With the alternatives' own texts, the likeliest first; and nothing where nobody asked."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=3, logprobs=2)
        await client.until(Eos)
        tokens = [event for event in client.events if isinstance(event, Token)]
        assert len(tokens) == 3
        for token in tokens:
            assert token.logprobs is not None
            likeliest, second = token.logprobs.top
            assert likeliest.token_id == token.token_id
            assert likeliest.text == bytes([token.token_id]).decode("utf-8", "replace")
            assert likeliest.logprob == token.logprobs.logprob > second.logprob
            assert math.exp(likeliest.logprob) < 1
        await client.ask(max_tokens=1, logprobs=0)
        await client.until(Eos)
        assert client.events[-2].logprobs.top == ()
        await client.ask(max_tokens=1)
        await client.until(Eos)
        assert client.events[-2].logprobs is None


async def test_a_bias_reaches_the_row(autojump_clock: MockClock) -> None:
    """The text is what the bias says, and not the model's."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(max_tokens=3, logit_bias={ord("z"): 100.0})
        await client.until(Eos)
        assert client.text == "zzz"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": {260: 1.0}}, "logit_bias holds a token that is not in the vocabulary"),
        ({"stop_token_ids": (260,)}, "stop_token_ids holds a token that is not"),
        ({"min_tokens": 11, "max_tokens": 10}, "min_tokens is 11, but the answer gets at most 10"),
        ({"min_tokens": 600}, "min_tokens is 600, but the answer gets at most 512"),
        ({"schema": {"not": {}}}, 'schema uses "not", which cannot be enforced'),
        ({"regex": "(a"}, "regex is not usable"),
        ({"grammar": "root ::= ("}, "grammar is not usable"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    autojump_clock: MockClock, fields: dict[str, Any], words: str
) -> None:
    """With the field, the bound or the reason, and the code of a bad request, before the engine hears of it."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(**fields)
        error = await client.until(Error)
        assert error.code == "E_PROTO_003"
        assert words in error.message


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
async def test_an_answer_is_an_instance_of_its_schema(
    autojump_clock: MockClock, temperature: float
) -> None:
    """Though the model knows nothing of JSON; it ends when the instance is whole."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(schema=SCHEMA, temperature=temperature, seed=3, max_tokens=400)
        eos = await client.until(Eos)
        assert eos.reason == "stop"
        found = json.loads(client.text)
        assert found["kind"] in ("cat", "dog")
        assert set(found) == {"kind", "age"}
        assert type(found["age"]) is int


@pytest.mark.parametrize(
    ("shape", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ("yes", "no")}, "yes|no"),
        ({"grammar": 'root ::= "a" [xy] [xy]'}, "a[xy]{2}"),
    ],
)
async def test_an_answer_has_the_shape_that_was_asked_for(
    autojump_clock: MockClock, shape: dict[str, Any], pattern: str
) -> None:
    """A second request on the connection is free again."""
    async with house() as daemon:
        client = daemon.connect()
        await client.ask(**shape, max_tokens=50)
        assert (await client.until(Eos)).reason == "stop"
        assert re.fullmatch(pattern, client.text)
        client.events.clear()
        await client.ask(max_tokens=5)
        await client.until(Eos)
        assert client.text == daemon.expected("hello", 5)


async def test_a_shape_that_takes_too_long_is_refused(autojump_clock: MockClock) -> None:
    """The compiler is left to its thread, and the client hears of it."""
    async with house(run_blocking=slowly(COMPILE_S + 1)) as daemon:
        client = daemon.connect()
        await client.ask(regex="a")
        error = await client.until(Error)
        assert error.code == "E_PROTO_003"
        assert "takes longer than 10 s" in error.message


async def test_a_chats_manner_reaches_the_template(autojump_clock: MockClock) -> None:
    """A begun answer is continued: its tokens are the last ones of the prompt."""
    async with house() as daemon:
        client = daemon.connect()
        chat = (Message("user", "Hi"), Message("assistant", "One, two,"))
        await client.send(Generate("a", messages=chat, continue_final_message=True, max_tokens=5))
        eos = await client.until(Eos)
        plain = "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOne, two,"
        tokens = daemon.backend.vocabulary.tokenize(plain, add_special=False, parse_special=True)
        assert eos.usage.prompt_tokens == len(tokens)
        assert client.text == daemon.backend.text_of(daemon.backend.continuation(tokens, 5))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"messages": []}, "the daemon's own"), ({"a b": 1}, "not an identifier")],
)
async def test_arguments_that_a_template_must_not_get_are_refused(
    autojump_clock: MockClock, arguments: dict[str, Any], words: str
) -> None:
    """Before anything is rendered, and without repeating them."""
    async with house() as daemon:
        client = daemon.connect()
        chat = (Message("user", "Hi"),)
        await client.send(Generate("a", messages=chat, chat_template_kwargs=arguments))
        error = await client.until(Error)
        assert error.code == "E_PROTO_003"
        assert error.message.startswith("chat_template_kwargs")
        assert words in error.message
        assert "im_end" not in error.message
