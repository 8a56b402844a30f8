"""Vectors and scores over HTTP: the shapes of three APIs, what is refused, and who has turns."""

from __future__ import annotations

import struct
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import trio
from attrs import evolve
from encoder_kit import N_CTX, FakeEncoder, info_of, vector_of
from http_kit import http_house
from trio.testing import MockClock

from uma_trio.backend.encoder import Pair
from uma_trio.service import embedding
from uma_trio.service.embedding import normalised

EMBED = "/v1/embeddings"


def encoders(**options: Any) -> dict[str, FakeEncoder]:
    """Return an encoder of each kind."""
    return {"embed": FakeEncoder(**options), "rank": FakeEncoder(info_of("rank"))}


def expected(text: str) -> list[float]:
    """Return the vector of a text, as it is answered."""
    vector = vector_of(np.array([256, *text.encode()], np.int32))
    return [round(x, 5) for x in (vector / np.linalg.norm(vector)).tolist()]


def rounded(vector: list[float]) -> list[float]:
    """Return numbers as far as they are compared."""
    return [round(x, 5) for x in vector]


async def test_texts_are_answered_in_order_as_openai_does(autojump_clock: MockClock) -> None:
    """With the tokens that were used, whatever the model was called."""
    async with http_house(encoders=encoders()) as daemon:
        answer = await daemon.ask("POST", EMBED, {"input": ["a long text", "b"], "model": "x"})
        assert answer.status == 200
        found = answer.json
        assert (found["object"], found["model"]) == ("list", "x")
        assert [each["index"] for each in found["data"]] == [0, 1]
        assert [rounded(each["embedding"]) for each in found["data"]] == [
            expected("a long text"),
            expected("b"),
        ]
        assert found["usage"] == {"prompt_tokens": 14, "total_tokens": 14}


@pytest.mark.parametrize(
    "given", [[256, 98], [[256, 98]], ["b"], "b"], ids=["ids", "lists of ids", "texts", "a text"]
)
async def test_a_text_and_its_token_ids_have_the_same_vector(
    autojump_clock: MockClock, given: Any
) -> None:
    """In each form in which OpenAI's clients send them."""
    async with http_house(encoders=encoders()) as daemon:
        answer = await daemon.ask("POST", EMBED, {"input": given, "model": "x"})
        assert rounded(answer.json["data"][0]["embedding"]) == expected("b")


@pytest.mark.parametrize(
    "given",
    [
        {"prompt_string": "bcd"},
        {"content": [{"type": "text", "text": "bc"}, {"type": "text", "text": "d"}]},
        ["b", 99, "d"],
        [["b", 99, 100]],
        [256, "bc", 100],
    ],
    ids=["prompt", "content", "mixed", "a mixed list", "mixed behind ids"],
)
async def test_a_text_may_be_an_object_or_have_token_ids_in_it(
    autojump_clock: MockClock, given: Any
) -> None:
    """As llama-server takes it; what begins a text goes with the first part, if that is a text."""
    async with http_house(encoders=encoders()) as daemon:
        answer = await daemon.ask("POST", EMBED, {"input": given, "model": "x"})
        assert [rounded(each["embedding"]) for each in answer.json["data"]] == [expected("bcd")]


async def test_base64_is_the_float32_of_the_vector(autojump_clock: MockClock) -> None:
    """Little-endian: what OpenAI's clients ask for by default."""
    async with http_house(encoders=encoders()) as daemon:
        body = {"input": "b", "model": "x", "encoding_format": "base64"}
        answer = await daemon.ask("POST", EMBED, body)
        data = b64decode(answer.json["data"][0]["embedding"])
        assert rounded(list(struct.unpack("<4f", data))) == expected("b")


async def test_fewer_dimensions_are_normalised_again(autojump_clock: MockClock) -> None:
    """More than there are, or any others for a strict daemon, are refused."""
    async with http_house(encoders=encoders()) as daemon:
        answer = await daemon.ask("POST", EMBED, {"input": "b", "dimensions": 2, "model": "x"})
        vector = answer.json["data"][0]["embedding"]
        assert len(vector) == 2
        assert np.linalg.norm(vector) == pytest.approx(1)
        more = await daemon.ask("POST", EMBED, {"input": "b", "dimensions": 5, "model": "x"})
        assert (more.status, more.error["param"]) == (400, "dimensions")
    async with http_house(encoders=encoders(), strict=True) as daemon:
        body = {"input": "b", "dimensions": 2, "model": "embedder"}
        assert (await daemon.ask("POST", EMBED, body)).status == 400


