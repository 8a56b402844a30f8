"""The only list of models: finds them by name, loads and unloads them, makes room, and cleans up after an engine that died."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Final, TypeVar

import trio
from attrs import evolve

from uma_protocol.errors import Code
from uma_trio.backend.base import Adapter, ModelError
from uma_trio.backend.llama_probe import Untried
from uma_trio.backend.needs import Estimate
from uma_trio.config.errors import ConfigError
from uma_trio.config.models import ON_DEMAND
from uma_trio.config.options import Config
from uma_trio.engine.inbox import EngineDied, bury
from uma_trio.machine.machine import Machine
from uma_trio.models.files import Fitted, file_names, kind_of, names_in_file
from uma_trio.models.host import Host
from uma_trio.models.loaded import LoadedModel
from uma_trio.models.model import Model, Unwanted
from uma_trio.models.names import (
    adapters_by_list,
    adapters_by_name,
    find_by_name,
    no_model_of,
    refuse,
    substitute,
    variant_suffix,
)
from uma_trio.models.refusal import Refusal
from uma_trio.models.room import ModelRoom, NoRoom
from uma_trio.observe import log
from uma_trio.policy.costing.calibrate import Neighbour
from uma_trio.words import Gives

Result = TypeVar("Result")
Build = Callable[[Model, ExitStack, Neighbour | None], Awaitable[LoadedModel]]
"""Loads a model and wires its engine. What it opens, the stack closes; progress goes to :meth:`Model.report_progress`.

