"""Whole answers that take long: white space before the document, and a cut where no document comes."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import h11
import pytest
import test_loading
import trio
from attrs import evolve
from encoder_kit import FakeEncoder, info_of
from http_kit import Client, http_house
from test_loading import loading_house
from trio.testing import MockClock

from uma_trio.backend.base import ModelError
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost

PROMPT = "x" * 300
MESSAGES = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
#: Each takes about a minute with :func:`slow`.
TEXTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/completion": {"prompt": PROMPT, "n_predict": 2},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 2},
    "/v1/messages": {**MESSAGES, "max_tokens": 2},
    "/api/chat": {**MESSAGES, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": PROMPT, "stream": False, "options": {"num_predict": 2}},
    "/generate": {"prompt": PROMPT, "stream": False, "max_tokens": 2},
}
LONG_TEXT = "d" * 9000  # 45 s: a token takes 5 ms
ENCODED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["abc", LONG_TEXT]},
    "/embedding": {"content": ["abc", LONG_TEXT]},
    "/api/embed": {"input": ["abc", LONG_TEXT]},
    "/api/embeddings": {"prompt": LONG_TEXT},
    "/v1/rerank": {"query": "abc", "documents": [LONG_TEXT, "e"]},
}
LOADED: dict[str, dict[str, Any]] = {
    "/load": {},
    "/models/load": {},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses/input_tokens": {"input": "x"},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/api/generate": {"prompt": "", "stream": False},
    "/generate": {"prompt": "x", "stream": False, "max_tokens": 1},
}


def slow(**options: Any) -> FakeBackend:
    """Return a model that takes 0.2 s for each token of a prompt."""
    return FakeBackend(n_ctx=4096, cost=linear_cost(0.5, 0.2), **options)


async def timed(client: Client) -> list[tuple[float, bytes]]:
    """Read an answer to its end; return its pieces and when each came."""
    began = trio.current_time()
    assert (await client.head()).status == 200
    pieces = [(trio.current_time() - began, b"")]
    while data := await client.piece():
        pieces.append((trio.current_time() - began, data))
    return pieces


async def last_event(client: Client) -> str:
    """Read an answer whose head was read; return "cut" if it has no end, else "end"."""
    try:
        while await client.piece():
            pass
    except h11.RemoteProtocolError:
        return "cut"
    return "end"


def check(pieces: list[tuple[float, bytes]]) -> None:
    """Check that a space came after 20 s and then each 15 s, and a document behind them."""
    *signs, (_, document) = pieces[1:]
    assert pieces[0][0] == pytest.approx(20, abs=1)
    assert signs
    for at, (when, data) in enumerate(signs):
        assert data == b" "
        assert when == pytest.approx(20 + 15 * at, abs=1)
    assert isinstance(json.loads(document), dict | list)
    assert not document.startswith(b" ")


@pytest.mark.parametrize("path", TEXTS)
async def test_a_long_whole_answer_begins_with_spaces(autojump_clock: MockClock, path: str) -> None:
    async with http_house(backend=slow()) as daemon:
        client = daemon.connect()
        await client.send("POST", path, TEXTS[path])
        check(await timed(client))
        assert (await client.ask("GET", "/health")).status == 200


@pytest.mark.parametrize("path", ENCODED)
async def test_long_vectors_and_scores_begin_with_spaces(
    autojump_clock: MockClock, path: str
) -> None:
    encoders = {
        kind: FakeEncoder(evolve(info_of(kind), n_ctx=10_000, max_tokens=20_000), part_s=0.005)
        for kind in ("mean", "rank")
    }
    async with http_house(encoders=encoders) as daemon:
        client = daemon.connect()
        await client.send("POST", path, {**ENCODED[path], "model": "x"})
        check(await timed(client))


@pytest.mark.parametrize("path", LOADED)
async def test_an_answer_whose_model_takes_long_to_load_begins_with_spaces(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, path: str
) -> None:
    monkeypatch.setattr(test_loading, "STEP_S", 4.5)
    async with loading_house() as daemon:
        client = daemon.house.connect()
        await client.send("POST", path, {**LOADED[path], "model": "code"})
        check(await timed(client))


async def test_a_short_whole_answer_has_its_length(autojump_clock: MockClock) -> None:
    async with http_house() as daemon:
        answer = await daemon.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert int(answer.headers["content-length"]) == len(answer.body)


async def test_headers_go_ahead_with_the_spaces(autojump_clock: MockClock) -> None:
    async with http_house(backend=slow()) as daemon:
        answer = await daemon.ask("POST", "/v1/completions", {**TEXTS["/v1/completions"], "odd": 1})
        assert answer.headers["x-uma-ignored"] == "odd"
        assert answer.headers["content-type"] == "application/json"
        assert "x-request-id" in answer.headers


@pytest.mark.parametrize("n_bytes", [10, 65_537, 2_000_000])
async def test_a_document_of_any_length_comes_whole(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, n_bytes: int
) -> None:
    document = json.dumps("x" * n_bytes).encode()

    async def load(exchange: Exchange) -> Reply:
        exchange.expect_document()
        await trio.sleep(40)
        return Reply(200, document)

    async with http_house() as daemon:
        routes = daemon.server._router._exact["/load"]  # no handler of the daemon's is so long
        monkeypatch.setitem(routes, "POST", evolve(routes["POST"], handler=load))
        client = daemon.connect(by_socket=True)  # TCP's own clock would stand still
        answer = await client.ask("POST", "/load", {"model": "fake"})
        assert answer.body == b"  " + document


@pytest.mark.parametrize("minor", [0, 1])
async def test_an_answer_that_fails_behind_the_spaces_is_cut(
    autojump_clock: MockClock, minor: int
) -> None:
    """Clients take the missing end for a lost connection, and send the request again."""
    backend = slow(faults={3: InjectedFault(bad_rows=(0,))})
    body = json.dumps({"prompt": "x" * 200, "max_tokens": 9}).encode()
    async with http_house(backend=backend) as daemon:
        client = daemon.connect()
        await client.send_bytes(
            b"POST /v1/completions HTTP/1.%d\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
            % (minor, len(body), body)
        )
        said = b""
        with suppress(trio.BrokenResourceError):  # a reset is as good an end
            while data := await client.transport.receive_some():
                said += data
        head, _, rest = said.partition(b"\r\n\r\n")
        assert b" 200 " in head
        assert rest.replace(b"1\r\n \r\n", b" ").strip() == b""  # and no last chunk
        assert b"0\r\n" not in rest


async def test_a_load_that_fails_behind_the_spaces_is_cut(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """One that fails before has a status."""
    for step_s, is_cut in ((4.5, True), (1.0, False)):
        monkeypatch.setattr(test_loading, "STEP_S", step_s)
        async with loading_house() as daemon:
            daemon.error = ModelError("the file is damaged.")
            client = daemon.house.connect()
            await client.send("POST", "/load", {"model": "code"})
            assert (await client.head()).status == (200 if is_cut else 503)
            assert (await last_event(client) == "cut") is is_cut


async def test_an_older_client_reads_the_document_to_the_end_of_the_connection(
    autojump_clock: MockClock,
) -> None:
    body = json.dumps(TEXTS["/v1/completions"]).encode()
    async with http_house(backend=slow()) as daemon:
        client = daemon.connect()
        await client.send_bytes(
            b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        said = b""
        while data := await client.transport.receive_some():
            said += data
        head, _, rest = said.partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert rest.startswith(b" ")
        assert json.loads(rest)["object"] == "text_completion"
