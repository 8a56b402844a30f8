"""Memory for a model that is about to be loaded: idle models are unloaded, and a model that is never idle drains.

If two models only fit one after the other, requests for the unloaded one wait together until the other
is idle: a swap takes seconds, and serves all of them. A model that is never idle takes no further requests once the other
has waited for :func:`patience_s`, so that it becomes idle.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from uma_trio.backend.needs import Estimate
from uma_trio.models.host import Host
from uma_trio.models.model import Model

#: Maximum seconds that a model waits for the memory of one that is never idle before that one drains.
SWAP_AFTER_S: Final = 10.0
_MIN_PATIENCE_S: Final = 1.0
#: With models that are never idle, swaps take at most a tenth of the time.
_WORK_PER_LOAD_S: Final = 10.0
_POLL_S: Final = 0.05
#: Models behind the first of the queue poll less often, and only some of them: requests can name many variants.
_QUEUED_POLL_S: Final = 0.1
_MAX_OVERTAKING: Final = 8

_Shortage = Callable[[Sequence[Model]], int]
"""How many bytes, or contexts, are missing once some models are unloaded."""


class NoRoom(Exception):
    """The model does not fit beside those that cannot be unloaded; the message has the sum."""


class ModelRoom:
    """The queue of models that wait for memory. `unload` and `estimate` are those of the manager."""

    def __init__(
        self,
        models: Sequence[Model],
        host: Host,
        unload: Callable[[Model], Awaitable[bool]],
        can_unload: Callable[[Model], bool],
        estimate: Callable[[Model], Awaitable[Estimate]],
    ) -> None:
        self._models, self._host = models, host
        self._unload, self._can_unload, self._estimate = unload, can_unload, estimate
        self._queue: list[Model] = []
        self._unloaded: set[Model] = set()  # for the first of the queue

    async def wait_for(self, model: Model, needed: Estimate) -> None:
        """Return when the model fits. It stays in the queue until :meth:`leave`, also if it has to wait again.

        The first of the queue, and the base of a variant, have others unloaded. Those behind it may overtake if they fit
        into free memory, unless they were unloaded for the first one: so the first one makes progress.

        Raises:
            NoRoom: waiting would not help.
        """
        if model not in self._queue:
            self._queue.append(model)
        while model not in (self._queue[0], self._queue[0].base):
            may_overtake = self._queue.index(model) <= _MAX_OVERTAKING
            if may_overtake and model not in self._unloaded and await self.has_room(model, needed):
                return
            model.wait_for(f"waits for memory behind {self._queue[0].names[0]}")
            await trio.sleep(_QUEUED_POLL_S)
        await self._make(model, needed)

    def leave(self, model: Model) -> None:
        """Leave the queue. Idempotent."""
        if model in self._queue:
            if self._queue[0] is model:
                self._unloaded.clear()
            self._queue.remove(model)

    async def has_room(self, model: Model, needed: Estimate) -> bool:
        """Whether the model fits without an unload.

        Raises:
            NoRoom: it never will.
        """
        return not (await self._in_the_way(model, needed))[0]

    async def _make(self, model: Model, needed: Estimate) -> None:
        """Unload models that are not pinned, least recently used first, until this one fits.

        A busy one is waited for, and the idle ones stay loaded until then.
        """
        began, draining = trio.current_time(), list[Model]()
        try:
            while True:
                others, shortage = await self._in_the_way(model, needed)
                if not others:
                    return
                leaving = next((each for each in others if each.is_unloading), None)
                if leaving is not None:
                    await leaving.changed.wait()
                    continue
                by_use = sorted(others, key=lambda one: one.used_at)
                model.wait_for(_waits_for(model, by_use))
                idle = [each for each in by_use if self._is_idle(each)]
                if shortage(idle) > 0 or not await self._unload_one(idle):
                    if trio.current_time() - began >= patience_s(others):
                        _drain_one(by_use, draining)
                    await trio.sleep(_POLL_S)
        finally:
            for each in draining:
                if each.state == "draining" and each.loaded is not None:
                    each.set_state("loaded")

    async def _unload_one(self, idle: Sequence[Model]) -> bool:
        for each in idle:
            self._unloaded.add(each)
            if await self._unload(each):
                return True
            self._unloaded.discard(each)
        return False

    async def _in_the_way(
        self, model: Model, needed: Estimate
    ) -> tuple[Sequence[Model], _Shortage]:
        """Return models of which some have to be unloaded for this one, and what is missing once some are."""
        required = (model, model.base)
        while True:
            others = [one for one in self._models if one not in required and self._frees(one)]
            if model.base is not None:
                variants = [each for each in others if each.base is model.base]
                if len(variants) >= model.config.lora_contexts:
                    return variants, lambda gone: 1 - len(gone)
            unknown = next((one for one in others if one.estimate is None and one.loaded), None)
            if unknown is not None:  # it was loaded at the start of the daemon
                unknown.estimate = await self._estimate(unknown)
                continue
            shortage, refusal = await self._shortage(needed)
            if shortage is None:
                return [], lambda _gone: 0
            if any(each.is_unloading for each in others) or shortage(others) <= 0:
                return others, shortage
            if not await self._drop_prefixes(but_for=model):
                raise NoRoom(refusal)

    async def _shortage(self, needed: Estimate) -> tuple[_Shortage | None, str]:
        """Return what is missing and the refusal where waiting does not help; None if nothing is missing."""
        least, free = needed.needs, self._host.free_memory()
        if free is not None and (missing := least.total - free) > 0:
            return lambda gone: missing - sum(each.size for each in gone), needed.refusal(free)
        if least.device:
            on_device = await self._host.run(self._host.free_device_memory)
            if on_device is not None and (lack := least.device - on_device) > 0:
                refusal = needed.refusal_of_devices(on_device)
                return lambda gone: lack - sum(map(_device_bytes, gone)), refusal
        return None, ""

    def _is_idle(self, model: Model) -> bool:
        """Whether a model and its variants may be unloaded now: not before it was loaded for as long as its load took."""
        stays_s = min(model.load_s, SWAP_AFTER_S)
        if model.loaded is None or trio.current_time() - model.loaded_at < stays_s:
            return False
        uses = model.loaded.uses
        variants = [each for each in self._models if each.base is model and each.loaded]
        only_idle_variants = uses.n_variants == len(variants) and all(map(self._is_idle, variants))
        return not uses.has_requests and only_idle_variants

    async def _drop_prefixes(self, but_for: Model) -> bool:
        """Free the saved prefixes of the model that was unloaded first; False if there are none."""
        kept = [each for each in self._models if each.prefixes is not None and each is not but_for]
        if not kept:
            return False
        min(kept, key=lambda one: one.used_at).prefixes = None
        await self._host.run(self._host.collect)
        return True

    def _frees(self, model: Model) -> bool:
        """Whether memory of this model is free later."""
        if model.is_unloading:
            return True
        return model.loaded is not None and not model.config.model_pin and self._can_unload(model)


def patience_s(others: Sequence[Model]) -> float:
    """Return how long a model waits before one of `others`, which are never idle, drains."""
    load_s = max(each.load_s or SWAP_AFTER_S for each in others)
    return min(SWAP_AFTER_S, max(_MIN_PATIENCE_S, _WORK_PER_LOAD_S * load_s))


def _device_bytes(model: Model) -> int:
    return 0 if model.estimate is None else model.estimate.needs.device


def _waits_for(model: Model, others: Sequence[Model]) -> str:
    contexts = model.base is not None and all(each.base is model.base for each in others)
    what = (
        f"one of {model.config.lora_contexts} contexts (--lora-contexts)" if contexts else "memory"
    )
    return f"waits for {what} that {' and '.join(each.names[0] for each in others)} has"


def _drain_one(by_use: Sequence[Model], draining: list[Model]) -> None:
    """Let the next loaded model take no further requests; `draining` has those that do not."""
    for each in by_use:
        if each.state == "loaded":
            each.set_state("draining")
            draining.append(each)
            return
