"""Memory for a model that is about to be loaded: who is idle goes, and who has work for ever gives way.

Where two models have room one after the other only, requests for the absent one wait together until the other
has nothing to do: a change costs seconds, and serves all who wait. A model with work for ever drains when another one
has waited long enough (:func:`patience_s`), and its further requests wait.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import trio

from uma_trio.backend.kv_memory import available_memory
from uma_trio.backend.needs import Estimate
from uma_trio.config.hardware import give_memory_back
from uma_trio.models.entry import Entry
from uma_trio.models.trial import held_by

SWAP_AFTER_S: Final = 10.0
"""A model that never is idle takes no further requests when another one has waited so long for its memory, at the most."""
_LEAST_PATIENCE_S: Final = 1.0
_WORK_TO_LOADING: Final = (
    10.0  # at most a tenth of the time goes into changes between models with work for ever
)
_LOOK_S: Final = 0.05
# Those that are not the first in line look less often, and only so many of them look at all: requests make up variants.
_PASS_LOOK_S, _PASSING = 0.1, 8

_Lacks = Callable[[Sequence[Entry]], int]
"""How many bytes, or contexts, lack once some models are gone."""


class NoRoom(Exception):
    """The model does not fit beside those that cannot be unloaded; the message has the sum."""


class ModelRoom:
    """Makes room among the `entries`. `unload` and `found` are the keeper's, and `may_go` says whether a model may be unloaded at all."""

    def __init__(
        self,
        entries: Sequence[Entry],
        unload: Callable[[Entry], Awaitable[bool]],
        may_go: Callable[[Entry], bool],
        found: Callable[[Callable[[Entry], Estimate], Entry], Awaitable[Estimate]],
    ) -> None:
        self._entries, self._unload, self._may_go, self._found = entries, unload, may_go, found
        self._line: list[Entry] = []
        self._victims: set[Entry] = set()

    async def wait_for(self, entry: Entry, needed: Estimate) -> None:
        """Return when a model fits; it stays in line until :meth:`leave`, also if it has to wait again.

        The first in line, and the model that it is a variant of, have others unloaded. Those behind it may pass if they fit
        as it is, but not where they were unloaded for the first: so it comes to its turn. Raises :class:`NoRoom` where
        waiting would not help.
        """
        if entry not in self._line:
            self._line.append(entry)
        while not self._is_first(entry):
            first = self._line[0]
            if entry not in self._victims and self._line.index(entry) <= _PASSING:
                others, _ = await self._in_the_way(entry, needed)
                if not others:
                    return
            entry.is_tried, entry.phase = True, f"waits for memory behind {first.names[0]}"
            await trio.sleep(_PASS_LOOK_S)
        await self._make(entry, needed)

    def leave(self, entry: Entry) -> None:
        """Note that a model waits no more. Idempotent."""
        if entry in self._line:
            if self._line[0] is entry:
                self._victims.clear()
            self._line.remove(entry)

    def _is_first(self, entry: Entry) -> bool:
        return entry in (self._line[0], self._line[0].base)

    async def _make(self, entry: Entry, needed: Estimate) -> None:
        """Unload models that are not pinned, least recently used first, until this one fits.

        One that is in use is waited for, and until then the idle ones stay. Raises as :meth:`wait_for`.
        """
        began, draining = trio.current_time(), list[Entry]()
        try:
            while True:
                others, lacks = await self._in_the_way(entry, needed)
                if not others:
                    return
                leaving = next((each for each in others if each.state == "unloading"), None)
                if leaving is not None:
                    await leaving.changed.wait()
                    continue
                by_use = sorted(others, key=lambda one: one.used_at)
                entry.is_tried, entry.phase = True, _waits_for(entry, by_use)
                idle = [each for each in by_use if self._is_idle(each)]
                if lacks(idle) > 0 or not await self._unloaded(idle):
                    if trio.current_time() - began >= patience_s(others):
                        _drain(by_use, draining)
                    await trio.sleep(_LOOK_S)
        finally:
            for each in draining:
                if each.state == "draining":
                    each.become("loaded")

    async def _unloaded(self, idle: Sequence[Entry]) -> bool:
        """Unload one of these; False if none can be."""
        for each in idle:
            self._victims.add(each)
            if await self._unload(each):
                return True
            self._victims.discard(each)
        return False

    async def has_room(self, entry: Entry, needed: Estimate) -> bool:
        """Whether no other model has to go before this one is loaded. Raises :class:`NoRoom`."""
        return not (await self._in_the_way(entry, needed))[0]

    async def _in_the_way(self, entry: Entry, needed: Estimate) -> tuple[Sequence[Entry], _Lacks]:
        """Return models of which some have to go before this one is loaded, and what lacks once some are gone.

        Raises :class:`NoRoom`.
        """
        needs = (entry, entry.base)
        while True:
            given = [each for each in self._entries if each not in needs and self._gives(each)]
            if entry.base is not None:
                variants = [each for each in given if each.base is entry.base]
                if len(variants) >= entry.config.lora_contexts:
                    return variants, lambda gone: 1 - len(gone)
            if await self._estimated(given):
                continue
            lacks, refusal = await _lacking(needed)
            if lacks is None:
                return [], lambda _gone: 0
            if any(each.state == "unloading" for each in given) or lacks(given) <= 0:
                return given, lacks
            if not await self._drop_prefixes(but_for=entry):
                raise NoRoom(refusal)

    def _is_idle(self, entry: Entry) -> bool:
        """Whether a model may make room now, with its variants. It stays at least as long as its loading took: half of the time goes there at most."""
        stays_s = min(entry.took_s, SWAP_AFTER_S)
        if entry.deployment is None or trio.current_time() - entry.loaded_at < stays_s:
            return False
        uses = entry.deployment.served.uses
        variants = [each for each in self._entries if each.base is entry and each.deployment]
        held_by_idle = uses.held == len(variants) and all(map(self._is_idle, variants))
        return not uses.are_requests and held_by_idle

    async def _estimated(self, given: Sequence[Entry]) -> bool:
        """Find out what one more of these takes; False if that is known of all that are loaded."""
        for each in given:
            if (
                each.estimate is None and each.deployment is not None
            ):  # it was loaded with the daemon
                model = each.deployment.served.model
                each.estimate = await self._found(partial(held_by, model=model), each)
                return True
        return False

    async def _drop_prefixes(self, but_for: Entry) -> bool:
        """Free the saved prefixes of the model that was unloaded the longest ago; False if there are none."""
        kept = [each for each in self._entries if each.prefixes is not None and each is not but_for]
        if not kept:
            return False
        min(kept, key=lambda one: one.used_at).prefixes = None
        await trio.to_thread.run_sync(collect)
        return True

    def _gives(self, entry: Entry) -> bool:
        if entry.state == "unloading":
            return True
        is_loaded = entry.state in ("loaded", "draining")
        return is_loaded and not entry.config.model_pin and self._may_go(entry)


