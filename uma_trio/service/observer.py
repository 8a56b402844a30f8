"""Snapshots, request records and metrics of all models.

A model that is unloaded, or whose engine dies, during a query is left out of the result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from uma_protocol.errors import Code
from uma_trio.models.loaded import LoadedModel, no_history
from uma_trio.models.manager import ModelManager
from uma_trio.observe.records import Recorded, RequestRecord, Snapshot, explained
from uma_trio.observe.view import ReadModel, State, Viewer
from uma_trio.service.ask import Refusal
from uma_trio.service.directory import Directory, waiting_records, waiting_snapshot
from uma_trio.sockets.principal import Principal

_STOPPED: Final = "the engine has stopped and the daemon is going down; ask again when it is back"

Answer = TypeVar("Answer")


class Observer:
    """Queries over all models. For trio's thread only."""

    def __init__(
        self,
        directory: Directory,
        clock: Callable[[], float],
        models: ModelManager,
    ) -> None:
        self._directory, self._clock = directory, clock
        self._models = models
        self.view = ReadModel()
        models.on_load.append(self.watch)
        models.on_unload.append(self.close)
        for loaded in models.loaded:
            self.watch(loaded)

    def viewer(self, principal: Principal) -> Viewer:
        """Return what a principal may see."""
        return Viewer(principal, self._directory.name_of)

    def watch(self, served: LoadedModel) -> None:
        """Add all further snapshots of a model to the view."""
        served.snapshots.on_snapshot = partial(self.view.take, served.bounds.model)

    def close(self, served: LoadedModel) -> None:
        """Keep the latest requests and ticks of a model whose engine has ended, for explanations."""
        self.view.close(served.bounds.model, served.history())
        served.history = no_history  # the function refers to the engine

    async def state(self) -> State:
        """Return the present state of all models, with the requests that wait for a model to be loaded.

        Waits for the end of a tick of each.

        Raises:
            Refusal: no engine runs.
        """
        found = await self.of_each(lambda served: served.snapshot())
        waiting = waiting_snapshot(self._directory, self._clock())
        return self._state([*found, waiting] if waiting.queue or not found else found)

    async def state_of(self, served: LoadedModel) -> State:
        """Return the present state of one model.

        Raises:
            Refusal: its engine has stopped.
        """
        return self._state([await served.snapshot()])

    def _state(self, snapshots: Sequence[Snapshot]) -> State:
        return State.of(snapshots, self._directory.live)

    async def explain(self, handle: int | None, ticks: int) -> Recorded:
        """Return the record of one request, or of the latest ones, with `ticks` ticks.

        Without a handle the ticks are the default model's.

        Raises:
            Refusal: no engine runs.
        """
        found = await self.of_each(lambda served: served.explain(handle, ticks))
        now = self._clock()
        waiting = waiting_records(self._directory, handle)
        if handle is not None:
            first = next((each for each in found if each.requests), None)
            return (
                first
                or self.view.explain(now, handle, ticks)
                or explained(now, waiting[:1], (), ticks, one=True)
            )
        records = [
            *waiting,
            *self.view.records(),
            *(one for each in found for one in each.requests),
        ]
        by_handle = {one.handle: one for one in records}
        every = tuple(by_handle[each] for each in sorted(by_handle))
        return Recorded(found[0].now, every, found[0].ticks) if found else Recorded(now, every, ())

    def text_of(self, viewer: Principal) -> Callable[[RequestRecord, int], str | None]:
        """Return a function that returns the text of a request's token, None if `viewer` may not read it."""

        def text(record: RequestRecord, token: int) -> str | None:
            if token < 0 or record.namespace is None or not viewer.owns(record.namespace):
                return None
            model = self._directory.name_of(record.handle).model
            served = next((one for one in self.alive if one.bounds.model == model), None)
            if served is None:
                return None  # its vocabulary was unloaded with it
            return served.detokenize([token]).decode("utf-8", "replace") or f"<token {token}>"

        return text

    @property
    def alive(self) -> list[LoadedModel]:
        """The models whose engines run."""
        return [served for served in self._models.loaded if served.is_alive]

    async def of_each(self, ask: Callable[[LoadedModel], Awaitable[Answer]]) -> list[Answer]:
        """Return the answers of all engines that run; one that ends meanwhile is left out.

        Raises:
            Refusal: no engine runs, and none is loaded again.
        """
        found = list[Answer]()
        for served in self.alive:
            if served.is_alive:  # the earlier queries may have taken a while
                with suppress(Refusal):
                    found.append(await ask(served))
        if not found and not self._models.can_swap:
            raise Refusal(Code.E_LIFECYCLE_001, _STOPPED)
        return found
