"""The background work of the prefix cache: restoring pages and saving leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attrs import define

from uma_trio.engine.kv.cache import PrefixCache
from uma_trio.engine.sequences import Sequence
from uma_trio.machine.background import QUICK_S, BackgroundWork, Bound, Part


class Requests(Protocol):
    """The requests of the model."""

    @property
    def running(self) -> Mapping[int, Sequence]:
        """Those that have a slot, by key."""

    @property
    def awaits_masks(self) -> bool:
        """Whether some wait for masks, which are found on the same cores."""


def works_of(prefix: PrefixCache, requests: Requests) -> tuple[BackgroundWork, ...]:
    """Return the works of a cache, most urgent first; none of one that is off."""
    if not prefix.on:
        return ()
    return (Restoring(prefix), SavingLeaves(prefix, requests))


@define(eq=False)
class Restoring:
    """Restores the pages of requests that wait for them, in the order in which they came."""

    prefix: PrefixCache
    bound: Bound = "readers"
    makes_room: bool = False

    def claim(self, *, idle: bool) -> Part | None:
        need_s = self.prefix.next_restore_s()
        return None if need_s is None else Part(need_s, waits=True)

    def advance(self, most_s: float, *, idle: bool) -> float:
        took_s = 0.0
        while took_s < most_s and (need_s := self.prefix.next_restore_s()) is not None:
            if most_s - took_s < need_s:
                break
            took_s += self.prefix.restore_next()
        return took_s


@define(eq=False)
class SavingLeaves:
    """Saves leaves in the time that saving has earned (:class:`uma_trio.engine.kv.saving.Saving`)."""

    prefix: PrefixCache
    requests: Requests
    bound: Bound = "readers"
    makes_room: bool = True

    def claim(self, *, idle: bool) -> Part | None:
        saving = self.prefix.saving
        if not saving.due or (idle and self.requests.awaits_masks):
            return None
        return Part(saving.next_s(QUICK_S) if idle else 0.0)

    def advance(self, most_s: float, *, idle: bool) -> float:
        prefix = self.prefix
        if idle:
            prefix.saving.one(most_s)
            return 0.0
        took_s = prefix.saving.some(most_s, share=not prefix.is_alone(self.requests.running))
        prefix.room.release_leaves()
        return took_s
