"""Memory that waits for clients: bodies of which the rest is to come, answers of which the rest is to be read.

All connections share it. A client that stops in the middle costs nothing but memory, so that it has to give
way: who has waited longest, of the user who holds most, once another client needs the room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from attrs import define, frozen

FREE: Final = 65_536
"""Bytes of each connection that are not counted: a short request is never refused for others' long ones."""
PATIENCE_S: Final = 2.0
"""A client is not asked to give way before. On this machine 8 MiB take a tenth of a second."""


@define(eq=False)
class MemoryHolder:
    """What a connection of `owner` holds of a body, or of an answer, under way.

    `waits_since` says since when it waits for its client; None if it does not. `give_way` ends the connection, and
    frees its memory soon; it is idempotent.
    """

    owner: str
    give_way: Callable[[], None]
    waits_since: float | None = None


@frozen
class _Share:
    owner: str
    n_bytes: int


class ClientMemory:
    """`most` bytes, of which each owner leaves `one` to the others. For trio's thread."""

    def __init__(self, most: int, one: int) -> None:
        self._most = most
        self._most_of_owner = most - one
        self._shares: dict[MemoryHolder, _Share] = {}
        self._owners: Counter[str] = Counter()

    @property
    def counted(self) -> int:
        """The bytes that are counted."""
        return self._owners.total()

    def take(self, holder: MemoryHolder, in_all: int, now: float) -> bool:
        """Let a holder have so many bytes in all; False if there is no room for them.

        If need be, others that have waited for their clients give way.
        """
        wanted = max(0, in_all - FREE)
        owner = holder.owner
        while not self._fits(holder, owner, wanted):
            other = self._slowest(holder, now)
            if other is None:
                return False
            self.give(other)
            other.give_way()
        self.give(holder)
        if wanted:
            self._shares[holder] = _Share(owner, wanted)
            self._owners[owner] += wanted
        return True

    def give(self, holder: MemoryHolder) -> None:
        """Return all that a holder has."""
        share = self._shares.pop(holder, None)
        if share is not None:
            self._owners[share.owner] -= share.n_bytes
            if not self._owners[share.owner]:
                del self._owners[share.owner]

    def _fits(self, holder: MemoryHolder, owner: str, wanted: int) -> bool:
        share = self._shares.get(holder)
        more = wanted - (0 if share is None else share.n_bytes)
        return more <= 0 or (
            self.counted + more <= self._most and self._owners[owner] + more <= self._most_of_owner
        )

    def _slowest(self, holder: MemoryHolder, now: float) -> MemoryHolder | None:
        """Return who is to give way to `holder`: the owner with most comes first, then who waited longest."""
        found: tuple[int, float] | None = None
        slowest: MemoryHolder | None = None
        for other, share in self._shares.items():
            since = other.waits_since
            if other is holder or since is None or now - since < PATIENCE_S:
                continue
            rank = (self._owners[share.owner], now - since)
            if found is None or rank > found:
                found, slowest = rank, other
        return slowest
