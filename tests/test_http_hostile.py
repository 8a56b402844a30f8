"""What must not come in over HTTP: other names, other pages, broken bytes, endless bodies, no time."""

from __future__ import annotations

import gc
import json
import socket
import weakref
from typing import Any

import h11
import pytest
import trio
from http_kit import Answer, Client, HttpHouse, http_house
from trio.testing import MockClock

from uma_trio.api.bodies import decode, document_of
from uma_trio.api.encoders import RERANK
from uma_trio.http.connection import Connection
from uma_trio.http.errors import Fault
from uma_trio.sockets.principal import Principal

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODY = json.dumps(CHAT).encode()
JSON = b"Content-Type: application/json\r\n"


async def raw(daemon: HttpHouse, data: bytes) -> Answer | None:
    """Send bytes as they are; return the answer, None if there is none."""
    client = daemon.connect()
    # h11 reads an answer only behind a request of its own.
    client.http.send(h11_get())
    await client.send_bytes(data)
    try:
        return await client.answer()
    except AssertionError:
        return None


def h11_get() -> h11.Request:
    """Return a request that a client's h11 may believe it sent."""
    return h11.Request(method="GET", target="/", headers=[("Host", "x")])


OWN_PAGE = b"Origin: http://localhost\r\n"
FORM = b"Content-Type: application/x-www-form-urlencoded\r\n"
NO_TYPE = b"Content-Type: \r\n"


def post(headers: bytes = b"", body: bytes = BODY, path: bytes = b"/v1/chat/completions") -> bytes:
    """Return a request's bytes; a Content-Type and the length are added where none is given."""
    lower = b"\n" + headers.lower()
    if b"content-type" not in lower:
        headers += JSON
    if b"content-length" not in lower and b"transfer-encoding" not in lower:
        headers += b"Content-Length: %d\r\n" % len(body)
    host = b"" if b"\nhost:" in lower else b"Host: localhost\r\n"
    return b"POST %s HTTP/1.1\r\n%s%s\r\n%s" % (path, host, headers, body)


def get(path: bytes = b"/v1/models", headers: bytes = b"Host: localhost\r\n") -> bytes:
    """Return the bytes of a request without a body."""
    return b"GET %s HTTP/1.1\r\n%s\r\n" % (path, headers)