The neighbour is another loaded model, whose readers must not be disturbed by measurements.
"""

#: Seconds until a model that failed to load is tried again, or one whose engine died soon after its load.
RETRY_S: Final = 30.0
_POLL_S: Final = 0.25
_SAVE_S, _SAVE_POLL_S = 1.0, 0.02  # for an engine that ends to save prefixes
_MAX_LOOKS: Final = 3  # at files that are replaced each time
_FAULT: Final = "a fault of the daemon's; its log says more"
_DIED: Final = "the engine of this model has stopped"
_ONE_DIED: Final = "the engine of this model has stopped; a further request loads it again"
_ONLY_DIED: Final = "the engine has stopped; the daemon is going down"
_STOPPING: Final = "the daemon is stopping; send the request again once it has restarted"
_IN_USE: Final = "requests use or wait for the model; end them first: uma-trio ps"
_ONLY: Final = "it is the daemon's only model, and stays loaded; `uma-trio stop` ends the daemon"


class ModelManager:
    """All configured models, the default one first, and variants that requests named. For trio's thread.

    The `machine` computes their engines.

    Attributes:
        debts: seconds of the machine by user, for checks and loads that their requests caused; the next request is charged.
        on_load, on_unload: are called with what was loaded, and with what was unloaded once its engine has ended.
        died: why the daemon has to end: the engine of its only model died. `on_death` is called then.
    """

    def __init__(
        self,
        models: list[Model],
        build: Build,
        machine: Machine,
        host: Host | None = None,
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        self.models: Sequence[Model] = models
        self._models = models  # the same list
        self._build, self._machine, self._host = build, machine, host or Host()
        self._on_death = on_death
        self.on_load: list[Callable[[LoadedModel], object]] = []
        self.on_unload: list[Callable[[LoadedModel], object]] = []
        self.debts: dict[str, float] = {}
        self.died: EngineDied | None = None
        self._last_loaded: LoadedModel | None = None
        self._is_stopping = False
        self._load_lock, self._probe_lock = trio.Lock(), trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._log = log.get("models")
        self._room = ModelRoom(
            models,
            self._host,
            self.unload,
            self._can_unload,
            lambda model: self._look(self._host.measure, model),
        )
        for model in tuple(models):
            for adapter in model.known_adapters:
                self.variant(model, (adapter,)).is_temporary = False

    # --- names ---

    @property
    def bases(self) -> Sequence[Model]:
        """The models without adapters."""
        return [each for each in self.models if each.base is None]

    @property
    def can_swap(self) -> bool:
        """Whether several models are configured; a single one stays loaded."""
        return len(self.bases) > 1

    @property
    def loaded(self) -> tuple[LoadedModel, ...]:
        """What is loaded, of the default model first; if nothing is, what was unloaded last, which refuses requests."""
        found = tuple(each.loaded for each in self.models if each.loaded is not None)
        return found or (() if self._last_loaded is None else (self._last_loaded,))

    @property
    def default(self) -> LoadedModel:
        """What answers a request that names no model, as far as it is loaded: the first that writes text, if there is one."""
        loaded = self.loaded
        return next((each for each in loaded if each.kind == "text"), loaded[0])

    @property
    def slots(self) -> int:
        """Requests that one loaded model computes at the same time, at the most."""
        return max((each.slots for each in self.loaded), default=1)

    def find(
        self, name: str | None, kind: Gives | None = None, *, exact: bool = False
    ) -> Model | None:
        """Return the model for a request, loaded or not; its kind may differ from the requested one.

        Unless the name has to be `exact`, an unknown one means the only model of that kind.

        Raises:
            Refusal: the model has no such adapter.
        """
        bases = self.bases
        found = None
        if name is not None:
            found = find_by_name(
                name,
                bases,
                kind,
                lambda text, base: self.variant(base, adapters_by_name(text, base.known_adapters)),
            )
        return found or substitute(bases, name, kind, exact=exact)

    def resolve(self, name: str | None, kind: Gives | None = None, *, exact: bool = False) -> Model:
        """Return the model for a request as :meth:`find` does.

        Raises:
            Refusal: there is none, or it is of another kind.
        """
        found = self.find(name, kind, exact=exact)
        if found is None or kind not in (None, found.kind):
            raise refuse(found, name, kind, self.bases)
        return found

    def loaded_model(self, name: str | None) -> LoadedModel:
        """Return the loaded model of this name; without a name the default one.

        Raises:
            Refusal: there is none, or it is not loaded.
        """
        if name is None:
            return self.default
        model = self.resolve(name)
        if model.loaded is None:
            why = f"{model.names[0]} is {model.state}; a request for an answer loads it"
            raise Refusal(Code.E_MODEL_001, why)
        return model.loaded

    def require(self, kind: Gives) -> None:
        """Check that a model of this kind is configured.

        Raises:
            Refusal: there is none.
        """
        if all(model.kind != kind for model in self.bases):
            raise no_model_of(kind, self.bases)

    def with_adapters(
        self, name: str | None, requested: Sequence[Mapping[str, object]] | None
    ) -> str | None:
        """Return the name of the model with the adapters of llama-server's list in place of its own.

        Raises:
            Refusal: no model has the name, it is no such list, or an adapter does not exist.
        """
        if requested is None:
            return name
        model = self.find(name)
        if model is None:
            adapters_by_list(requested, ())
            return name
        base = model.base or model
        return self.variant(base, adapters_by_list(requested, base.known_adapters)).names[0]

    def variant(self, base: Model, adapters: tuple[Adapter, ...]) -> Model:
        """Return the model with these adapters, added to the list if it is new; forgotten ones are removed from it."""
        if not adapters:
            return base
        name = f"{base.names[0]}:{variant_suffix(adapters, base.known_adapters)}"
        for model in self._models:
            if model.base is base and model.names[0] == name:
                return model
        self._models[:] = [each for each in self._models if not _is_obsolete(each)]
        made = Model(
            _variant_config(base.config, name), base=base, adapters=adapters, is_temporary=True
        )
        self._models.append(made)
        return made

    # --- loading ---

    async def load_at_start(self) -> None:
        """Load the default model and those with ``load: start``, before the daemon serves. Their stacks close with :meth:`close`.

        Raises:
            ModelError, ConfigError, OSError: one cannot be loaded.
        """
        for model in [m for n, m in enumerate(self.bases) if not n or m.config.load == "start"]:
            model.held = ExitStack()
            if model.kind == "text":
                self._set_fit(model, await self._host.run(self._host.fit, model, self.bases))
            self.admit(model, await self._build(model, model.held, None))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load what is requested and unload what is idle, until cancelled. Memory that is being freed is freed to the end."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                while True:
                    await trio.sleep(_POLL_S)
                    for model in tuple(self.models):
                        ttl_s = model.ttl_s
                        if model.is_in_use:
                            model.touch()
                        elif ttl_s is not None and trio.current_time() - model.used_at >= ttl_s:
                            await self.unload(model)
        finally:
            self._nursery = None  # an engine may still die

    def stop(self) -> None:
        """Load nothing from now on: a load that goes on ends without its engine, and waiters are refused."""
        self._is_stopping = True
        for model in self.models:
            if model.before_thread is not None:
                model.before_thread.cancel()

    def close(self) -> None:
        """Free what is loaded. For after :meth:`run` and the compute thread have ended; blocks."""
        for model in self.models:
            if model.held is not None:
                model.held.close()

    async def ready(
        self, model: Model, payer: str = "", *, by_operator: bool = False
    ) -> LoadedModel:
        """Return a model once it is loaded; a use of it has to begin before the next checkpoint.

        Cancelled, it ends a load that no other request waits for. The `payer` of the first request is charged for it.

        Raises:
            Refusal: it cannot be loaded, only an operator may load it, or too many requests wait.
        """
        if model.state == "loaded" and model.loaded is not None:
            model.touch()
            return model.loaded
        name = model.names[0]
        if model.waiting >= model.config.max_queue:
            why = f"{model.waiting} requests wait until {name} is loaded (--max-queue)"
            raise Refusal(Code.E_LIMIT_003, why, retry_after_s=1.0)
        if model.config.load == "explicit" and not by_operator and model.state != "loading":
            why = f"{name} is loaded only when an operator says so: uma-trio load {name}"
            raise Refusal(Code.E_MODEL_001, why)
        model.waiting += 1
        try:
            return await self._wait_for_load(model, payer)
        finally:
            model.waiting -= 1
            if not model.waiting and model.before_thread is not None:
                model.before_thread.cancel()

    async def _wait_for_load(self, model: Model, payer: str) -> LoadedModel:
        joined = False
        while model.state != "loaded" or model.loaded is None:
            if self._is_stopping or self._nursery is None:
                raise Refusal(Code.E_LIFECYCLE_001, _STOPPING)
            again_s = model.failed_at + RETRY_S - trio.current_time()
            if model.state == "failed" and (joined or again_s > 0):
                raise Refusal(Code.E_MODEL_001, model.error, retry_after_s=max(1.0, again_s))
            if model.state in ("unloaded", "failed"):
                model.set_state("loading")
                model.payer = payer
                self._nursery.start_soon(self._load, model)
            joined = model.state == "loading"  # its result is the answer
            await model.changed.wait()
        model.touch()
        return model.loaded

    async def load(self, name: str) -> str:
        """Load a model for an operator and return its name. Cancelled, it ends a load that no request waits for.

        Raises:
            Refusal: no model has the name, or it cannot be loaded.
        """
        model = self.resolve(name, exact=True)
        return (await self.ready(model, by_operator=True)).bounds.model

    def keep(self, name: str | None, seconds: float) -> bool:
        """Keep a model loaded for that long after its latest request; it may make room earlier. False if it is always loaded."""
        model = self.find(name)
        if model is not None and self._can_unload(model):
            model.keep_s = seconds
        return self.can_swap

    def charge(self, payer: str, seconds: float) -> None:
        """Have a user's next request charged for machine time; "" is no user."""
        if payer:
            self.debts[payer] = self.debts.get(payer, 0.0) + seconds

    async def _load(self, model: Model) -> None:
        name, held = model.names[0], ExitStack()
        began = trio.current_time()
        try:
            with trio.CancelScope() as model.before_thread:
                while model.loaded is None:
                    await self._try_load(model, held)
        except Unwanted:
            pass
        except NoRoom as error:  # memory may be free at the next request
            self._fail(model, str(error), retry_s=0.0)
        except (ModelError, ConfigError, OSError) as error:
            self._fail(model, str(error))
        except Refusal as refusal:  # of the base of a variant
            self._fail(model, refusal.message)
        except Exception as error:
            self._log.error("cannot be loaded", model=name, exc_info=error)
            self._fail(model, "memory ran out" if isinstance(error, MemoryError) else _FAULT)
        finally:
            self._room.leave(model)
            has_begun, model.before_thread = model.before_thread is None, None
            if model.loaded is None and has_begun:
                with trio.CancelScope(shield=True):
                    await self._host.run(self._close, held)
            elif model.loaded is None:
                held.close()  # at most the use of a base
            if model.loaded is not None:
                self._log.info("loaded", model=name, seconds=round(model.load_s, 1))
            elif model.state != "failed":
                self._log.info(
                    "not loaded: no request waits for it any more",
                    model=name,
                    seconds=round(trio.current_time() - began, 1),
                )
                model.set_state("unloaded")

    def _fail(self, model: Model, why: str, retry_s: float = RETRY_S) -> None:
        name = model.names[0]
        self._log.error("cannot be loaded", model=name, why=why)
        model.failed_at = trio.current_time() + retry_s - RETRY_S
        model.set_state("failed", f"{name} cannot be loaded: {why}")

    async def _try_load(self, model: Model, held: ExitStack) -> None:
        """Load a model, unless files or memory change while it waits: then it is tried again.

        Memory is waited for without the lock, so a model that fits is loaded meanwhile.
        """
        host, base = self._host, model.base
        if base is not None:
            model.phase = f"waits for model {base.names[0]}"
            await self.ready(
                base, model.payer
            )  # it may be unloaded again until the variant uses it
        if not model.is_checked:
            model.phase = "is checked before it is loaded"
            if model.kind == "text":
                fit = partial(self._host.fit, peers=self.bases)
                self._set_fit(model, await self._look(fit, model, model.payer))
        needed = model.estimate = await self._look_for_request(host.check, model)
        with suppress(Untried):  # no model is unloaded for one that is known to be damaged
            await host.recall(host.check_computing, model)
        has_room = True
        try:
            await self._room.wait_for(model, needed)
        except NoRoom:
            if not self._load_lock.locked():
                raise
            has_room = False  # the model that is being loaded may be unloaded then
        if self._load_lock.locked():
            model.wait_for("waits until another model is loaded")
        async with self._load_lock:
            if has_room and await self._can_load_now(model, needed, held):
                await self._load_now(model, held)
            else:
                held.close()  # the use of the base

    def _set_fit(self, model: Model, fit: Fitted) -> None:
        model.config, model.largest_n_ctx, model.chosen = fit.config, fit.largest_n_ctx, fit.chosen
        if fit.chosen and self._nursery is not None:  # at the start the block of the daemon has it
            self._log.info("context", model=model.names[0], chosen=fit.chosen)

    async def _can_load_now(self, model: Model, needed: Estimate, held: ExitStack) -> bool:
        """Check again what was true before it waited for the lock. From here on a variant uses its base."""
        base = model.base
        if base is not None:
            if base.state != "loaded" or base.loaded is None:
                return False
            held.callback(base.loaded.uses.begin(by_variant=True))
        if not await self._room.has_room(model, needed):
            return False
        if base is None:
            await self._look_for_request(self._host.check_computing, model)
        model.is_checked = True
        return await self._look_for_request(self._host.check, model) == needed

    async def _load_now(self, model: Model, held: ExitStack) -> None:
        model.before_thread = None  # `report_progress` ends it from here on
        began = trio.current_time()
        try:
            with self._reserving_cores():
                loaded = await self._build(model, held, self._neighbour())
            if self._is_stopping:
                loaded.inbox.close()
                raise Unwanted
            model.held, model.load_s = held, trio.current_time() - began
            self.admit(model, loaded)
        finally:
            self.charge(model.payer, trio.current_time() - began)

    def admit(self, model: Model, loaded: LoadedModel) -> None:
        """Serve and compute what was built from now on."""
        if loaded.engine is None:
            raise ValueError(f"{model.names[0]} was built without an engine")
        self._machine.add(loaded.engine, partial(self._engine_died, loaded))
        model.loaded, model.prefixes = loaded, None  # the engine has the prefixes
        model.file_names = loaded.bounds.from_file  # the file may be another one by now
        model.loads += 1
        model.loaded_at = trio.current_time()
        model.touch()
        model.set_state("loaded")
        self._last_loaded = None
        for call in self.on_load:
            call(loaded)

    async def _look_for_request(self, look: Callable[[Model], Result], model: Model) -> Result:
        """Look at a model's files for the requests that wait for it.

        Raises:
            ModelError: it cannot be loaded.
            Unwanted: they have left.
        """
        found = await self._look(look, model, model.payer)
        if not model.waiting:
            raise Unwanted
        return found

    async def _look(self, look: Callable[[Model], Result], model: Model, payer: str = "") -> Result:
        """Return what is known of a model's files as they are now, or what a probe process finds, one process at a time.

        A probe runs to its end also when the last client leaves: its result is remembered, and the next request
        joins it. The `payer` is charged for it.
        """
        for _ in range(_MAX_LOOKS):
            try:
                return await self._host.recall(look, model)
            except Untried:
                pass
            async with self._probe_lock:
                scope, model.before_thread = model.before_thread, None
                began = trio.current_time()
                try:
                    with self._reserving_cores():
                        await self._host.probe(look, model)
                finally:
                    model.before_thread = scope
                    self.charge(payer, trio.current_time() - began)
        raise ModelError("its files change while they are looked at; try again.")

    def _reserving_cores(self) -> AbstractContextManager[None]:
        """Leave cores to a load, if engines compute on them."""
        if any(each.needs_cores for each in self.loaded):
            return self._machine.loading()
        return nullcontext()

    def _neighbour(self) -> Neighbour | None:
        found = (each.as_neighbour() for each in self.loaded)
        return next((each for each in found if each is not None), None)

    # --- unloading ---

    async def unload_by_name(self, name: str) -> str:
        """Unload a model with its idle variants and return its name; one that is not loaded stays so.

        Raises:
            Refusal: no model has the name, it is in use, or it is the only model.
        """
        model = self.resolve(name, exact=True)
        if not self._can_unload(model):
            raise Refusal(Code.E_MODEL_003, _ONLY)
        is_there = model.state in ("loading", "loaded", "draining")
        if is_there and not await self.unload(model, with_variants=True):
            raise Refusal(Code.E_MODEL_003, _IN_USE)
        return model.names[0]

    async def unload(self, model: Model, *, with_variants: bool = False) -> bool:
        """Unload a model that no request uses; False if it is in use or not loaded.

        Loaded variants use it, unless they are idle and unloaded `with_variants`. Cancelled, it leaves the rest to :meth:`run`.
        """
        variants = [each for each in self.models if each.base is model and each.loaded]
        if with_variants and not any(each.is_in_use for each in (model, *variants)):
            for each in variants:
                await self.unload(each)
        loaded, nursery = model.loaded, self._nursery
        if model.state not in ("loaded", "draining") or loaded is None or nursery is None:
            return False
        if loaded.uses or not self._can_unload(model):
            return False
        if model.waiting and model.state == "loaded":
            return False  # the request is about to begin
        self._begin_unloading(model, loaded)
        nursery.start_soon(self._free, model, loaded)
        del loaded  # which must not keep its memory
        await model.changed.wait()
        return True

    def _can_unload(self, model: Model) -> bool:
        return model.base is not None or self.can_swap

    def _begin_unloading(self, model: Model, loaded: LoadedModel, error: str = "") -> None:
        model.loaded = model.keep_s = None
        self._last_loaded = loaded
        loaded.retire()
        model.set_state("draining", error)

    async def _free(self, model: Model, loaded: LoadedModel) -> None:
        """Save what is kept of a model, end its engine, and free its memory, also while the daemon ends."""
        with trio.CancelScope(shield=True):
            await self._end_engine(loaded, model)
            has_died = loaded.has_died
            loaded.release()
            held, model.held = model.held, None
            if held is not None:
                await self._host.run(self._close, held)
        self._log.info("unloaded", model=model.names[0])
        soon = trio.current_time() - model.loaded_at < RETRY_S
        if has_died and soon:
            model.failed_at = trio.current_time()
            model.set_state("failed", _DIED)
        else:
            model.set_state("unloaded")

    async def _end_engine(self, loaded: LoadedModel, model: Model) -> None:
        engine = loaded.engine
        if engine is None:
            return
        if not loaded.has_died:
            await wait_until_saved([loaded])
        await self._machine.remove(engine)
        for call in self.on_unload:
            call(loaded)
        if not loaded.has_died:
            await self._host.run(loaded.remember_cost)
            model.prefixes = loaded.saved_prefixes()

    def _close(self, held: ExitStack) -> None:
        held.close()
        self._host.collect()

    def forget_prefixes(self, is_mine: Callable[[str], bool]) -> None:
        """Drop the saved prefixes of unloaded models in namespaces of a user."""
        for model in self.models:
            if model.prefixes is not None:
                store = model.prefixes.store
                store.clear([name for name in store.namespaces if is_mine(name)])

    def _engine_died(self, loaded: LoadedModel, error: Exception) -> None:
        """Fail the requests of an engine that raised, and free its model. Without another configured model the daemon ends."""
        loaded.has_died = True
        model = next((each for each in self.models if each.loaded is loaded), None)
        is_only = [each for each in self.models if not each.is_temporary] == [model]
        self._log.error("the engine has stopped", model=loaded.bounds.model, exc_info=error)
        if loaded.engine is None:
            return
        died = bury(loaded.engine, error, _ONLY_DIED if is_only else _ONE_DIED)
        if model is None:
            return  # it is being unloaded
        if is_only or self._nursery is None:
            self.died = died
            self._on_death()
            return
        self._begin_unloading(model, loaded, _DIED)
        self._nursery.start_soon(self._free, model, loaded)


