"""Vectors and scores over the socket: what comes, what is refused, and who has turns; and the clients."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from client_kit import served
from encoder_kit import N_CTX, FakeEncoder, info_of, vector_of
from net_kit import house
from trio.testing import MockClock

from uma_protocol import (
    Cancel,
    Embed,
    Eos,
    Error,
    Explain,
    Explanation,
    Generate,
    ListSessions,
    LocalProtocolError,
    Ok,
    Rerank,
    Scores,
    Sessions,
    SetPriority,
    Vectors,
)
from uma_trio.client import ServerError, connect
from uma_trio.client.encoding import MAX_TEXTS, batches
from uma_trio.uds import relay


def encoders(**options: Any) -> dict[Any, FakeEncoder]:
    """Return an encoder of each kind."""
    return {"embed": FakeEncoder(**options), "rank": FakeEncoder(info_of("rank"))}


def expected(text: str, width: int = 4) -> list[float]:
    """Return the vector of a text, as it is answered."""
    vector = vector_of(np.array([256, *text.encode()], np.int32))[:width]
    return [round(x, 5) for x in (vector / np.linalg.norm(vector)).tolist()]


def numbers(data: bytes) -> list[float]:
    """Return the numbers of a vector."""
    return [round(x, 5) for x in struct.unpack(f"<{len(data) // 4}f", data)]


# --- the frames ---


async def test_vectors_come_in_order_and_then_the_end(autojump_clock: MockClock) -> None:
    """With the tokens that were used; the connection takes the next request."""
    async with house(encoders=encoders()) as daemon:
        client = daemon.connect()
        for name in ("first", "second"):
            await client.send(Embed(id=name, model="embedder", input=("a long text", "b")))
            found = await client.until(Vectors)
            assert (found.id, found.first) == (name, 0)
            assert [numbers(each) for each in found.vectors] == [
                expected("a long text"),
                expected("b"),
            ]
            eos = await client.until(Eos)
            assert (eos.reason, eos.usage.prompt_tokens, eos.usage.completion_tokens) == (
                "stop",
                14,
                0,
            )


async def test_many_vectors_come_in_several_events(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says which texts its vectors are of."""
    monkeypatch.setattr(relay, "EVENT_BYTES", 2 * 4 * 4)
    async with house(encoders=encoders()) as daemon:
        client = daemon.connect()
        await client.send(Embed(id="a", input=tuple("abcde")))
        await client.until(Eos)
        events = [event for event in client.events if isinstance(event, Vectors)]
        assert [(event.first, len(event.vectors)) for event in events] == [(0, 2), (2, 2), (4, 1)]
        found = [numbers(each) for event in events for each in event.vectors]
        assert found == [expected(text) for text in "abcde"]


async def test_documents_come_best_first(autojump_clock: MockClock) -> None:
    """The best `top_n` of them, with the score of each."""
    async with house(encoders=encoders()) as daemon:
        client = daemon.connect()
        documents = ("b", "dd", "ccc", "a")
        await client.send(Rerank(id="a", query="q", documents=documents))
        every = (await client.until(Scores)).scores
        assert sorted(score.index for score in every) == [0, 1, 2, 3]
        assert [score.score for score in every] == sorted((s.score for s in every), reverse=True)
        await client.until(Eos)
        await client.send(Rerank(id="b", top_n=2, query="q", documents=documents))
        assert (await client.until(Scores)).scores == every[:2]
        await client.until(Eos)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (
            Embed(id="a", input=("a", "b" * N_CTX)),
            "E_LIMIT_004",
            "input[1] is too large: it has 49 tokens",
        ),
        (Embed(id="a", dimensions=5, input=("a",)), "E_PROTO_003", "at most 4"),
        (Embed(id="a", model="other", input=("a",)), "E_MODEL_002", "this daemon serves embedder"),
        (Rerank(id="a", model="x", query="q", documents=("a",)), "E_MODEL_002", "serves ranker"),
        (Rerank(id="a", query="q" * N_CTX, documents=("a",)), "E_LIMIT_004", "query is too large"),
    ],
)
async def test_what_cannot_be_computed_is_refused_with_the_bound(
    autojump_clock: MockClock, request_: Embed | Rerank, code: str, words: str
) -> None:
    """As over HTTP; nothing reaches the encoder, and the connection ends as after any refusal."""
    models = encoders()
    async with house(encoders=models) as daemon:
        client = daemon.connect()
        await client.send(request_)
        error = await client.until(Error)
        assert (error.id, error.code, error.fatal) == ("a", code, True)
        assert words in error.message
        assert await client.next() is None
        assert not models["embed"].batches


