"""One client's connection: keep-alive, time, readers that stop, clients that leave, the drain."""

from __future__ import annotations

import errno
import json
import socket
import struct
from typing import Any

import h11
import pytest
import trio
from http_kit import Client, HttpHouse, events_of, http_house, tcp_pair
from net_kit import TICK_S, slowly
from trio.testing import MockClock

from uma_protocol import Code
from uma_trio.api import status
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Head
from uma_trio.http.settings import Settings
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.transport import Transport
from uma_trio.sockets.writer import Writer
from uma_trio_sim.fake import FakeBackend, linear_cost

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "temperature": 0}
STREAM = {**LONG, "stream": True}


async def streaming(daemon: HttpHouse, *, by_socket: bool = False) -> Client:
    """Return a client whose answer has begun."""
    client = daemon.connect(by_socket=by_socket)
    await client.send("POST", CHAT, STREAM)
    await client.head()
    await client.piece()
    await client.piece()
    return client


def texts(event: Any) -> Any:
    """Return what of an event is the same in every answer to one question."""
    return event if isinstance(event, str) else event["choices"]


async def test_one_connection_serves_one_request_after_the_other(
    autojump_clock: MockClock,
) -> None:
    """Whole answers, streams, refusals and what has no body."""
    async with http_house() as daemon:
        client = daemon.connect()
        short = {**LONG, "max_tokens": 3}
        for _ in range(2):
            assert (await client.ask("POST", CHAT, short)).status == 200
            assert (await client.ask("POST", CHAT, {**short, "stream": True})).events[
                -1
            ] == "[DONE]"
            assert (await client.ask("POST", CHAT, {"messages": 1})).status == 400
            assert (await client.ask("GET", "/nowhere")).status == 404
            assert (await client.ask("PUT", CHAT, {})).status == 405
            assert (await client.ask("OPTIONS", CHAT)).status == 200
        assert daemon.inner.recorder.opened == 1


async def test_a_head_is_an_answer_without_its_body(autojump_clock: MockClock) -> None:
    """For each GET; the headers are the same."""
    async with http_house() as daemon:
        client = daemon.connect()
        whole = await client.ask("GET", "/v1/models")
        head = await client.ask("HEAD", "/v1/models")
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.body))


async def test_another_method_is_told_which_there_are(autojump_clock: MockClock) -> None:
    """405 with Allow, and OPTIONS says the same."""
    async with http_house() as daemon:
        answer = await daemon.ask("GET", CHAT)
        assert (answer.status, answer.headers["allow"]) == (405, "POST, OPTIONS")
        answer = await daemon.ask("OPTIONS", "/v1/models")
        assert answer.headers["allow"] == "GET, HEAD, OPTIONS"


async def test_a_client_that_asks_first_is_told_to_go_on(autojump_clock: MockClock) -> None:
    """100 before the body is sent; a body that would be refused is not asked for."""
    async with http_house() as daemon:
        client = daemon.connect()
        body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            f"Content-Type: {{}}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await client.send_bytes(head.format("application/json").encode())
        assert (await client.transport.receive_some()).startswith(b"HTTP/1.1 100 ")
        await client.send_bytes(body)
        assert (await client.transport.receive_some()).startswith(b"HTTP/1.1 200 ")
        client = daemon.connect()
        await client.send_bytes(head.format("text/plain").encode())
        assert (await client.transport.receive_some()).startswith(b"HTTP/1.1 415 ")


async def test_requests_sent_ahead_are_answered_in_order(autojump_clock: MockClock) -> None:
    """Pipelining is slow, not wrong."""
    async with http_house() as daemon:
        client = daemon.connect()
        one = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        await client.send_bytes(one % b"/health" + one % b"/v1/models" + one % b"/health")
        said = b""
        while said.count(b"HTTP/1.1 200") < 3:
            said += await client.transport.receive_some()
        assert said.index(b'"status"') < said.index(b'"list"') < said.rindex(b'"status"')


async def test_the_head_goes_out_when_the_request_is_accepted(autojump_clock: MockClock) -> None:
    """Long before a long prompt is computed."""
    backend = FakeBackend(n_ctx=4096, cost=linear_cost(1.0, 0.1))
    async with http_house(backend=backend) as daemon:
        client = daemon.connect()
        asked = {**STREAM, "messages": [{"role": "user", "content": "x" * 800}], "max_tokens": 2}
        began = trio.current_time()
        await client.send("POST", CHAT, asked)
        assert (await client.head()).status == 200
        assert trio.current_time() - began < 0.1
        while b'"content":"' not in (data := await client.piece()) or b'"role"' in data:
            pass
        assert trio.current_time() - began > 30
        while await client.piece():
            pass