async def wait_until_saved(models: Sequence[LoadedModel]) -> None:
    """Wait until prefixes are saved, for a moment at most."""
    with trio.move_on_after(_SAVE_S):
        while any(each.is_saving for each in models):  # noqa: ASYNC110 - the compute thread sends no message
            await trio.sleep(_SAVE_POLL_S)


def configured_models(configs: Sequence[Config], n_given: int = 0) -> list[Model]:
    """Return the models of a configuration; of the first `n_given` no file is read, because they are loaded already and write text.

    Raises:
        ConfigError: two have the same name, or a file is of another kind than its option says.
    """
    models = [
        Model(each, "text" if n < n_given else kind_of(each)) for n, each in enumerate(configs)
    ]
    for n, model in enumerate(models):
        others = [each for each in models if each is not model]
        reserved = frozenset(name for each in others for name in each.configured_names)
        for other in others:
            taken = set(model.configured_names).intersection(other.configured_names)
            if taken and other.kind == model.kind:
                why = f"two models are called {min(taken)}; give each a name of its own under `models`"
                raise ConfigError(why)
        model.reserved_names = reserved
        found = () if n < n_given else names_in_file(model.config)
        model.file_names = file_names(model.config, found, reserved) if found else ()
    return models


def has_several_contexts(models: Sequence[Model]) -> bool:
    """Whether several contexts may write text at once, variants with adapters included.

    Ticks of one have to stop for the readers of another then.
    """
    texts = [model for model in models if model.kind == "text"]
    return len(texts) > 1 or any(model.known_adapters for model in texts)


def _variant_config(config: Config, name: str) -> Config:
    """Return the configuration of a variant: that of the model, with a name and a trace of its own."""
    trace = config.trace
    if trace is not None:
        part = "".join(each if each.isalnum() else "-" for each in name)
        trace = trace.with_name(f"{trace.stem}-{part}{trace.suffix}")
    return evolve(
        config,
        alias=(name,),
        load=ON_DEMAND,
        lora=(),
        is_variant=True,
        model_pin=False,
        trace=trace,
    )


def _is_obsolete(model: Model) -> bool:
    """Whether a variant that a request named is of no use any more."""
    has_failed = model.state == "failed" and trio.current_time() - model.failed_at >= RETRY_S
    return model.is_temporary and not model.waiting and (model.state == "unloaded" or has_failed)