async def test_without_such_a_model_the_option_is_named(autojump_clock: MockClock) -> None:
    """So that whoever asks knows what to do."""
    async with house() as daemon:
        client = daemon.connect()
        await client.send(Rerank(id="a", query="q", documents=("d",)))
        error = await client.until(Error)
        assert error.code == "E_MODEL_002"
        assert "--rerank-model" in error.message


async def test_a_long_text_may_be_cut(autojump_clock: MockClock) -> None:
    """Where the request says so."""
    async with house(encoders=encoders()) as daemon:
        client = daemon.connect()
        await client.send(Embed(id="a", truncate=True, dimensions=2, input=("b" * 100,)))
        (vector,) = (await client.until(Vectors)).vectors
        assert len(numbers(vector)) == 2
        assert (await client.until(Eos)).usage.prompt_tokens == N_CTX


async def test_a_cancel_ends_it_and_frees_the_encoder(autojump_clock: MockClock) -> None:
    """With `eos`; other requests are answered meanwhile, and the connection is usable."""
    models = encoders()
    async with house(encoders=models) as daemon:
        client = daemon.connect()
        await client.send(Embed(id="a", input=("some text",) * 2000))
        await client.send(ListSessions())
        assert (await client.until(Sessions)).models[1].gives == "vectors"
        await client.send(SetPriority(id="a", priority="interactive"))
        await client.until(Ok)
        await trio.sleep(0.02)
        await client.send(Cancel("a"))
        eos = await client.until(Eos)
        assert (eos.reason, eos.timings.total_ms >= 20) == ("cancelled", True)
        batches = len(models["embed"].batches)
        await client.send(Generate("b", prompt="hello", max_tokens=3))
        assert (await client.until(Eos)).reason == "length"
        assert len(models["embed"].batches) <= batches + 1 < 100


async def test_it_is_listed_explained_and_ended_by_its_handle(autojump_clock: MockClock) -> None:
    """From another connection, as any request: with its model, its texts' tokens and how much is computed."""
    async with house(encoders=encoders()) as daemon:
        client, other = daemon.connect(), daemon.connect()
        await client.send(Embed(id="a", input=("some text",) * 2000))
        await trio.sleep(0.3)
        await other.send(ListSessions())
        (session,) = (await other.until(Sessions)).sessions
        assert (session.id, session.model, session.lane) == ("a", "embedder", "background")
        assert (session.state, session.prompt_tokens) == ("prefill", 20_000)
        assert 0 < session.computed_tokens < 20_000
        assert not daemon.service.directory.has_streams  # which a busy thread would hold up
        await other.send(Cancel(request=session.request))
        await other.until(Ok)
        eos = await client.until(Eos)
        assert (eos.reason, eos.request) == ("cancelled", session.request)
        await other.send(Explain(request=session.request))
        (story,) = (await other.until(Explanation)).requests
        assert (story.state, story.model, story.prompt_tokens) == ("cancelled", "embedder", 20_000)


async def test_what_a_model_does_not_do_is_refused_with_what_it_does(
    autojump_clock: MockClock,
) -> None:
    """And which models do it."""
    async with house(encoders=encoders()) as daemon:
        for wrong, words in (
            (Generate("a", model="embedder", prompt="hello"), "embedder makes vectors of texts"),
            (Embed(id="a", model="fake", input=("a",)), "fake writes text, and nothing else"),
            (Embed(id="a", model="ranker", input=("a",)), "embedder makes vectors of texts"),
        ):
            client = daemon.connect()
            await client.send(wrong)
            error = await client.until(Error)
            assert (error.code, words in error.message) == ("E_MODEL_002", True), error.message


async def test_a_client_that_leaves_frees_the_encoder(autojump_clock: MockClock) -> None:
    """The daemon is idle within a moment: `house` checks it."""
    models = encoders()
    async with house(encoders=models) as daemon:
        client = daemon.connect()
        await client.send(Embed(id="a", input=("some text",) * 2000))
        await trio.sleep(0.02)
        client.close()
        await trio.sleep(0.1)
        assert len(models["embed"].batches) < 50


