"""Which of the configured models are in memory: loaded when they are asked for, unloaded when they are idle.

A model is *unloaded*, *loading*, *loaded*, *draining*, *unloading* or *failed*. One is loaded at a time, beside the
streams of the others. A file is tried in a process of its own first, because llama.cpp ends its process at some files. A
model is unloaded only while nobody uses it.

Where two models have room one after the other only, requests for the absent one wait together until the other
has nothing to do: a change costs seconds, and serves all who wait. Who has work for ever gives way after
:data:`SWAP_AFTER_S`: it drains, and its further requests wait.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, Literal

import trio
from attrs import define, evolve, field

from uma_protocol.errors import Code
from uma_trio.backend.base import Adapter, ModelError
from uma_trio.backend.kv_memory import available_memory
from uma_trio.backend.needs import Estimate
from uma_trio.config.errors import ConfigError
from uma_trio.config.models import ON_DEMAND
from uma_trio.config.options import Config
from uma_trio.costing.measured import Neighbour
from uma_trio.deployment import Deployment, KeptPrefixes, Loaded, Read, load
from uma_trio.machine import give_memory_back
from uma_trio.service.ask import Refusal
from uma_trio.service.served import ServedModel
from uma_trio.service.service import Service
from uma_trio.service.variants import by_list, by_name, name_of
from uma_trio.telemetry import log
from uma_trio.telemetry.metrics import Metrics
from uma_trio.wiring import adapters_of, estimate, load_backend, try_adapters, variant_estimate

State = Literal["unloaded", "loading", "loaded", "draining", "unloading", "failed"]
AGAIN_S: Final = 30.0
"""Who failed to load is not tried again for so long."""
SWAP_AFTER_S: Final = 10.0
"""A model that never is idle takes no further requests when another one has waited so long for its memory."""
_LOOK_S: Final = 0.25
_LOOK_FOR_ROOM_S: Final = 0.05
_FAULT: Final = "a fault of the daemon's; its log says more"


class NoRoom(Exception):
    """The model does not fit beside those that cannot be unloaded; the message has the sum."""


class Unwanted(Exception):
    """Nobody waits for the model any more."""


@define(eq=False)
class Entry:
    """One configured model. `held` closes what was opened for it; `used_at` is when a request had it last.

    `waiting` requests wait for it. While it is loaded `phase` says what is done, as far as `progress`. It was loaded at
    `loaded_at`, in `took_s`. `keep_s` is how long a request said that it stays, and `served_as` what it was called when it was
    loaded last. `metrics` count on when it is loaded again. `estimate` is what memory it takes, once that was
    found out. `prefixes` are what
    was saved before it was unloaded. `payer` caused the loading that goes on. A *variant* is the model `base` with some of
    its `known` adapters, in a context of its own on the same weights; one that a request made up is `passing`, and
    forgotten when it is not loaded. `tried` are the adapters' files that were tried with a model, and `further` what a further
    context of it takes.
    """

    config: Config
    base: Entry | None = None
    adapters: tuple[Adapter, ...] = ()
    passing: bool = False
    tried: set[Hashable] = field(factory=set)
    further: Estimate | None = None
    state: State = "unloaded"
    deployment: Deployment | None = None
    held: ExitStack | None = None
    used_at: float = 0.0
    why: str = ""
    estimate: Estimate | None = None
    failed_at: float = 0.0
    waiting: int = 0
    phase: str = ""
    progress: float = 0.0
    is_tried: bool = False
    loaded_at: float = -math.inf
    took_s: float = 0.0
    keep_s: float | None = None
    served_as: tuple[str, ...] = ()
    metrics: Metrics = field(factory=Metrics)
    prefixes: KeptPrefixes | None = None
    payer: str = ""
    changed: trio.Event = field(factory=trio.Event)
    before_thread: trio.CancelScope | None = None

    @property
    def known(self) -> tuple[Adapter, ...]:
        """The adapters that requests may use with it."""
        return adapters_of(self.config)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it."""
        if self.deployment is not None:
            return self.deployment.served.names
        return self.served_as or self.config.alias or (str(self.config.model),)

    @property
    def size(self) -> int:
        """About how many bytes it takes, 0 if that is not known."""
        return 0 if self.estimate is None else self.estimate.least.total

    @property
    def n_ctx(self) -> int:
        """The tokens of its context."""
        return self.config.n_ctx

    @property
    def hidden(self) -> bool:
        """Whether it is left out of lists."""
        return self.config.model_hidden

    @property
    def in_use(self) -> bool:
        """Whether a request has it, or is about to."""
        return self.waiting > 0 or (
            self.deployment is not None and bool(self.deployment.served.uses)
        )

    @property
    def lives_s(self) -> float | None:
        """How long it stays loaded while nobody uses it; None: until its memory is needed."""
        found = self.config.model_ttl_s if self.keep_s is None else self.keep_s
        return None if self.config.model_pin or found == math.inf else found

    @property
    def expires_s(self) -> float | None:
        """How long it stays loaded from now on if nobody asks it; None: until its memory is needed."""
        lives_s = self.lives_s
        if lives_s is None or self.in_use:
            return lives_s
        return max(0.0, self.used_at + lives_s - trio.current_time())

    @property
    def wait(self) -> str:
        """What a request for it waits for, or why it could not be loaded; "" where it is loaded."""
        name = self.names[0]
        match self.state:
            case "loaded":
                return ""
            case "failed":
                return self.why
            case "draining" | "unloading":
                return f"model {name} makes room for another one, and is loaded again then"
            case _:
                return f"model {name} {self.phase or 'is about to be loaded'}"

    def become(self, state: State, why: str = "") -> None:
        """Change the state, and wake who waits for a change."""
        self.state, self.why, self.phase, self.progress = state, why, "", 0.0
        self.is_tried = False
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    def show(self, phase: str, share: float) -> None:
        """Say what is done and how far it is. Called on the loading thread, too.

        Raises:
            Unwanted: it is for nobody.
        """
        if not self.waiting:
            raise Unwanted
        self.progress = share
        self.phase = f"{phase}, {share:.0%}"


