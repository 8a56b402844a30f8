"""Which idle connection makes room for a newcomer where all places are held. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar

# A program that has just connected, or read an answer, may be about to send its next request.
GRACE_S = 1.0
# The same for connections of an owner who holds more than a fair share of the places.
OVER_SHARE_GRACE_S = 0.1


class Occupant(Protocol):
    """A connection, as far as its place is concerned."""

    @property
    def owner(self) -> Hashable:
        """Whose it is: places are shared fairly among owners."""

    @property
    def idle_since(self) -> float | None:
        """Since when its client has sent nothing while it owes the next byte; None otherwise."""


P = TypeVar("P", bound=Occupant)


def is_quiet(place: Occupant, now: float, grace_s: float = GRACE_S) -> bool:
    """Whether a connection has been idle for so long that its client is hardly about to ask."""
    since = place.idle_since
    return since is not None and now - since >= grace_s


def connection_to_evict(places: Iterable[P], owner: Hashable, now: float) -> P | None:
    """Return the connection that is closed for a newcomer of `owner`; None if none may be.

    Among owners who hold more than the newcomer's, and his own connections, the owner who holds the
    most gives way, with the one that has been idle for the longest. An owner who holds more than all
    places by the number of owners keeps an idle one for :data:`OVER_SHARE_GRACE_S` only: who opens
    hundreds at once shuts nobody out. Looks at every place once.
    """
    every = list(places)
    held = Counter(place.owner for place in every)
    fair = len(every) / len(held.keys() | {owner})
    chosen: tuple[int, float] | None = None
    found: P | None = None
    for place in every:
        since, n = place.idle_since, held[place.owner]
        if since is None or not is_quiet(place, now, OVER_SHARE_GRACE_S if n > fair else GRACE_S):
            continue
        if place.owner != owner and n <= held[owner]:
            continue
        rank = (-n, since)
        if chosen is None or rank < chosen:
            chosen, found = rank, place
    return found
