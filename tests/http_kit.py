"""What tests of the HTTP side are built from: a daemon in virtual time, and a client of plain bytes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import trio
from attrs import Factory, define, evolve, fields
from net_kit import House, at_once, house

from uma_trio.api.context import Context
from uma_trio.api.routes import router
from uma_trio.http.memory import ClientMemory
from uma_trio.http.server import Server
from uma_trio.http.settings import ServerContext, Settings
from uma_trio.sockets.peers import principal_of
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.transport import Transport


@define
class Answer:
    """One answer, whole."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object in the body."""
        return dict(self.json["error"])

    @property
    def events(self) -> list[Any]:
        """The server-sent events, `[DONE]` as text."""
        return events_of(self.body)

    @property
    def lines(self) -> list[Any]:
        """The documents of a stream that has one in each line."""
        return [json.loads(line) for line in self.body.splitlines()]


def events_of(body: bytes) -> list[Any]:
    """Return the events of a stream; comments are left out."""
    found: list[Any] = []
    for block in body.decode().split("\n\n"):
        _, named, rest = block.partition("\ndata: ") if block.startswith("event: ") else ("",) * 3
        if named or block.startswith("data: "):
            data = rest or block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


@define(eq=False)
class Client:
    """The other end of a connection: it can send anything, and reads what comes."""

    sock: socket.socket
    transport: Transport = Factory(lambda self: Transport(self.sock), takes_self=True)
    http: h11.Connection = Factory(lambda: h11.Connection(h11.CLIENT))

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes as they are."""
        while data:
            data = data[self.transport.send_nowait(data) :]
            if data:
                await self.transport.wait_sendable()

    async def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        """Write a request; what is no bytes is sent as JSON."""
        if self.http.our_state is h11.DONE:
            self.http.start_next_cycle()
        data = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        every = {"Host": "localhost", **(headers or {})}
        if body is not None:
            every = {"Content-Type": "application/json", "Content-Length": str(len(data)), **every}
        request = h11.Request(method=method, target=path, headers=list(every.items()))
        out = self.http.send(request) or b""
        if data:
            out += self.http.send(h11.Data(data=data)) or b""
        await self.send_bytes(out + (self.http.send(h11.EndOfMessage()) or b""))

    async def event(self) -> Any:
        """Return h11's next event."""
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event
            try:
                data = await self.transport.receive_some()
            except trio.BrokenResourceError:
                data = b""
            self.http.receive_data(data)

    async def head(self) -> Answer:
        """Read the head of an answer."""
        event = await self.event()
        while isinstance(event, h11.InformationalResponse):
            event = await self.event()
        if not isinstance(event, h11.Response):
            raise AssertionError(f"no answer but {event!r}")
        headers = {k.decode(): v.decode("latin-1") for k, v in event.headers}
        return Answer(event.status_code, headers)

    async def piece(self) -> bytes:
        """Return the next piece of a body; b"" at its end."""
        event = await self.event()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def answer(self) -> Answer:
        """Read an answer to its end."""
        answer = await self.head()
        while data := await self.piece():
            answer.body += data
        return answer

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request and return its answer."""
        await self.send(method, path, body, headers)
        return await self.answer()

    async def is_closed(self) -> bool:
        """Wait until the daemon closes; whether it did so without another word."""
        try:
            return not await self.transport.receive_some()
        except trio.BrokenResourceError:
            return True

    async def is_cut(self) -> bool:
        """Read to the end; whether the daemon closed within an answer."""
        try:
            await self.answer()
        except (h11.RemoteProtocolError, trio.BrokenResourceError):
            return True
        return False

    def close(self) -> None:
        """Leave."""
        self.transport.close()


@define(eq=False)
class HttpHouse:
    """A daemon with an HTTP side."""

    inner: House
    server: Server
    bodies: ClientMemory
    answers: ClientMemory
    clients: list[Client] = Factory(list)
    #: Whom the kernel is to name for the next connections; None: whom it does name.
    peer: Principal | None = None

    def who(self, sock: socket.socket, operator_uid: int) -> Principal:
        """Return whom a connection belongs to."""
        found = principal_of(sock, operator_uid)
        if self.peer is None or sock.family == socket.AF_UNIX:
            return found
        return evolve(self.peer, connection=found.connection)

    def connect(self, *, by_socket: bool = False) -> Client:
        """Return a new client, over TCP or a Unix socket."""
        ours, theirs = socket.socketpair() if by_socket else tcp_pair()
        self.server.admit_at_once(theirs)
        self.clients.append(Client(ours))
        return self.clients[-1]

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Ask on a connection of its own. Headers are written with underscores."""
        client = self.connect()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await client.ask(method, path, body, named)
        client.close()
        return answer


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    return ours, theirs


@asynccontextmanager
async def http_house(**options: Any) -> AsyncIterator[HttpHouse]:
    """Run a daemon in virtual time; at the end the clients leave, and it must be idle."""
    names = {field.name for field in fields(Settings)}
    settings = Settings(**{k: v for k, v in options.items() if k in names})
    async with house(**{k: v for k, v in options.items() if k not in names}) as inner:
        run_blocking = options.get("run_blocking", at_once)
        handlers = Context(
            settings=settings,
            service=inner.service,
            name="test",
            started=1_700_000_000,
            run_blocking=run_blocking,
        )
        context = ServerContext(
            settings=settings,
            log=inner.log,
            name="test",
            bodies=settings.bodies(),
            answers=settings.answers(),
            run_blocking=run_blocking,
            thread_share=inner.service.thread_share,
            queries=inner.service.questions,
            metrics=inner.service.telemetry,
        )

        def who(sock: socket.socket, operator_uid: int) -> Principal:
            return daemon.who(sock, operator_uid)

        server = Server(context, router(handlers), os.geteuid(), who)
        daemon = HttpHouse(inner, server, context.bodies, context.answers)
        await inner.nursery.start(daemon.server.serve_accepted)
        try:
            yield daemon
        finally:
            for client in daemon.clients:
                client.close()
        await inner.until_idle()
        if daemon.server.n_connections:
            raise AssertionError("a connection is still there")
        if context.bodies.counted or context.answers.counted:
            raise AssertionError("memory of a body or an answer is still held")
