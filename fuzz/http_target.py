"""What must hold of the HTTP side for every stream of bytes: an answer or an end, whole or in pieces.

The connection is the real one, over a socket pair; behind it stand two paths that need no engine.
"""

from __future__ import annotations

import json
import re
import socket
from itertools import count, pairwise
from typing import Any

import trio
import trio.testing
from hypothesis import strategies as st

from uma_trio.http import chats, messages_input, responses_input
from uma_trio.http.connection import Connection
from uma_trio.http.fields import decode, document_of
from uma_trio.http.message import Caller, Exchange, Reply
from uma_trio.http.messages_api import Messages
from uma_trio.http.openai_chat import ChatCompletions
from uma_trio.http.openai_completions import Completions
from uma_trio.http.responses_api import Responses
from uma_trio.http.router import Route, Router
from uma_trio.http.settings import Bodies, Settings, Shared
from uma_trio.sockets.transport import Transport

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_MAX_BYTES = 1 << 16


class _Faults:
    """A log that takes every fault of ours for a broken invariant."""

    def warning(self, event: str, *args: Any, **values: Any) -> None:
        raise AssertionError(event)

    def exception(self, event: str, *args: Any, **values: Any) -> None:
        raise AssertionError(event)


async def _echo(exchange: Exchange, shared: Shared) -> Reply:
    """Read a body as the text endpoints do, as far as that goes without an engine."""
    document = document_of(exchange.request.body)
    for api in (ChatCompletions, Completions, Responses, Messages):
        body = decode(
            api.fields, {"messages": 1, "prompt": 1, "input": 1, **document}, strict=False
        )
        if "messages" in document and api is ChatCompletions:
            chats.messages_of(body.get("messages"))
        elif "messages" in document and api is Messages:
            messages_input.messages_of(body.get("system"), body.get("messages"), _aside)
            messages_input.tools_of(body.get("tools"), _aside)
            messages_input.choice_of(body.get("tool_choice"))
        elif "input" in document and api is Responses:
            responses_input.messages_of(body.get("instructions"), body.get("input"), _aside)
            responses_input.tools_of(body.get("tools"), _aside)
            responses_input.choice_of(body.get("tool_choice"), parallel=True)
    return Reply(200, b"{}")


def _aside(name: str) -> None:
    """Take the name of what is set aside, which goes into a header."""
    if not name.isascii() or not name.isprintable():
        raise AssertionError(f"{name!r} cannot be in a header")


async def _well(exchange: Exchange, shared: Shared) -> Reply:
    """Answer."""
    return Reply(200, b"{}")


_ROUTER = Router((Route("POST", "/echo", _echo), Route("GET", "/health", _well, access="open")))


def http(data: bytes) -> None:
    """Any stream gets the same statuses whole, byte by byte and cut anywhere; nothing hangs."""
    cuts = sorted({len(data) * byte // 256 for byte in data[:6]} | {0, len(data)})
    whole = _statuses([data])
    for pieces in ([data[i : i + 1] for i in range(len(data))], _pieces(data, cuts)):
        if _statuses(pieces) != whole:
            raise AssertionError(f"in {len(pieces)} pieces it is answered differently")


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise(cuts)]


def _statuses(pieces: list[bytes]) -> list[bytes]:
    said = trio.run(_converse, pieces)
    for block in said.split(b"\r\n\r\n"):
        if block.startswith(b"{"):
            json.JSONDecoder().raw_decode(block.decode())  # the next answer's head is behind it
    return _STATUS.findall(said)


async def _converse(pieces: list[bytes]) -> bytes:
    """Send the pieces one by one, each when the one before is dealt with; return what came back."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    settings = Settings(max_prompt_bytes=4096)
    shared = Shared(
        settings=settings,
        service=None,  # type: ignore[arg-type]  # these paths have no use for one
        log=_Faults(),
        name="fuzz",
        bodies=Bodies(settings.all_bodies_bytes),
        started=0,
    )
    connection = Connection(
        Transport(theirs), shared, _ROUTER, lambda *_: Caller(-1), by_socket=True
    )
    said = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        for piece in [*pieces, b""]:
            if not piece:
                ours.shutdown(socket.SHUT_WR)
            elif not _sent(ours, piece):
                break
            for _ in count():
                await trio.testing.wait_all_tasks_blocked()
                if not _received(ours, said):
                    break
        ours.close()
    if shared.bodies.held:
        raise AssertionError("memory of a body is still held")
    return bytes(said)


def _sent(sock: socket.socket, piece: bytes) -> bool:
    try:
        return sock.send(piece) == len(piece)
    except OSError:
        return False


def _received(sock: socket.socket, said: bytearray) -> bool:
    try:
        data = sock.recv(_MAX_BYTES)
    except OSError:
        return False
    said += data
    return bool(data)


_BODIES = st.sampled_from(
    [
        b"{}",
        b"[]",
        b'{"messages": []}',
        b'{"messages": [{"role": "user", "content": "hi"}], "stop": ["a"], "seed": 1e400}',
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"n": 1.0, "logit_bias": {"1": 1}, "user": "x"}',
        b'{"input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "hi"}]}',
        b'{"input": "hi", "tools": [{"type": "x\\n"}, {"type": "function", "name": "f"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "system": []}',
        b"\xff",
    ]
)
_HEADERS = st.lists(
    st.sampled_from(
        [
            b"Host: localhost\r\n",
            b"Host: evil\r\n",
            b"Content-Type: application/json\r\n",
            b"Content-Length: 2\r\n",
            b"Content-Length: 99999999\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Expect: 100-continue\r\n",
            b"Origin: null\r\n",
            b"Connection: close\r\n",
            b"X: " + b"a" * 300 + b"\r\n",
            b": \r\n",
            b" folded\r\n",
        ]
    ),
    max_size=5,
).map(b"".join)


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    """A request that is mostly sound."""
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"G\0T"]))
    path = draw(st.sampled_from([b"/health", b"/v1/echo", b"/", b"/x y", b"*", b"/%00%zz?a=b&c"]))
    head = method + b" " + path + b" HTTP/1.1\r\n"
    if draw(st.booleans()):
        body = draw(_BODIES)
        sound = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        return head + sound % len(body) + body
    return head + draw(_HEADERS) + b"\r\n" + draw(st.one_of(_BODIES, st.binary(max_size=8)))


requests = st.lists(
    st.one_of(
        st.binary(max_size=8), _request(), st.sampled_from([b"2\r\nhi\r\n0\r\n\r\n", b"\r\n"])
    ),
    max_size=3,
).map(b"".join)
