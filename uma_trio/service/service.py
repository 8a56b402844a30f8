"""The interface of the daemon for its front ends: request text, list requests, change them.

A front end translates between its wire format and these calls. It needs no knowledge of the engine,
of tokens or of limits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import trio

from uma_protocol.errors import Code
from uma_trio.backend.base import Adapter
from uma_trio.observe.figures import Outlook
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.records import PrefixReport
from uma_trio.service.answers import Answers
from uma_trio.service.ask import Ask, Origin, Refusal
from uma_trio.service.choice import Choosable, called, instead, mismatch, none_gives, unknown
from uma_trio.service.directory import Directory, RunningRequest
from uma_trio.service.fair import RunBlocking
from uma_trio.service.observer import Observer
from uma_trio.service.playout import Playout
from uma_trio.service.prefix_files import PrefixFiles
from uma_trio.service.pulse import LoadReading, Pulse
from uma_trio.service.questions import Questions
from uma_trio.service.request_log import LogRequest, no_log
from uma_trio.service.served import ServedModel
from uma_trio.service.shares import Shares
from uma_trio.service.shelf import Shelf, ShelfEntry
from uma_trio.service.thread_share import ThreadShare
from uma_trio.service.timer import Timer
from uma_trio.service.variants import by_list
from uma_trio.sockets.principal import Principal
from uma_trio.words import Gives, Lane

_ONLY: Final = "this model is not in the section `models` of the settings file, and stays loaded"
_IN_USE: Final = "requests use or wait for the model; end them first: uma-trio ps"


Found = TypeVar("Found", bound=Choosable)
Answer = TypeVar("Answer")


class Service:
    """The shared service of all front ends: a router over the loaded models. For trio's thread only.

    `clock` is the engines' clock. `timer` wakes the playout; without one the playout has the resolution of trio's
    clock. `give_memory_back` returns freed memory to the system. `log_request` gets a line about each answer when
    it is over. `disk` has saved prefixes in files. Add a model before a front end is served.
    """

    def __init__(
        self,
        *,
        telemetry: Metrics,
        clock: Callable[[], float],
        run_blocking: RunBlocking,
        timer: Timer | None = None,
        give_memory_back: Callable[[], None] | None = None,
        log_request: LogRequest = no_log,
        settings: Mapping[str, str] | None = None,
        disk: PrefixFiles | None = None,
    ) -> None:
        self._disk = disk
        self.telemetry = telemetry
        self.clock = clock
        #: What the daemon was told, by the names of flags, for an operator who asks.
        self.settings: Mapping[str, str] = settings or {}
        self.directory = Directory()
        self.shares = Shares()
        directory = self.directory
        #: Whoever asks for figures, lists or explanations waits here for a turn.
        self.questions = Questions(clock, lambda: directory.has_streams)
        #: What the bytes of clients cost trio's thread is counted here.
        self.thread_share = ThreadShare(clock, lambda: directory.has_streams)
        #: Seconds of the machine that users owe for trials and loads that they caused; their next request is charged.
        self.debts: dict[str, float] = {}
        #: Somebody has to be in its `run`, or tokens that are held stay so.
        self.playout = Playout(clock, timer)
        self.draining = False
        self.log_request = log_request
        self._models: list[ServedModel] = []
        #: What runs on all models.
        self.observer = Observer(
            directory, clock, lambda: self._models, lambda: self.shelf is not None
        )
        #: What loads and unloads models, where there are several.
        self.shelf: Shelf[Any] | None = None
        self._rest = Pulse(trio.lowlevel.checkpoint, lambda: None, Outlook, 1)
        self._run_blocking = run_blocking
        self._give_memory_back = give_memory_back
        self._handles = itertools.count(1)

    def charge(self, payer: str, seconds: float) -> None:
        """Have a user's next request charged for what was done on the user's behalf; "" is nobody."""
        if payer:
            self.debts[payer] = self.debts.get(payer, 0.0) + seconds

    # --- models ---

    def add(self, served: ServedModel) -> None:
        """Serve a model from now on. The first one answers requests that name none."""
        self._models = [each for each in self._models if each.is_alive] + [served]
        self.observer.watch(served)
        if self.shelf is not None:
            places = {entry.served: place for place, entry in enumerate(self.shelf.entries)}
            self._models.sort(key=lambda one: places.get(one, len(places)))

    def remove(self, served: ServedModel) -> None:
        """Serve a model no more. The last one is shown, and refuses what needs it, until there is another."""
        if len(self._models) > 1 and served in self._models:
            self._models.remove(served)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The models that are served, the default one first."""
        return tuple(self._models)

    async def load_reading(self) -> LoadReading:
        """Return the load, for routers: that of the default model, or of nothing while no model is loaded.

        Raises:
            Refusal: the engine has stopped, and none is loaded again.
        """
        try:
            return await self.default.pulse.read()
        except Refusal:
            if self.shelf is None:
                raise
            return await self._rest.read()

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none: the first that writes text, if one does."""
        return instead(self._models, None, None) or self._models[0]

    def require(self, gives: Gives) -> None:
        """Refuse what no model, loaded or not, makes of a text. Raises :class:`Refusal`."""
        if all(one.gives != gives for one in self._choosable):
            raise none_gives(gives, [one for one in self._choosable if not one.hidden])

    @property
    def _choosable(self) -> Sequence[ServedModel | ShelfEntry]:
        """All models, loaded or not, without adapters."""
        return self._models if self.shelf is None else self.shelf.bases

    @property
    def slots(self) -> int:
        """How many requests one model computes at once, at the most."""
        return max(served.slots for served in self._models)

    async def ready(
        self,
        name: str | None,
        waits: Callable[[ShelfEntry], None] | None = None,
        payer: str = "",
        *,
        gives: Gives | None = None,
        exact: bool = False,
    ) -> ServedModel:
        """Return the model of this name, once it is loaded: a use of it has to begin before the next checkpoint.

        `waits` is called with a model that is not loaded yet. Cancelled, it leaves a load that nobody else
        waits for undone. `payer` is whose machine time a loading for this request is. With `gives` it has to make that of
        a text; a name that none has is that of the only one which does, but not if it has to be `exact`.

        Raises:
            Refusal: there is none of this name, it makes something else, or it cannot be loaded.
        """
        shelf = self.shelf
        if shelf is None:
            return self._required(self._loaded(name, gives, exact=exact), name, gives)
        entry = self._required(self.entry(name, gives, exact=exact), name, gives)
        if waits is not None and entry.wait:
            waits(entry)
        return await shelf.ready(entry, payer)

    def entry(
        self, name: str | None, gives: Gives | None = None, *, exact: bool = False
    ) -> ShelfEntry | None:
        """Return the configured model of this name, loaded or not, whatever it gives; None if there is none, or only one model.

        Who names none, or one that is not there, gets the model that `gives` what is asked, as in :meth:`ready`.
        """
        shelf = self.shelf
        if shelf is None:
            return None
        one: ShelfEntry | None = None if name is None else shelf.find(name, gives)
        return one or instead(shelf.bases, name, gives, exact=exact)

    def configured(
        self, name: str | None, gives: Gives | None = None, *, exact: bool = False
    ) -> ShelfEntry | None:
        """Return the configured model of this name, loaded or not, as :meth:`entry`; None if there is only one model.

        Raises:
            Refusal: there is none of this name, or it makes something else.
        """
        if self.shelf is None:
            return None
        return self._required(self.entry(name, gives, exact=exact), name, gives)

    def _loaded(
        self, name: str | None, gives: Gives | None = None, *, exact: bool = False
    ) -> ServedModel | None:
        """Return the loaded model of this name, as :meth:`entry`."""
        found = None if name is None else called(name, self._models, gives)
        return found or instead(self._models, name, gives, exact=exact)

    def _required(self, found: Found | None, name: str | None, gives: Gives | None) -> Found:
        """Return what was found if it gives what is asked. Raises :class:`Refusal`."""
        if found is not None and (gives is None or found.gives == gives):
            return found
        models = [one for one in self._choosable if not one.hidden]
        if found is not None and gives is not None:
            raise mismatch(found, gives, models)
        if gives is not None:
            self.require(gives)
        raise unknown(name or "", [one for one in models if gives in (None, one.gives)])

    def adapters(self, name: str | None) -> Sequence[Adapter]:
        """Return the adapters that requests may use with a model.

        Raises:
            Refusal: there is none of this name.
        """
        entry = self.entry(name)
        if entry is None:
            self.find(name)  # with the nearest name
            return ()
        return entry.known

    def with_adapters(
        self, name: str | None, asked: Sequence[Mapping[str, object]] | None
    ) -> str | None:
        """Return the name of a model with the adapters of llama-server's list; its own where there is no list.

        Raises:
            Refusal: there is no model of this name, the list is no such list, or names what is not there.
        """
        if asked is None:
            return name
        shelf, entry = self.shelf, self.entry(name)
        if shelf is None or entry is None:
            by_list(asked, ())
            return name
        return shelf.with_adapters(entry, asked)

    def find(self, name: str | None) -> ServedModel:
        """Return the loaded model of this name, whatever it gives. The only one is returned under any name.

        Raises:
            Refusal: there are several, and none has this name, or it is not loaded.
        """
        if name is None:
            return self.default
        if self.shelf is None:
            return self._required(self._loaded(name), name, None)
        entry = self._required(self.entry(name), name, None)
        if entry.served is not None:
            return entry.served
        why = f"{entry.names[0]} is {entry.state}; a request for an answer loads it"
        raise Refusal(Code.E_MODEL_001, why)

    async def load(self, name: str) -> str:
        """Load a model, and return what it is called. Cancelled, it ends a loading that nobody else waits for.

        Raises:
            Refusal: there is none of this name, or it cannot be loaded.
        """
        shelf = self.shelf
        if shelf is None:
            return self.find(name).bounds.model
        entry = self._required(self.entry(name, exact=True), name, None)
        return (await shelf.ready(entry, by_name=True)).bounds.model

    def keep(self, name: str | None, seconds: float) -> None:
        """Keep a configured model loaded for so long behind its latest request; it may make room for others earlier."""
        shelf, entry = self.shelf, self.entry(name)
        if shelf is not None and entry is not None:
            shelf.keep(entry, seconds)

    async def unload(self, name: str) -> str:
        """Unload a model that no request has, and return what it is called; one that is not loaded stays so.

        Raises:
            Refusal: there is none of this name, or it is in use, or no other model is configured.
        """
        shelf = self.shelf
        if shelf is None:
            self.find(name)  # with the nearest name
            raise Refusal(Code.E_MODEL_003, _ONLY)
        entry = self._required(self.entry(name, exact=True), name, None)
        is_there = entry.state in ("loading", "loaded", "draining")
        if is_there and not await shelf.unload(entry, with_variants=True):
            raise Refusal(Code.E_MODEL_003, _IN_USE)
        return entry.names[0]

    # --- requests ---

    def generate(
        self, asks: Sequence[Ask], origin: Origin, served: ServedModel | None = None
    ) -> Answers:
        """Accept a request; from now on it is listed and can be ended.

        Entering the returned :class:`Answers` checks and submits it, to the model `served`, or else to that which
        the first ask names.
        """
        return Answers(self, asks, origin, served)

    def new_handle(self) -> int:
        """Return a handle that is unique for the life of the daemon."""
        return next(self._handles)

    # --- what runs ---

    async def prefixes(
        self,
        whose: Principal,
        *,
        clear: bool = False,
        session: str | None = None,
        pin_s: float = 0.0,
    ) -> PrefixReport:
        """Return the cached prefixes of a principal, of all models, after clearing them or pinning a session.

        With them goes what is remembered of its texts.

        Raises:
            Refusal: no engine runs.
        """
        if clear and self.shelf is not None:
            self.shelf.forget(whose.owns)
        found = await self.observer.of_each(
            lambda served: served.prefixes(whose, clear=clear, session=session, pin_s=pin_s)
        )
        disk = self._disk
        if clear and disk is not None:
            await self._run_blocking(partial(disk.clear, whose.shares_as))
        if clear and self._give_memory_back is not None:
            await self._run_blocking(self._give_memory_back)
        return PrefixReport(
            budget=sum(each.budget for each in found),
            n_bytes=sum(each.n_bytes for each in found),
            namespaces=tuple(one for each in found for one in each.namespaces),
            dropped=sum(each.dropped for each in found),
            disk_budget=0 if disk is None else disk.budget,
            disk_bytes=0 if disk is None else disk.n_bytes,
            own_disk_bytes=0 if disk is None else disk.held_by(whose.shares_as),
        )

    def metrics(self, model: str | None = None) -> Mapping[str, Any]:
        """Return every metric by name: of the daemon and its default model, or those of another model.

        Raises:
            Refusal: there is no model of this name.
        """
        return self.telemetry.snapshot() if model is None else self.find(model).telemetry.snapshot()

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

    def _writers(self) -> Sequence[ServedModel]:
        """Return the loaded models that write, without the hidden ones; none where only one is configured."""
        shelf, writers = self.shelf, [one for one in self._models if one.gives == "text"]
        every = writers if shelf is None else [e for e in shelf.entries if e.gives == "text"]
        listed = [one for one in writers if not self.is_hidden(one)]
        return listed if max(len(writers), len(every)) > 1 else ()

    def is_hidden(self, served: ServedModel) -> bool:
        """Whether a loaded model is left out of lists."""
        entry = self.entry(served.bounds.model)
        return entry is not None and entry.hidden

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
        """Return a request that `by` may change. That another one lives is not told: the answer is the same."""
        generation = self.directory.get(handle)
        may = generation is not None and by.may_change(generation.origin.principal)
        return generation if may else None

    # --- the end ---

    async def wait_until_idle(self) -> None:
        """Wait until no request is under way."""
        await self.directory.wait_until_empty()

    def stop_taking(self) -> None:
        """Refuse all further requests."""
        self.draining = True

    def end_all(self, code: Code, message: str) -> None:
        """End every request with an error."""
        for generation in self.directory:
            generation.end(code.value, message)
