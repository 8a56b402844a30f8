"""The composition root: builds the parts, and owns the nurseries and the order of shutdown.

Every part receives what it needs here; no other module makes an engine, a policy or a socket. The order of start: the socket's name
is taken, models are loaded, the socket is made, clients are accepted. The order of the end is the reverse, and running requests are
finished, or end with an error, in between.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from attrs import evolve, frozen

from uma_protocol import Code
from uma_trio.app.build import Builder, Progress
from uma_trio.app.http import credentials, http_server, settings_of, with_own_key
from uma_trio.app.outputs import check_trace, open_prefix_disk, scorecard_file
from uma_trio.app.replacing import Replacing
from uma_trio.app.shapes import warm_if_used
from uma_trio.app.sockets import (
    Fronts,
    can_be_replaced,
    fronts_taken,
    handed_by,
    token_of,
    with_inherited_addresses,
)
from uma_trio.backend.base import Backend, ContextLimits, ModelFacts
from uma_trio.backend.encoder import EncoderInfo
from uma_trio.config.hardware import (
    files_needed,
    give_memory_back,
    share_interpreter,
    spare_imports,
)
from uma_trio.config.options import Config
from uma_trio.config.settings import restated
from uma_trio.engine.cells import PrefixDisk
from uma_trio.engine.outlet import Outlet
from uma_trio.machine.bell import Bell
from uma_trio.machine.machine import Machine, run_machine
from uma_trio.models.files import check_adapters, check_template, chosen_policy, import_backend
from uma_trio.models.loaded import EncoderModel, LoadedModel, TextModel
from uma_trio.models.manager import (
    ModelManager,
    configured_models,
    has_several_contexts,
    wait_until_saved,
)
from uma_trio.models.refusal import Refusal
from uma_trio.observe import log
from uma_trio.observe.log import FaultLog
from uma_trio.observe.scorecard import ScoreKeeper
from uma_trio.observe.table_file import TableFile
from uma_trio.policy.pipeline import Policy
from uma_trio.service.agent import Agent
from uma_trio.service.directory import Directory
from uma_trio.service.fair import HELPERS, in_fair_threads, in_threads
from uma_trio.service.loop import LagWatch, Presence
from uma_trio.service.service import Service
from uma_trio.service.timer import finest_timer
from uma_trio.sockets.handover import TakenSockets, take_over
from uma_trio.sockets.inherited import NONE, Inherited
from uma_trio.sockets.listener import Listeners
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.supervisor import Supervisor
from uma_trio.uds.server import Server
from uma_trio.uds.settings import Settings, Shared

if TYPE_CHECKING:
    from uma_trio.http.server import Server as HttpServer
    from uma_trio.service.front import FrontListener as PortListener

FORCED_EXIT = 130
_FLUSH_S = 2.0
_WRITE_S = 5.0  # and to the disk, when the daemon ends
_FORCED_S = 1.0
_STOPPING = "the daemon is stopping; send the request again once it has restarted"


@frozen
class ReadyInfo:
    """What is being served, once clients can connect.

    `http_missing` says why HTTP is not served, or not on both loopback addresses. `chosen` is what was chosen for the context, and why.
    `model` is the default one. `models` are those that write, by their names; without any there are no `limits`.
    """

    socket: str
    model: ModelFacts
    limits: ContextLimits | None
    backend: str
    policy: str
    http: str | None = None
    http_keys: Path | None = None
    http_missing: str = ""
    chosen: str = ""
    models: tuple[str, ...] = ()
    encoders: tuple[EncoderInfo, ...] = ()


async def serve(
    config: Config,
    *,
    on_ready: Callable[[ReadyInfo], None] | None = None,
    on_progress: Progress | None = None,
    on_measuring: Progress | None = None,
    backend: Backend | None = None,
    inherited: Inherited = NONE,
    supervisor: Supervisor | None = None,
    replace: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    A second signal does not wait: it raises ``SystemExit``, with the socket removed. Cancelled,
    it closes all connections, waits for the tick that is being computed, and removes the
    socket. `backend` is closed in any case. `on_progress` and `on_measuring`
    are called in the loading thread, with the part of the model that is loaded and of the machine's measuring.
    `inherited` sockets are served in place of the configured ones; the `supervisor` receives the state.
    With `replace` the daemon that serves there hands its sockets over once the model is loaded, finishes its
    requests and ends; until then it serves, also if this one fails.

    Raises:
        uma_trio.sockets.listener.SocketTaken: another daemon serves there; nothing was loaded.
        uma_trio.sockets.handover.HandoverFailed: the daemon that was to be replaced serves on.
        uma_trio.sockets.listener.SocketUnusable: the socket cannot be made there.
        uma_trio.sockets.port.PortUnusable: the TCP port of the framed protocol cannot be had.
        uma_trio.config.option.ConfigError: no policy has that name, the trace or the scorecard cannot
            be written where they should be, or the token cannot be used.
        uma_trio.backend.base.ModelError: the model cannot be used.
        uma_trio.engine.inbox.EngineDied: every stream got an error, and the socket is removed.
    """
    policy = chosen_policy(config)
    config = with_own_key(with_inherited_addresses(inherited, config))
    token = token_of(config)
    check_trace(config)
    for each in config.each():
        check_adapters(each)
    await trio.to_thread.run_sync(check_template, config)
    with closing(inherited), ExitStack() as held:
        fronts, taken = None, None
        if not replace or not await can_be_replaced(config):
            fronts = held.enter_context(fronts_taken(config, inherited))
        table = held.enter_context(scorecard_file(config))
        disk = await trio.to_thread.run_sync(_open_disk, config, token)
        if disk is not None:
            held.callback(disk.close)
        daemon = _Daemon(config, policy, table, supervisor or Supervisor(), token, disk, backend)
        held.callback(daemon.models.close)
        await daemon.load(on_progress, on_measuring, replaces=fronts is None)
        if fronts is None:
            taken = await take_over(str(config.socket))
            handed = () if taken is None else taken.handed
            fronts = held.enter_context(fronts_taken(config, handed=handed))
        if taken is not None:
            held.enter_context(closing(taken))
        with fronts.listen() as listener:
            await daemon.run(fronts, listener, on_ready, taken)


