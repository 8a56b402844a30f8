"""The verbs as processes, and the double of a daemon that they talk to."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import trio
from attrs import Factory, define

from uma_protocol import (
    Eos,
    Error,
    Event,
    FrameReader,
    Generate,
    GetMetrics,
    ListSessions,
    Metrics,
    Ok,
    Prefix,
    Prefixes,
    PrefixInfo,
    Request,
    SessionInfo,
    Sessions,
    SetPriority,
    Timings,
    Token,
    Usage,
    decode_request,
    encode_event,
    frame,
)
from uma_protocol.requests import UnloadModel

PATIENCE_S = 30
PROGRAMS = {
    "uma-trio": "from uma_trio.cli.main import main; main()",
    "umad": "from uma_trio.cli.main import umad; umad()",
    "uma-cli": "from uma_trio.cli.main import uma_cli; uma_cli()",
}
TIMINGS = Timings(queue_ms=1.0, ttft_ms=12.0, total_ms=50.0, tokens_per_s=80.0)
SESSION = SessionInfo(
    request=7,
    id="r-1",
    app="editor",
    pid=os.getpid(),
    uid=0,
    state="decode",
    lane="interactive",
    prompt_tokens=20,
    computed_tokens=25,
    completion_tokens=5,
    tokens_per_s=42.0,
    age_ms=1500.0,
)


def eos(reason: str = "stop", text: str | None = None, **more: str) -> Eos:
    """Return the end of an answer; the double fills in the id."""
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    return Eos("", reason, usage, TIMINGS, 1, text, **more)  # type: ignore[arg-type]


def answer(*pieces: str) -> list[Event]:
    """Return a whole answer."""
    return [*(Token("", piece, number) for number, piece in enumerate(pieces)), eos()]


def refusal(code: str) -> list[Event]:
    """Return a fatal error."""
    return [Error(code, "it said no", fatal=True, retryable=False)]


@define
class Double:
    """Plays one daemon: `plays` are the answers to the requests to come, in order."""

    path: Path
    plays: list[list[Event]]
    heard: list[Request] = Factory(list)
    running: str = ""
    connections: int = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer what comes on one connection, until either end has left."""
        self.connections += 1
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._converse(stream)

    async def _converse(self, stream: trio.SocketStream) -> None:
        reader = FrameReader()
        while data := await stream.receive_some():
            reader.feed(data)
            while (payload := reader.next_payload()) is not None:
                request = decode_request(payload)
                self.heard.append(request)
                await self._answer(stream, request)

    async def _answer(self, stream: trio.SocketStream, request: Request) -> None:
        if isinstance(request, ListSessions):
            return await self._say(stream, Sessions((SESSION,)))
        if isinstance(request, GetMetrics):
            return await self._say(stream, Metrics({"sessions": 3, "p95_ms": None}))
        if isinstance(request, Prefix):
            kept = PrefixInfo(pages=1, tokens=9, bytes=9, leaf_tokens=0, sessions=("kept",))
            return await self._say(stream, Prefixes(100, 9, (kept,)))
        if isinstance(request, SetPriority | UnloadModel):
            return await self._say(stream, Ok())
        if not isinstance(request, Generate):
            return await self._say(stream, eos("cancelled"), self.running)
        self.running = request.id
        for event in self.plays.pop(0):
            await self._say(stream, event, request.id)
            if isinstance(event, Error) and event.fatal:
                await stream.aclose()
        return None

    async def _say(self, stream: trio.SocketStream, event: Event, request: str = "") -> None:
        if isinstance(event, Token | Eos):
            event = msgspec.structs.replace(event, id=request)
        await stream.send_all(frame(encode_event(event)))


@asynccontextmanager
async def double(folder: Path, *plays: list[Event]) -> AsyncIterator[Double]:
    """Serve a double on a socket in `folder`."""
    played = Double(folder / "uma.sock", list(plays))
    sock = trio.socket.socket(trio.socket.AF_UNIX)
    with sock:
        await sock.bind(str(played.path))
        sock.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, played.serve, [trio.SocketListener(sock)])
            yield played
            nursery.cancel_scope.cancel()


def command(program: str, *arguments: str) -> list[str]:
    """Return how to start one of our programs."""
    return [sys.executable, "-c", PROGRAMS[program], *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return an environment without settings of whoever runs the tests."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("UMA_")}
    return {**kept, "COLUMNS": "100", **more}


async def run(
    program: str, *arguments: str, stdin: bytes = b"", **env: str
) -> tuple[int, str, str]:
    """Run one of our programs; return its status, output and errors."""
    with trio.fail_after(PATIENCE_S):
        done = await trio.run_process(
            command(program, *arguments),
            check=False,
            capture_stdout=True,
            capture_stderr=True,
            stdin=stdin,
            env=environment(**env),
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()