def free_device_memory() -> int | None:
    """Return the bytes that are free on the GPUs; None if that is not known."""
    from uma_trio.backend import _llama_lib  # takes a while, and tests do without

    return _llama_lib.free_device_memory()


async def _lacking(needed: Estimate) -> tuple[_Lacks | None, str]:
    """Return what says how much is lacking once some models are gone, and why it is refused then; None if nothing is lacking."""
    need, free = needed.needs, available_memory()
    if free is not None and (short := need.total - free) > 0:
        return lambda gone: short - sum(each.size for each in gone), needed.refusal(free)
    if need.device:
        there = await trio.to_thread.run_sync(free_device_memory)
        if there is not None and (lack := need.device - there) > 0:
            return lambda gone: lack - sum(map(_on_device, gone)), needed.refusal_of_devices(there)
    return None, ""


def _on_device(entry: Entry) -> int:
    return 0 if entry.estimate is None else entry.estimate.needs.device


def patience_s(others: Sequence[Entry]) -> float:
    """Return how long a model waits before one of the `others`, which always has work, drains for it."""
    took_s = max(each.took_s or SWAP_AFTER_S for each in others)
    return min(SWAP_AFTER_S, max(_LEAST_PATIENCE_S, _WORK_TO_LOADING * took_s))


def collect() -> None:
    """Free what nobody holds any more, and return it to the system. Takes a while: for a helper thread."""
    gc.collect()
    give_memory_back()


def _waits_for(entry: Entry, others: Sequence[Entry]) -> str:
    """Return what a model waits for that `others` have."""
    contexts = entry.base is not None and all(each.base is entry.base for each in others)
    what = (
        f"one of {entry.config.lora_contexts} contexts (--lora-contexts)" if contexts else "memory"
    )
    return f"waits for {what} that {' and '.join(each.names[0] for each in others)} has"


def _drain(by_use: Sequence[Entry], draining: list[Entry]) -> None:
    """Let one more model take no further requests; `draining` has those that do."""
    for each in by_use:
        if each.state == "loaded":
            each.become("draining")
            draining.append(each)
            return