async def test_a_strict_daemon_refuses_another_models_name(autojump_clock: MockClock) -> None:
    """And serves its own."""
    async with http_house(encoders=encoders(), strict=True) as daemon:
        other = await daemon.ask("POST", EMBED, {"input": "b", "model": "other"})
        assert (other.status, other.error["code"]) == (404, "model_not_found")
        own = await daemon.ask("POST", EMBED, {"input": "b", "model": "embedder"})
        assert own.status == 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input[1]"),
        ({"input": [["a"]]}, 400, "input[0][0]"),
        ({"input": ["a", 1.5]}, 400, "input[1]"),
        ({"input": ["a", -1]}, 400, "input[1:][0]"),
        ({"input": {"content": "a"}}, 400, "input"),
        ({"input": {"content": [{"type": "image_url"}]}}, 400, "input.content[0]"),
        ({"input": {"prompt_string": ""}}, 400, "input.prompt_string"),
        ({"input": [[1, 9999]]}, 400, "input[0]"),
        ({"input": {"a": 1}}, 400, "input"),
        ({}, 400, "input"),
        ({"input": ["a"] * 16_385}, 413, "input"),
        ({"input": ["a", "b" * N_CTX]}, 400, "input[1]"),
    ],
)
async def test_bad_input_is_refused_and_named(
    autojump_clock: MockClock, body: dict[str, Any], status: int, param: str
) -> None:
    """With what is wrong; nothing reaches the encoder."""
    models = encoders()
    async with http_house(encoders=models) as daemon:
        answer = await daemon.ask("POST", EMBED, {"model": "x", **body})
        assert (answer.status, answer.error["param"]) == (status, param), answer.body
        assert not models["embed"].batches


async def test_a_text_that_is_too_long_is_refused_with_both_numbers_or_cut(
    autojump_clock: MockClock,
) -> None:
    """Its last token, which ends a text, is kept."""
    models = encoders()
    async with http_house(encoders=models) as daemon:
        body = {"input": "b" * 60, "model": "x"}
        answer = await daemon.ask("POST", EMBED, body)
        assert answer.error["code"] == "context_length_exceeded"
        assert (answer.error["n_prompt_tokens"], answer.error["n_ctx"]) == (61, N_CTX)
        cut = await daemon.ask("POST", EMBED, {**body, "truncate": True})
        assert cut.status == 200
        assert models["embed"].batches == [[N_CTX]]


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
async def test_llama_servers_form_is_a_list(autojump_clock: MockClock, path: str) -> None:
    """Where it is served without /v1, and no model is named."""
    async with http_house(encoders=encoders()) as daemon:
        answer = await daemon.ask("POST", path, {"content": ["b", "c"]})
        assert [each["index"] for each in answer.json] == [0, 1]
        assert rounded(answer.json[0]["embedding"][0]) == expected("b")
        raw = await daemon.ask("POST", path, {"content": "b", "embd_normalize": -1})
        assert raw.json[0]["embedding"][0] == vector_of(np.array([256, 98])).tolist()


def test_norms_are_those_of_llama_cpp() -> None:
    """The largest number, the sum of all, the length; nothing is divided by zero."""
    vectors = np.array([[3, -4], [0, 0]], np.float32)
    assert normalised(vectors, 0).tolist()[0] == pytest.approx([24_570, -32_760])
    assert normalised(vectors, 1).tolist()[0] == pytest.approx([3 / 7, -4 / 7])
    assert normalised(vectors, 2).tolist() == [pytest.approx([0.6, -0.8]), [0, 0]]


