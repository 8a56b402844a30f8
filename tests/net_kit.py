"""What tests of the socket side are built from: a daemon without threads, in virtual time.

The sockets are real pairs. They work under an autojumping clock because both ends live in this
thread: what one end wrote is readable before the clock may jump.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import Factory, define, evolve, fields
from engine_kit import Bench
from inline_kit import Wakeup, run_encoder_inline, run_inline
from models_kit import FakeHost, StubMachine

import uma_protocol
from uma_protocol import (
    NEED_DATA,
    PAUSED,
    ClientState,
    ConnectionClosed,
    Eos,
    Error,
    Event,
    Generate,
    RemoteProtocolError,
    Request,
    Role,
    Token,
)
from uma_trio.backend.encoder import EncoderModel as EncoderBackend
from uma_trio.config.options import Config
from uma_trio.engine.encoder import EncoderEngine, Encodings
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.messages import StreamItem
from uma_trio.engine.planner import EngineSettings
from uma_trio.models.loaded import EncoderModel, LoadedModel, TextModel
from uma_trio.models.manager import Build, ModelManager
from uma_trio.models.model import Model
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.baseline import baseline
from uma_trio.policy.cost import CostModel
from uma_trio.policy.pipeline import Policy
from uma_trio.service.answers import Answers
from uma_trio.service.checks import Bounds
from uma_trio.service.fair import Answer, RunBlocking
from uma_trio.service.service import Service
from uma_trio.service.stream import Pipe
from uma_trio.sockets.listener import Listener
from uma_trio.sockets.transport import Transport
from uma_trio.text.frontend import FrontEnd
from uma_trio.uds.server import Server
from uma_trio.uds.settings import Settings, Shared
from uma_trio_sim.fake import FakeBackend, linear_cost

TICK_S = 0.020


class Recorder(Metrics):
    """Metrics that keep what was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = self.closed = self.failed_accepts = self.trims = 0
        self.first_chunks: list[float] = []
        self.errors: list[str] = []
        self.ended: list[str] = []
        self.gaps: list[float] = []

    def gave_memory_back(self) -> None:
        """Count it."""
        self.trims += 1

    def session_opened(self) -> None:
        """Count it."""
        super().session_opened()
        self.opened += 1

    def session_closed(self) -> None:
        """Count it."""
        super().session_closed()
        self.closed += 1

    def error_sent(self, code: str) -> None:
        """Keep the code."""
        super().error_sent(code)
        self.errors.append(code)

    def ended_early(self, outcome: str) -> None:
        """Keep the outcome."""
        super().ended_early(outcome)
        self.ended.append(outcome)

    def first_chunk(self, seconds: float) -> None:
        """Keep the time to the first frame."""
        super().first_chunk(seconds)
        self.first_chunks.append(seconds)

    def shown(self, seconds: float, lane: str) -> None:
        """Keep the gap."""
        super().shown(seconds, lane)
        self.gaps.append(seconds)

    def accept_failed(self) -> None:
        """Count it."""
        super().accept_failed()
        self.failed_accepts += 1


@define
class LogBook:
    """Keeps what was logged; a test that logs a fault has found one."""

    lines: list[str] = Factory(list)
    faults: list[str] = Factory(list)

    def warning(self, event: str, *args: Any, **values: Any) -> None:
        """Keep the line."""
        self.lines.append(event)

    def exception(self, event: str, *args: Any, **values: Any) -> None:
        """Keep the traceback."""
        self.faults.append(traceback.format_exc())


async def take_from(pipe: Pipe) -> list[StreamItem]:
    """Return what is to be shown of one answer, once something is."""
    taken: list[StreamItem] = []

    def take() -> bool:
        taken.extend(pipe.take())
        return False

    await pipe.reader.read(take)
    return taken


def give(pipe: Pipe, *items: StreamItem) -> None:
    """Put items into a stream and have them taken, as the outlet does."""
    for item in items:
        pipe.send_nowait(item)
    pipe.flush()


async def items_of(answers: Answers) -> AsyncIterator[StreamItem]:
    """Yield every item of a request with one answer."""
    while not answers.finished:
        for _, items in await answers.burst():
            for item in items:
                yield item


async def at_once(function: Callable[[], Answer], /) -> Answer:
    """Tokenise without a thread and without taking time."""
    await trio.lowlevel.checkpoint()
    return function()


def slowly(seconds: float) -> RunBlocking:
    """Tokenise in so much virtual time."""

    async def run(function: Callable[[], Answer], /) -> Answer:
        await trio.sleep(seconds)
        return function()

    return run


