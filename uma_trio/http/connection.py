"""One client of the HTTP side: its requests, one after the other, and how long each may take.

h11 knows HTTP; this module gives it the bytes, the time and the bounds. While a request is
answered nothing is read but the end of the connection: a client that leaves ends its request. The
answer goes out through the same :class:`Writer` as on the Unix socket, so a reader that stops
holds up nobody but itself.

How it ends: everything that ends a connection cancels its scope; what was written is flushed, and
the socket is closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus

import h11
import trio

from uma_trio.http import guard
from uma_trio.http.encodings import BodyDecoder, body_too_large, codings_of
from uma_trio.http.errors import ErrorForm, Fault, openai_error
from uma_trio.http.exchange import LONG_BODY, Exchange
from uma_trio.http.guard import behind, for_proxy, is_listed
from uma_trio.http.heads import (
    check_lines,
    check_trailers,
    check_upgrade,
    head_of,
    is_ambiguous,
    without_empty_lines,
)
from uma_trio.http.memory import MemoryHolder
from uma_trio.http.message import Head, Headers, Reply
from uma_trio.http.router import Route, Router
from uma_trio.http.settings import ServerContext
from uma_trio.service.fair import program_of, set_client
from uma_trio.service.front import is_quiet
from uma_trio.service.loop import HEAD_S, Meter
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.transport import Transport
from uma_trio.sockets.writer import Writer

_READ_BYTES = 16_384
# Of a compressed body of `_SHORT_BODY` so much is decoded on trio's thread, in 0.2 ms.
_SHORT_BODY, _DECODED_AT_ONCE = 4_096, 65_536
_LATE = "first-token"  # of X-UMA-Head: a proxy may send the request elsewhere until then
# No other request can be read behind it. One that asks for another protocol, as Java's client does, is
# whole: it is declined.
_LAST = (h11.IDLE, h11.SEND_BODY, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)
_CONTINUE = h11.InformationalResponse(status_code=100, headers=[])


class Connection:
    """A client that was let in. :meth:`run` closes the transport, however it ends.

    `principal` is the user at the other end, as far as the kernel tells. `by_socket` is whether this
    is a Unix socket.
    """

    def __init__(
        self,
        transport: Transport,
        context: ServerContext,
        router: Router,
        principal: Principal,
        *,
        by_socket: bool,
    ) -> None:
        settings = context.settings
        transport.limit_send_buffer(settings.send_buffer_bytes)
        self._transport = transport
        self._context = context
        self._settings = settings
        self._router = router
        self._principal = principal
        self._by_socket = by_socket
        self._by_proxy = not by_socket and is_listed(principal.host, settings.proxies)
        self._http = self._new_http()
        self._writer = Writer(
            transport,
            stall_timeout_s=settings.stall_timeout_s,
            lost=self._gone,
            stalled=self._gone,
        )
        self._scope = trio.CancelScope()
        self._answering = False
        self._watches = False  # whether the answer has no end of its own
        self._last = False
        self._leaves = False
        self._is_head = False
        self._incoming = MemoryHolder(principal.counts_as, self.make_room)
        self._outgoing = MemoryHolder(principal.counts_as, self._gone)
        self._receiving: trio.CancelScope | None = None
        self._heard_at = trio.current_time()
        self._begun = False  # whether a byte of the next head is there
        self._makes_room = False
        self._meter = Meter(context.thread_share)

    def _new_http(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._settings.head_bytes)

    async def run(self) -> None:
        """Serve the client until it leaves, breaks a rule, or :meth:`end` is called.

        Cancelled, it ends what runs and closes the socket without a further word.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._writer.run)
                    await self._serve()
                    nursery.cancel_scope.cancel()
            if not self._writer.broken:
                await self._linger()
        finally:
            self._context.answers.give(self._outgoing)
            self._incoming.give_way = self._outgoing.give_way = self._transport.close
            self._transport.close()
            self._writer.close()

    async def _linger(self) -> None:
        settings = self._settings
        with trio.move_on_after(settings.linger_s):
            with trio.move_on_after(settings.linger_quiet_s) as finishing:
                await self._writer.finish()
            if not finishing.cancelled_caught:
                await self._transport.linger(settings.linger_bytes, settings.linger_quiet_s)

    def end(self) -> None:
        """End the connection once the request that runs is answered. Idempotent."""
        self._last = True
        if not self._answering or self._watches:
            self._scope.cancel()

    @property
    def host(self) -> str:
        """The address of the other end."""
        return self._principal.host

    @property
    def owner(self) -> str:
        """Who has its place."""
        return self._principal.counts_as

    @property
    def idle_since(self) -> float | None:
        """When its client sent the latest byte, or the latest answer was out, if the next is awaited."""
        return None if self._receiving is None else self._heard_at

    def leave(self) -> None:
        """Tell the client with the next answer that it is the last; end when it is quiet. Idempotent."""
        self._leaves = True
        if self._watches or is_quiet(self, trio.current_time()):
            self.end()

    def make_room(self) -> None:
        """Close the connection for another client; half a request is told so. Idempotent."""
        self._makes_room = self._last = True
        if self._receiving is not None:
            self._receiving.cancel()

    def _gone(self) -> None:
        self._writer.broken = True  # nobody reads what is left
        self._scope.cancel()

    # --- one request after the other ---

    async def _serve(self) -> None:
        """Answer every request whose head is there; what is no request is told why."""
        share = self._context.thread_share
        while not self._last:
            try:
                head = await self._read_head()
                if head is None:
                    await share.turn()  # hundreds may leave at once
                    return
                self._answering = True
                await share.spend(program_of(self._principal, head.app), HEAD_S)
                await self._exchange(head)
            except Fault as fault:
                self._refuse(fault)
                return
            except h11.RemoteProtocolError as error:
                why, _, _ = str(error).partition(": bytearray(")  # and what was sent
                self._refuse(
                    Fault(
                        error.error_status_hint,
                        f"this is not HTTP/1.1 as it should be: {why}",
                        code="bad_request",
                        closes=True,
                    )
                )
                return
            except Exception:
                self._context.log.exception("request ended by a fault")
                self._refuse(_sorry())
                return
            await self._writer.flushed()
            self._context.answers.give(self._outgoing)
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()
            self._answering = self._watches = False

    async def _exchange(self, head: Head) -> None:
        """Answer one request, whatever is wrong with it."""
        number = self._context.next_number()
        headers: Headers = (("X-Request-Id", f"{self._context.name}-{number}"),)
        form: ErrorForm = openai_error
        self._last = self._last or self._leaves or is_ambiguous(head)
        try:
            named = self._by_socket or self._by_proxy
            cors = guard.enter(head, self._settings, any_name=named)
            headers = (*headers, *cors)
            form = self._router.form(head)
            check_upgrade(head)
            if head.method == "OPTIONS":
                with self._holding_body():
                    await self._read_body(head)
                self._reply(self._options(head), headers[:1])
                return
            route = self._router.find(head)
            self._watches = route.watches
            principal = guard.admit(
                head, self._settings, route.access, self._peer(head), any_user=named
            )
            set_client(program_of(principal, head.app))
            with self._holding_body():
                # No variable here or in a caller holds the body: it is freed once it is decoded.
                exchange = self._exchanged(
                    head, principal, number, await self._decoded_body(head), headers
                )
                await self._answer(route, exchange, headers)
        except Fault as fault:
            if not fault.closes:
                await self._skip_body(head)
            self._refuse(fault, headers, form)

    def _peer(self, head: Head) -> Principal:
        if not self._by_proxy:
            return self._principal
        return behind(head, self._principal, self._settings.proxies)

    async def _skip_body(self, head: Head) -> None:
        """Read what comes with a request that is refused, so that the next one can be read."""
        if self._http.their_state is not h11.SEND_BODY:
            return
        if self._http.they_are_waiting_for_100_continue:
            return
        try:
            with self._holding_body():
                await self._read_body(head)
        except Fault:
            return  # too long: the connection ends after the answer

    def _exchanged(
        self, head: Head, principal: Principal, number: int, body: bytes, headers: Headers
    ) -> Exchange:
        return Exchange(
            head,
            principal,
            number,
            body,
            self._give_body_back,
            self._http,
            self._writer,
            (*headers, ("Connection", "close")) if self._last else headers,
            self._settings,
            late=head.headers.get("x-uma-head") == _LATE and not self._watches,
        )

    async def _answer(self, route: Route, exchange: Exchange, headers: Headers) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(exchange.keep_alive)
            try:
                reply = await self._handled(route, exchange)
                if reply is not None:
                    self._keep(reply)
                    if not exchange.opened:
                        self._reply(reply, headers)
                    elif reply.status == HTTPStatus.OK:
                        await exchange.close(reply.body)
                    else:
                        self._gone()  # the status is out
            except Fault as fault:
                self._fail(fault, exchange, headers, route)
            except Exception:
                # A fault of ours in one client's request is no reason to drop the others.
                self._context.log.exception("request ended by a fault", path=route.path)
                self._fail(_sorry(), exchange, headers, route)
            nursery.cancel_scope.cancel()

    async def _handled(self, route: Route, exchange: Exchange) -> Reply | None:
        """Let the handler answer; what only asks for figures or lists waits for its turn."""
        if route.method != "GET" or route.watches:  # who watches takes a turn for each message
            return await route.handler(exchange)
        asker = exchange.principal.counts_as
        queries = self._context.queries
        return await queries.answer(asker, lambda: route.handler(exchange))

    def _fail(self, fault: Fault, exchange: Exchange, headers: Headers, route: Route) -> None:
        self._last = self._last or exchange.opened
        if not exchange.opened:
            self._refuse(fault, headers, route.errors)
        elif self._http.our_state is h11.SEND_BODY:
            self._gone()  # half an answer is out: only its missing end can tell

    async def _watch(self) -> None:
        """Wait until the client has left. What it sends ahead is kept, as far as one read goes."""
        try:
            data = await self._transport.receive_some(_READ_BYTES)
        except trio.BrokenResourceError:
            self._gone()
            return
        self._http.receive_data(data)
        # TCP cannot tell a client that ended its sending side from one that left altogether.
        if data or self._by_socket:
            await self._transport.wait_until_closed()
        self._gone()

    # --- reading ---

    async def _read_head(self) -> Head | None:
        """Return the head of the next request; None at the end of the connection."""
        deadline = trio.current_time() + self._settings.idle_timeout_s
        self._is_head = False
        self._heard_at = trio.current_time()
        self._begun = False
        while True:
            data = self._skip_empty_lines()
            if data and not self._begun:
                self._begun = True
                deadline = trio.current_time() + self._settings.head_timeout_s
            check_lines(data)
            # Half an empty line is no error yet.
            is_half = self._http.trailing_data == (b"\r", False)
            event = h11.NEED_DATA if is_half else self._http.next_event()
            if isinstance(event, h11.Request):
                self._is_head = event.method == b"HEAD"
                return head_of(event, self._settings.head_bytes)
            if event is not h11.NEED_DATA:
                return None
            if await self._receive(deadline) is None:
                if not self._begun:
                    self._writer.broken |= self._makes_room  # no word is left to be read
                    return None
                raise h11.RemoteProtocolError("its head came too slowly", 408)

    def _skip_empty_lines(self) -> bytes:
        """Return what has come of the next request; h11, which takes no empty line before it, gets none."""
        data, ended = self._http.trailing_data
        rest = without_empty_lines(data)
        if rest != data:
            self._http = self._new_http()
            if rest:
                self._http.receive_data(rest)
            if ended:
                self._http.receive_data(b"")
        return b"" if rest == b"\r" else rest

    @contextmanager
    def _holding_body(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._give_body_back()

    def _give_body_back(self) -> None:
        self._context.bodies.give(self._incoming)
        self._incoming.waits_since = None

    async def _read_body(self, head: Head) -> bytes:
        settings = self._settings
        declared = head.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > settings.max_body_bytes:
            raise body_too_large(settings.max_body_bytes)
        if self._http.they_are_waiting_for_100_continue:
            self._write(self._http.send(_CONTINUE))
        body = bytearray()
        began = self._incoming.waits_since = trio.current_time()
        between_chunks = chunked = "transfer-encoding" in head.headers
        client = program_of(self._principal, head.app)
        while True:
            if between_chunks:
                check_trailers(self._http.trailing_data[0])
            event = self._http.next_event()
            if isinstance(event, h11.Data):
                body += event.data
                between_chunks = chunked and event.chunk_end
                self._hold(len(body))
                await self._meter.chunk(client)
            elif isinstance(event, h11.EndOfMessage):
                self._incoming.waits_since = None
                return bytes(body)
            elif event is h11.NEED_DATA:
                patience = settings.body_grace_s + len(body) / settings.body_bytes_per_s
                if await self._receive(began + patience) is None:
                    raise h11.RemoteProtocolError("its body came too slowly", 408)
            else:
                raise h11.RemoteProtocolError("its body has no end", 400)

    async def _decoded_body(self, head: Head) -> bytes:
        body = await self._read_body(head)
        codings = codings_of(head) if head.method == "POST" and body else ()
        if not codings:
            return body
        decoder = BodyDecoder(body, codings, self._settings.max_body_bytes)
        if len(body) <= _SHORT_BODY:
            decoder.advance(_DECODED_AT_ONCE)
        del body
        while decoder.body is None:
            await self._context.run_blocking(decoder.advance)
            self._reserve(decoder.held_bytes)
        self._reserve(len(decoder.body))
        return decoder.body

    def _hold(self, in_all: int) -> None:
        if in_all > self._settings.max_body_bytes:
            raise body_too_large(self._settings.max_body_bytes)
        self._reserve(in_all)

    def _reserve(self, in_all: int) -> None:
        if not self._context.bodies.take(self._incoming, in_all, trio.current_time()):
            raise _overloaded("too many long requests are being sent at once")

    async def _receive(self, deadline: float) -> bytes | None:
        """Give h11 what comes; None if nothing has come in time, b"" at the end.

        Raises:
            Fault: the connection makes room for another client, and half a request is there.
        """
        self._receiving = trio.CancelScope(deadline=deadline)
        with self._receiving:
            try:
                data = await self._transport.receive_some(_READ_BYTES)
            except trio.BrokenResourceError:
                self._gone()
                data = b""
            self._heard_at = trio.current_time()
            self._http.receive_data(data)
        waiting, self._receiving = self._receiving, None
        if not waiting.cancelled_caught:
            return data
        if self._makes_room and self._begun:
            raise _overloaded("the rest of this request did not come, and another client waits")
        return None

    # --- answering ---

    def _options(self, head: Head) -> Reply:
        allowed = ", ".join(self._router.methods(head))
        return Reply(200, headers=(("Allow", allowed), *guard.preflight(head, self._settings)))

    def _refuse(self, fault: Fault, headers: Headers = (), form: ErrorForm = openai_error) -> None:
        self._last = self._last or fault.closes
        if self._by_proxy:
            fault = for_proxy(fault)
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._reply(form(fault, dict(headers).get("X-Request-Id", "")), headers)

    def _keep(self, reply: Reply) -> None:
        """Reserve the memory of an answer until it is read.

        Raises:
            Fault: too many long answers are unread.
        """
        self._outgoing.waits_since = now = trio.current_time()
        if not self._context.answers.take(self._outgoing, len(reply.body), now):
            raise _overloaded("too many long answers wait to be read")

    def _reply(self, reply: Reply, headers: Headers) -> None:
        every = [("Date", formatdate(usegmt=True)), *reply.headers, *headers]
        every.append(("Content-Length", str(len(reply.body))))
        if reply.body:
            every += [("Content-Type", reply.content_type), ("X-Content-Type-Options", "nosniff")]
        if self._last or self._http.their_state in _LAST:
            every.append(("Connection", "close"))
        http = self._http
        head = http.send(h11.Response(status_code=reply.status, headers=every)) or b""
        data = None if self._is_head else h11.Data(data=reply.body)
        if data is not None and len(reply.body) > LONG_BODY:
            self._write(head)
            for part in http.send_with_data_passthrough(data) or ():
                self._write(part)
            head, data = b"", None
        body = b"" if data is None else http.send(data) or b""
        self._write(head + body + (http.send(h11.EndOfMessage()) or b""))

    def _write(self, data: bytes | None) -> None:
        if data:
            self._writer.write(data)


def _overloaded(why: str) -> Fault:
    return Fault(
        503,
        why,
        code="overloaded",
        kind="server_error",
        headers=(("Retry-After", "1"),),
        closes=True,
    )


def _sorry() -> Fault:
    return Fault(
        500,
        "a fault of the daemon's; its log says more",
        code="internal_error",
        kind="server_error",
    )