async def test_silence_is_broken_by_a_comment(autojump_clock: MockClock) -> None:
    """Every 15 seconds, while a prompt is computed; never between tokens."""
    backend = FakeBackend(n_ctx=4096, cost=linear_cost(1.0, 0.1))
    async with http_house(backend=backend) as daemon:
        asked = {**STREAM, "messages": [{"role": "user", "content": "x" * 800}], "max_tokens": 2}
        answer = await daemon.ask("POST", CHAT, asked)
        assert answer.body.count(b": keep-alive\n\n") >= 2
        assert answer.events[-1] == "[DONE]"
    async with http_house() as daemon:
        assert b"keep-alive" not in (await daemon.ask("POST", CHAT, STREAM)).body


async def test_a_client_of_the_older_version_reads_a_stream_to_the_end_of_the_connection(
    autojump_clock: MockClock,
) -> None:
    """HTTP/1.0 has no chunks; the text is the same."""
    body = json.dumps({**STREAM, "max_tokens": 20}).encode()
    async with http_house() as daemon:
        chunked = await daemon.ask("POST", CHAT, body)
        client = daemon.connect()
        head = f"POST {CHAT} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await client.send_bytes(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        said = b""
        while data := await client.transport.receive_some():
            said += data
        older = events_of(said.partition(b"\r\n\r\n")[2])
        assert b"chunked" not in said
        assert [texts(event) for event in older] == [texts(event) for event in chunked.events]


async def test_no_part_of_a_stream_ends_it_but_the_last(autojump_clock: MockClock) -> None:
    """A part without a byte is no chunk: one of length 0 would be the end of the answer."""
    ours, theirs = tcp_pair()
    transport = Transport(theirs)
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    server.next_event()
    head, who = Head("GET", "/", {}, {}), Principal(connection=1)
    writer = Writer(transport, stall_timeout_s=1, lost=lambda: None, stalled=lambda: None)
    exchange = Exchange(head, who, 1, b"", lambda: None, server, writer, (), Settings())
    client = Client(ours)
    await client.send_bytes(
        client.http.send(h11.Request(method="GET", target="/", headers=[("Host", "localhost")]))
        or b""
    )
    client.http.send(h11.EndOfMessage())
    exchange.open((), bytes, b"")
    parts = [b"", b"a", b"", b"\r\n0\r\n\r\n", b"x" * 5000]
    for part in parts:
        if not exchange.send(part):
            await exchange.sent()
    await exchange.close(b"")
    assert (await client.answer()).body == b"".join(parts)
    client.close()
    transport.close()


# --- clients that leave ---


@pytest.mark.parametrize("by_socket", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_while_tokens_come_frees_its_row(
    autojump_clock: MockClock, how: str, by_socket: bool
) -> None:
    """By the next tick."""
    async with http_house() as daemon:
        client = await streaming(daemon, by_socket=by_socket)
        leave(client, how)
        await trio.sleep(3 * TICK_S)
        daemon.inner.check_idle_engine()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_prompt_is_computed_frees_its_row(
    autojump_clock: MockClock, stream: bool
) -> None:
    """Though nothing has been written to it since."""
    backend = FakeBackend(n_ctx=4096, cost=linear_cost(1.0, 0.1))
    async with http_house(backend=backend) as daemon:
        client = daemon.connect()
        chat = [{"role": "user", "content": "x" * 800}]
        await client.send("POST", CHAT, {**LONG, "stream": stream, "messages": chat})
        await trio.sleep(5)
        assert (await daemon.inner.service.observer.state()).requests
        client.close()
        await trio.sleep(30)
        daemon.inner.check_idle_engine()


async def test_a_client_that_leaves_while_its_prompt_is_tokenised_is_forgotten(
    autojump_clock: MockClock,
) -> None:
    """The engine never hears of it."""
    async with http_house(run_blocking=slowly(5)) as daemon:
        client = daemon.connect()
        await client.send("POST", CHAT, LONG)
        await trio.sleep(1)
        client.close()
        await trio.sleep(1)
        assert not len(daemon.inner.service.directory)


async def test_a_client_that_ends_its_side_has_left_tcp_and_not_a_unix_socket(
    autojump_clock: MockClock,
) -> None:
    """TCP cannot tell the two apart."""
    async with http_house() as daemon:
        for by_socket in (False, True):
            client = await streaming(daemon, by_socket=by_socket)
            client.sock.shutdown(socket.SHUT_WR)
            await trio.sleep(5 * TICK_S)
            assert len((await daemon.inner.service.observer.state()).requests) == by_socket
            client.close()
            await trio.sleep(5 * TICK_S)


async def test_a_client_that_leaves_does_not_disturb_the_others(autojump_clock: MockClock) -> None:
    """Their streams end as they would have."""
    async with http_house() as daemon:
        stay, go = await streaming(daemon), await streaming(daemon)
        leave(go, "reset")
        body = b""
        while data := await stay.piece():
            body += data
        assert body.endswith(b"data: [DONE]\n\n")


async def test_a_client_is_told_with_its_next_answer_that_the_daemon_leaves(
    autojump_clock: MockClock,
) -> None:
    """Closed without a word the connection could take the next request with it."""
    async with http_house() as daemon:
        busy, quiet = daemon.connect(), daemon.connect()
        await busy.send("POST", CHAT, STREAM)
        await busy.head()
        daemon.server.drain_connections()
        while await busy.piece():
            pass
        last = await busy.ask("GET", "/health")
        assert last.headers["connection"] == "close"
        assert await busy.is_closed()
        await trio.sleep(1.1)
        daemon.server.drain_connections()
        assert await quiet.is_closed()


# --- readers that stop ---


async def test_a_reader_that_stops_is_parked_and_then_closed(autojump_clock: MockClock) -> None:
    """Its request holds its place for 30 seconds, and nobody waits for it."""
    async with http_house(backend=_roomy()) as daemon:
        # The kernel's own timers make TCP with a full window a matter of real time.
        client = daemon.connect(by_socket=True)
        await client.send("POST", CHAT, {**STREAM, "max_tokens": 3000})
        await trio.sleep(20)
        (running,) = (await daemon.inner.service.observer.state()).requests
        assert running.record.state == "parked"
        other = await daemon.ask("POST", CHAT, {**LONG, "max_tokens": 5})
        assert other.status == 200
        await trio.sleep(60)
        assert (await daemon.inner.service.observer.state()).requests == ()
        assert daemon.server.n_connections == 0


async def test_a_reader_that_resumes_gets_every_token(autojump_clock: MockClock) -> None:
    """Nothing is lost while it sleeps."""
    async with http_house(backend=_roomy()) as daemon:
        asked = {**STREAM, "max_tokens": 2000}
        whole = await daemon.ask("POST", CHAT, {**asked, "stream": False})
        # The kernel's own timers make TCP with a full window a matter of real time.
        client = daemon.connect(by_socket=True)
        await client.send("POST", CHAT, asked)
        await trio.sleep(20)
        answer = await client.answer()
        text = "".join(
            event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]
        )
        assert text == whole.json["choices"][0]["message"]["content"]