class Keeper:
    """Loads and unloads models. For trio's thread.

    To `entries`, which it owns, it adds variants. `deploy` wires what was loaded and lets it be computed; `let_go` ends that, and returns when no thread uses it.
    """

    def __init__(
        self,
        entries: list[Entry],
        service: Service,
        deploy: Callable[[Entry, Loaded], Deployment],
        let_go: Callable[[Deployment], Awaitable[None]],
    ) -> None:
        self.entries: Sequence[Entry] = entries
        self._entries = entries  # the same list
        self._service = service
        self._deploy, self._let_go = deploy, let_go
        self._one, self._trial = trio.Lock(), trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._log = log.get("models")
        for entry in tuple(entries):
            for adapter in entry.known:
                self.variant(entry, (adapter,)).passing = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load what is asked for, and unload what is idle, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                await trio.sleep(_LOOK_S)
                for entry in self.entries:
                    lives_s = entry.lives_s
                    if entry.in_use:
                        entry.used_at = trio.current_time()
                    elif lives_s is not None and trio.current_time() - entry.used_at >= lives_s:
                        await self.unload(entry)

    @property
    def is_one(self) -> bool:
        """Whether there is one model only, without or with adapters."""
        return sum(each.base is None for each in self.entries) < 2

    def find(self, name: str) -> Entry | None:
        """Return the model of this name, which may be that of a variant.

        Raises:
            Refusal: it has no such adapter.
        """
        for entry in self.entries:
            if name in entry.names:
                return entry
        model, _, adapters = name.rpartition(":")
        base = next((e for e in self.entries if not e.base and model in e.names), None)
        if base is None or not base.known or adapters == "latest":
            return None
        return self.variant(base, by_name(adapters, base.known))

    def with_adapters(self, entry: Entry, asked: Sequence[Mapping[str, object]]) -> str:
        """Return the name of a model with the adapters of llama-server's list in place of its own.

        Raises:
            Refusal: the list is no such list, or names what is not there.
        """
        base = entry.base or entry
        return self.variant(base, by_list(asked, base.known)).names[0]

    def variant(self, base: Entry, adapters: tuple[Adapter, ...]) -> Entry:
        """Return a model with these adapters."""
        if not adapters:
            return base
        name = f"{base.names[0]}:{name_of(adapters, base.known)}"
        for entry in self.entries:
            if entry.base is base and entry.names[0] == name:
                return entry
        self._entries[:] = [each for each in self._entries if not _is_forgotten(each)]
        made = Entry(_variant_config(base.config, name), base, adapters, passing=True)
        self._entries.append(made)
        return made

    def keep(self, entry: Entry, seconds: float) -> None:
        """Keep a model loaded for so long behind its latest request; it may make room for others earlier."""
        entry.keep_s = seconds

    async def ready(self, entry: Entry, payer: str = "", *, by_name: bool = False) -> ServedModel:
        """Return a model once it is loaded: a use of it has to begin before the next checkpoint.

        When the last who waits for it is cancelled, so is the load. The `payer` of the first is charged for it. With `by_name` somebody asks to have it
        loaded, and not for an answer.

        Raises:
            Refusal: it cannot be loaded, is loaded only by name, or too many wait for it.
        """
        if entry.state == "loaded" and entry.deployment is not None:
            entry.used_at = trio.current_time()
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
                asked = True
            await entry.changed.wait()
        entry.used_at = trio.current_time()
        return entry.deployment.served

    async def unload(self, entry: Entry) -> bool:
        """Unload a model that nobody uses; False if it is in use or not loaded. Cancelled, it leaves the rest to :meth:`run`."""
        deployment, held, nursery = entry.deployment, entry.held, self._nursery
        if entry.state not in ("loaded", "draining") or deployment is None or held is None:
            return False
        if nursery is None or deployment.served.uses or not self._may_go(entry):
            return False
        if entry.waiting and entry.state == "loaded":
            return False  # whoever asked is about to begin
        entry.become("unloading")
        entry.served_as, entry.keep_s = deployment.served.names, None
        entry.deployment = entry.held = None
        self._service.remove(deployment.served)
        deployment.served.retire()
        nursery.start_soon(self._free, entry, deployment, held)
        del deployment, held  # which must not keep its memory
        await entry.changed.wait()
        return True

    async def _free(self, entry: Entry, deployment: Deployment, held: ExitStack) -> None:
        """End the computing of a model that takes no more requests, and free its memory."""
        await self._let_go(deployment)
        entry.prefixes = deployment.prefixes()
        del deployment
        await trio.to_thread.run_sync(partial(_freed, held))
        self._log.info("unloaded", model=entry.names[0])
        entry.become("unloaded")

    def lost(self, deployment: Deployment) -> None:
        """Note that the engine of a model has died."""
        for entry in self.entries:
            if entry.deployment is deployment:
                entry.served_as = deployment.served.names
                entry.deployment, entry.failed_at = None, trio.current_time()
                entry.become("failed", "the engine of this model has stopped")

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop the saved prefixes of unloaded models in the namespaces that are `mine`."""
        for entry in self.entries:
            if entry.prefixes is not None:
                store = entry.prefixes.store
                store.clear([name for name in store.namespaces if mine(name)])

    def _may_go(self, entry: Entry) -> bool:
        """Whether a model may be unloaded at all: encoders compute beside the first one."""
        if entry.base is not None:
            return True
        return not self.is_one and not (entry is self.entries[0] and self._service.embedders)

    async def _load(self, entry: Entry) -> None:
        name, held = entry.names[0], ExitStack()
        try:
            with trio.CancelScope() as entry.before_thread:
                await self._in_turn(entry, held)
        except Unwanted:
            pass
        except (ModelError, ConfigError, NoRoom, OSError) as error:
            self._failed(entry, str(error))
        except Refusal as refusal:  # of the model that it is a variant of
            self._failed(entry, refusal.message)
        except Exception as error:
            # Memory that ran out, or a fault of ours: the other models are served on.
            self._log.error("cannot be loaded", model=name, exc_info=error)
            self._failed(entry, "memory ran out" if isinstance(error, MemoryError) else _FAULT)
        finally:
            entry.before_thread = None
            if entry.deployment is None:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(partial(_freed, held))
        if entry.deployment is not None:
            entry.used_at = entry.loaded_at = trio.current_time()
            entry.prefixes = None  # the engine has them
            if entry.payer:
                entry.deployment.served.debts[entry.payer] = entry.took_s
            self._log.info("loaded", model=name, seconds=round(entry.took_s, 1))
            entry.become("loaded")
        elif entry.state != "failed":
            self._log.info("is not loaded: nobody waits for it any more", model=name)
            entry.become("unloaded")

    def _failed(self, entry: Entry, why: str) -> None:
        name = entry.names[0]
        self._log.error("cannot be loaded", model=name, why=why)
        entry.failed_at = trio.current_time()
        entry.become("failed", f"{name} cannot be loaded: {why}")

    async def _in_turn(self, entry: Entry, held: ExitStack) -> None:
        """Load a model when it is its turn and there is room. Cancelled before the loading begins, it does nothing."""
        base = entry.base
        if base is not None:
            await self._wait_for_base(entry, base)
        entry.phase = "is tried before it is loaded"
        async with self._trial:
            entry.estimate = await trio.to_thread.run_sync(_tried, entry, abandon_on_cancel=True)
        while entry.deployment is None:
            entry.is_tried, entry.phase = True, "waits until another model is loaded"
            async with self._one:
                if base is None or base.state == "loaded":
                    await self._now(entry, entry.estimate, held)
                    return
            await self._wait_for_base(entry, base)

    async def _wait_for_base(self, entry: Entry, base: Entry) -> None:
        """Have the model of a variant loaded. Not used yet, it may make room for others meanwhile.

        Raises:
            Refusal: it cannot be loaded.
        """
        entry.phase = f"waits for model {base.names[0]}"
        await self.ready(base, entry.payer)

    async def _now(self, entry: Entry, needed: Estimate, held: ExitStack) -> None:
        """Load a model once there is room. One is loaded at a time."""
        read = self._on_base(entry, held)
        for each in tuple(self.entries):
            if each.held is not None and each.deployment is None:  # its engine died
                dead, each.held = each.held, None
                await trio.to_thread.run_sync(partial(_freed, dead))
        await self._make_room(entry, needed)
        entry.before_thread = None  # `show` ends it from here on
        began = trio.current_time()
        neighbour = self._neighbour()
        loaded = await load(
            entry.config,
            held,
            partial(entry.show, "is loading"),
            partial(entry.show, "is measured"),
            read=read or partial(load_backend, several=True, measures=neighbour is None),
            beside=neighbour,
        )
        entry.deployment, entry.held = self._deploy(entry, loaded), held
        entry.took_s = trio.current_time() - began

    def _on_base(self, entry: Entry, held: ExitStack) -> Read | None:
        """Return what makes a variant's context; the weights stay in memory for as long as it is there."""
        if entry.base is None or entry.base.deployment is None:
            return None
        held.callback(entry.base.deployment.served.uses.begin())
        backend, adapters = entry.base.deployment.backend, entry.adapters
        return lambda _config, _progress: backend.variant(adapters)

    async def _make_room(self, entry: Entry, needed: Estimate) -> None:
        """Unload models that are not pinned, least recently used first, until this one fits.

        One that is in use is waited for. Raises :class:`NoRoom` where that would not help.
        """
        began, draining = trio.current_time(), list[Entry]()
        try:
            while others := self._in_the_way(entry, needed):
                unknown = [each for each in others if each.estimate is None]
                for each in unknown:  # it was loaded with the daemon
                    each.estimate = await trio.to_thread.run_sync(_estimated, each)
                if unknown:
                    continue
                leaving = [each for each in others if each.state == "unloading"]
                if leaving:
                    await leaving[0].changed.wait()
                    continue
                by_use = sorted(others, key=lambda one: one.used_at)
                entry.phase = _waits_for(entry, by_use)
                for each in by_use:
                    if _is_idle(each) and await self.unload(each):
                        break
                else:
                    if trio.current_time() - began >= SWAP_AFTER_S:
                        _drain(by_use, draining)
                    await trio.sleep(_LOOK_FOR_ROOM_S)
        finally:
            for each in draining:
                if each.state == "draining":
                    each.become("loaded")

    def _in_the_way(self, entry: Entry, needed: Estimate) -> list[Entry]:
        """Return the models of which one has to go before this one is loaded.

        Where it is not known what memory one of them takes, all are returned. Raises :class:`NoRoom`.
        """
        needs = (entry, entry.base)
        given = [each for each in self.entries if each not in needs and self._gives(each)]
        if entry.base is not None:
            variants = [each for each in given if each.base is entry.base]
            if len(variants) >= entry.config.lora_contexts:
                return variants
        need, free = needed.least.total, available_memory()
        while free is not None and need > free:
            known = all(each.estimate is not None for each in given)
            if given and (not known or need <= free + sum(each.size for each in given)):
                return given
            if not self._drop_prefixes(but_for=entry):
                raise NoRoom(needed.refusal(free))
            free = available_memory()
        return []

    def _drop_prefixes(self, but_for: Entry) -> bool:
        """Free the saved prefixes of the model that was unloaded the longest ago; False if there are none."""
        kept = [each for each in self.entries if each.prefixes is not None and each is not but_for]
        for each in sorted(kept, key=lambda one: one.used_at)[:1]:
            each.prefixes = None
        if kept:
            gc.collect()
            give_memory_back()
        return bool(kept)

    def _neighbour(self) -> Neighbour | None:
        """Return what is known of the machine by a model that is loaded."""
        loaded = [each.deployment for each in self.entries if each.deployment is not None]
        found = (each.as_neighbour() for each in loaded)
        return next((each for each in found if each is not None), None)

    def _gives(self, entry: Entry) -> bool:
        if entry.state == "unloading":
            return True
        is_loaded = entry.state in ("loaded", "draining")
        return is_loaded and not entry.config.model_pin and self._may_go(entry)


