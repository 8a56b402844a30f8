"""Loads and unloads models. One is loaded at a time, beside the streams of the others, and only what nobody uses is unloaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Final, TypeVar

import trio
from attrs import evolve

from uma_protocol.errors import Code
from uma_trio.app.deployment import Deployment, Loaded, Read, load
from uma_trio.app.wiring import load_backend, nth_trace
from uma_trio.app.wiring_encoders import LoadedEncoder, load_encoder
from uma_trio.backend.base import ModelError
from uma_trio.backend.llama_probe import Untried
from uma_trio.backend.needs import Estimate
from uma_trio.config.errors import ConfigError
from uma_trio.models.catalogue import AGAIN_S, Catalogue
from uma_trio.models.entry import AnyDeployment, Entry, Unwanted
from uma_trio.models.room import ModelRoom, NoRoom, collect
from uma_trio.models.trial import computed, probed, recalled, tried
from uma_trio.observe import log
from uma_trio.policy.costing.calibrate import Neighbour
from uma_trio.service.ask import Refusal
from uma_trio.service.served import ServedModel
from uma_trio.service.service import Service

Found = TypeVar("Found")

_LOOK_S: Final = 0.25
_LOOKS: Final = 3  # at files that are replaced each time
_FAULT: Final = "a fault of the daemon's; its log says more"
_DIED: Final = "the engine of this model has stopped"


class Keeper(Catalogue):
    """Loads and unloads the models of a catalogue. For trio's thread.

    `deploy` wires what was loaded and lets it be computed; `let_go` ends that, and returns when no thread uses it. Readers of
    other models are told to get ahead while `loading` is entered.
    """

    def __init__(
        self,
        entries: list[Entry],
        service: Service,
        deploy: Callable[[Entry, Loaded | LoadedEncoder], AnyDeployment],
        let_go: Callable[[AnyDeployment], Awaitable[None]],
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(entries)
        self._service = service
        self._deploy, self._let_go, self._loading = deploy, let_go, loading
        self._one, self._probing = trio.Lock(), trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._log = log.get("models")
        self._room = ModelRoom(self.entries, self.unload, self._may_go, self._found)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load what is asked for, and unload what is idle, until cancelled. An unloading that has begun is finished."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                await trio.sleep(_LOOK_S)
                for entry in tuple(self.entries):
                    lives_s = entry.lives_s
                    if entry.is_asked:
                        entry.touch()
                    elif lives_s is not None and trio.current_time() - entry.used_at >= lives_s:
                        await self.unload(entry)

    def keep(self, entry: Entry, seconds: float) -> None:
        """Keep a model loaded for so long behind its latest request; it may make room for others earlier."""
        entry.keep_s = seconds

    async def ready(self, entry: Entry, payer: str = "", *, by_name: bool = False) -> ServedModel:
        """Return a model once it is loaded: a use of it has to begin before the next checkpoint.

        When the last who waits for it is cancelled, so is the load. The `payer` of the first is charged for it. With
        `by_name` somebody asks to have it loaded, and not for an answer.

        Raises:
            Refusal: it cannot be loaded, is loaded only by name, or too many wait for it.
        """
        if entry.state == "loaded" and entry.deployment is not None:
            entry.touch()
            return entry.deployment.served
        if entry.waiting >= entry.config.max_queue:
            why = f"{entry.waiting} requests wait until {entry.names[0]} is loaded (--max-queue)"
            raise Refusal(Code.E_LIMIT_003, why, retry_after_s=1.0)
        if entry.config.load == "explicit" and not by_name and entry.state != "loading":
            name = entry.names[0]
            why = f"{name} is loaded only when an operator says so: uma-trio load {name}"
            raise Refusal(Code.E_MODEL_001, why)
        entry.waiting += 1
        try:
            return await self._wanted(entry, payer)
        finally:
            entry.waiting -= 1
            if not entry.waiting and entry.before_thread is not None:
                entry.before_thread.cancel()

    async def _wanted(self, entry: Entry, payer: str) -> ServedModel:
        """Have a model loaded unless it is. Raises :class:`Refusal`."""
        asked = False
        while entry.state != "loaded" or entry.deployment is None:
            if entry.state == "failed" and (
                asked or trio.current_time() - entry.failed_at < AGAIN_S
            ):
                again = max(1.0, AGAIN_S + entry.failed_at - trio.current_time())
                raise Refusal(Code.E_MODEL_001, entry.why, retry_after_s=again)
            if entry.state in ("unloaded", "failed") and self._nursery is not None:
                entry.become("loading")
                entry.payer = payer
                self._nursery.start_soon(self._load, entry)
            asked = entry.state == "loading"  # what comes of that is the answer
            await entry.changed.wait()
        entry.touch()
        return entry.deployment.served

    async def unload(self, entry: Entry, *, with_variants: bool = False) -> bool:
        """Unload a model that nobody uses; False if it is in use or not loaded.

        Its variants use it, unless they are idle and go `with_variants`. Cancelled, it leaves the rest to :meth:`run`.
        """
        variants = [each for each in self.entries if each.base is entry and each.deployment]
        if with_variants and not any(each.is_asked for each in (entry, *variants)):
            for each in variants:
                await self.unload(each)
        deployment, held, nursery = entry.deployment, entry.held, self._nursery
        if entry.state not in ("loaded", "draining") or deployment is None or held is None:
            return False
        if nursery is None or deployment.served.uses or not self._may_go(entry):
            return False
        if entry.waiting and entry.state == "loaded":
            return False  # whoever asked is about to begin
        entry.become("unloading")
        entry.deployment = entry.keep_s = None
        self._service.remove(deployment.served)
        deployment.served.retire()
        nursery.start_soon(self._free, entry, deployment, held)
        del deployment, held  # which must not keep its memory
        await entry.changed.wait()
        return True

    async def _free(self, entry: Entry, deployment: AnyDeployment, held: ExitStack) -> None:
        """End the computing of a model that takes no more requests, and free its memory, also while the daemon ends."""
        with trio.CancelScope(shield=True):
            await self._let_go(deployment)
            self._service.observer.close(deployment.served)
            entry.prefixes = deployment.prefixes()
            del deployment
            await trio.to_thread.run_sync(_freed, held)
            entry.held = None
        self._log.info("unloaded", model=entry.names[0])
        entry.become("unloaded")

    def lost(self, deployment: AnyDeployment) -> None:
        """Note that the engine of a model has died, and have its memory freed."""
        for entry in self.entries:
            if entry.deployment is deployment and self._nursery is not None:
                entry.deployment = None
                deployment.served.retire()
                entry.become("unloading", _DIED)
                self._nursery.start_soon(self._free_dead, entry, entry.held or ExitStack())

    async def _free_dead(self, entry: Entry, held: ExitStack) -> None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_freed, held)
            entry.held = None
        entry.failed_at = trio.current_time()
        entry.become("failed", _DIED)

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop the saved prefixes of unloaded models in the namespaces that are `mine`."""
        for entry in self.entries:
            if entry.prefixes is not None:
                store = entry.prefixes.store
                store.clear([name for name in store.namespaces if mine(name)])

    def _may_go(self, entry: Entry) -> bool:
        """Whether a model may be unloaded at all: the only one stays."""
        return entry.base is not None or len(self.bases) > 1

    async def _load(self, entry: Entry) -> None:
        name, held = entry.names[0], ExitStack()
        try:
            with trio.CancelScope() as entry.before_thread:
                await self._in_turn(entry, held)
        except Unwanted:
            pass
        except NoRoom as error:  # memory may be free by the next request
            self._failed(entry, str(error), again_s=0.0)
        except (ModelError, ConfigError, OSError) as error:
            self._failed(entry, str(error))
        except Refusal as refusal:  # of the model that it is a variant of
            self._failed(entry, refusal.message)
        except Exception as error:
            # Memory that ran out, or a fault of ours: the other models are served on.
            self._log.error("cannot be loaded", model=name, exc_info=error)
            self._failed(entry, "memory ran out" if isinstance(error, MemoryError) else _FAULT)
        finally:
            began, entry.before_thread = entry.before_thread is None, None
            if entry.deployment is None and not began:
                held.close()
            elif entry.deployment is None:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(_freed, held)
        if entry.deployment is not None:
            entry.loaded_at = trio.current_time()
            entry.touch()
            entry.prefixes = None  # the engine has them
            self._log.info("loaded", model=name, seconds=round(entry.took_s, 1))
            entry.become("loaded")
        elif entry.state != "failed":
            self._log.info("is not loaded: nobody waits for it any more", model=name)
            entry.become("unloaded")

    def _failed(self, entry: Entry, why: str, again_s: float = AGAIN_S) -> None:
        """Note why a model was not loaded, which is tried again after `again_s`."""
        name = entry.names[0]
        self._log.error("cannot be loaded", model=name, why=why)
        entry.failed_at = trio.current_time() + again_s - AGAIN_S
        entry.become("failed", f"{name} cannot be loaded: {why}")

    async def _in_turn(self, entry: Entry, held: ExitStack) -> None:
        """Load a model when there is room and it is its turn. Cancelled before the loading begins, it does nothing.

        Room is waited for without the lock: a model that fits is loaded meanwhile. What was true before a wait is looked at
        again behind it, the files, too.
        """
        try:
            while entry.deployment is None:
                await self._step(entry, held)
        finally:
            self._room.leave(entry)

    async def _step(self, entry: Entry, held: ExitStack) -> None:
        """Load a model if nothing has changed behind its waits."""
        if entry.base is not None:
            await self._wait_for_base(entry, entry.base)
        if not entry.is_tried:
            entry.phase = "is tried before it is loaded"
        needed = entry.estimate = await self._tried(tried, entry)
        with suppress(Untried):  # what is known to be damaged makes nobody go
            await trio.to_thread.run_sync(recalled, computed, entry)
        has_room = True
        try:
            await self._room.wait_for(entry, needed)
        except NoRoom:
            if not self._one.locked():
                raise
            has_room = False  # what is being loaded now may make room then
        if self._one.locked():
            entry.is_tried, entry.phase = True, "waits until another model is loaded"
        async with self._one:
            if has_room and await self._is_ready(entry, needed, held):
                await self._now(entry, held)
            else:
                held.close()

    async def _is_ready(self, entry: Entry, needed: Estimate, held: ExitStack) -> bool:
        """Whether a model whose turn it is can be loaded at once. What a variant is loaded on is held from here on."""
        base = entry.base
        if base is not None and (base.state != "loaded" or base.deployment is None):
            return False
        if base is not None and base.deployment is not None:
            held.callback(base.deployment.served.uses.begin(holds=True))
        if not await self._room.has_room(entry, needed):
            return False
        if base is None:
            await self._tried(computed, entry)
        entry.is_tried = True
        return await self._tried(tried, entry) == needed

    async def _tried(self, look: Callable[[Entry], Found], entry: Entry) -> Found:
        """Return what is found by looking at the files of a model that somebody waits for. Raises :class:`ModelError`."""
        found = await self._found(look, entry, entry.payer)
        if not entry.waiting:
            raise Unwanted
        return found

    async def _found(self, look: Callable[[Entry], Found], entry: Entry, payer: str = "") -> Found:
        """Return what is known of the files of a model as they are now, or is found by a process of its own.

        There is one such process at a time. It runs to its end also if the last client leaves: what it finds is remembered,
        and who asks again joins it. The `payer` is charged for it.
        """
        for _ in range(_LOOKS):
            try:
                return await trio.to_thread.run_sync(recalled, look, entry)
            except Untried:
                pass
            async with self._probing:
                scope, entry.before_thread = entry.before_thread, None
                began = trio.current_time()
                try:
                    with self._loading():
                        await trio.to_thread.run_sync(probed, look, entry)
                finally:
                    entry.before_thread = scope
                    self._service.charge(payer, trio.current_time() - began)
        raise ModelError("its files change while they are looked at; try again.")

    async def _wait_for_base(self, entry: Entry, base: Entry) -> None:
        """Have the model of a variant loaded. Not used yet, it may make room for others meanwhile.

        Raises:
            Refusal: it cannot be loaded.
        """
        entry.phase = f"waits for model {base.names[0]}"
        await self.ready(base, entry.payer)

    async def _now(self, entry: Entry, held: ExitStack) -> None:
        """Load a model that there is room for."""
        entry.before_thread = None  # `show` ends it from here on
        began = trio.current_time()
        try:
            with self._loading():
                loaded = await self._loaded(entry, held)
            entry.held = held
            entry.deployment = self._deploy(entry, loaded)
        finally:
            entry.took_s = trio.current_time() - began
            self._service.charge(entry.payer, entry.took_s)

    async def _loaded(self, entry: Entry, held: ExitStack) -> Loaded | LoadedEncoder:
        on_loading, config = partial(entry.show, "is loading"), entry.config
        if entry.gives != "text":
            return await load_encoder(config, held, on_loading, tried=True)
        entry.loads += 1
        if config.trace is not None and entry.loads > 1:
            config = evolve(config, trace=nth_trace(config.trace, entry.loads))
        neighbour = self._neighbour()
        return await load(
            config,
            held,
            on_loading,
            partial(entry.show, "is measured"),
            metrics=entry.metrics,
            read=_on_base(entry)
            or partial(load_backend, several=True, polite=neighbour is not None),
            beside=neighbour,
        )

    def _neighbour(self) -> Neighbour | None:
        """Return what is known of the machine by a model that is loaded."""
        loaded = [each.deployment for each in self.entries if each.deployment is not None]
        found = (each.as_neighbour() for each in loaded)
        return next((each for each in found if each is not None), None)


def _on_base(entry: Entry) -> Read | None:
    """Return what makes a variant's context on the weights of its model."""
    if entry.base is None or not isinstance(entry.base.deployment, Deployment):
        return None  # an encoder has no variants
    backend, adapters = entry.base.deployment.backend, entry.adapters
    return lambda _config, _progress: backend.variant(adapters)


def _freed(held: ExitStack) -> None:
    held.close()
    collect()
