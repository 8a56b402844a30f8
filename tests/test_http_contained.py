"""Whatever a client sends, it gets an answer, and a fault of ours stays with the request that met it."""

from __future__ import annotations

import json
from typing import Any

import h11
import pytest
import trio
from http_kit import Client, HttpHouse, http_house, tcp_pair
from hypothesis import example, given, settings
from hypothesis import strategies as st
from net_kit import LogBook
from trio.testing import MockClock

from uma_trio.api.anthropic.endpoint import Messages
from uma_trio.api.api import Api
from uma_trio.api.bodies import BodySpec
from uma_trio.api.llama.completion import Completion
from uma_trio.api.ollama.endpoint import OllamaChat, OllamaGenerate
from uma_trio.api.openai.chat import ChatCompletions
from uma_trio.api.openai.completions import Completions
from uma_trio.api.responses.endpoint import Responses
from uma_trio.http import connection
from uma_trio.http.errors import Fault
from uma_trio.http.heads import MOST_QUERY_FIELDS, head_of
from uma_trio.observe import log as fault_log
from uma_trio.observe.log import FaultLog

SAID = [{"role": "user", "content": "hi"}]
# Every endpoint that gives text, with the least that it has to be asked.
TEXTS: dict[str, tuple[type[Api], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletions, {"messages": SAID, "max_tokens": 2}),
    "/v1/completions": (Completions, {"model": "fake", "prompt": "hi", "max_tokens": 2}),
    "/completion": (Completion, {"prompt": "hi", "n_predict": 2}),
    "/v1/responses": (Responses, {"input": "hi", "max_output_tokens": 2}),
    "/v1/messages": (Messages, {"messages": SAID, "max_tokens": 2, "model": "fake"}),
    "/api/chat": (OllamaChat, {"messages": SAID, "options": {"num_predict": 20}}),
    "/api/generate": (OllamaGenerate, {"prompt": "hi", "options": {"num_predict": 20}}),
}
ODD: tuple[Any, ...] = (
    *(True, 0, -1, 0.5, 1e308, 2**31 - 1, "", "\x00é", [], [[]], [{}], ["x"], [1], [[1, 2]], {}),
    *({"x": 1}, {"type": "x"}, [{"type": "x"}]),
)


async def client_of(daemon: HttpHouse, *, by_socket: bool = False) -> Client:
    """Return a client whose h11 reads answers to what is sent as plain bytes."""
    client = daemon.connect(by_socket=by_socket)
    client.http.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    return client


async def everything(client: Client) -> bytes:
    """Return what comes up to the end of the connection."""
    said = b""
    try:
        while data := await client.transport.receive_some():
            said += data
    except trio.BrokenResourceError:
        return said
    return said


# --- what a body says ---


@pytest.mark.parametrize("bias", [[], {}, [[97, 1.5], ["b", False]], [{"token": 97, "bias": None}]])
@pytest.mark.parametrize("path", TEXTS)
async def test_biases_may_be_a_list(autojump_clock: MockClock, path: str, bias: Any) -> None:
    """Also an empty one, as llama-server's clients send it by default."""
    async with http_house() as daemon:
        for streams in (False, True):
            asked = {**TEXTS[path][1], "logit_bias": bias, "stream": streams}
            answer = await daemon.ask("POST", path, asked)
            assert answer.status == 200, answer.body


async def test_what_props_tells_is_accepted_as_a_request(autojump_clock: MockClock) -> None:
    """And so is what an answer says of how it was made."""
    async with http_house() as daemon:
        told = (await daemon.ask("GET", "/props")).json
        params = told["default_generation_settings"]["params"]
        asked = {**params, "prompt": "hi", "n_predict": 2, "max_tokens": 2}
        answer = await daemon.ask("POST", "/completion", asked)
        assert answer.status == 200, answer.body
        mine = {
            "prompt": "hi",
            "n_predict": 2,
            "logit_bias": [[97, 2], ["b", False]],
            "stop": ["q"],
        }
        used = (await daemon.ask("POST", "/completion", mine)).json["generation_settings"]
        again = await daemon.ask("POST", "/completion", {**used, "prompt": "hi"})
        assert again.status == 200, again.body
        assert again.json["generation_settings"] == used


