"""Everything of one loaded model, in one value made by one function.

:func:`load` is what takes time; :func:`deployed` wires what it found. A daemon has one
:class:`SharedParts`, whose parts all deployments share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import trio
from attrs import field, frozen

from uma_trio import __version__
from uma_trio.app.wiring import (
    Progress,
    bounds,
    engine_settings,
    load_backend,
    model_info,
    recorder,
    reply_format,
)
from uma_trio.app.wiring_shapes import confinement
from uma_trio.backend.base import Backend, ModelError, ModelFacts
from uma_trio.backend.gguf_header import mark_of
from uma_trio.config.options import Config
from uma_trio.engine.cells import PageStore, PrefixDisk
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.sampling import MaskThreads
from uma_trio.machine.background import BackgroundScheduler
from uma_trio.machine.bell import Bell
from uma_trio.observe import log
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.records import Recorded
from uma_trio.observe.view import MOST_TICKS
from uma_trio.policy.cost import CostModel
from uma_trio.policy.costing.calibrate import Neighbour
from uma_trio.policy.costing.store import cost_file, remember
from uma_trio.policy.pipeline import Policy, keeps_latency_cap
from uma_trio.policy.state import Contract
from uma_trio.service.compiling import RunFor
from uma_trio.service.fair import RunBlocking
from uma_trio.service.served import ServedModel
from uma_trio.text.frontend import FrontEnd

Read = Callable[[Config, Progress | None], Backend]


@frozen(eq=False)
class Loaded:
    """A model in memory, what was measured of it, and what its `cells` depend on ("": that is not known)."""

    config: Config
    backend: Backend
    settings: EngineSettings
    recorder: Recorder
    model: ModelFacts
    texts: FrontEnd
    cells: str = ""


@frozen(eq=False)
class SharedParts:
    """What all models of a daemon share. The `scheduler` gives background work its time. Texts to encode have helper threads of their own, `run_encoding`. `readers_s` counts the seconds in which clients could be heard, and `debts` are what users owe. Saved prefixes are on the `disk`, too, if there is one."""

    policy: Policy
    bell: Bell
    outlet: Outlet
    run_blocking: RunBlocking
    run_compiling: RunFor
    run_encoding: RunBlocking
    readers_s: Callable[[], float]
    scheduler: BackgroundScheduler
    debts: dict[str, float] = field(factory=dict)
    disk: PrefixDisk | None = None


@frozen(eq=False)
class KeptPrefixes:
    """The saved prefixes of a model that was unloaded, in host memory. They are those of a `file` as it was."""

    file: tuple[object, ...]
    store: PageStore


@frozen(eq=False)
class Deployment:
    """One loaded model: its memory, its engine, and how front ends see it."""

    config: Config
    backend: Backend
    engine: Engine
    served: ServedModel
    metrics: Metrics

    @property
    def saves(self) -> bool:
        """Whether prefixes are to be saved before it is unloaded."""
        return self.engine.cells.is_saving

    def as_neighbour(self) -> Neighbour | None:
        """Return what is known of the machine by this model, if anything is: to measure beside its readers is worse."""
        cost = self.engine.memory.cost
        return None if cost is None else Neighbour(cost, self.backend)

    def prefixes(self) -> KeptPrefixes | None:
        """Return its saved prefixes, for when it is loaded again; None if there are none. The engine has to have ended."""
        store = self.engine.cells.store
        return KeptPrefixes(identity_of(self.backend), store) if store.n_pages else None

    def remember(self) -> None:
        """Store what ticks cost here, if that is trusted. For when the engine has ended in order."""
        learnt = self.engine.memory.cost
        if learnt is not None and learnt.trusted:
            _remember(self.backend, learnt)


async def load(
    config: Config,
    held: ExitStack,
    on_loading: Progress | None,
    on_measuring: Progress | None,
    backend: Backend | None = None,
    *,
    metrics: Metrics,
    read: Read = load_backend,
    beside: Neighbour | None = None,
) -> Loaded:
    """Load a model by `read`, and measure what its ticks take, in threads. A `backend` that is given is loaded.

    `beside` a model that others use nothing is measured (:func:`measured_cost`).

    What was opened is closed with `held`. Cancelled, it waits for a measurement, and leaves a file that is being
    loaded to its thread.

    Raises:
        ModelError: it cannot be used.
        ConfigError: the trace cannot be written.
    """
    run = trio.to_thread.run_sync
    if backend is None:
        backend = await run(read, config, on_loading, abandon_on_cancel=True)
    held.callback(backend.close)
    settings = await run(engine_settings, config, backend, on_measuring, beside)
    model, texts = await run(_texts, config, backend, metrics)
    held.callback(texts.close)
    cells = await run(backend.kv_identity) if config.prefix_disk else ""
    writes = held.enter_context(recorder(config, backend, settings))
    return Loaded(config, backend, settings, writes, model, texts, cells)


def deployed(
    loaded: Loaded,
    machine: SharedParts,
    metrics: Metrics,
    kept: KeptPrefixes | None = None,
    reserved: Container[str] = (),
) -> Deployment:
    """Wire a loaded model. It begins with the prefixes that were `kept` if they are its own; `reserved` names are other models'."""
    config, backend, texts = loaded.config, loaded.backend, loaded.texts
    describe(metrics, config, backend, machine.policy)
    inbox = Inbox(config.max_queue, bell=machine.bell)
    disk = machine.disk.of(loaded.cells, inbox.wake) if machine.disk and loaded.cells else None
    cell_bytes, ram = backend.model.cell_bytes, loaded.settings.prefix_bytes
    if disk is not None and backend.limits.n_ctx_seq * cell_bytes > ram:
        log.get("prefix").warning(
            "longer prefixes do not fit into --prefix-ram and are not on disk as a whole",
            model=loaded.model.name,
            tokens=int(ram / cell_bytes),
        )
    engine = Engine(
        backend,
        machine.policy,
        inbox,
        machine.outlet,
        metrics,
        time.monotonic,
        settings=loaded.settings,
        recorder=loaded.recorder,
        masks=MaskThreads(),
        readers_s=machine.readers_s,
        store=kept.store if kept is not None and kept.file == identity_of(backend) else None,
        scheduler=machine.scheduler,
        disk=disk,
    )
    engine.refining.keep = lambda cost: _remember(backend, cost)
    served = ServedModel(
        model=loaded.model,
        slots=config.parallel,
        bounds=bounds(config, backend, reserved),
        front_end=texts,
        inbox=inbox,
        telemetry=metrics,
        run_blocking=machine.run_blocking,
        run_compiling=machine.run_compiling,
        defaults=config.defaults,
        history=partial(_history, loaded.recorder),
    )
    return Deployment(config, backend, engine, served, metrics)