def _tried(entry: Entry) -> Estimate:
    """Try the files of a model, and return what it takes. Raises :class:`ModelError`.

    An adapter is tried once with its model, whatever scales requests ask for: a trial reads the model's file.
    """
    if entry.base is None:
        return estimate(entry.config)
    marks = {each.name: _mark(each) for each in entry.adapters}
    untried = [each for each in entry.adapters if marks[each.name] not in entry.base.tried]
    if untried or entry.base.further is None:
        try_adapters(entry.config, untried)
        entry.base.further = variant_estimate(entry.config)
        entry.base.tried.update(marks.values())
    return entry.base.further


def _mark(adapter: Adapter) -> Hashable:
    """Return what an adapter's file is known by: another one of the same name is tried again."""
    try:
        found = adapter.path.stat()
    except OSError:
        return adapter.path
    return adapter.path, found.st_mtime_ns, found.st_size


def _estimated(entry: Entry) -> Estimate:
    """Return what memory a model takes; of a variant only its context. Raises :class:`ModelError`."""
    return estimate(entry.config) if entry.base is None else variant_estimate(entry.config)


def _variant_config(config: Config, name: str) -> Config:
    """Return the settings of a variant: those of the model, with a name, and a trace, of its own."""
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
        model_ttl_s=None,
        model_pin=False,
        trace=trace,
    )