def _odd_bodies(spec: BodySpec[Any], base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return bodies with one odd value each; of a field that is not read a few will do."""
    others = (*spec.refused, *spec.ignored)
    return [
        *({**base, name: odd} for name in spec.by_name for odd in ODD),
        *({**base, name: odd} for name in others for odd in ODD[::9]),
    ]


@pytest.mark.parametrize("path", TEXTS)
async def test_an_odd_value_of_any_field_is_taken_or_refused(
    autojump_clock: MockClock, path: str
) -> None:
    """Never with a status of ours, never with half an answer, and no fault is logged."""
    api, base = TEXTS[path]
    async with http_house() as daemon:
        client = daemon.connect()
        for body in _odd_bodies(api.spec, base):
            answer = await client.ask("POST", path, body)
            assert answer.status < 500, (body, answer.body)
            assert answer.body
            if answer.headers.get("connection") == "close":
                client = daemon.connect()


# --- what a head says ---


async def test_every_complete_head_gets_an_answer(autojump_clock: MockClock) -> None:
    """A preflight with any bytes in its names, a query of any length."""
    async with http_house(origins=frozenset({"localhost"})) as daemon:
        preflight = (
            b"Origin: http://localhost\r\nAccess-Control-Request-Headers: x-a, \xe9, a b, x-b"
        )
        for head in (
            b"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\n" + preflight + b"\r\n\r\n",
            b"GET /v1/models?" + b"&" * 31 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ):
            client = await client_of(daemon)
            await client.send_bytes(head)
            answer = await client.answer()
            assert answer.status == 200
            names = answer.headers.get("access-control-allow-headers", "x-a, x-b")
            assert names == "x-a, x-b"


HEADER_BYTES = st.binary(max_size=12).map(
    lambda raw: raw.translate(None, b"\x00\r\n\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0").strip()
)
HEADERS = st.sampled_from(
    [
        *("Origin", "Access-Control-Request-Headers", "Authorization", "Accept", "X-UMA-Priority"),
        *(
            "Content-Type",
            "Expect",
            "X-UMA-SLO-TTFT-MS",
            "Sec-Fetch-Site",
            "User-Agent",
            "X-UMA-App",
        ),
        *("Access-Control-Request-Private-Network", "Connection", "Upgrade"),
    ]
)
TARGETS = st.sampled_from(
    [
        *(b"/", b"/health", b"/v1/models", b"/v1/models/%ff%00", b"*", b"http://localhost/health"),
        *(b"http://localhost", b"http://?&", b"https://localhost?a", b"/%2e%2e/%0d%0aX:%20y"),
        b"/health?" + b"&" * 40,
        b"/metrics?format=%ff",
        b"/v1/responses/%0a",
    ]
) | st.binary(max_size=10).map(lambda raw: b"/" + bytes(33 + byte % 94 for byte in raw))


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """The bytes of a head whose syntax is right."""
    method = draw(st.sampled_from([b"GET", b"HEAD", b"POST", b"OPTIONS", b"DELETE", b"X"]))
    lines = [method + b" " + draw(TARGETS) + b" HTTP/1.1", b"Host: localhost"]
    values = st.sampled_from([b"http://localhost", b"application/json", b"close", b"nan", b"true"])
    for name in draw(st.lists(HEADERS, max_size=4, unique=True)):
        lines.append(name.encode() + b": " + draw(values | HEADER_BYTES))
    return b"\r\n".join([*lines, b"", b""])


@settings(max_examples=100, deadline=None)
@example([b"GET /metrics?format=%ff HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@given(st.lists(heads(), min_size=1, max_size=4))
def test_any_head_gets_an_answer(every: list[bytes]) -> None:
    """Each up to the one that ends the connection, with a status below 500; nothing is logged."""

    async def converse() -> None:
        async with http_house(origins=frozenset({"localhost"})) as daemon:
            for head in every:
                # Over TCP who ends its sending side cannot be told from who has left.
                client = await client_of(daemon, by_socket=True)
                await client.send_bytes(head)
                client.sock.shutdown(1)
                said = await everything(client)
                assert said.startswith(b"HTTP/1.1 "), head
                assert int(said[9:12]) < 500 or int(said[9:12]) == 501, said
                assert daemon.inner.log.faults == []

    trio.run(converse, clock=MockClock(autojump_threshold=0))


@given(heads())
def test_a_head_is_read_or_refused(data: bytes) -> None:
    """Nothing else is raised, and its query has few fields."""
    http = h11.Connection(h11.SERVER)
    http.receive_data(data)
    event = http.next_event()
    assert isinstance(event, h11.Request)
    if b"&" * MOST_QUERY_FIELDS in event.target:
        with pytest.raises(Fault, match="32 fields"):
            head_of(event, 16_384)
        return
    head = head_of(event, 16_384)
    assert len(head.query) <= MOST_QUERY_FIELDS
    assert head.path.startswith("/")


async def test_a_length_beside_chunks_ends_the_connection(autojump_clock: MockClock) -> None:
    """RFC 9112, 6.1: chunks count, and what follows them is nobody's request."""
    body = json.dumps({"content": "hi"}).encode()
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = (
        b"POST /tokenize HTTP/1.%d\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"%bTransfer-Encoding: chunked\r\n\r\n"
    )
    async with http_house() as daemon:
        for minor, length in ((1, b"Content-Length: 4\r\n"), (0, b"Connection: keep-alive\r\n")):
            client = await client_of(daemon)
            await client.send_bytes(head % (minor, length) + chunks + hidden)
            said = await everything(client)
            assert said.count(b"HTTP/1.1 ") == 1
            assert b"connection: close" in said.lower()
        client = await client_of(daemon)
        await client.send_bytes(head % (1, b"") + chunks + hidden)
        with trio.move_on_after(1):
            said = b""
            while said.count(b"HTTP/1.1 200") < 2:
                said += await client.transport.receive_some()
        assert said.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"http://localhost/v1/models", b"proxy.example"),
        (b"HTTP://LOCALHOST:8080/v1/models?a=b", b"localhost"),
        (b"http://127.0.0.1/v1/models", b""),
        (b"https://[::1]:8080/v1/models", b"localhost"),
    ],
)
async def test_a_target_may_be_absolute(
    autojump_clock: MockClock, target: bytes, host: bytes
) -> None:
    """RFC 9112, 3.2.2: its host counts, and the header's does not."""
    async with http_house() as daemon:
        client = await client_of(daemon)
        await client.send_bytes(b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (target, host))
        answer = await client.answer()
        assert (answer.status, answer.json["object"]) == (200, "list")