async def test_ollamas_forms(autojump_clock: MockClock) -> None:
    """/api/embed has a list of vectors, and cuts what is too long; /api/embeddings has one vector."""
    async with http_house(encoders=encoders()) as daemon:
        answer = await daemon.ask("POST", "/api/embed", {"model": "x", "input": ["b", "c" * 90]})
        assert rounded(answer.json["embeddings"][0]) == expected("b")
        assert answer.json["prompt_eval_count"] == 2 + N_CTX
        older = await daemon.ask("POST", "/api/embeddings", {"model": "x", "prompt": "b"})
        assert rounded(older.json["embedding"]) == expected("b")


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/api/embed", {"input": []}, {"embeddings": []}),
        ("/api/embed", {"input": ""}, {"embeddings": []}),
        ("/api/embeddings", {"prompt": ""}, {"embedding": []}),
    ],
)
async def test_an_empty_input_of_ollamas_is_answered_with_nothing(
    autojump_clock: MockClock, path: str, body: dict[str, Any], answer: dict[str, Any]
) -> None:
    """There it loads the model."""
    async with http_house(encoders=encoders()) as daemon:
        found = await daemon.ask("POST", path, {"model": "x", **body})
        assert (found.status, found.json | answer) == (200, found.json)


async def test_documents_are_answered_best_first(autojump_clock: MockClock) -> None:
    """With the numbers they came with, their texts if asked for, and no more than `top_n`."""
    async with http_house(encoders=encoders()) as daemon:
        texts = ["some", "other", "documents", "here"]
        body = {"query": "q", "documents": [*texts[:3], {"text": texts[3]}]}
        answer = await daemon.ask("POST", "/v1/rerank", {**body, "return_documents": True})
        results = answer.json["results"]
        scores = [each["relevance_score"] for each in results]
        assert scores == sorted(scores, reverse=True)
        assert [texts[each["index"]] for each in results] == [
            e["document"]["text"] for e in results
        ]
        first = await daemon.ask("POST", "/rerank", {**body, "top_n": 1})
        assert [each["index"] for each in first.json["results"]] == [results[0]["index"]]


async def test_texts_are_answered_as_tei_does(autojump_clock: MockClock) -> None:
    """A bare list, with the texts if asked for."""
    async with http_house(encoders=encoders()) as daemon:
        texts = ["some", "other", "texts"]
        body = {"query": "q", "texts": texts, "return_text": True}
        found = (await daemon.ask("POST", "/rerank", body)).json
        scores = [each["score"] for each in found]
        assert scores == sorted(scores, reverse=True)
        assert [each["text"] for each in found] == [texts[each["index"]] for each in found]
        first = (
            await daemon.ask("POST", "/rerank", {"query": "q", "texts": texts, "top_n": 1})
        ).json
        assert first == [{"index": found[0]["index"], "score": found[0]["score"]}]


