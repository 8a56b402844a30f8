"""The composition root: builds the parts, and owns the nurseries and the order of shutdown.

Everything is handed what it needs here; no other module makes an engine, a policy or a socket.
The order of start: name of the socket taken, model loaded, socket made, clients let in. The
order of the end is the reverse, with the running requests finished or told in between.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from attrs import evolve, frozen

from uma_protocol import Code
from uma_trio.app.deployment import Deployment, Loaded, Read, SharedParts, deployed, load
from uma_trio.app.replacing import Replacing
from uma_trio.app.wiring import (
    Progress,
    check_adapters,
    check_template,
    chosen_policy,
    file_names,
    gives_of,
    import_backend,
    load_backend,
    names_in_file,
    net_settings,
    open_prefix_disk,
    scorecard_file,
    unwritable,
)
from uma_trio.app.wiring_encoders import (
    EncoderDeployment,
    LoadedEncoder,
    encoder_deployed,
    load_encoder,
)
from uma_trio.app.wiring_http import credentials, http_server
from uma_trio.app.wiring_shapes import warm_if_used
from uma_trio.app.wiring_sockets import (
    Fronts,
    can_be_replaced,
    fronts_taken,
    handed_by,
    token_of,
    told_by,
)
from uma_trio.backend.base import Backend, ContextLimits, ModelFacts
from uma_trio.backend.encoder import EncoderInfo
from uma_trio.config.errors import ConfigError
from uma_trio.config.hardware import (
    files_needed,
    give_memory_back,
    share_interpreter,
    spare_imports,
)
from uma_trio.config.options import Config
from uma_trio.config.settings import restated
from uma_trio.engine.cells import PrefixDisk
from uma_trio.engine.inbox import EngineDied, bury
from uma_trio.engine.outlet import Outlet
from uma_trio.machine.bell import Bell
from uma_trio.machine.machine import Machine, run_machine
from uma_trio.machine.work import Work
from uma_trio.models.entry import AnyDeployment, Entry
from uma_trio.models.keeper import Keeper
from uma_trio.observe import log
from uma_trio.observe.log import FaultLog
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.scorecard import ScoreKeeper
from uma_trio.observe.table_file import TableFile
from uma_trio.policy.pipeline import Policy
from uma_trio.service.agent import Agent
from uma_trio.service.ask import Refusal
from uma_trio.service.compiling import in_fair_threads
from uma_trio.service.fair import HELPERS, in_threads
from uma_trio.service.lag import LagWatch, Presence
from uma_trio.service.served import ServedModel
from uma_trio.service.service import Service
from uma_trio.service.timer import finest_timer
from uma_trio.sockets.handover import TakenSockets, take_over
from uma_trio.sockets.inherited import NONE, Inherited
from uma_trio.sockets.listener import Listeners
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.supervisor import Supervisor
from uma_trio.uds.server import Server
from uma_trio.uds.settings import Shared

if TYPE_CHECKING:
    from uma_trio.http.server import Server as HttpServer
    from uma_trio.service.front import FrontListener as PortListener

FORCED_EXIT = 130
_FLUSH_S = 2.0
# An unloaded model's prompts may be saved for so long, and whether they are is looked at so often.
_SAVE_S, _LOOK_S = 1.0, 0.02
_WRITE_S = 5.0  # and to the disk, when the daemon ends
_FORCED_S = 1.0
_LAST_DIED = "the engine has stopped; the daemon is going down"
_ONE_DIED = "the engine of this model has stopped; the other models are served on"
_STOPPING = "the daemon is stopping; send the request again once it has restarted"


@frozen
class ReadyInfo:
    """What is being served, once clients can connect.

    `http_missing` says why HTTP is not served on both loopback addresses.
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
    `inherited` sockets are served in place of the configured ones; the `supervisor` is told what goes on.
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
        uma_trio.engine.inbox.EngineDied: every stream was told, and the socket is removed.
    """
    policy = chosen_policy(config)
    config = told_by(inherited, config)
    supervisor = supervisor or Supervisor()
    token = _checked(config)
    await trio.to_thread.run_sync(check_template, config)
    with closing(inherited), ExitStack() as held:
        fronts, taken = None, None
        if not replace or not await can_be_replaced(config):
            fronts = held.enter_context(fronts_taken(config, inherited))
        table = held.enter_context(scorecard_file(config))
        loading = _both(supervisor.loading, on_progress)
        measuring = _both(supervisor.measuring, on_measuring)
        disk = await trio.to_thread.run_sync(_disk, config, token)
        if disk is not None:
            held.callback(disk.close)
        entries = _entries(config, backend)
        held.callback(_close_all, entries)
        several = sum(entry.gives == "text" for entry in entries) > 1
        read = partial(load_backend, beside_another=fronts is None, several=several)
        await _import(config, backend)
        loaded = await _loaded(entries, held, loading, measuring, backend, read)
        await _warm(loaded)
        if fronts is None:
            taken = await take_over(str(config.socket))
            handed = () if taken is None else taken.handed
            fronts = held.enter_context(fronts_taken(config, handed=handed))
        if taken is not None:
            held.enter_context(closing(taken))
        daemon = _Daemon(config, loaded, entries, policy, table, fronts, supervisor, token, disk)
        share_interpreter(overlaps=_overlap(loaded))
        del loaded  # which would keep the weights of models that are unloaded
        with fronts.listen() as listener:
            await daemon.run(listener, on_ready, taken)


async def _import(config: Config, backend: Backend | None) -> None:
    """Import what loads models and takes a while, so that the garbage collector can spare it and not the models."""
    if backend is None:
        await trio.to_thread.run_sync(import_backend, config)
    spare_imports()


async def _warm(loaded: Sequence[Loaded | LoadedEncoder]) -> None:
    """Prepare for shapes where they were used lately: before a socket is taken, so that nobody waits for it."""
    for each in loaded:
        if isinstance(each, Loaded):
            await trio.to_thread.run_sync(warm_if_used, each.texts, abandon_on_cancel=True)


def _overlap(loaded: Sequence[Loaded | LoadedEncoder]) -> bool:
    """Whether the host is free while one of these models computes."""
    return any(isinstance(each, Loaded) and each.backend.traits.overlaps for each in loaded)


def _checked(config: Config) -> str | None:
    """Refuse what can be refused before anything is loaded; return the token of TCP clients."""
    _check_trace(config)
    token = token_of(config)
    for each in config.each():
        check_adapters(each)
    return token


async def _loaded(
    entries: Sequence[Entry],
    held: ExitStack,
    loading: Progress,
    measuring: Progress,
    backend: Backend | None,
    read: Read,
) -> list[Loaded | LoadedEncoder]:
    """Load the default model, and those that are loaded at the start; `held` closes them."""
    loaded: list[Loaded | LoadedEncoder] = []
    for entry in [one for n, one in enumerate(entries) if not n or one.config.load == "start"]:
        own = entry.held = held.enter_context(ExitStack())
        if entry.gives == "text":
            made = await load(
                *(entry.config, own, loading, measuring, backend), metrics=entry.metrics, read=read
            )
            loaded.append(made)
        else:
            loaded.append(await load_encoder(entry.config, own, loading))
    return loaded


class _Daemon:
    """The parts, wired; and how they stop."""

    def __init__(
        self,
        config: Config,
        loaded: Sequence[Loaded | LoadedEncoder],
        entries: list[Entry],
        policy: Policy,
        table: TableFile | None,
        fronts: Fronts,
        supervisor: Supervisor,
        token: str | None,
        disk: PrefixDisk | None,
    ) -> None:
        self._disk = disk
        self._supervisor, self._config = supervisor, config
        self._log = log.get("daemon")
        self._metrics = metrics = entries[0].metrics
        self._scorekeeper = ScoreKeeper(
            *(metrics, config.scorecard_interval_s, table),
            every=lambda: [each.metrics for each in self._deployments],
        )
        self._service = service = _service(metrics, config, disk)
        self._presence = Presence(time.monotonic, service.directory)
        self._deployments: list[AnyDeployment] = []
        self._new_models = trio.open_memory_channel[ServedModel](math.inf)
        started = [entry for entry in entries if entry.held is not None]
        self._machine = self._make_machine(policy)
        for entry, each in zip(started, loaded, strict=True):
            self._deploy(entry, each)
            entry.state, entry.loads = "loaded", 1
            entry.used_at = entry.loaded_at = trio.current_time()
        self._keep(entries)
        self._server = Server(_shared(config, self._service), token=token)
        self._port, self._agent_port = fronts.port, fronts.agent
        self._http = None if fronts.port is None else http_server(config, self._service)
        self._agent = Agent(service.load_reading, self._is_ending, log.get("agent"))
        self._lag = _lag_watch(self._service, metrics)
        self._stopping, self._computed = trio.Event(), trio.Event()
        self._died: EngineDied | None = None
        self._forced = False
        self._supervised = fronts.supervised
        self._replacing: Replacing | None = None
        self._clients = trio.CancelScope()

    def _make_machine(self, policy: Policy) -> SharedParts:
        """Make the compute task, and what models share."""
        post = trio.lowlevel.current_trio_token().run_sync_soon
        bell, floor = Bell(), self._config.background_floor
        self._compute = Machine(bell, time.monotonic, post, floor=floor)
        return SharedParts(
            *(
                policy,
                bell,
                Outlet(post),
                in_threads(HELPERS),
                in_fair_threads(),
                in_threads(HELPERS),
            ),
            readers_s=self._presence,
            scheduler=self._compute.background,
            debts=self._service.debts,
            disk=self._disk,
        )

    def _deploy(self, entry: Entry, loaded: Loaded | LoadedEncoder) -> AnyDeployment:
        """Wire a model, and have it served and computed from now on."""
        machine, metrics = self._machine, entry.metrics
        made: AnyDeployment
        if isinstance(loaded, Loaded):
            made = deployed(loaded, machine, metrics, entry.prefixes, entry.reserved)
            self._new_models[0].send_nowait(made.served)
        else:
            figures = self._metrics.encoding
            made = encoder_deployed(loaded, machine, metrics, figures, entry.reserved)
        self._deployments.append(made)
        entry.deployment = made
        entry.file_names = made.served.bounds.from_file  # another file may have another name
        self._service.add(made.served)
        self._compute.add(made.engine, partial(self._bury, made.engine))
        return made

    @property
    def _writers(self) -> list[Deployment]:
        return [each for each in self._deployments if isinstance(each, Deployment)]

    def _keep(self, entries: list[Entry]) -> None:
        """Make what loads and unloads models, where there are several."""
        self._keeper = Keeper(
            entries,
            self._service,
            self._deploy,
            self._let_model_go,
            self._beside_loading,
        )
        if len(self._keeper.entries) > 1:
            self._service.shelf = self._keeper

    def _beside_loading(self) -> AbstractContextManager[None]:
        """Have readers leave the processors to a loading, where their ticks need these, too."""
        needed = any(not each.backend.traits.overlaps for each in self._writers)
        return self._compute.loading() if needed else nullcontext()

    async def _let_model_go(self, deployment: AnyDeployment) -> None:
        """Compute a model no more; it is in no thread's hands when this returns."""
        await _saved([deployment])
        if deployment not in self._deployments:
            return  # its engine has died meanwhile
        self._deployments.remove(deployment)
        await self._compute.remove(deployment.engine)
        await trio.to_thread.run_sync(deployment.remember)

    async def run(
        self,
        listener: Listeners,
        on_ready: Callable[[ReadyInfo], None] | None,
        taken: TakenSockets | None,
    ) -> None:
        """Serve on `listener` until told to stop. Raises as :func:`serve` says.

        Whoever the sockets were `taken` from is told when clients can connect.
        """
        _want_files(files_needed(_connections(self._config)), self._log.warning)
        await self._serve(listener, on_ready, taken)
        for deployment in self._deployments:
            deployment.remember()
        if self._died is not None:
            raise self._died
        if self._forced:
            raise SystemExit(FORCED_EXIT)

    async def _serve(
        self,
        listener: Listeners,
        on_ready: Callable[[ReadyInfo], None] | None,
        taken: TakenSockets | None,
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._keeper.run)  # before any engine can die
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
                        await self._own(listener, taken)
                    await clients.start(self._server.serve, listener)
                    if self._http is not None and self._port is not None:
                        await clients.start(self._http.serve, self._port)
                    if not self._supervised:  # a supervisor keeps its own open
                        self._replacing = self._replaced_by_who_asks(listener)
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
            if self._disk is not None and self._died is None:
                await _saved(self._writers)
            self._compute.close()
            await self._computed.wait()
            if self._disk is not None:
                await trio.to_thread.run_sync(self._disk.close, _WRITE_S)
            nursery.cancel_scope.cancel()

    async def _try_templates(self) -> None:
        """Find out what chat templates can do, before the first chat waits for it."""
        async for served in self._new_models[1]:
            with suppress(Refusal):  # it was unloaded meanwhile
                why = await served.chat_problem()
                if why is not None:
                    self._log.warning("messages are refused", model=served.names[0], why=why)

    def _ready_info(self, listener: Listeners) -> ReadyInfo:
        """Return what is served. Before the first client, so that nothing was unloaded."""
        config, first = self._config, next(iter(self._writers), None)
        address, limits = config.http_address, None
        if first is not None:
            limits = evolve(first.backend.limits, n_slots=config.parallel)
        return ReadyInfo(
            socket=listener.path,
            model=self._service.default.model,
            limits=limits,
            backend=first.backend.description if first is not None else "",
            policy=config.policy,
            http=None if address is None else address.url,
            http_keys=config.http_key_file,
            http_missing="" if self._port is None else self._port.missing,
            models=tuple(each.served.bounds.model for each in self._writers),
            encoders=tuple(
                each.encoder.info
                for each in self._deployments
                if isinstance(each, EncoderDeployment)
            ),
        )

    async def _run_compute(self) -> None:
        try:
            await run_machine(self._compute)
        finally:
            self._computed.set()

    def _bury(self, engine: Work, error: Exception) -> None:
        """End the requests of an engine that raised; if no other model is configured the daemon ends, too."""
        dead = next((one for one in self._deployments if one.engine is engine), None)
        if dead is None:  # it is being unloaded, and nobody waits for it
            self._log.error("the engine has stopped", exc_info=error)
            return
        self._deployments.remove(dead)
        last = len(self._keeper.entries) < 2  # another one can be loaded, and this one again
        died = bury(dead.engine, error, _LAST_DIED if last else _ONE_DIED)
        name = dead.served.bounds.model
        self._log.error("the engine has stopped", model=name, exc_info=error)
        if last:
            # The streams have been told; their connections get a moment to pass it on.
            self._died = died
            self._stopping.set()
        else:
            self._service.remove(dead.served)
            self._service.observer.close(dead.served)
            self._keeper.lost(dead)

    async def _watch_name(self, listener: Listeners) -> None:
        await listener.until_lost()
        self._log.warning(
            "the socket file was removed or replaced: no new client can reach this daemon",
            socket=listener.path,
            fix="restart it; those who are connected are served until then",
        )

    async def _answer_proxies(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Tell HAProxy's agent-check the load, also while the last requests are finished."""
        if self._agent_port is None:
            task_status.started()
        else:
            await self._agent.serve(self._agent_port.sock, task_status=task_status)

    async def _show_life(self) -> None:
        """Tell the supervisor that the engine ticks or has nothing to do, as often as it asks."""
        if self._supervisor.watchdog_s <= 0:
            return
        seen = -1
        while True:
            # Half of the time is what sd_watchdog_enabled(3) recommends.
            await trio.sleep(self._supervisor.watchdog_s / 2)
            if self._compute.rounds != seen or self._compute.asleep:
                self._supervisor.alive()
            seen = self._compute.rounds

    async def _own(self, listener: Listeners, taken: TakenSockets) -> None:
        """Have the names from the daemon that handed them over. Raises HandoverFailed if it serves on."""
        await taken.serving()
        for each in self._sockets(listener):
            each.own()

    def _replaced_by_who_asks(self, listener: Listeners) -> Replacing:
        handed = handed_by(self._config, listener, self._port, self._agent_port)
        sockets, pauses = self._sockets(listener), (*self._fronts, self._agent)
        return Replacing(listener.path, handed, sockets, pauses, self._stopping.set)

    def _is_ending(self) -> bool:
        return self._stopping.is_set() or self._service.draining

    def _sockets(self, listener: Listeners) -> list[PortListener]:
        return [*listener.all, *(() if self._port is None else self._port.all)]

    @property
    def _fronts(self) -> tuple[Server | HttpServer, ...]:
        return (self._server,) if self._http is None else (self._server, self._http)

    async def _let_go(self) -> None:
        """Answer what was asked, and end connections between two requests: clients find the next daemon."""
        async with trio.open_nursery() as nursery:
            for front in self._fronts:
                nursery.start_soon(front.empty)

    async def _drain(self) -> None:
        """Let running requests finish, then end them; everybody is told all there is to say."""
        server, service = self._server, self._service
        patience = 0.0 if self._died is not None else self._config.drain_s
        deadline = trio.current_time() + patience
        self._supervisor.stopping(patience)
        self._log.info(
            "stopping; a second signal does not wait",
            connections=server.n_connections,
            drain_s=patience,
        )
        if self._supervised or (self._replacing is not None and self._replacing.replaced):
            with trio.move_on_at(deadline):
                await self._let_go()
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
            told = False  # a daemon that was replaced, or whose engine died, ends without a signal
            async for _ in signals:
                self._stopping.set()
                if not told:
                    told = True
                    continue
                self._forced = True
                self._clients.cancel()
                # A tick cannot be interrupted; a daemon that is told twice does not wait for it.
                await trio.sleep(_FORCED_S)
                if self._replacing is None or not self._replacing.busy:
                    listener.close()  # else another daemon may have the names by now
                os._exit(FORCED_EXIT)


def _entries(config: Config, backend: Backend | None) -> list[Entry]:
    """Return what is configured. A `backend` that is given writes. Raises :class:`ConfigError`."""
    every = config.each()
    given = () if backend is None else every[:1]
    entries = [Entry(each, "text" if each in given else gives_of(each)) for each in every]
    for entry in entries:
        others = [each for each in entries if each is not entry]
        entry.reserved = frozenset(name for each in others for name in each.configured)
        taken = entry.reserved.intersection(entry.configured)
        if any(taken.intersection(one.configured) and one.gives == entry.gives for one in others):
            why = f"two models are called {min(taken)}; give each a name of its own under `models`"
            raise ConfigError(why)
        if entry.config not in given:
            found = names_in_file(entry.config)
            entry.file_names = file_names(entry.config, found, entry.reserved) if found else ()
    return entries


async def _saved(deployments: Sequence[AnyDeployment]) -> None:
    """Wait until prefixes of these models are saved, for a moment at most."""
    with trio.move_on_after(_SAVE_S):
        while any(each.saves for each in deployments):  # noqa: ASYNC110 - the compute thread saves, and tells nobody
            await trio.sleep(_LOOK_S)


def _disk(config: Config, token: str | None) -> PrefixDisk | None:
    """Open the files of saved prefixes; who has a key or the token is known by it. Raises :class:`ConfigError`."""
    if not config.prefix_disk:
        return None
    if all(each.prefix_ram == 0 for each in config.each()):
        source, given = config.source("prefix_disk"), config.prefix_disk
        raise ConfigError(f"{source} {given}: it needs saved prefixes in memory (--prefix-ram)")
    known = credentials(config)
    if token is not None:
        known[Principal(connection=0, has_token=True).shares_as] = token.encode()
    return open_prefix_disk(config, known)


def _close_all(entries: Sequence[Entry]) -> None:
    """Close what models hold that were loaded on request. Idempotent."""
    for entry in entries:
        if entry.held is not None:
            entry.held.close()


def _service(metrics: Metrics, config: Config, disk: PrefixDisk | None) -> Service:
    return Service(
        settings=restated(config),
        telemetry=metrics,
        clock=time.monotonic,
        run_blocking=in_threads(HELPERS),
        timer=finest_timer(time.monotonic),
        give_memory_back=give_memory_back,
        log_request=_logged,
        disk=disk,
    )


def _shared(config: Config, service: Service) -> Shared:
    """Return what the connections of the socket have in common."""
    return Shared(settings=net_settings(config), service=service, log=FaultLog(log.get("net")))


def _lag_watch(service: Service, metrics: Metrics) -> LagWatch:
    """Return what measures the lag of trio's loop while requests run."""
    timer = finest_timer(time.monotonic)
    return LagWatch(time.monotonic, timer, metrics.loop_lagged, lambda: len(service.directory) > 0)


def _logged(line: Mapping[str, object]) -> None:
    """Write the line of an answer to the log."""
    log.get("request").info("answered", **line)


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


def _check_trace(config: Config) -> None:
    """Find out now what would come to light only when the model is loaded."""
    path = config.trace
    if path is None:
        return
    if path.is_dir():
        fault = errno.EISDIR
    elif not path.parent.is_dir():
        fault = errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        fault = errno.EACCES
    else:
        return
    raise unwritable(config, "trace", os.strerror(fault))


def _ending_signals() -> list[signal.Signals]:
    """Return what ends the daemon in order. A closed terminal is one, unless `nohup` said not."""
    ending = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.append(signal.SIGHUP)
    return ending


def _want_files(n: int, warn: Callable[..., object]) -> None:
    """Raise the soft limit of open files to `n` where we may; say so where we may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= n:
        return
    most = n if hard == resource.RLIM_INFINITY else min(n, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < n:
        warn("few file descriptors: clients may have to wait", limit=most, wanted=n)