async def test_a_step_that_fails_is_the_end_of_its_request_alone(autojump_clock: MockClock) -> None:
    """`eos` has the code, and the connection takes the next request."""
    async with house(encoders=encoders(fails=(1,))) as daemon:
        client = daemon.connect()
        await client.send(Embed(id="a", input=("a",)))
        eos = await client.until(Eos)
        assert (eos.reason, eos.code) == ("error", "E_RUNTIME_001")
        assert daemon.recorder.errors == ["E_RUNTIME_001"]
        await client.send(Embed(id="b", input=("a",)))
        assert (await client.until(Eos)).reason == "stop"


async def test_a_reader_keeps_its_pace_beside_thousands_of_texts(autojump_clock: MockClock) -> None:
    """Its text is that which it gets alone, and the vectors come, too."""
    async with house(encoders=encoders()) as daemon:
        reader, many = daemon.connect(), daemon.connect()
        await many.send(Embed(id="a", input=("some text",) * 300))
        await reader.ask(prompt="hello", max_tokens=40)
        assert (await reader.until(Eos)).reason == "length"
        assert reader.text == daemon.expected("hello", 40)
        assert (await many.until(Eos)).usage.prompt_tokens == 300 * 10


# --- the clients ---


async def test_a_client_gets_vectors_and_scores_of_more_than_a_frame_holds(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """They are split into requests and put together; numpy reads them as they are."""
    texts = [f"text {n}" for n in range(2 * MAX_TEXTS + 3)]
    async with served(tmp_path / "s", encoders=encoders()), connect(tmp_path / "s") as client:
        found = await client.embed(iter(texts))
        assert len(found.vectors) == len(texts)
        assert found.n_tokens == sum(len(text) + 1 for text in texts)
        for at in (0, MAX_TEXTS, 2 * MAX_TEXTS + 2):
            vector = np.frombuffer(found.vectors[at], np.float32)
            assert [round(x, 5) for x in vector.tolist()] == expected(texts[at])
        ranking = await client.rerank("q", texts, top_n=5)
        every = await client.rerank("q", texts)
        assert ranking.scores == every.scores[:5]
        assert sorted(score.index for score in every.scores) == list(range(len(texts)))
        assert (await client.embed("one", dimensions=2)).vectors[0].tolist() == pytest.approx(
            expected("one", 2), abs=1e-4
        )


async def test_errors_of_a_client_are_those_of_a_generation(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """What the protocol does not allow is raised before anything is sent."""
    path = tmp_path / "s"
    async with served(path, encoders=encoders()), connect(path, reconnect=True) as client:
        with pytest.raises(LocalProtocolError, match=r"input\[1\]"):
            await client.embed(["a", ""])
        texts = ["b"] * (MAX_TEXTS + 2) + ["b" * 100]
        with pytest.raises(ServerError, match=rf"E_LIMIT_004: input\[{MAX_TEXTS + 2}\]"):
            await client.embed(texts)
        assert len((await client.embed("b")).vectors) == 1


async def test_a_cancelled_client_ends_what_is_computed_for_it(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """The connection remains usable."""
    models = encoders()
    async with served(tmp_path / "s", encoders=models), connect(tmp_path / "s") as client:
        with trio.move_on_after(0.05) as scope:
            await client.embed(["some text"] * MAX_TEXTS)
        assert scope.cancelled_caught
        assert len(models["embed"].batches) < 100
        assert await client.generate("hello", max_tokens=2).text()


async def test_vectors_beside_a_generation_of_the_same_connection_are_refused(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """As a second generation is."""
    async with (
        served(tmp_path / "s", encoders=encoders()),
        connect(tmp_path / "s") as client,
        client.generate("hello", max_tokens=50) as story,
    ):
        await anext(story)
        with pytest.raises(trio.BusyResourceError):
            await client.embed("b")


def test_texts_are_split_by_the_bytes_of_a_frame() -> None:
    """Control characters take six; a text that fits into no frame is alone; order is kept."""
    texts = ["x" * 500_000, "\x01" * 100_000, "\x01" * 100_000, "y", "z" * (1 << 21), "end"]
    split = list(batches(texts))
    assert [text for some in split for text in some] == texts
    assert [len(some) for some in split] == [1, 1, 2, 1, 1]
    assert all(len(some) <= MAX_TEXTS for some in batches("x" for _ in range(5000)))