REFUSED = {
    "rebinding: a name of somebody's DNS": (post(b"Host: evil.example\r\n"), 403),
    "rebinding: with our port": (post(b"Host: evil.example:8080\r\n"), 403),
    "rebinding: a GET, which carries no Origin": (get(headers=b"Host: evil.example\r\n"), 403),
    "rebinding: localhost as a label": (post(b"Host: localhost.evil.example\r\n"), 403),
    "rebinding: an address in brackets": (post(b"Host: [::2]\r\n"), 403),
    "no Host": (get(headers=b""), 400),
    "two Hosts": (get(headers=b"Host: localhost\r\nHost: localhost\r\n"), 400),
    "another page": (post(b"Origin: https://evil.example\r\n"), 403),
    "another page reads": (
        get(headers=b"Host: localhost\r\nOrigin: https://evil.example\r\n"),
        403,
    ),
    "a page without a name": (post(b"Origin: null\r\n"), 403),
    "another port of this host": (post(b"Origin: http://localhost:3000\r\n"), 403),
    "a page that names our host in its own": (post(b"Origin: http://localhost.evil\r\n"), 403),
    "a cross-site picture": (
        get(headers=b"Host: localhost\r\nSec-Fetch-Site: cross-site\r\n"),
        403,
    ),
    "a form's text/plain": (post(b"Content-Type: text/plain\r\n"), 415),
    "a form's text/plain of our own page": (post(OWN_PAGE + b"Content-Type: text/plain\r\n"), 415),
    "a form of our own page": (post(OWN_PAGE + FORM), 415),
    "a form of another page": (post(b"Origin: https://evil.example\r\n" + FORM), 403),
    "a form of a page without a name": (post(b"Origin: null\r\n" + FORM), 403),
    "a form of another site": (post(b"Sec-Fetch-Site: cross-site\r\n" + FORM), 403),
    "a form of the same site": (post(b"Sec-Fetch-Site: same-site\r\n" + FORM), 415),
    "a form of the same origin": (post(b"Sec-Fetch-Site: same-origin\r\n" + FORM), 415),
    "a form that was typed in": (post(b"Sec-Fetch-Site: none\r\n" + FORM), 415),
    "a form under a name of somebody's DNS": (post(b"Host: evil.example\r\n" + FORM), 403),
    "a form with parts": (post(b"Content-Type: multipart/form-data; boundary=x\r\n"), 415),
    "no kind of body, of our own page": (post(OWN_PAGE + NO_TYPE), 415),
    "no kind of body, of another site": (post(b"Sec-Fetch-Site: cross-site\r\n" + NO_TYPE), 403),
    "no kind of body, of the same site": (post(b"Sec-Fetch-Site: same-site\r\n" + NO_TYPE), 415),
    "two kinds of body": (post(FORM + JSON), 415),
    "a form's fields": (post(FORM, b"messages=hi&max_tokens=1"), 400),
    "smuggling: length and chunks": (
        post(b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
        400,
    ),
    "smuggling: two lengths": (post(b"Content-Length: 4\r\nContent-Length: 5\r\n"), 400),
    "smuggling: a coding in a coding": (post(b"Transfer-Encoding: gzip, chunked\r\n"), 501),
    "smuggling: a space before the colon": (post(b"Content-Length : 4\r\n"), 400),
    "smuggling: a bare line feed in a header": (post(b"X: a\nContent-Length: 4\r\n"), 400),
    "smuggling: a folded header": (post(b"X: a\r\n  b: c\r\nContent-Length: x\r\n"), 400),
    "a length below nothing": (post(b"Content-Length: -1\r\n"), 400),
    "a length that is no number": (post(b"Content-Length: 0x10\r\n"), 400),
    "a chunk that is no number": (post(b"Transfer-Encoding: chunked\r\n", b"zz\r\nhi\r\n"), 400),
    "a chunk without its end": (
        post(b"Transfer-Encoding: chunked\r\n", b"2\r\nhixx0\r\n\r\n"),
        400,
    ),
    "a chunk of 2^64 bytes": (
        post(b"Transfer-Encoding: chunked\r\n", b"10000000000000000\r\n" + b"x" * 70_000),
        408,
    ),
    "a head without end": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 80_000, 431),
    "a head of many headers": (get(headers=b"Host: localhost\r\n" + b"X-A: b\r\n" * 2500), 431),
    "a target without end": (get(b"/" + b"a" * 40_000), 431),
    "a NUL in a header": (get(headers=b"Host: localhost\r\nX: a\0b\r\n"), 400),
    "a NUL in the target": (get(b"/v1/mo\0dels"), 400),
    "a NUL in the method": (b"G\0T / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "no target": (b"GET  HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /v1/models\r\n\r\n", 400),
    "HTTP/1.2": (b"GET /v1/models HTTP/1.2\r\nHost: localhost\r\n\r\n", 505),
    "HTTP/2.0 in the older form": (b"GET /v1/models HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
    "a bare carriage return in a header": (
        get(headers=b"Host: localhost\r\nX: a\rContent-Length: 4\r\n"),
        400,
    ),
    "rebinding: a name before our own": (get(headers=b"Host: localhost@evil.example\r\n"), 403),
    "an empty Host": (get(headers=b"Host: \r\n"), 403),
    "smuggling: a list of lengths": (post(b"Content-Length: 4, 5\r\n"), 400),
    "smuggling: chunks in chunks": (
        post(b"Transfer-Encoding: chunked, chunked\r\n", b"0\r\n\r\n"),
        501,
    ),
    "smuggling: a coding that is nearly chunked": (
        post(b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n"),
        501,
    ),
    "smuggling: two codings": (
        post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", b"0\r\n\r\n"),
        501,
    ),
    "a length with a sign": (post(b"Content-Length: +4\r\n"), 400),
    "a length of 5000 digits": (post(b"Content-Length: " + b"9" * 5000 + b"\r\n"), 400),
    "a length in other digits": (post(b"Content-Length: \xb2\r\n"), 400),
    "a chunk below nothing": (post(b"Transfer-Encoding: chunked\r\n", b"-1\r\nhi\r\n"), 400),
    "an extension of a chunk without end": (
        post(b"Transfer-Encoding: chunked\r\n", b"1;" + b"a" * 80_000),
        431,
    ),
    "trailers without end": (
        post(b"Transfer-Encoding: chunked\r\n", b"0\r\n" + b"X: y\r\n" * 20_000),
        431,
    ),
    "a trace": (b"TRACE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "JSON of another name": (post(b"Content-Type: application/vnd.api+json\r\n"), 415),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "a frame of the socket": (b"\x20\x00\x00\x00" + BODY + b"\r\n\r\n", 400),
    "a body of 5 GB": (post(b"Content-Length: 5000000000\r\n", b""), 413),
    "no JSON": (post(body=b'{"messages": '), 400),
    "JSON of another kind": (post(body=b"[1, 2]"), 400),
    "JSON without a bottom": (post(body=b"[" * 100_000), 400),
    "half a character": (post(body=b'{"messages": "\xff"}'), 400),
    "half a pair": (post(body=b'{"messages": "\\ud800"}'), 400),
    "a number beyond all": (post(body=b'{"messages": [], "seed": 1e999}'), 400),
    "an unknown path": (get(b"/api/nothing"), 404),
    "a path upwards": (get(b"/v1/../../etc/passwd"), 404),
    "a target of another host": (get(b"http://evil.example/v1/models"), 403),
    "a target of another host behind our name": (get(b"http://localhost@evil.example/x"), 403),
    "a target of no host": (get(b"http:///v1/models"), 403),
    "a target of another scheme": (get(b"ftp://localhost/v1/models"), 404),
    "33 fields in a query": (get(b"/v1/models?" + b"&a=b" * 32), 400),
    "33 fields of nothing in a query of another page": (
        get(b"/?" + b"&" * 32, b"Host: evil.example\r\n"),
        400,
    ),
    "an address in brackets and more": (get(headers=b"Host: [::1]evil\r\n"), 403),
    "another method": (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "a tunnel": (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_hostile_request_is_refused(autojump_clock: MockClock, name: str) -> None:
    """With its status, as JSON, and the daemon is as it was."""
    data, status = REFUSED[name]
    async with http_house(head_timeout_s=5.0) as daemon:
        answer = await raw(daemon, data)
        assert answer is not None
        assert answer.status == status, answer.body
        assert answer.error["message"]
        assert b"evil" not in answer.body
        assert "access-control-allow-origin" not in answer.headers
        assert (await daemon.ask("POST", "/v1/chat/completions", CHAT)).status == 200
        assert daemon.inner.log.faults == []


async def test_another_version_is_refused_with_the_one_to_send(autojump_clock: MockClock) -> None:
    """The client's own is named, too."""
    async with http_house() as daemon:
        answer = await raw(daemon, b"GET /v1/models HTTP/2.0\r\nHost: localhost\r\n\r\n")
        assert answer is not None
        assert answer.error["message"].endswith("its version is 2.0; send HTTP/1.1")


UPGRADE = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: "
HARMLESS = {
    "to a WebSocket, by a post": post(UPGRADE + b"websocket\r\n"),
    "to a WebSocket, without saying so to proxies": get(
        headers=b"Host: localhost\r\nUpgrade: websocket\r\n"
    ),
    "to nothing": get(headers=b"Host: localhost\r\nConnection: Upgrade\r\n"),
    "to TLS": get(headers=UPGRADE + b"TLS/1.2\r\n"),
    "an empty line before it": b"\r\n" + get(),
    "several": b"\r\n\n\r\n" + get(),
    "a form of curl": post(FORM),
    "a form of curl in UTF-8": post(FORM.replace(b"\r", b"; charset=UTF-8\r").upper()),
    "no kind of body": post(NO_TYPE),
    "no header for the kind of body": post().replace(JSON, b""),
    "to HTTP/2": get(headers=UPGRADE + b"h2c\r\nHTTP2-Settings: AAMAAABk\r\n"),
    "a post to HTTP/2": post(UPGRADE + b"h2c\r\n"),
    "an extension of a chunk": post(
        b"Transfer-Encoding: chunked\r\n", b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    ),
    "a body where there is none": get(headers=b"Host: localhost\r\nContent-Length: 2\r\n") + b"{}",
    "bare line feeds alone": b"GET /v1/models HTTP/1.1\nHost: localhost\n\n",
}


@pytest.mark.parametrize("name", HARMLESS)
async def test_what_a_server_may_pass_over_is_passed_over(
    autojump_clock: MockClock, name: str
) -> None:
    """No upgrade is taken up, and the next request on the connection is read where it begins."""
    async with http_house() as daemon:
        client = daemon.connect()
        client.http.send(h11_get())
        client.http.send(h11.EndOfMessage())
        await client.send_bytes(HARMLESS[name])
        answer = await client.answer()
        assert answer.status == 200
        assert "upgrade" not in answer.headers
        assert (await client.ask("GET", "/health")).json == {"status": "ok"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses",
        "/v1/chat/completions",
        "/",
        "/v1/models",
        "/nowhere",
        "/v1/realtime?model=x",
    ],
)
@pytest.mark.parametrize("also", [b"", b"h2c, "])
async def test_the_handshake_of_a_websocket_is_told_what_to_send(
    autojump_clock: MockClock, path: str, also: bytes
) -> None:
    """At once and on every path, so that a client falls back; the connection goes on."""
    headers = (
        b"Host: localhost\r\nConnection: keep-alive, Upgrade\r\nUpgrade: %bWebSocket\r\n" % also
    )
    async with http_house() as daemon:
        client = daemon.connect()
        client.http.send(h11_get())
        client.http.send(h11.EndOfMessage())
        more = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        await client.send_bytes(get(path.encode(), headers + more))
        answer = await client.answer()
        assert answer.status == 426
        assert answer.headers["upgrade"] == "HTTP/1.1"
        assert "upgrade" in answer.headers["connection"].lower()
        assert "stream: true" in answer.error["message"]
        assert (await client.ask("GET", "/health")).json == {"status": "ok"}


async def test_the_handshake_of_another_page_is_refused(autojump_clock: MockClock) -> None:
    async with http_house() as daemon:
        page = b"Origin: https://evil.example\r\n"
        answer = await raw(daemon, get(headers=UPGRADE + b"websocket\r\n" + page))
        assert answer is not None
        assert answer.status == 403


@pytest.mark.parametrize("split", [1, 2, 3, 4])
async def test_an_empty_line_may_come_in_parts(autojump_clock: MockClock, split: int) -> None:
    """Also behind a body, where older clients send one that they do not count."""
    async with http_house() as daemon:
        client = daemon.connect(by_socket=True)  # TCP would wait with the second part
        client.http.send(h11_get())
        client.http.send(h11.EndOfMessage())
        data = b"\r\n\r\n" + get()
        await client.send_bytes(data[:split])
        await trio.sleep(1)
        await client.send_bytes(data[split:])
        assert (await client.answer()).status == 200
        await client.send("POST", "/v1/chat/completions", CHAT)
        await client.send_bytes(b"\r\n")
        assert (await client.answer()).status == 200
        assert (await client.ask("GET", "/health")).status == 200


async def test_nothing_but_empty_lines_is_no_request(autojump_clock: MockClock) -> None:
    """They keep no connection open, and are not answered."""
    async with http_house() as daemon:
        client = daemon.connect()
        began = trio.current_time()

        async def send() -> None:
            while True:
                await client.send_bytes(b"\r\n" * 100)
                await trio.sleep(5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert await client.is_closed()
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began == pytest.approx(75, abs=2)


@pytest.mark.parametrize("data", [b"\rGET / HTTP/1.1\r\n\r\n", b"\r\r\n\r\n", b" \r\n" + get()])
async def test_what_only_looks_like_an_empty_line_is_refused(
    autojump_clock: MockClock, data: bytes
) -> None:
    async with http_house() as daemon:
        answer = await raw(daemon, data)
        assert answer is not None
        assert answer.status == 400


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (b"", 75),
        (b"GET /v1/models HT", 10),
        (post(b"Content-Length: 1000\r\n", b"{"), 10),
        (post(b"Transfer-Encoding: chunked\r\n", b"5\r\nhe"), 10),
    ],
)
async def test_a_request_that_does_not_come_ends_its_connection(
    autojump_clock: MockClock, data: bytes, seconds: float
) -> None:
    """Half a request is told why, an idle connection is just closed."""
    async with http_house() as daemon:
        client = daemon.connect()
        began = trio.current_time()
        await client.send_bytes(data)
        said = b""
        while piece := await client.transport.receive_some():
            said += piece
        assert trio.current_time() - began == pytest.approx(seconds, abs=2)
        assert (b" 408 " in said) is bool(data)


async def test_a_head_that_trickles_is_given_up(autojump_clock: MockClock) -> None:
    """One byte a second is not ten seconds for the next one."""
    async with http_house() as daemon:
        client = daemon.connect()
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as nursery:

                async def trickle() -> None:
                    for byte in get() + b"X" * 60:
                        await client.send_bytes(bytes([byte]))
                        await trio.sleep(1)

                nursery.start_soon(trickle)
                assert b" 408 " in await client.transport.receive_some()
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught


async def test_a_body_may_take_its_time_if_it_is_long(autojump_clock: MockClock) -> None:
    """16 KiB a second is enough for ever, less is not."""
    async with http_house() as daemon:
        for rate, status in ((20_000, 400), (10_000, 408)):
            client = daemon.connect()
            client.http.send(h11_get())
            body = b" " * 600_000
            await client.send_bytes(post(body=b"")[: -len(b"Content-Length: 0\r\n\r\n")])
            await client.send_bytes(b"Content-Length: %d\r\n\r\n" % len(body))

            async def send(client: Client = client, rate: int = rate, body: bytes = body) -> None:
                try:
                    for start in range(0, len(body), rate):
                        await client.send_bytes(body[start : start + rate])
                        await trio.sleep(1)
                except trio.BrokenResourceError:
                    return

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                assert (await client.answer()).status == status
                nursery.cancel_scope.cancel()


LONG = BODY + b" " * 390_000
ALICE = Principal(connection=100, host="127.0.0.1", uid=1001)
BOB = Principal(connection=200, host="127.0.0.1", uid=1002)


async def half_bodies(daemon: HttpHouse, n: int) -> list[Client]:
    """Return clients that have sent all but the end of a body of 400,000 bytes."""
    clients = [daemon.connect() for _ in range(n)]
    for client in clients:
        client.http.send(h11_get())
        await client.send_bytes(post(b"Content-Length: 400000\r\n", b" " * 390_000))
        await trio.sleep(0.3)
    return clients


async def test_the_memory_for_all_bodies_is_bounded(autojump_clock: MockClock) -> None:
    """What does not fit is told to come back; short requests fit, and so do those of another user."""
    async with http_house(max_prompt_bytes=100_000) as daemon:
        daemon.peer = ALICE
        await half_bodies(daemon, 3)
        answer = await daemon.ask("POST", "/v1/chat/completions", LONG)
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert (await daemon.ask("POST", "/v1/chat/completions", CHAT)).status == 200
        daemon.peer = BOB
        assert (await daemon.ask("POST", "/v1/chat/completions", LONG)).status == 200


async def test_a_body_of_which_the_rest_does_not_come_makes_room(
    autojump_clock: MockClock,
) -> None:
    """The oldest of the user with most; its client is told, and the others' stay."""
    async with http_house(max_prompt_bytes=100_000) as daemon:
        daemon.peer = ALICE
        holders = await half_bodies(daemon, 3)
        daemon.peer = BOB
        (other,) = await half_bodies(daemon, 1)
        await trio.sleep(2)
        daemon.peer = ALICE
        assert (await daemon.ask("POST", "/v1/chat/completions", LONG)).status == 200
        answer = await holders[0].answer()
        assert answer.status == 503
        assert "did not come" in answer.error["message"]
        assert daemon.bodies.counted > 0
        await other.send_bytes(b" " * (10_000 - len(b"{}")) + b"{}")
        assert (await other.answer()).status == 400  # no messages


async def test_answers_that_nobody_reads_are_bounded(autojump_clock: MockClock) -> None:
    """Of one user half of the memory for them; then the client that read nothing for the longest time goes."""
    asked = {"content": "a" * 100_000}
    async with http_house(all_answers_bytes=1_000_000) as daemon:
        daemon.peer = ALICE
        slow = [daemon.connect() for _ in range(3)]
        for client in slow:
            await client.send("POST", "/tokenize", asked)
            await trio.testing.wait_all_tasks_blocked()
        refused = await daemon.ask("POST", "/tokenize", asked)
        assert refused.status == 503
        assert "wait to be read" in refused.error["message"]
        daemon.peer = BOB
        assert (await daemon.ask("POST", "/tokenize", asked)).status == 200
        await trio.sleep(3)
        daemon.peer = ALICE
        assert (await daemon.ask("POST", "/tokenize", asked)).status == 200
        assert await slow[0].is_cut()
        assert (await slow[1].answer()).status == 200


async def test_an_answer_that_was_cut_leaves_no_memory_to_the_garbage_collector(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that leaves in the middle of it: its connection is freed when it ends."""
    made: list[weakref.ref[Connection]] = []
    begin = Connection.__init__

    def noted(self: Connection, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Connection, "__init__", noted)
    gc.disable()
    try:
        async with http_house() as daemon:
            client = daemon.connect()
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await client.send("POST", "/tokenize", {"content": "a" * 100_000})
            await trio.sleep(1)
            client.close()
            await trio.sleep(1)
            await trio.testing.wait_all_tasks_blocked()
            assert [each() for each in made] == [None]
    finally:
        gc.enable()


async def test_a_body_gives_its_place_back_once_it_is_decoded(autojump_clock: MockClock) -> None:
    """Its answer may take hours, in which others send bodies of their own."""
    async with http_house(max_prompt_bytes=100_000) as daemon:
        padded = json.dumps({**CHAT, "stream": True, "max_tokens": 5}).encode() + b" " * 390_000
        clients = [daemon.connect() for _ in range(8)]
        for client in clients:
            await client.send("POST", "/v1/chat/completions", padded)
            assert (await client.head()).status == 200
        assert daemon.bodies.counted == 0


async def test_one_connection_too_many_is_told_and_closed(autojump_clock: MockClock) -> None:
    """The others do not notice."""
    async with http_house(max_connections=2) as daemon:
        clients = [daemon.connect() for _ in range(3)]
        clients[2].http.send(h11_get())
        answer = await clients[2].answer()
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert (await clients[0].ask("GET", "/v1/models")).status == 200


# --- keys and pages ---


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer two"}, 200),
        ({"x-api-key": "two"}, 200),
        ({"x-api-key": "tw"}, 401),
    ],
)
async def test_where_there_are_keys_one_is_needed(
    autojump_clock: MockClock, headers: dict[str, str], status: int
) -> None:
    """In either header; only /health goes without."""
    async with http_house(keys=(b"one", b"two")) as daemon:
        client = daemon.connect()
        assert (await client.ask("GET", "/props", None, headers)).status == status
        assert (await daemon.ask("GET", "/health")).status == 200


async def test_a_listed_page_may_ask_and_read(autojump_clock: MockClock) -> None:
    """Its preflight is answered without a key, and it alone is named."""
    page = {"Origin": "http://localhost:3000"}
    async with http_house(origins=frozenset({page["Origin"]}), keys=(b"k",)) as daemon:
        client = daemon.connect()
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
        answer = await client.ask("OPTIONS", "/v1/chat/completions", None, {**page, **asks})
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == page["Origin"]
        assert answer.headers["access-control-allow-headers"] == "x-a"
        answer = await client.ask("GET", "/v1/models", None, {**page, "x-api-key": "k"})
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == page["Origin"]
        assert answer.headers["vary"] == "Origin"
        move = {"request": 1, "priority": "background"}
        answer = await client.ask("POST", "/priority", move, {**page, "x-api-key": "k"})
        assert answer.status == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("http://localhost:5173", 200),
        ("https://127.0.0.1:3000", 200),
        ("http://[::1]:3000", 200),
        ("http://notlocalhost", 403),
        ("http://localhost.evil.example", 403),
        ("http://localhost:80@evil.example", 403),
        ("http://127.0.0.1.evil.example", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("localhost", 403),
    ],
)
async def test_all_pages_of_this_machine_may_be_listed_at_once(
    autojump_clock: MockClock, origin: str, status: int
) -> None:
    """Whatever their port; a name that only looks like it is refused."""
    async with http_house(origins=frozenset({"localhost"})) as daemon:
        answer = await daemon.connect().ask("OPTIONS", "/v1/models", None, {"Origin": origin})
        assert answer.status == status
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == (origin if status == 200 else None)


async def test_a_page_of_our_own_needs_no_list(autojump_clock: MockClock) -> None:
    """Same host, same port."""
    async with http_house() as daemon:
        own = {"Host": "localhost:8080", "Origin": "http://localhost:8080"}
        client = daemon.connect()
        assert (await client.ask("GET", "/v1/models", None, own)).status == 200


@pytest.mark.parametrize(
    "host", ["LOCALHOST", "localhost:9", "127.0.0.1:8080", "[::1]:8080", "box"]
)
async def test_the_daemons_own_names_are_known(autojump_clock: MockClock, host: str) -> None:
    """The loopback's, with any port, and those that the operator listed."""
    async with http_house(hosts=frozenset({"box"})) as daemon:
        client = daemon.connect()
        assert (await client.ask("GET", "/v1/models", None, {"Host": host})).status == 200


async def test_nothing_secret_is_shown(autojump_clock: MockClock) -> None:
    """Neither keys nor prompts stand in the metrics, in logs or in the settings' text."""
    async with http_house(keys=(b"s3cret",)) as daemon:
        await daemon.ask("POST", "/v1/chat/completions", CHAT, x_api_key="s3cret")
        assert "s3cret" not in repr(daemon.server._context.settings)
        assert daemon.inner.log.lines == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b" \n", "the body is empty; send a JSON object"),
        (b"{", "the body is not JSON: "),
        (b"[]", "the body must be a JSON object"),
    ],
)
def test_what_is_no_object_is_told_apart(body: bytes, said: str) -> None:
    """An empty body is a client's mistake of its own, such as a file that was not there."""
    with pytest.raises(Fault, match=said):
        document_of(body)


def test_what_a_missing_field_takes_is_said() -> None:
    """In the words of the bound that would be checked."""
    with pytest.raises(Fault, match="query is missing: a string that is not empty"):
        decode(RERANK, {}, strict=False)