# --- the end ---


async def test_a_drain_lets_a_stream_finish_and_sends_idle_clients_away(
    autojump_clock: MockClock,
) -> None:
    """New requests are refused with a time to come back."""
    async with http_house() as daemon:
        idle, busy = daemon.connect(), await streaming(daemon)
        await idle.ask("GET", "/health")
        daemon.inner.service.stop_taking()
        assert (await idle.ask("GET", "/health")).status == 503
        refused = await idle.ask("POST", CHAT, LONG)
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert "retry-after" in refused.headers
        daemon.server.end_connections()
        assert await idle.is_closed()
        body = b""
        while data := await busy.piece():
            body += data
        assert body.endswith(b"data: [DONE]\n\n")
        assert await busy.is_closed()


async def test_the_end_of_a_drain_is_an_error_event(autojump_clock: MockClock) -> None:
    """A stream that is cut off says why; a whole answer gets the status."""
    async with http_house() as daemon:
        stream = await streaming(daemon)
        whole = daemon.connect()
        await whole.send("POST", CHAT, LONG)
        await trio.sleep(1)
        daemon.inner.service.end_all(Code.E_LIFECYCLE_001, "stopping")
        body = b""
        while data := await stream.piece():
            body += data
        assert b'"code":"shutting_down"' in body
        assert b"[DONE]" not in body
        assert (await whole.answer()).status == 503


async def test_a_fault_of_ours_is_a_500_and_spares_the_others(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged, and the connection goes on."""
    async with http_house() as daemon:
        client = daemon.connect()
        monkeypatch.setattr(daemon.inner.service, "metrics", lambda: 1 / 0)
        answer = await client.ask("GET", "/metrics")
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert len(daemon.inner.log.faults) == 1
        daemon.inner.log.faults.clear()
        assert (await client.ask("GET", "/health")).status == 200


async def test_an_answer_that_cannot_be_written_is_a_fault_of_ours(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is none is never sent; the client is told, and the connection goes on."""
    async with http_house() as daemon:
        client = daemon.connect()
        monkeypatch.setattr(status, "_PROMETHEUS", "text\r\nX: y")
        answer = await client.ask("GET", "/metrics?format=prometheus")
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert len(daemon.inner.log.faults) == 1
        daemon.inner.log.faults.clear()
        assert (await client.ask("GET", "/health")).status == 200


async def test_running_out_of_descriptors_is_told_once(autojump_clock: MockClock) -> None:
    """Every failure is counted; the log is not flooded with them."""
    async with http_house() as daemon:
        for _ in range(5):
            daemon.server._accept_failed(OSError(errno.EMFILE, "Too many open files"))
        assert daemon.inner.recorder.failed_accepts == 5
        assert daemon.inner.log.lines == ["cannot accept clients"]


def leave(client: Client, how: str) -> None:
    """Close a client's socket, politely or not."""
    if how == "reset" and client.sock.family != socket.AF_UNIX:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _roomy(**more: Any) -> FakeBackend:
    return FakeBackend(n_ctx=8192, cost=linear_cost(0.001, 0.0), **more)
