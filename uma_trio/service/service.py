"""The interface of the daemon for its front ends: request text, list requests, change them.

A front end translates between its wire format and these calls, without the engine, tokens or limits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from uma_protocol.errors import Code
from uma_trio.engine.cells import PrefixDisk
from uma_trio.models.loaded import LoadedModel
from uma_trio.models.manager import ModelManager
from uma_trio.models.model import Model
from uma_trio.observe.figures import Outlook
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.records import PrefixReport
from uma_trio.service.ask import Refusal
from uma_trio.service.directory import Directory, RunningRequest
from uma_trio.service.fair import RunBlocking, RunFor, Shares, unqueued
from uma_trio.service.load import LoadMonitor, LoadReading
from uma_trio.service.loop import Questions, ThreadShare
from uma_trio.service.observer import Observer
from uma_trio.service.stream import Playout
from uma_trio.service.timer import Timer
from uma_trio.sockets.principal import Principal
from uma_trio.words import Gives, Lane

LogRequest = Callable[[Mapping[str, object]], None]
"""Writes the log line of an answer."""


class Service:
    """The shared service of all front ends: a router over the loaded models. For trio's thread only.

    `clock` is the engines' clock. `timer` wakes the playout; without one the playout has the resolution of trio's
    clock. `give_memory_back` returns freed memory to the system. `log_request` gets a line about each answer when
    it is over. `disk` has saved prefixes in files.
    """

    def __init__(
        self,
        models: ModelManager,
        *,
        telemetry: Metrics,
        clock: Callable[[], float],
        run_blocking: RunBlocking,
        run_compiling: RunFor | None = None,
        directory: Directory | None = None,
        timer: Timer | None = None,
        give_memory_back: Callable[[], None] | None = None,
        log_request: LogRequest = lambda _: None,
        settings: Mapping[str, str] | None = None,
        disk: PrefixDisk | None = None,
    ) -> None:
        self.models = models
        self._disk = disk
        self.telemetry = telemetry
        self.clock = clock
        #: The daemon's configuration by the names of flags, for operators.
        self.settings: Mapping[str, str] = settings or {}
        self.directory = directory = Directory() if directory is None else directory
        self.shares = Shares()
        #: Queue of requests for metrics, lists and explanations.
        self.questions = Questions(clock, lambda: directory.has_streams)
        #: Charges users for the time that their bytes cost trio's thread.
        self.thread_share = ThreadShare(clock, lambda: directory.has_streams)
        #: Releases held tokens; a task has to be in its `run`.
        self.playout = Playout(clock, timer)
        self.draining = False
        self.log_request = log_request
        #: Queries over all models.
        self.observer = Observer(directory, clock, models)
        self._load: tuple[LoadedModel, LoadMonitor] | None = None
        self._idle_load = LoadMonitor(trio.lowlevel.checkpoint, lambda: None, Outlook, 1)
        self._run_blocking = run_blocking
        #: Compiles constraints, with fair turns between clients.
        self.run_compiling = run_compiling or unqueued(run_blocking)
        self._give_memory_back = give_memory_back
        self._handles = itertools.count(1)

    # --- models ---

    async def load_reading(self) -> LoadReading:
        """Return the load of the default model, or an idle one while no model is loaded.

        Raises:
            Refusal: the engine of the only model has stopped.
        """
        model = self.models.default
        if self._load is None or self._load[0] is not model:
            snapshots = model.snapshots
            self._load = (
                model,
                LoadMonitor(
                    model.snapshot,
                    lambda: snapshots.latest,
                    model.telemetry.outlook,
                    model.slots,
                ),
            )
        try:
            return await self._load[1].read()
        except Refusal:
            if not self.models.can_swap:
                raise
            return await self._idle_load.read()

    async def ready(
        self,
        name: str | None,
        on_wait: Callable[[Model], None] | None = None,
        payer: str = "",
        *,
        kind: Gives | None = None,
        exact: bool = False,
    ) -> LoadedModel:
        """Return the model for a request (:meth:`ModelManager.resolve`), once it is loaded.

        A use of it has to begin before the next checkpoint. `on_wait` is called with a model that is not loaded yet.

        Raises:
            Refusal: there is none, or it cannot be loaded.
        """
        model = self.models.resolve(name, kind, exact=exact)
        if on_wait is not None and model.wait_reason:
            on_wait(model)
        return await self.models.ready(model, payer)

    # --- requests ---

    def new_handle(self) -> int:
        """Return a handle that is unique for the life of the daemon."""
        return next(self._handles)

    # --- running requests ---

    async def prefixes(
        self,
        owner: Principal,
        *,
        clear: bool = False,
        session: str | None = None,
        pin_s: float = 0.0,
    ) -> PrefixReport:
        """Return the cached prefixes of a principal, of all models, after clearing them or pinning a session.

        Clearing also removes the principal's remembered tokens.

        Raises:
            Refusal: no engine runs.
        """
        if clear:
            self.models.forget_prefixes(owner.owns)
        found = await self.observer.of_each(
            lambda served: served.prefixes(owner, clear=clear, session=session, pin_s=pin_s)
        )
        disk = self._disk
        if clear and disk is not None:
            await self._run_blocking(partial(disk.clear, owner.shares_as))
        if clear and self._give_memory_back is not None:
            await self._run_blocking(self._give_memory_back)
        return PrefixReport(
            budget=sum(each.budget for each in found),
            n_bytes=sum(each.n_bytes for each in found),
            namespaces=tuple(one for each in found for one in each.namespaces),
            dropped=sum(each.dropped for each in found),
            disk_budget=0 if disk is None else disk.budget,
            disk_bytes=0 if disk is None else disk.n_bytes,
            own_disk_bytes=0 if disk is None else disk.held_by(owner.shares_as),
        )

    def metrics(self, model: str | None = None) -> Mapping[str, Any]:
        """Return every metric by name: of the daemon and its default model, or those of another model.

        Raises:
            Refusal: there is no model of this name.
        """
        if model is None:
            return self.telemetry.snapshot()
        return self.models.loaded_model(model).telemetry.snapshot()

    async def figures(self) -> dict[str, Any]:
        """Return every metric as :meth:`metrics`; where several models write, those of each loaded one are its `models`."""
        found, each = dict(self.metrics()), dict[str, Mapping[str, Any]]()
        for served in self._writers():
            await trio.lowlevel.checkpoint()
            each[served.bounds.model] = served.telemetry.snapshot()
        return {**found, "models": each} if each else found

    def metrics_of_each(self) -> Mapping[str, Mapping[str, Any]]:
        """Return every metric of each loaded model, by the model's name; nothing where only one writes."""
        return {served.bounds.model: served.telemetry.snapshot() for served in self._writers()}

    def _writers(self) -> Sequence[LoadedModel]:
        """Return the loaded models that write, without the hidden ones; none where only one is configured."""
        text = [model for model in self.models.models if model.kind == "text"]
        if len(text) < 2:
            return ()
        return [one.loaded for one in text if one.loaded is not None and not one.is_hidden]

    def move(self, handle: int, lane: Lane, by: Principal) -> bool:
        """Move a request to a lane; False if the handle is unknown, or another principal's and `by` is no operator."""
        generation = self._changeable(handle, by)
        if generation is not None:
            generation.move_to(lane)
        return generation is not None

    def cancel(self, handle: int, by: Principal) -> bool:
        """End a request; False as :meth:`move`."""
        generation = self._changeable(handle, by)
        if generation is not None:
            generation.end()
        return generation is not None

    def _changeable(self, handle: int, by: Principal) -> RunningRequest | None:
        """Return a request that `by` may change. None also if it is another principal's, so that its existence is not revealed."""
        generation = self.directory.get(handle)
        may = generation is not None and by.may_change(generation.origin.principal)
        return generation if may else None

    # --- shutdown ---

    async def wait_until_idle(self) -> None:
        await self.directory.wait_until_empty()

    def stop_taking(self) -> None:
        self.draining = True

    def end_all(self, code: Code, message: str) -> None:
        """End every request with an error."""
        for generation in self.directory:
            generation.end(code.value, message)