def _history(recorder: Recorder) -> Recorded:
    return recorder.explain(time.monotonic(), None, MOST_TICKS)


def identity_of(backend: Backend) -> tuple[object, ...]:
    """Return what has to be equal for saved cells to be another backend's: the file, and how it is computed."""
    try:
        file = mark_of(Path(backend.model.path))
    except ModelError:
        file = (0, 0, 0, 0)  # it was removed while it was loaded
    return (*file, cost_file(backend))


def describe(metrics: Metrics, config: Config, backend: Backend, policy: Policy) -> None:
    """Tell metrics what is running, and what was promised if anything was."""
    contract = Contract(config.latency_cap, background_floor=config.background_floor)
    metrics.describe(
        model=backend.model.name,
        backend=backend.description,
        policy=config.policy,
        version=__version__,
        n_ctx=backend.limits.n_ctx,
        n_slots=config.parallel,
        latency_cap=contract.promised_cap if keeps_latency_cap(policy) else None,
    )


def _texts(config: Config, backend: Backend, metrics: Metrics) -> tuple[ModelFacts, FrontEnd]:
    """Return what is known of a model, and its front end: a large vocabulary takes 20 ms, so that it is for a helper thread."""
    model = model_info(config, backend)
    front_end = FrontEnd(
        backend.vocabulary,
        model.chat_template,
        reply_format(config),
        confinement(config, metrics.shape_events),
        reasons={"on": True, "off": False}.get(config.reasoning),
    )
    return model, front_end


def _remember(backend: Backend, cost: CostModel) -> None:
    """Store what ticks cost here. Called from the compute thread, too."""
    remember(cost_file(backend), cost.for_storage(), backend.model.weight_bytes)