async def test_a_template_keeps_white_space_with_the_texts_beside_it(
    autojump_clock: MockClock,
) -> None:
    """So a text is split into tokens as in a prompt that was put together; its own marks stay plain text."""
    model = FakeEncoder(
        evolve(
            info_of("rank"),
            pair=Pair((1,), (2,), (3,), around_query=(" ", "\n"), around_document=("", "!")),
        )
    )
    async with http_house(encoders={"rank": model}) as daemon:
        await daemon.ask("POST", "/rerank", {"query": "q", "documents": ["d"]})
        assert model.texts == [[1, *b" q\n", 2, *b"d!", 3]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "texts": [1]}, "texts[0]"),
        ({"query": "q", "documents": ["a", 1]}, "documents[1]"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q" * 60, "documents": ["a"]}, "query"),
        ({"query": "q", "documents": ["a", "a" * 60]}, "documents[1]"),
    ],
)
async def test_a_bad_question_about_documents_is_named(
    autojump_clock: MockClock, body: dict[str, Any], param: str
) -> None:
    """As any other field at fault."""
    async with http_house(encoders=encoders()) as daemon:
        answer = await daemon.ask("POST", "/rerank", body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body


@pytest.mark.parametrize(
    ("path", "option"), [(EMBED, "--embedding-model"), ("/rerank", "--rerank-model")]
)
async def test_without_such_a_model_the_flag_is_named(
    autojump_clock: MockClock, path: str, option: str
) -> None:
    """400, since no retry can help."""
    async with http_house() as daemon:
        answer = await daemon.ask("POST", path, {"input": "a", "query": "q", "documents": ["a"]})
        assert answer.status == 400
        assert option in answer.error["message"]


async def test_a_client_that_leaves_frees_the_encoder(autojump_clock: MockClock) -> None:
    """What is left of its inputs is not computed."""
    models = encoders()
    async with http_house(encoders=models) as daemon:
        client = daemon.connect()
        await client.send("POST", EMBED, {"input": ["some text"] * 200, "model": "x"})
        await trio.sleep(0.02)
        client.close()
        await trio.sleep(0.1)
        assert len(models["embed"].batches) < 50


async def test_one_user_asks_while_another_has_thousands_of_texts(
    autojump_clock: MockClock,
) -> None:
    """The short request is answered first."""
    async with http_house(encoders=encoders(), keys=(b"one", b"two")) as daemon:
        many, few = daemon.connect(), daemon.connect()
        headers = {"Authorization": "Bearer one"}
        await many.send("POST", EMBED, {"input": ["some text"] * 2000, "model": "x"}, headers)
        await trio.sleep(0.02)
        began = trio.current_time()
        headers = {"Authorization": "Bearer two"}
        answer = await few.ask("POST", EMBED, {"input": ["b"], "model": "x"}, headers)
        assert answer.status == 200
        assert trio.current_time() - began < 0.1
        assert len((await many.answer()).json["data"]) == 2000


async def test_a_failed_step_is_an_error_of_its_requests_alone(autojump_clock: MockClock) -> None:
    """500, and the next request is served."""
    async with http_house(encoders=encoders(fails=(1,))) as daemon:
        answer = await daemon.ask("POST", EMBED, {"input": "a", "model": "x"})
        assert (answer.status, answer.error["code"]) == (500, "decode_failed")
        again = await daemon.ask("POST", EMBED, {"input": "a", "model": "x"})
        assert again.status == 200


async def test_the_models_are_listed_beside_that_which_writes(autojump_clock: MockClock) -> None:
    """With what a client has to know of them."""
    async with http_house(encoders=encoders()) as daemon:
        models = (await daemon.ask("GET", "/v1/models")).json["data"]
        assert [each["id"] for each in models] == ["fake", "embedder", "ranker"]
        assert (models[1]["meta"]["n_embd"], models[1]["max_model_len"]) == (4, N_CTX)
        can = [each["capabilities"] for each in models]
        assert can == [["completion"], ["embedding"], ["rerank"]]


async def test_each_request_has_a_line_in_the_log(autojump_clock: MockClock) -> None:
    """As each answer has: who asked which model, how much, and how it ended."""
    async with http_house(encoders=encoders(fails=(2,))) as daemon:
        for _ in range(2):
            await daemon.ask("POST", EMBED, {"input": ["b", "cc"], "model": "x"})
        told = [
            (line["model"], line["prompt_tokens"], line["reason"]) for line in daemon.inner.answered
        ]
        assert told == [("embedder", 5, "stop"), ("embedder", 5, "error")]


async def test_of_two_models_of_one_name_the_one_that_gives_it_is_asked(
    autojump_clock: MockClock,
) -> None:
    """As files of one family are called by what they say of themselves."""
    models = {kind: FakeEncoder(evolve(each.info, name="x")) for kind, each in encoders().items()}
    async with http_house(encoders=models) as daemon:
        body = {"query": "q", "documents": ["a"], "input": ["a"], "model": "x"}
        for path in (EMBED, "/v1/rerank"):
            assert (await daemon.ask("POST", path, body)).status == 200


async def test_a_long_query_is_not_copied_for_ever(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts once for each document; a request with too many tokens in all is refused with the bound."""
    monkeypatch.setattr(embedding, "MAX_TOKENS", 1000)
    async with http_house(encoders=encoders()) as daemon:
        body = {"query": "q" * 30, "documents": ["b"] * 20}
        assert (await daemon.ask("POST", "/v1/rerank", body)).status == 200
        answer = await daemon.ask("POST", "/v1/rerank", {**body, "documents": ["b"] * 60})
        assert (answer.status, answer.error["param"]) == (413, "documents")
        assert "1000 tokens" in answer.error["message"]


async def test_memory_of_requests_that_wait_is_bounded(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further one is told to come back, and is served when the first ones are answered."""
    monkeypatch.setattr(embedding, "MAX_HELD", 2000)
    body = {"input": ["a long text"] * 100, "model": "x"}
    async with http_house(encoders=encoders()) as daemon:
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await daemon.ask("POST", EMBED, body)).status)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        assert sorted(statuses) == [200, 429, 429]
        assert (await daemon.ask("POST", EMBED, body)).status == 200