def _is_forgotten(entry: Entry) -> bool:
    """Whether nobody needs what a request made up."""
    failed = entry.state == "failed" and trio.current_time() - entry.failed_at >= AGAIN_S
    return entry.passing and not entry.waiting and (entry.state == "unloaded" or failed)


def _is_idle(entry: Entry) -> bool:
    """Whether a model may make room now. It stays at least as long as its loading took: half of the time goes there at most."""
    stays_s = min(entry.took_s, SWAP_AFTER_S)
    used = entry.deployment is not None and bool(entry.deployment.served.uses)
    return not used and trio.current_time() - entry.loaded_at >= stays_s


def _waits_for(entry: Entry, others: Sequence[Entry]) -> str:
    """Return what a model waits for that `others` have."""
    contexts = entry.base is not None and all(each.base is entry.base for each in others)
    what = "a context" if contexts else "memory"
    return f"waits for {what} that {' and '.join(each.names[0] for each in others)} has"


def _drain(by_use: Sequence[Entry], draining: list[Entry]) -> None:
    """Let one more model take no further requests; `draining` has those that do."""
    for each in by_use:
        if each.state == "loaded":
            each.become("draining")
            draining.append(each)
            return


def _freed(held: ExitStack) -> None:
    held.close()
    gc.collect()
    give_memory_back()
