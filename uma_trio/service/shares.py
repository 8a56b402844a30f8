"""Among whom machine time is shared: numbers for principals, their programs, and their conversations.

Machine time is divided among principals first, then among the programs of a principal by the names
that they give themselves, then among the conversations of a program. A client chooses its names and
conversations, so these can only divide the share of its principal.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from uma_trio.service.ask import Origin

#: How many are remembered at each level below one above; one that is forgotten gets another number.
MOST_REMEMBERED = 256


class _Node:
    """One that has a share, and those that share it. `number` is unique for the life of the daemon."""

    __slots__ = ("_within", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._within: OrderedDict[str, _Node] = OrderedDict()

    def at(self, name: str, numbers: Iterator[int]) -> _Node:
        """Return who has this name below it; of too many who was used least recently is forgotten."""
        node = self._within.get(name)
        if node is None:
            node = self._within[name] = _Node(next(numbers))
            if len(self._within) > MOST_REMEMBERED:
                self._within.popitem(last=False)
        self._within.move_to_end(name)
        return node


class Shares:
    """Numbers everybody whose requests come, so that one who comes again has the same numbers.

    A principal with many names forgets only its own: each level is bounded for itself.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._everybody = _Node(0)

    def path(self, origin: Origin, session: str | None) -> tuple[int, ...]:
        """Return the numbers of a request's principal, program and conversation."""
        node, path = self._everybody, []
        for name in _names(origin, session):
            node = node.at(name, self._numbers)
            path.append(node.number)
        return tuple(path)


def _names(origin: Origin, session: str | None) -> Sequence[str]:
    """Return the names of a request on each level.

    Requests without a session are one conversation, of a process where the kernel tells which.
    """
    principal = origin.principal
    process = "" if principal.pid is None else principal.process
    conversation = process if session is None else f"session {session}"
    return principal.counts_as, origin.app or "", conversation
