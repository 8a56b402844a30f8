"""Which of the configured models are in memory: loaded when they are asked for, unloaded when they are idle.

A model is *unloaded*, *loading*, *loaded*, *unloading* or *failed*. One model is loaded at a time, beside the streams of the
others. A file is tried in a process of its own first, because llama.cpp ends the process at some files. A model
is unloaded only while no request has it.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, Literal

import trio
from attrs import define, field

from uma_protocol.errors import Code
from uma_trio.backend.base import ModelError
from uma_trio.backend.kv_memory import available_memory
from uma_trio.backend.needs import Estimate
from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config
from uma_trio.deployment import Deployment, Loaded, load
from uma_trio.machine import give_memory_back
from uma_trio.service.ask import Refusal
from uma_trio.service.served import ServedModel
from uma_trio.service.service import Service
from uma_trio.telemetry import log
from uma_trio.wiring import estimate

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
AGAIN_S: Final = 30.0
"""Who failed to load is not tried again for so long."""
_LOOK_S: Final = 0.25


class NoRoom(Exception):
    """The model does not fit beside those that cannot be unloaded; the message has the sum."""


@define(eq=False)
class Entry:
    """One configured model. `held` closes what was opened for it; `used_at` is when a request had it last.

    `estimate` is what memory it takes, once that was found out.
    """

    config: Config
    state: State = "unloaded"
    deployment: Deployment | None = None
    held: ExitStack | None = None
    used_at: float = 0.0
    why: str = ""
    estimate: Estimate | None = None
    failed_at: float = 0.0
    changed: trio.Event = field(factory=trio.Event)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it."""
        if self.deployment is not None:
            return self.deployment.served.names
        return self.config.alias or (str(self.config.model),)

    def become(self, state: State, why: str = "") -> None:
        """Change the state, and wake who waits for a change."""
        self.state, self.why = state, why
        changed, self.changed = self.changed, trio.Event()
        changed.set()


class Keeper:
    """Loads and unloads models. For trio's thread.

    `deploy` wires what was loaded and lets it be computed; `let_go` ends that, and returns when no thread uses it.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        service: Service,
        deploy: Callable[[Loaded], Deployment],
        let_go: Callable[[Deployment], Awaitable[None]],
    ) -> None:
        self.entries = entries
        self._service = service
        self._deploy, self._let_go = deploy, let_go
        self._one = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._log = log.get("models")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load what is asked for, and unload what is idle, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                await trio.sleep(_LOOK_S)
                for entry in self.entries:
                    ttl_s = entry.config.model_ttl_s
                    if self._is_used(entry):
                        entry.used_at = trio.current_time()
                    elif ttl_s is not None and trio.current_time() - entry.used_at >= ttl_s:
                        await self.unload(entry)

    def find(self, name: str) -> Entry | None:
        """Return the model of this name."""
        return next((entry for entry in self.entries if name in entry.names), None)

    async def ready(self, entry: Entry) -> ServedModel:
        """Return a model once it is loaded.

        Raises:
            Refusal: it cannot be loaded.
        """
        asked = False
        while entry.state != "loaded" or entry.deployment is None:
            if entry.state == "failed" and (
                asked or trio.current_time() - entry.failed_at < AGAIN_S
            ):
                again = max(1.0, AGAIN_S + entry.failed_at - trio.current_time())
                raise Refusal(Code.E_MODEL_001, entry.why, retry_after_s=again)
            if entry.state in ("unloaded", "failed") and self._nursery is not None:
                entry.become("loading")
                self._nursery.start_soon(self._load, entry)
                asked = True
            await entry.changed.wait()
        entry.used_at = trio.current_time()
        return entry.deployment.served

    async def unload(self, entry: Entry) -> bool:
        """Unload a model that no request has; False if it is in use or not loaded.

        The default model stays.
        """
        deployment, held = entry.deployment, entry.held
        is_default = deployment is not None and deployment.served is self._service.default
        if entry.state != "loaded" or deployment is None or held is None:
            return False
        if is_default or self._is_used(entry):
            return False
        entry.become("unloading")
        entry.deployment = entry.held = None
        self._service.remove(deployment.served)
        await self._let_go(deployment)
        del deployment
        await trio.to_thread.run_sync(partial(_freed, held))
        self._log.info("unloaded", model=entry.names[0])
        entry.become("unloaded")
        return True

    def lost(self, deployment: Deployment) -> None:
        """Note that the engine of a model has died."""
        for entry in self.entries:
            if entry.deployment is deployment:
                entry.deployment, entry.failed_at = None, trio.current_time()
                entry.become("failed", "the engine of this model has stopped")

    def _is_used(self, entry: Entry) -> bool:
        return any(request.model == entry.names[0] for request in self._service.directory)

    async def _load(self, entry: Entry) -> None:
        name, held = entry.names[0], ExitStack()
        try:
            async with self._one:
                if entry.held is not None:  # its engine died
                    await trio.to_thread.run_sync(partial(_freed, entry.held))
                entry.estimate = await trio.to_thread.run_sync(estimate, entry.config)
                await self._make_room(entry, entry.estimate)
                loaded = await load(entry.config, held, None, None)
                entry.deployment, entry.held = self._deploy(loaded), held
        except (ModelError, ConfigError, NoRoom, OSError) as error:
            held.close()
            self._log.error("cannot be loaded", model=name, why=str(error))
            entry.failed_at = trio.current_time()
            entry.become("failed", f"{name} cannot be loaded: {error}")
        except BaseException:
            held.close()
            raise
        else:
            self._log.info("loaded", model=name)
            entry.used_at = trio.current_time()
            entry.become("loaded")

    async def _make_room(self, entry: Entry, needed: Estimate) -> None:
        """Unload idle models, least recently used first, until this one fits. Raises :class:`NoRoom`."""
        while (free := available_memory()) is not None and needed.least.total > free:
            idle = [
                each
                for each in self.entries
                if each.state == "loaded"
                and each.config.model_ttl_s is not None
                and not self._is_used(each)
            ]
            for each in sorted(idle, key=lambda one: one.used_at):
                if await self.unload(each):
                    break
            else:
                raise NoRoom(needed.refusal(free))


def _freed(held: ExitStack) -> None:
    held.close()
    gc.collect()
    give_memory_back()