def inline_manager(build: Build) -> ModelManager:
    """Return a manager whose models are admitted by :func:`serve_inline` and computed by their own tasks."""
    return ModelManager([], build, StubMachine(), FakeHost(64 << 30))  # type: ignore[arg-type]


def serve_inline(models: ModelManager, loaded: LoadedModel, **config: Any) -> Model:
    """Have a loaded model answer requests; return its entry in the list."""
    bounds = loaded.bounds
    model = Model(
        Config(alias=bounds.configured, **config), loaded.kind, file_names=bounds.from_file
    )
    models.models.append(model)  # type: ignore[attr-defined]
    models.admit(model, loaded)
    return model


class Client:
    """The other end of a connection, as a test wants it: small steps, nothing hidden."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.transport = Transport(sock)
        self.protocol = uma_protocol.Connection(Role.CLIENT)
        self.events: list[Event] = []

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes as they are."""
        while data:
            sent = self.transport.send_nowait(data)
            data = data[sent:]
            if data:
                await self.transport.wait_sendable()

    async def send(self, request: Request) -> None:
        """Write a request."""
        if self.protocol.state is ClientState.DONE:
            self.protocol.start_next_cycle()
        await self.send_bytes(self.protocol.send(request))

    async def ask(self, id: str = "r", prompt: str = "hello", **fields: Any) -> None:  # noqa: A002
        """Write a `generate` request."""
        await self.send(Generate(id=id, prompt=prompt, **fields))

    async def next(self) -> Event | None:
        """Return the next event; None when the daemon has closed."""
        while True:
            try:
                event = self.protocol.next_event()
            except RemoteProtocolError:
                return None
            if event is PAUSED:
                self.protocol.start_next_cycle()
            elif event is NEED_DATA:
                try:
                    data = await self.transport.receive_some()
                except trio.BrokenResourceError:
                    return None
                if not data and not self.protocol.mid_frame:
                    return None
                self.protocol.receive_data(data)
            elif isinstance(event, ConnectionClosed):
                return None
            else:
                self.events.append(event)  # type: ignore[arg-type]
                return event  # type: ignore[return-value]

    async def until(self, kind: type, most: int = 10_000) -> Any:
        """Return the next event of this kind."""
        for _ in range(most):
            event = await self.next()
            if event is None:
                raise AssertionError(f"the daemon closed before a {kind.__name__}: {self.events}")
            if isinstance(event, kind):
                return event
        raise AssertionError(f"no {kind.__name__} among {most} events")

    async def rest(self) -> list[Event]:
        """Return everything up to the end of file."""
        events = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events

    def end_sending(self) -> None:
        """Half-close."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Leave."""
        self.transport.close()

    @property
    def text(self) -> str:
        """All text that came."""
        return "".join(e.text or "" for e in self.events if isinstance(e, Token | Eos))

    @property
    def n_tokens(self) -> int:
        """How many tokens came."""
        return sum(isinstance(e, Token) for e in self.events)

    @property
    def ends(self) -> list[Eos | Error]:
        """Terminal events: there must be one for each request."""
        return [e for e in self.events if isinstance(e, Eos) or (isinstance(e, Error) and e.fatal)]


