"""The side work of the prefix cache: restoring pages, saving leaves, and moving cells down.

See :class:`uma_trio.engine.side.SideWork`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from attrs import define, field

from uma_trio.engine.kv.cache import PrefixCache
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.side import SideWork, Yields
from uma_trio.policy.fairness import Path


def works_of(prefix: PrefixCache) -> tuple[SideWork, ...]:
    """Return the side work of a cache, most urgent first; none of one that is off."""
    return (Restoring(prefix), SavingLeaves(prefix), Moving(prefix)) if prefix.on else ()


@define(eq=False)
class Restoring:
    """Restores the pages of requests that wait for them, in the order in which they came."""

    prefix: PrefixCache
    yields_to: Yields = "readers"
    makes_room: bool = False
    _short: bool = field(default=False, init=False)

    def look(self, running: Mapping[int, Sequence], *, alone: bool) -> bool:
        """Let forks go on whose leader is done, and leaders be due for those who wait for them."""
        return self.prefix.settle(running, alone=alone)

    def do(self, most_s: float) -> float:
        """Restore pages; the next one waits if it should take longer than what is left."""
        took_s, self._short = 0.0, False
        while took_s < most_s and (need_s := self.prefix.next_restore_s()) is not None:
            if most_s - took_s < need_s:
                self._short = True
                break
            took_s += self.prefix.restore_next()
        return took_s

    def falls_short(self, left_s: float) -> bool:
        """Whether a page waits."""
        return self._short

    def do_idle(self, most_s: float) -> float | None:
        """Who waits for a page is running: there is none while nothing is computed."""
        return None


@define(eq=False)
class SavingLeaves:
    """Saves leaves in the time that saving has earned (:class:`uma_trio.engine.kv.saving.Saving`)."""

    prefix: PrefixCache
    yields_to: Yields = "readers"
    makes_room: bool = True
    _alone: bool = field(default=False, init=False)

    def look(self, running: Mapping[int, Sequence], *, alone: bool) -> bool:
        """Drop the leaves that may leave."""
        self._alone = alone
        self.prefix.room.let_go()
        return self.prefix.saving.due

    def do(self, most_s: float) -> float:
        """Save pages."""
        if not self.prefix.saving.due:
            return 0.0
        took_s = self.prefix.saving.some(most_s, share=not self._alone)
        self.prefix.room.let_go()
        return took_s

    def falls_short(self, left_s: float) -> bool:
        """What is not saved now has time: saving puts by what it has earned itself."""
        return False

    def do_idle(self, most_s: float) -> float | None:
        """Save a page."""
        return 0.0 if self.prefix.saving.one(most_s) else None


@define(eq=False)
class Moving:
    """Moves cells down, so that decodes span fewer, once that pays for itself."""

    prefix: PrefixCache
    yields_to: Yields = "people"
    makes_room: bool = False
    _running: Mapping[int, Sequence] = field(factory=dict, init=False)

    def look(self, running: Mapping[int, Sequence], *, alone: bool) -> bool:
        """Whether there are free cells that moving could remove."""
        self._running = running
        return self.prefix.room.compaction.spans_a_gap

    def do(self, most_s: float) -> float:
        """Move cells, and charge clients by their tokens that are due: each of them spans fewer cells."""
        room, blocked = self.prefix.room, self.prefix.blocked
        moving = [each for key, each in self._running.items() if key not in blocked]
        due: Counter[Path] = Counter()
        for sequence in moving:
            due[sequence.submit.program] += sequence.view.due
        if not room.gap_costs(due.total(), [_still_expected(sequence) for sequence in moving]):
            return 0.0
        took_s, total = room.compaction.some(most_s), due.total()
        for client, n in due.items() if took_s else ():
            self.prefix.ledger.spend(client, took_s * n / max(1, total))
        return took_s

    def falls_short(self, left_s: float) -> bool:
        """Whether moves are under way."""
        return self.prefix.room.compaction.under_way

    def do_idle(self, most_s: float) -> float | None:
        """Without a decode no cell costs anything."""
        return None


def _still_expected(sequence: Sequence) -> int:
    """Return how many tokens an answer will probably still get: as many as it has, at most what it may have."""
    n = sequence.n_generated
    return min(n, sequence.submit.max_tokens - n)