async def test_an_absolute_target_without_a_path_is_the_root(autojump_clock: MockClock) -> None:
    """As RFC 9112 says of an empty path."""
    async with http_house() as daemon:
        client = await client_of(daemon)
        await client.send_bytes(b"GET http://localhost?a HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await client.answer()).body == b"uma-trio is running\n"


# --- faults of ours ---


class _Broken(Exception):
    """What nobody expects."""


async def test_a_fault_before_a_handler_is_told_and_ends_the_connection(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 500 and a line in the log; the next client is served."""

    def fails(*_: object) -> None:
        raise _Broken

    async with http_house() as daemon:
        with monkeypatch.context() as patch:
            patch.setattr(connection, "head_of", fails)
            client = await client_of(daemon)
            await client.send_bytes(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (500, "internal_error")
            assert await client.is_closed()
        assert len(daemon.inner.log.faults) == 1
        daemon.inner.log.faults.clear()
        assert (await daemon.ask("GET", "/health")).status == 200


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completions", b'data: {"error":'),
        ("/v1/completions", b'data: {"error":'),
        ("/completion", b"error: {"),
        ("/v1/responses", b"event: response.failed\n"),
        ("/v1/messages", b"event: error\n"),
        ("/api/chat", b'{"error":"'),
        ("/api/generate", b'{"error":"'),
    ],
)
async def test_a_fault_in_a_stream_ends_it_with_an_error_event(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, path: str, told: bytes
) -> None:
    """As the API tells errors; then the connection ends, and the others go on."""
    api, base = TEXTS[path]
    asked = {**base, "stream": True}
    asked |= {name: 20 for name in asked if name.endswith(("_tokens", "n_predict"))}
    async with http_house() as daemon:
        whole = daemon.connect()
        await whole.send("POST", path, asked)
        await whole.head()

        def fails(*_: object) -> bytes:
            raise _Broken

        client = daemon.connect()
        make = api.encoder

        def breaking(self: Any, generations: Any) -> Any:
            encoder = make(self, generations)
            encoder.token = fails
            return encoder

        monkeypatch.setattr(api, "encoder", breaking)
        answer = await client.ask("POST", path, asked)
        assert told in answer.body
        assert await client.is_closed()
        assert len(daemon.inner.log.faults) == 1
        daemon.inner.log.faults.clear()
        while await whole.piece():
            pass
        assert whole.http.their_state is h11.DONE


async def test_a_client_that_cannot_be_let_in_ends_nobody_else(autojump_clock: MockClock) -> None:
    """Its socket is closed."""
    async with http_house() as daemon:
        ours, theirs = tcp_pair()

        def fails(*_: object) -> None:
            raise _Broken

        daemon.server.admit = fails  # type: ignore[method-assign]
        daemon.server.admit_at_once(theirs)
        assert ours.recv(1) == b""
        ours.close()
        daemon.inner.log.faults.clear()


async def test_one_fault_is_told_once_a_minute(autojump_clock: MockClock) -> None:
    """And then how often it came; another fault has a line of its own."""
    book = LogBook()
    log = FaultLog(book)

    def fail(kind: type[Exception]) -> None:
        try:
            raise kind
        except kind:
            log.exception("a fault")

    for _ in range(500):
        fail(_Broken)
    fail(ValueError)
    assert len(book.faults) == 2
    await trio.sleep(fault_log.EVERY_S)
    fail(_Broken)
    assert len(book.faults) == 3


async def test_faults_at_many_places_are_bounded(autojump_clock: MockClock) -> None:
    """So many tracebacks a minute are enough for anybody."""
    book = LogBook()
    log = FaultLog(book)
    kinds = [type(f"Fault{n}", (Exception,), {}) for n in range(3 * fault_log.MOST_PLACES)]
    for kind in kinds:
        try:
            raise kind
        except kind:
            log.exception("a fault")
    assert len(book.faults) == fault_log.MOST_PLACES
    await trio.sleep(fault_log.EVERY_S)
    try:
        raise kinds[-1]
    except kinds[-1]:
        log.exception("a fault")
    assert len(book.faults) == fault_log.MOST_PLACES + 1


_TOO_LONG = 40 << 20


@pytest.mark.parametrize(
    ("host", "status", "by_socket"),
    [(b"localhost", 413, False), (b"localhost", 413, True), (b"evil", 403, False)],
)
async def test_who_is_refused_while_it_sends_reads_the_answer(
    autojump_clock: MockClock, host: bytes, status: int, *, by_socket: bool
) -> None:
    """Clients send a body to its end before they read: the connection stays until then."""
    async with http_house() as daemon:
        client = daemon.connect(by_socket=by_socket)
        head = b"POST /completion HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\n"
        plain = b"Content-Type: application/json\r\n\r\n"
        await client.send_bytes(head % (host, _TOO_LONG) + plain + b" " * _TOO_LONG)
        client.http.send(h11.Request(method="POST", target="/", headers=[("Host", "x")]))
        answer = await client.answer()
        assert answer.status == status
        assert answer.error["message"]
        assert await client.is_closed()


async def test_what_a_refused_client_sends_is_read_up_to_a_bound(autojump_clock: MockClock) -> None:
    """Who sends for ever does not keep its place."""
    async with http_house(linger_bytes=1 << 20) as daemon:
        client = daemon.connect()
        head = (
            b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
        )
        with pytest.raises(trio.BrokenResourceError):
            await client.send_bytes(head + b" " * _TOO_LONG)


async def test_who_says_nothing_more_is_not_waited_for(autojump_clock: MockClock) -> None:
    """A refused client that neither sends nor closes has its place for a second."""
    async with http_house(linger_quiet_s=1.0) as daemon:
        client = daemon.connect()
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
        await client.send_bytes(head)
        await trio.sleep(1.5)
        assert not daemon.server.n_connections