class _Daemon:
    """The parts, wired; and how they start and stop."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        table: TableFile | None,
        supervisor: Supervisor,
        token: str | None,
        disk: PrefixDisk | None,
        backend: Backend | None,
    ) -> None:
        self._config, self._supervisor, self._token, self._disk = config, supervisor, token, disk
        self._log = log.get("daemon")
        self._stopping, self._computed = trio.Event(), trio.Event()
        self._untried = trio.open_memory_channel[LoadedModel](math.inf)
        self._forced = False
        self._replacing: Replacing | None = None
        self._clients = trio.CancelScope()
        models = configured_models(config.each(), 0 if backend is None else 1)
        metrics = models[0].metrics
        post = trio.lowlevel.current_trio_token().run_sync_soon
        bell, directory = Bell(), Directory()
        self._machine = Machine(bell, time.monotonic, post, floor=config.background_floor)
        self._presence = Presence(time.monotonic, directory)
        self._builder = Builder(
            policy,
            bell,
            Outlet(post),
            self._presence,
            self._machine.background,
            metrics.encoding,
            disk=disk,
            given=backend,
            has_several=has_several_contexts(models),
        )
        self.models = ModelManager(
            models,
            self._builder.build,
            self._machine,
            on_death=self._stopping.set,
        )
        self.models.on_load.append(self._untried[0].send_nowait)
        self._service = Service(
            self.models,
            settings=restated(config),
            telemetry=metrics,
            clock=time.monotonic,
            run_blocking=in_threads(HELPERS),
            run_compiling=in_fair_threads(),
            directory=directory,
            timer=finest_timer(time.monotonic),
            give_memory_back=give_memory_back,
            log_request=lambda line: log.get("request").info("answered", **line),
            disk=disk,
        )
        self._scorekeeper = ScoreKeeper(
            metrics,
            config.scorecard_interval_s,
            table,
            every=lambda: [each.telemetry for each in self.models.loaded],
        )
        self._lag = LagWatch(
            time.monotonic,
            finest_timer(time.monotonic),
            metrics.loop_lagged,
            lambda: len(directory) > 0,
        )

    async def load(
        self, on_progress: Progress | None, on_measuring: Progress | None, *, replaces: bool
    ) -> None:
        """Load the models that are loaded at the start. Raises as :func:`serve` does."""
        builder = self._builder
        builder.on_loading = _both(self._supervisor.loading, on_progress)
        builder.on_measuring = _both(self._supervisor.measuring, on_measuring)
        builder.replaces = replaces
        if builder.given is None:
            await trio.to_thread.run_sync(import_backend, self._config)
        spare_imports()  # what is loaded from here on the garbage collector has to look at
        await self.models.load_at_start()
        texts = self._texts
        for each in texts:  # before a socket is taken, so that no client waits for it
            await trio.to_thread.run_sync(warm_if_used, each.front_end, abandon_on_cancel=True)
        builder.started()
        await trio.to_thread.run_sync(give_memory_back)  # of what was only needed to load
        share_interpreter(overlaps=any(not each.needs_cores for each in texts))

    @property
    def _texts(self) -> list[TextModel]:
        return [each for each in self.models.loaded if isinstance(each, TextModel)]

    async def run(
        self,
        fronts: Fronts,
        listener: Listeners,
        on_ready: Callable[[ReadyInfo], None] | None,
        taken: TakenSockets | None,
    ) -> None:
        """Serve on `listener` until a signal ends it. Raises as :func:`serve` does.

        The daemon that the sockets were `taken` from receives when clients can connect.
        """
        config, service = self._config, self._service
        _raise_file_limit(files_needed(_connections(config)), self._log.warning)
        self._fronts = fronts
        settings = Settings(
            max_prompt_bytes=config.max_prompt_bytes,
            max_sessions=config.max_sessions,
            idle_timeout_s=config.idle_timeout_s,
        )
        shared = Shared(settings=settings, service=service, log=FaultLog(log.get("net")))
        self._server = Server(shared, token=self._token)
        service.settings = {**service.settings, **settings_of(fronts.http, config)}
        self._http = None if fronts.http.listeners is None else http_server(config, service)
        self._agent = Agent(service.load_reading, self._is_ending, log.get("agent"))
        await self._serve(listener, on_ready, taken)
        for model in self.models.loaded:
            if not model.has_died:
                model.remember_cost()
        if self.models.died is not None:
            raise self.models.died
        if self._forced:
            raise SystemExit(FORCED_EXIT)

    async def _serve(
        self,
        listener: Listeners,
        on_ready: Callable[[ReadyInfo], None] | None,
        taken: TakenSockets | None,
    ) -> None:
        port = self._fronts.http.listeners
        async with trio.open_nursery() as nursery:
            await nursery.start(self.models.run)  # before any engine can die
            nursery.start_soon(self._run_compute)
            nursery.start_soon(self._scorekeeper.run)
            nursery.start_soon(self._service.playout.run)
            nursery.start_soon(self._lag.run)
            nursery.start_soon(self._presence.run)
            nursery.start_soon(self._watch_name, listener)
            nursery.start_soon(self._show_life)
            nursery.start_soon(self._try_templates)
            await nursery.start(self._obey_signals, listener)
            await nursery.start(self._answer_proxies)
            with self._clients:
                async with trio.open_nursery() as clients:
                    if taken is not None:
                        await taken.serving()  # raises HandoverFailed if it serves on
                        for each in self._sockets(listener):
                            each.own()
                    await clients.start(self._server.serve, listener)
                    if self._http is not None and port is not None:
                        await clients.start(self._http.serve, port)
                    if not self._fronts.supervised:  # a supervisor keeps its own open
                        self._replacing = self._make_replacing(listener)
                        await nursery.start(self._replacing.run)
                    info = self._ready_info(listener)
                    self._supervisor.ready(f"serving {info.model.name} on {info.socket}")
                    if on_ready is not None:
                        on_ready(info)
                    await self._stopping.wait()
                    if self._replacing is not None:
                        await self._replacing.end()
                    await self._drain()
                    clients.cancel_scope.deadline = trio.current_time() + _FLUSH_S
            # The tick that is being computed has to end. A second signal must still be heard.
            self.models.stop()
            if self._disk is not None and self.models.died is None:
                await wait_until_saved(self.models.loaded)
            self._machine.close()
            await self._computed.wait()
            if self._disk is not None:
                await trio.to_thread.run_sync(self._disk.close, _WRITE_S)
            nursery.cancel_scope.cancel()

    async def _try_templates(self) -> None:
        """Find out what chat templates can do before the first chat waits for it."""
        async for loaded in self._untried[1]:
            with suppress(Refusal):  # it was unloaded meanwhile
                why = await loaded.chat_problem() if loaded.kind == "text" else None
                if why is not None:
                    self._log.warning("messages are refused", model=loaded.bounds.model, why=why)

    def _ready_info(self, listener: Listeners) -> ReadyInfo:
        """Describe what is served. Called before the first client, so that nothing was unloaded."""
        config, texts, http = self._config, self._texts, self._fronts.http
        first = next(iter(texts), None)
        backend = None if first is None else first.backend
        return ReadyInfo(
            socket=listener.path,
            model=self.models.default.facts,
            limits=None
            if backend is None or first is None
            else evolve(backend.limits, n_slots=first.slots),
            backend="" if backend is None else backend.description,
            policy=config.policy,
            http=http.url,
            http_keys=config.http_key_file,
            http_missing=http.missing,
            chosen=next((each.chosen for each in self.models.models if each.loaded is first), ""),
            models=tuple(each.bounds.model for each in texts),
            encoders=tuple(
                each.info for each in self.models.loaded if isinstance(each, EncoderModel)
            ),
        )

    async def _run_compute(self) -> None:
        try:
            await run_machine(self._machine)
        finally:
            self._computed.set()

    async def _watch_name(self, listener: Listeners) -> None:
        await listener.until_lost()
        self._log.warning(
            "the socket file was removed or replaced: no new client can reach this daemon",
            socket=listener.path,
            fix="restart it; connected clients are served until then",
        )

    async def _answer_proxies(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Tell HAProxy's agent-check the load, also while the last requests are finished."""
        if self._fronts.agent is None:
            task_status.started()
        else:
            await self._agent.serve(self._fronts.agent.sock, task_status=task_status)

    async def _show_life(self) -> None:
        """Tell the supervisor that the engine ticks or has nothing to do, as often as it asks."""
        if self._supervisor.watchdog_s <= 0:
            return
        seen = -1
        while True:
            # Half of the time is what sd_watchdog_enabled(3) recommends.
            await trio.sleep(self._supervisor.watchdog_s / 2)
            if self._machine.rounds != seen or self._machine.asleep:
                self._supervisor.alive()
            seen = self._machine.rounds

    def _make_replacing(self, listener: Listeners) -> Replacing:
        fronts = self._fronts
        handed = handed_by(listener, fronts.http, fronts.agent)
        pauses = (*self._servers, self._agent)
        sockets = self._sockets(listener)
        return Replacing(listener.path, handed, sockets, pauses, self._stopping.set)

    def _is_ending(self) -> bool:
        return self._stopping.is_set() or self._service.draining

    def _sockets(self, listener: Listeners) -> list[PortListener]:
        port = self._fronts.http.listeners
        return [*listener.all, *(() if port is None else port.all)]

    @property
    def _servers(self) -> tuple[Server | HttpServer, ...]:
        return (self._server,) if self._http is None else (self._server, self._http)

    async def _drain_connections(self) -> None:
        """End each connection between two requests, so that its client finds the next daemon."""
        async with trio.open_nursery() as nursery:
            for front in self._servers:
                nursery.start_soon(front.empty)

    async def _drain(self) -> None:
        """Let running requests finish for a while, then end them with an error."""
        server, service = self._server, self._service
        patience = 0.0 if self.models.died is not None else self._config.drain_s
        deadline = trio.current_time() + patience
        self._supervisor.stopping(patience)
        self._log.info(
            "stopping; a second signal does not wait",
            connections=server.n_connections,
            drain_s=patience,
        )
        if self._fronts.supervised or (self._replacing is not None and self._replacing.replaced):
            with trio.move_on_at(deadline):
                await self._drain_connections()
        service.stop_taking()
        server.stop_accepting()
        if self._http is not None:
            self._http.stop_accepting()
        with trio.move_on_at(deadline):
            await service.wait_until_idle()
        service.end_all(Code.E_LIFECYCLE_001, _STOPPING)
        with trio.move_on_after(_FLUSH_S):
            await service.directory.wait_until_empty()
        server.end_connections()

    async def _obey_signals(
        self,
        listener: Listeners,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with trio.open_signal_receiver(*_ending_signals()) as signals:
            task_status.started()
            is_second = (
                False  # a daemon that was replaced, or whose engine died, ends without a signal
            )
            async for _ in signals:
                self._stopping.set()
                if not is_second:
                    is_second = True
                    continue
                self._forced = True
                self._clients.cancel()
                # A tick cannot be interrupted, and after a second signal it is not waited for.
                await trio.sleep(_FORCED_S)
                if self._replacing is None or not self._replacing.busy:
                    listener.close()  # otherwise another daemon may have the names by now
                os._exit(FORCED_EXIT)


def _open_disk(config: Config, token: str | None) -> PrefixDisk | None:
    """Open the files of saved prefixes; an owner with a key or the token is known by it. Raises :class:`ConfigError`."""
    if not config.prefix_disk:
        return None
    known = credentials(config)
    if token is not None:
        known[Principal(connection=0, has_token=True).shares_as] = token.encode()
    return open_prefix_disk(config, known)


def _both(first: Progress, second: Progress | None) -> Progress:
    """Return what tells both how far something is."""

    def tell(share: float) -> None:
        first(share)
        if second is not None:
            second(share)

    return tell


def _connections(config: Config) -> int:
    """Return how many clients there may be at once, on the socket and over HTTP."""
    over_http = 0 if config.http_address is None else config.http_max_connections
    return config.max_sessions + over_http


def _ending_signals() -> list[signal.Signals]:
    """Return what ends the daemon in order. A closed terminal is one, unless `nohup` said not."""
    ending = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.append(signal.SIGHUP)
    return ending


def _raise_file_limit(n: int, warn: Callable[..., object]) -> None:
    """Raise the soft limit of open files to `n` where we may; say so where we may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= n:
        return
    most = n if hard == resource.RLIM_INFINITY else min(n, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < n:
        warn("few file descriptors: clients may have to wait", limit=most, wanted=n)
