"""One client: its reader half, its writer half, and the request that runs between them.

A :class:`Connection` owns the transport, the protocol object and three tasks. The reader half
always reads, so a client that leaves is noticed in every state; it answers admin requests on the
spot and hands requests that are computed to the request task. That task follows one after the
other from its frame to its terminal event. The writer half sends what the kernel would not take.

How it ends: everything that ends a connection calls :meth:`Connection.end` or ``_disconnected``, which
cancel the tasks. The running request is then cancelled, pending bytes are flushed, and the socket is closed.
What it must not know: tokens, models, plans.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

import trio

import uma_protocol
from uma_protocol import (
    Cancel,
    Code,
    ConnectionClosed,
    Embed,
    Error,
    Event,
    Explain,
    Generate,
    GetMetrics,
    Hello,
    ListSessions,
    LoadModel,
    LocalProtocolError,
    Metrics,
    Ok,
    Pause,
    Prefix,
    RemoteProtocolError,
    Rerank,
    Role,
    Sessions,
    SetPriority,
    UnloadModel,
    Work,
)
from uma_trio.observe.explain import explanation, tick_infos, ticks_for
from uma_trio.service.answers import Answers
from uma_trio.service.ask import Origin, Refusal
from uma_trio.service.embedding import EncodeRequest
from uma_trio.service.fair import program_of, set_client
from uma_trio.service.front import is_quiet
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.transport import Transport
from uma_trio.sockets.writer import Writer
from uma_trio.uds.relay import EncodedRequest, relay, report_loading
from uma_trio.uds.settings import Settings, Shared
from uma_trio.uds.wire import (
    ask_of,
    error_event,
    memory_info,
    models_info,
    origin_of,
    prefixes_event,
    refusal_event,
    session_info,
)

Answer = TypeVar("Answer")
Query = Callable[[], Coroutine[Any, Any, Event]]
"""Computes the answer to a query."""
Relay = Callable[[], Coroutine[Any, Any, None]]
"""Follows a request to its terminal event."""

_NOT_RECORDED: Final = (
    "no record of that request is kept; `uma-trio explain` lists the recorded ones"
)


class Connection:
    """An admitted client. `run` closes the transport, however it ends.

    With `takes_place` it has a place for operators: it may send queries, and is refused when it
    generates, unless `takes_place` returns True. A `protocol` has already received the hello, and may hold what the client sent after its hello.
    """

    def __init__(
        self,
        transport: Transport,
        principal: Principal,
        shared: Shared,
        takes_place: Callable[[], bool] | None = None,
        protocol: uma_protocol.Connection | None = None,
    ) -> None:
        settings = shared.settings
        self._takes_place = takes_place
        transport.limit_send_buffer(settings.send_buffer_bytes)
        self._principal = principal
        self._shared = shared
        self._service = shared.service
        self._settings = settings
        self._transport = transport
        self._protocol = protocol or uma_protocol.Connection(Role.SERVER)
        self._writer = Writer(
            transport,
            stall_timeout_s=settings.stall_timeout_s,
            lost=self._disconnected,
            stalled=self._stalled,
        )
        self._scope = trio.CancelScope()
        self._reading = trio.CancelScope()
        self._requests, self._next_request = trio.open_memory_channel[tuple[str, Relay]](1)
        self._running: Answers | EncodedRequest | None = None
        self._frame_began: float | None = None
        self._idle_since = trio.current_time()
        self._inspected: trio.Event | None = None
        self._watch: trio.CancelScope | None = None
        self._loads = 0
        self._over = False
        self._sent_final_error = False
        self._leaves = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Hello: self._on_hello,
            Generate: self._on_generate,
            Embed: self._on_encode,
            Rerank: self._on_encode,
            Cancel: self._on_cancel,
            SetPriority: self._on_priority,
            ListSessions: self._on_sessions,
            Explain: self._on_explain,
            Prefix: self._on_prefix,
            LoadModel: self._on_load,
            UnloadModel: self._on_load,
            GetMetrics: self._on_metrics,
            ConnectionClosed: self._on_closed,
        }

    async def run(self) -> None:
        """Serve the client until it leaves, breaks a rule, or :meth:`end` is called.

        Cancelled, it ends the running request and closes the socket without a further event.
        """
        set_client(program_of(self._principal, None))
        try:
            try:
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        self._nursery = nursery
                        nursery.start_soon(self._writer.run)
                        nursery.start_soon(self._serve_requests)
                        await self._read()
            finally:
                self._over = True
                self._close_running()
            if not self._writer.broken:
                with trio.move_on_after(self._settings.linger_s):
                    await self._writer.finish()
                    if self._sent_final_error:
                        await self._transport.linger(self._settings.linger_bytes)
        finally:
            self._transport.close()
            self._writer.close()

    def end(self, final_error: Error | None = None) -> None:
        """End the connection after `final_error`, once all pending bytes are written. Idempotent."""
        if self._over:
            return
        if final_error is not None:
            self._send(final_error)
            self._sent_final_error = True
        self._over = True
        self._scope.cancel()

    @property
    def owner(self) -> str:
        """The user that its place is charged to."""
        return self._principal.counts_as

    @property
    def is_over(self) -> bool:
        """Whether it has ended, but for its last bytes."""
        return self._over

    @property
    def idle_since(self) -> float | None:
        """When the client last sent or received something, if it may send a request or has sent half of one."""
        if self._over or not self._is_idle or self._inspected or self._writer.waiting_bytes:
            return None
        return self._idle_since

    @property
    def watches(self) -> bool:
        """Whether the client only receives metrics periodically."""
        return self._watch is not None and self._running is None

    def leave(self) -> None:
        """End the connection when its answers are sent, or when it is idle. Idempotent."""
        self._leaves = True
        if self.watches:
            self.end()  # a watch never ends by itself
        elif is_quiet(self, trio.current_time()):
            self._close_receiving()

    def _close_receiving(self) -> None:
        """Answer what the client has sent so far, and end; its further sends fail.

        Over TCP they are lost: the peer's sending side cannot be closed.
        """
        if self._principal.host:
            self.end()
        else:
            self._transport.end_receiving()  # read as EOF

    def make_room(self) -> None:
        """End the connection, which is idle, since another client needs its place. Idempotent."""
        seconds = trio.current_time() - self._idle_since
        why = f"the connection was idle for {seconds:.0f} s, and another client needs the place"
        self.end(error_event(Code.E_LIMIT_006, why))

    def _disconnected(self) -> None:
        self._writer.broken = True  # pending bytes have no reader
        self._over = True
        self._scope.cancel()

    def _stalled(self) -> None:
        seconds = self._settings.stall_timeout_s
        self.end(error_event(Code.E_IO_001, f"nothing was read for {seconds:g} s"))

    def _close_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _send(self, event: Event) -> None:
        """Send an event, or queue it until the client reads."""
        if self._over:
            return
        self._writer.write(self._protocol.send(event))
        if isinstance(event, Error):
            self._service.telemetry.error_sent(event.code)

    def _refuse(self, refusal: Refusal, request: str | None = None) -> None:
        """Answer a refused query. That ends the connection if no request runs, and never a running request."""
        event = refusal_event(refusal, request, idle=self._running is None)
        if event.fatal:
            self.end(event)
        else:
            self._send(event)

    # --- the reader half ---

    async def _read(self) -> None:
        await self._catch_up()
        while True:
            with trio.CancelScope(deadline=self._deadline()) as self._reading:
                try:
                    data = await self._transport.receive_some()
                except trio.BrokenResourceError:
                    self._disconnected()
                    return
            if self._reading.cancelled_caught:
                self._too_late()
                continue
            self._idle_since = trio.current_time()
            self._protocol.receive_data(data)
            # Over TCP a client that has left looks like one that has ended its sending side.
            if not data and (self._principal.host or self._transport.is_closed()):
                await self._service.thread_share.turn()  # hundreds may leave at once
                self._disconnected()
                return
            await self._catch_up()
            if not data:
                # The client has ended its sending side and still reads: finish the running request.
                await self._transport.wait_until_closed()
                self._disconnected()
                return

    async def _catch_up(self) -> None:
        """Handle every buffered frame, as fast as the answers are sent."""
        self._pump()
        while self._congested and not self._over:
            await self._wait_for_room()
            self._pump()

    def _pump(self) -> None:
        while not self._over and not self._congested:
            try:
                event = self._protocol.next_event()
            except RemoteProtocolError as fault:
                self._frame_began = None
                answer = self._protocol.error_event(fault)
                if fault.fatal:
                    self.end(answer)
                    return
                self._send(answer)
                continue
            if isinstance(event, Pause):
                break
            self._frame_began = None
            self._handlers[type(event)](event)
            if isinstance(event, ConnectionClosed):
                break  # next_event would return it forever
        self._watch_frame()

    def _watch_frame(self) -> None:
        # While congested, the rest of the frame may be unread in the socket.
        if self._congested or not self._protocol.mid_frame:
            self._frame_began = None
        elif self._frame_began is None:
            self._frame_began = trio.current_time()

    @property
    def _congested(self) -> bool:
        """Whether further reading would only queue up answers."""
        return (
            self._inspected is not None or self._writer.waiting_bytes > self._settings.backlog_bytes
        )

    async def _wait_for_room(self) -> None:
        if self._inspected is not None:
            await self._inspected.wait()
        else:
            await self._writer.flushed()

    @property
    def _is_idle(self) -> bool:
        return self._running is None and self._watch is None and not self._loads

    def _deadline(self) -> float:
        if self._frame_began is not None:
            return self._frame_began + self._settings.frame_timeout_s
        if self._is_idle:
            patience = self._settings.idle_timeout_s
            if self._takes_place is not None:
                patience = self._settings.operator_idle_s
            return self._idle_since + patience
        return float("inf")

    def _too_late(self) -> None:
        now = trio.current_time()
        if now < self._deadline():
            return  # it was moved while the reader was waking
        if self._frame_began is not None:
            seconds = self._settings.frame_timeout_s
            self.end(error_event(Code.E_PROTO_006, f"a frame took longer than {seconds:g} s"))
        elif self._takes_place is not None:
            self.end(too_many(self._settings))
        else:
            seconds = self._settings.idle_timeout_s
            self.end(error_event(Code.E_LIMIT_006, f"nothing happened for {seconds:g} s"))

    # --- events of the client ---

    def _on_hello(self, _: Hello) -> None:
        """The protocol has compared the token, if one is required."""

    def _on_generate(self, generate: Generate) -> None:
        if not self._has_place(generate.id):
            return
        origin = origin_of(generate, self._principal, self._shared.door)
        self._running = answers = Answers(self._service, [ask_of(generate)], origin)
        self._report_waiting(generate, answers)
        followed = partial(relay, generate, answers, self._protocol, self._writer, self._service)
        self._requests.send_nowait((generate.id, followed))

    def _on_encode(self, request: Embed | Rerank) -> None:
        if not self._has_place(request.id):
            return
        origin = Origin(principal=self._principal, door=self._shared.door, name=request.id)
        self._running = encoding = EncodedRequest(request, origin, self._service)
        self._report_waiting(request, encoding.request)
        followed = partial(encoding.relay, self._protocol, self._writer)
        self._requests.send_nowait((request.id, followed))

    def _report_waiting(self, request: Work, waiting: Answers | EncodeRequest) -> None:
        if request.progress:
            report = partial(report_loading, request.id, waiting, self._send)
            waiting.on_wait = lambda: self._nursery.start_soon(report)

    def _has_place(self, request: str) -> bool:
        """Return whether the client may send requests; otherwise end the connection with the reason."""
        if self._takes_place is not None and not self._takes_place():
            self.end(too_many(self._settings, request))
            return False
        self._takes_place = None
        return True

    def _on_cancel(self, request: Cancel) -> None:
        if request.request is not None:
            self._change(lambda handle: self._service.cancel(handle, self._principal), request)
        elif self._running is not None:  # the protocol lets only its id through
            self._running.end()

    def _on_priority(self, request: SetPriority) -> None:
        if request.request is not None:
            self._change(
                lambda handle: self._service.move(handle, request.priority, self._principal),
                request,
            )
        elif self._running is not None:  # the protocol lets only its id through
            self._running.move_to(request.priority)
            self._send(Ok(id=request.id))

    def _change(self, change: Callable[[int], bool], request: Cancel | SetPriority) -> None:
        """Change the request with a handle, and answer whether there was one."""
        found = change(request.request or 0)
        why = "that request is not running, or not yours; `uma-trio ps` lists those that are"
        self._send(Ok(id=request.id) if found else error_event(Code.E_PROTO_005, why))

    def _on_sessions(self, request: ListSessions) -> None:
        self._start_query(lambda: self._sessions(request.ticks or 0))

    async def _sessions(self, ticks: int) -> Event:
        service, observer = self._service, self._service.observer
        viewer, state = observer.viewer(self._principal), await observer.state()
        several = sum(each.kind == "text" for each in service.models.loaded) > 1
        return Sessions(
            tuple(session_info(seen) for seen in viewer.requests(state)),
            waiting=state.waiting,
            memory=memory_info(state) if self._principal.is_operator else None,
            models=models_info(service),
            ticks=await tick_infos(
                observer.view.newest(ticks), viewer, state.at, name_models=several
            ),
            settings=dict(service.settings) if self._principal.is_operator else None,
        )

    def _on_explain(self, request: Explain) -> None:
        self._start_query(lambda: self._explanation(request))

    async def _explanation(self, request: Explain) -> Event:
        observer = self._service.observer
        found = await explanation(
            await observer.explain(request.request, ticks_for(request)),
            observer.viewer(self._principal),
            one=request.request is not None,
            text=observer.text_of(self._principal),
        )
        return error_event(Code.E_PROTO_005, _NOT_RECORDED) if found is None else found

    def _on_prefix(self, request: Prefix) -> None:
        if request.action == "pin" and request.session is None:
            fault = "session is missing: `pin` keeps the latest turn of that conversation"
            self._refuse(Refusal(Code.E_PROTO_003, fault))
            return
        self._start_query(lambda: self._prefixes(request))

    async def _prefixes(self, request: Prefix) -> Event:
        pinned = request.session if request.action == "pin" else None
        seconds = 300 if request.seconds is None else request.seconds
        found = await self._service.prefixes(
            self._principal, clear=request.action == "clear", session=pinned, pin_s=seconds
        )
        return prefixes_event(found, self._principal.shares_as)

    def _start_query(self, query: Query, *, ends: bool = False) -> None:
        """Answer a query in its turn, and read nothing until then; with `ends`, then end the connection."""
        self._inspected = trio.Event()
        self._nursery.start_soon(self._answer, query, self._inspected, ends)

    def _in_turn(self, query: Callable[[], Coroutine[Any, Any, Answer]]) -> Awaitable[Answer]:
        return self._service.questions.answer(self._principal.counts_as, query)

    async def _answer(self, query: Query, answered: trio.Event, ends: bool) -> None:
        try:
            event = await self._in_turn(query)
            self._idle_since = trio.current_time()
            self._send(event)
        except Refusal as refusal:
            self._refuse(refusal)
        except LocalProtocolError as fault:
            self._refuse(_unsendable(fault))
        if ends:
            self.end()
        self._inspected = None
        if self._leaves and self._is_idle:
            self._close_receiving()
        self._reading.deadline = self._deadline()
        answered.set()

    def _on_load(self, request: LoadModel | UnloadModel) -> None:
        """Load or unload a model as a task of its own, which the client may outlive or leave."""
        if not self._principal.is_operator:
            why = "only the user that runs the daemon may load and unload models"
            self._refuse(Refusal(Code.E_AUTH_002, why))
        elif self._loads:
            why = "this connection loads or unloads a model already; wait for its ok"
            self._refuse(Refusal(Code.E_PROTO_004, why))
        else:
            self._loads += 1
            self._nursery.start_soon(self._load, request)

    async def _load(self, request: LoadModel | UnloadModel) -> None:
        models = self._service.models
        change = models.load if isinstance(request, LoadModel) else models.unload_by_name
        refused: Refusal | None = None
        try:
            await change(request.model)
        except Refusal as refusal:
            refused = refusal
        self._loads -= 1
        self._idle_since = trio.current_time()
        if refused is None:
            self._send(Ok())
        else:
            self._refuse(refused)
        self._reading.deadline = self._deadline()

    def _on_metrics(self, request: GetMetrics) -> None:
        ends = request.interval_ms is None and self._running is None
        self._start_query(lambda: self._metrics(request), ends=ends)

    async def _metrics(self, request: GetMetrics) -> Event:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if request.interval_ms is not None:
            self._watch = trio.CancelScope()
            self._nursery.start_soon(self._repeat_metrics, request.interval_ms / 1e3, self._watch)
        return await self._figures()

    async def _figures(self) -> Metrics:
        figures = await self._service.figures()
        return Metrics(
            metrics=dict(self._service.observer.viewer(self._principal).figures(figures))
        )

    async def _repeat_metrics(self, interval_s: float, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                await trio.sleep(interval_s)
                if self._writer.waiting_bytes:
                    continue  # it does not read: skip this one
                try:
                    self._send(await self._in_turn(self._figures))
                except LocalProtocolError as fault:
                    self._refuse(_unsendable(fault))

    def _on_closed(self, _: ConnectionClosed) -> None:
        if self._is_idle:
            self.end()

    # --- the request between the halves ---

    async def _serve_requests(self) -> None:
        async for request, followed in self._next_request:
            try:
                await followed()
            except Refusal as refusal:
                self.end(refusal_event(refusal, request))
                return
            except LocalProtocolError:
                if self._over:
                    return  # the connection ended while this task was started
                raise
            if not self._over:
                await self._go_on()

    async def _go_on(self) -> None:
        """Begin the next cycle: the terminal event of the request is wholly written."""
        self._running = None
        self._idle_since = trio.current_time()
        self._protocol.start_next_cycle()
        # The reader may be waiting for bytes, so what was sent ahead of them is read here.
        await self._catch_up()
        if self._leaves and self._is_idle:
            self._close_receiving()
        self._reading.deadline = self._deadline()


def _unsendable(fault: LocalProtocolError) -> Refusal:
    """Return the refusal of a query whose answer cannot be sent: most likely it exceeds a frame."""
    is_long = fault.code is Code.E_PROTO_002
    return Refusal(Code.E_LIMIT_005 if is_long else fault.code, fault.message)


def too_many(settings: Settings, request: str | None = None) -> Error:
    """Return the error for a client when all places are taken; `request` is the id of its request."""
    most = settings.max_sessions
    why = f"the most connections, {most}, are open already; close one, or raise --max-sessions"
    after = settings.refused_retry_s
    return error_event(Code.E_LIMIT_002, why, id=request, retry_after_s=after)
