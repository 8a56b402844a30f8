"""The background work of the prefix cache: restoring pages, saving leaves, and moving cells down."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from attrs import define

from uma_trio.engine.kv.cache import PrefixCache
from uma_trio.engine.sequences import Sequence
from uma_trio.machine.background import QUICK_S, BackgroundWork, Bound, Part
from uma_trio.policy.fairness import Path


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
    return (Restoring(prefix), SavingLeaves(prefix, requests), Moving(prefix, requests))


@define(eq=False)
class Restoring:
    """Restores the pages of requests that wait for them, in the order in which they came."""

    prefix: PrefixCache
    bound: Bound = "readers"
    makes_room: bool = False

    def claim(self, *, idle: bool) -> Part | None:
        """Return the next page."""
        need_s = self.prefix.next_restore_s()
        return None if need_s is None else Part(need_s, waits=True)

    def advance(self, most_s: float, *, idle: bool) -> float:
        """Restore pages."""
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
        """Return the next page, while the machine is idle a quick one if there is any."""
        saving = self.prefix.saving
        if not saving.due or (idle and self.requests.awaits_masks):
            return None
        return Part(saving.next_s(QUICK_S) if idle else 0.0)

    def advance(self, most_s: float, *, idle: bool) -> float:
        """Save pages."""
        prefix = self.prefix
        if idle:
            prefix.saving.one(most_s)
            return 0.0
        took_s = prefix.saving.some(most_s, share=not prefix.is_alone(self.requests.running))
        prefix.room.release_leaves()
        return took_s


@define(eq=False)
class Moving:
    """Moves cells down, so that decodes span fewer, once that pays for itself."""

    prefix: PrefixCache
    requests: Requests
    bound: Bound = "people"
    makes_room: bool = False

    def claim(self, *, idle: bool) -> Part | None:
        """Return a part if there are free cells that moving could remove; without a decode no cell costs anything."""
        compaction = self.prefix.room.compaction
        if idle or not compaction.spans_a_gap:
            return None
        return Part(math.inf, waits=True) if compaction.under_way else Part()

    def advance(self, most_s: float, *, idle: bool) -> float:
        """Move cells, and charge clients by their tokens that are due: each of them spans fewer cells."""
        room, blocked = self.prefix.room, self.prefix.blocked
        moving = [each for key, each in self.requests.running.items() if key not in blocked]
        due: Counter[Path] = Counter()
        for sequence in moving:
            due[sequence.submit.program] += sequence.view.due
        if not room.gap_costs(due.total(), [_still_expected(sequence) for sequence in moving]):
            return 0.0
        took_s, total = room.compaction.some(most_s), due.total()
        for client, n in due.items() if took_s else ():
            self.prefix.charges.spend(client, took_s * n / max(1, total))
        return took_s


def _still_expected(sequence: Sequence) -> int:
    """Return how many tokens an answer will probably still get: as many as it has, at most what it may have."""
    n = sequence.n_generated
    return min(n, sequence.submit.max_tokens - n)
