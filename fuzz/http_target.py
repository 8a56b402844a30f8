"""What must hold of the HTTP side for every stream of bytes: an answer or an end, whole or in pieces.

The connection is the real one, over a socket pair; behind it stand two paths that need no engine: one reads a body as every text endpoint does.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import zlib
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

import trio
import trio.testing
from hypothesis import strategies as st

from uma_trio.api.anthropic import messages as messages_input
from uma_trio.api.anthropic.endpoint import Messages
from uma_trio.api.api import Api
from uma_trio.api.bodies import document_of
from uma_trio.api.context import Context
from uma_trio.api.headers import origin_of
from uma_trio.api.llama.completion import Completion
from uma_trio.api.ollama.endpoint import OllamaChat, OllamaGenerate
from uma_trio.api.openai.chat import ChatCompletions
from uma_trio.api.openai.completions import Completions
from uma_trio.api.responses import messages as responses_input
from uma_trio.api.responses.endpoint import Responses
from uma_trio.config.options import Config
from uma_trio.engine.inbox import Inbox
from uma_trio.http.connection import Connection
from uma_trio.http.exchange import Exchange
from uma_trio.http.message import Reply
from uma_trio.http.router import Route, Router
from uma_trio.http.settings import ServerContext, Settings
from uma_trio.models.loaded import Bounds, TextModel
from uma_trio.models.manager import ModelManager
from uma_trio.models.model import Model
from uma_trio.observe.metrics import Metrics
from uma_trio.service.fair import Answer
from uma_trio.service.service import Service
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.transport import Transport
from uma_trio.text.frontend import FrontEnd
from uma_trio_sim.fake import FakeBackend

_APIS: tuple[type[Api], ...] = (
    *(ChatCompletions, Completions, Completion, Responses, Messages),
    *(OllamaChat, OllamaGenerate),
)
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_MAX_BYTES = 1 << 16


class _Faults:
    """A log that takes every fault of ours for a broken invariant."""

    def warning(self, event: str, *args: Any, **values: Any) -> None:
        raise AssertionError(event)

    def exception(self, event: str, *args: Any, **values: Any) -> None:
        raise AssertionError(event)


async def _echo(exchange: Exchange) -> Reply:
    """Read a body as the text endpoints do, up to what is asked of the engine."""
    with exchange.body() as data:
        document = document_of(data, _CONTEXT.limits())
    origin = origin_of(exchange, _CONTEXT, "fuzzed")
    for api in _APIS:
        needed = {field.name: "x" for field in api.spec.fields if field.required}
        decoded = api.decode(needed | document, strict=False)
        body = await api.tokenised(decoded.body, _CONTEXT)
        api(decoded._replace(body=body), exchange.head, _CONTEXT, origin).asks()
    if "tools" in document:
        messages_input.tools_of(document["tools"], _aside)
        responses_input.tools_of(document["tools"], _aside)
    return Reply(200, b"{}")


def _aside(name: str) -> None:
    """Take the name of what is set aside, which goes into a header."""
    if not name.isascii() or not name.isprintable():
        raise AssertionError(f"{name!r} cannot be in a header")


async def _well(_exchange: Exchange) -> Reply:
    """Answer."""
    return Reply(200, b"{}")


async def _at_once(function: Callable[[], Answer], /) -> Answer:
    """Tokenise without a thread."""
    await trio.lowlevel.checkpoint()
    return function()


def _service() -> Service:
    """Return a service that reads requests; nobody computes them."""
    backend = FakeBackend()
    limits, vocabulary = backend.limits, backend.model.n_vocab
    model = Model(Config(alias=("fake",)), state="loaded")
    model.loaded = TextModel(
        facts=backend.model,
        slots=limits.n_slots,
        bounds=Bounds(model="fake", n_ctx_seq=limits.n_ctx_seq, n_vocab=vocabulary),
        front_end=FrontEnd(backend.vocabulary, backend.model.chat_template),
        inbox=Inbox(8),
        telemetry=Metrics(),
        run_blocking=_at_once,
    )
    models: Any = ModelManager([model], None, None)  # type: ignore[arg-type]
    return Service(models, telemetry=Metrics(), clock=trio.current_time, run_blocking=_at_once)


_SERVICE = _service()
_CONTEXT = Context(
    settings=Settings(max_prompt_bytes=4096),
    service=_SERVICE,
    name="fuzz",
    started=0,
    run_blocking=_at_once,
)
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
    settings = _CONTEXT.settings
    context = ServerContext(
        settings=settings,
        log=_Faults(),
        name="fuzz",
        bodies=settings.bodies(),
        answers=settings.answers(),
        run_blocking=_at_once,
        thread_share=_SERVICE.thread_share,
        queries=_SERVICE.questions,
        metrics=_SERVICE.telemetry,
    )
    connection = Connection(
        Transport(theirs), context, _ROUTER, Principal(connection=1), by_socket=True
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
    if context.bodies.counted or context.answers.counted:
        raise AssertionError("memory of a body or an answer is still held")
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
        b'{"prompt": [[1, 2], "x"], "logit_bias": [], "stop": "", "max_tokens": -1}',
        b'{"logit_bias": [[1, false], {"token": "x", "bias": null}], "grammar": "", "seed": -1}',
        b'{"input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "hi"}]}',
        b'{"input": "hi", "tools": [{"type": "x\\n"}, {"type": "function", "name": "f"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "system": []}',
        b"\xff",
        gzip.compress(b"{}", mtime=0),
        zlib.compress(b"{}"),
        gzip.compress(b" " * 100_000, mtime=0),
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
            b"Content-Type: application/x-www-form-urlencoded\r\n",
            b"Content-Encoding: gzip\r\n",
            b"Content-Encoding: deflate, br\r\n",
            b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
            b"Access-Control-Request-Headers: \xe9, x\r\n",
            b"Connection: close\r\n",
            b"X: " + b"a" * 300 + b"\r\n",
            b": \r\n",
            b" folded\r\n",
        ]
    ),
    max_size=5,
).map(b"".join)

_PATHS = [
    *(b"/health", b"/v1/echo", b"/", b"/x y", b"*", b"/%00%zz?a=b&c", b"/health?" + b"&" * 40),
    *(b"http://localhost/health", b"http://evil", b"https://?&", b"//v1/v1//echo/", b"/echo%2F"),
]


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    """A request that is mostly sound."""
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"G\0T"]))
    path = draw(st.sampled_from(_PATHS))
    head = method + b" " + path + b" HTTP/1.1\r\n"
    if draw(st.booleans()):
        body = draw(_BODIES)
        sound = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        coding = draw(st.sampled_from([b"", b"", b"gzip", b"deflate", b"zstd", b"gzip, gzip"]))
        encoded = b"Content-Encoding: %b\r\n" % coding if coding else b""
        return head + sound % len(body) + encoded + b"\r\n" + body
    return head + draw(_HEADERS) + b"\r\n" + draw(st.one_of(_BODIES, st.binary(max_size=8)))


requests = st.lists(
    st.one_of(
        st.binary(max_size=8),
        _request(),
        st.sampled_from([b"2\r\nhi\r\n0\r\n\r\n", b"\r\n", b"\r", b"\n"]),
    ),
    max_size=3,
).map(b"".join)