class House:
    """A whole daemon but for the listener: engine inline, fake model, real socket pairs."""

    def __init__(
        self,
        nursery: trio.Nursery,
        backend: FakeBackend,
        run_blocking: RunBlocking,
        max_waiting: int,
        settings: dict[str, Any],
        prefix_bytes: int = 0,
        policy: Policy = baseline,
        cost: CostModel | None = None,
        encoders: Mapping[str, EncoderBackend] | None = None,
    ) -> None:
        self.nursery = nursery
        self.wakeup = Wakeup()
        self.backend = backend
        self.bench = Bench(
            backend,
            policy,
            max_waiting=max_waiting,
            clock=trio.current_time,
            wake=self.wakeup.set,
            settings=EngineSettings(prefix_bytes=prefix_bytes, cost=cost),
        )
        self.recorder = Recorder()
        self.log = LogBook()
        self.answered: list[Mapping[str, object]] = []  # the request log
        reply_format = settings.pop("reply_format", None)
        names = {field.name for field in fields(Bounds)}
        limits = backend.limits
        plain = Bounds(model="fake", n_ctx_seq=limits.n_ctx_seq, n_vocab=backend.model.n_vocab)
        self.settings = Settings(**{k: v for k, v in settings.items() if k not in names})
        self.build: Build | None = None  # for tests that load models
        self.models = inline_manager(self._build)
        self.service = Service(
            self.models,
            telemetry=self.recorder,
            clock=trio.current_time,
            run_blocking=run_blocking,
            give_memory_back=self.recorder.gave_memory_back,
            log_request=self.answered.append,
        )
        self.served = TextModel(
            facts=backend.model,
            slots=limits.n_slots,
            bounds=evolve(plain, **{k: v for k, v in settings.items() if k in names}),
            front_end=FrontEnd(backend.vocabulary, backend.model.chat_template, reply_format),
            inbox=self.bench.inbox,
            telemetry=self.recorder,
            run_blocking=run_blocking,
            engine=self.bench.engine,
        )
        serve_inline(self.models, self.served)
        self.encoders = [self._encoder(each, run_blocking) for each in (encoders or {}).values()]
        self.shared = Shared(settings=self.settings, service=self.service, log=self.log)
        self.server = Server(self.shared)
        self.clients: list[Client] = []

    async def _build(self, *arguments: Any) -> LoadedModel:
        if self.build is None:
            raise AssertionError("nothing is to be loaded")
        return await self.build(*arguments)

    def _encoder(self, model: EncoderBackend, run_blocking: RunBlocking) -> EncoderEngine:
        """Serve an encoder, and return its engine."""
        wakeup, clock = Wakeup(), trio.current_time
        inbox = Inbox(256, wakeup.set)
        post = lambda call: call()  # noqa: E731 - shorter than its name
        info, n_vocab = model.info, model.vocabulary.n_vocab
        queue = Encodings(model, post, clock, self.bench.metrics.encoding)
        engine = EncoderEngine(queue, inbox, post, clock)
        served = EncoderModel(
            facts=evolve(self.backend.model, n_embd=info.width, name=info.name),
            bounds=Bounds(model=info.name, n_ctx_seq=info.n_ctx, n_vocab=n_vocab),
            front_end=FrontEnd(model.vocabulary, None),
            inbox=inbox,
            telemetry=self.recorder,
            run_blocking=run_blocking,
            info=info,
            vocabulary=model.vocabulary,
            engine=engine,
        )
        serve_inline(self.models, served)
        self.nursery.start_soon(run_encoder_inline, engine, wakeup)
        return engine

    def connect(self) -> Client:
        """Return a new client of this daemon."""
        ours, theirs = socket.socketpair()
        self.server.admit_at_once(theirs)
        return self.adopt(ours)

    def adopt(self, ours: socket.socket) -> Client:
        """Return the client whose end of a connection this is."""
        self.clients.append(Client(ours))
        return self.clients[-1]

    def expected(self, prompt: str, n: int) -> str:
        """Return the text that `prompt` must give."""
        return self.backend.text_of(self.bench.expected(prompt, n))

    async def until_idle(self) -> None:
        """Let everything that is under way come to its end, without much time passing."""
        for _ in range(5):
            await trio.sleep(TICK_S)

    def check_idle_engine(self) -> None:
        """Check that the engine holds nothing, whatever waits to be written."""
        registry = self.bench.engine.registry
        if registry.running or registry.waiting:
            raise AssertionError("a request is still in the engine")

    def check_idle(self) -> None:
        """Check that nothing is held by nobody."""
        self.bench.check_idle()
        if self.log.faults:
            raise AssertionError(self.log.faults[0])
        registry = self.bench.engine.registry
        if any(each.has_work for each in [one.queue for one in self.encoders]):
            raise AssertionError("a text is still to be encoded")
        if registry.running or registry.waiting or len(self.service.directory):
            raise AssertionError("a request is still there")


@asynccontextmanager
async def house(
    backend: FakeBackend | None = None,
    *,
    run_blocking: RunBlocking = at_once,
    max_waiting: int = 256,
    listener: Listener | None = None,
    prefix_bytes: int = 0,
    policy: Policy = baseline,
    cost: CostModel | None = None,
    encoders: Mapping[str, EncoderBackend] | None = None,
    **settings: Any,
) -> AsyncIterator[House]:
    """Run a daemon in virtual time; at the end the clients leave, and it must be idle.

    With a `listener` it is served too, for clients that dial.
    """
    backend = backend or FakeBackend(cost=linear_cost(TICK_S, 0.0))
    async with trio.open_nursery() as nursery:
        daemon = House(
            *(nursery, backend, run_blocking, max_waiting, settings, prefix_bytes, policy, cost),
            encoders,
        )
        nursery.start_soon(
            run_inline,
            daemon.bench.engine,
            daemon.bench.inbox,
            daemon.wakeup,
            lambda: backend.last_cost_s,
        )
        nursery.start_soon(daemon.service.playout.run)
        if listener is None:
            await nursery.start(daemon.server.serve_accepted)
        else:
            await nursery.start(daemon.server.serve, listener)
        try:
            yield daemon
        finally:
            for client in daemon.clients:
                client.close()
        await daemon.until_idle()
        daemon.check_idle()
        nursery.cancel_scope.cancel()
