"""Clients that have connected and are not let in yet, in turns by user: a flood of one delays no other."""

from __future__ import annotations

import socket
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Final

import trio

from uma_trio.sockets.principal import Principal

# Each client in here holds a descriptor. Twice the connections that HTTP admits by default.
MOST: Final = 512


class Arrivals:
    """A queue of connected sockets, one lane for each user. For trio's thread only.

    The kernel's backlog is first come, first served, so that it must be kept short. If this queue is full, the
    latest client of the user who has most in it is closed.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[Hashable, deque[tuple[socket.socket, Principal]]] = OrderedDict()
        self._length = 0
        self._some = trio.Event()
        self._none = trio.Event()
        self._none.set()

    def __len__(self) -> int:
        return self._length

    def add(self, sock: socket.socket, principal: Principal) -> None:
        """Put a client behind those of its user."""
        self._lanes.setdefault(_user(principal), deque()).append((sock, principal))
        self._length += 1
        if self._length == 1:
            self._some.set()
            self._none = trio.Event()
        if self._length > MOST:
            max(self._lanes.values(), key=len).pop()[0].close()
            self._length -= 1

    def take(self) -> tuple[socket.socket, Principal]:
        """Return the first client of the user whose turn it is. There must be one."""
        user, lane = self._lanes.popitem(last=False)
        first = lane.popleft()
        if lane:
            self._lanes[user] = lane
        self._length -= 1
        if not self._length:
            self._some = trio.Event()
            self._none.set()
        return first

    async def wait(self) -> None:
        """Wait until there is a client."""
        await self._some.wait()

    async def until_empty(self) -> None:
        """Wait until nobody is left."""
        await self._none.wait()

    def close(self) -> None:
        """Close the sockets of all who wait."""
        while self._length:
            self.take()[0].close()


def _user(principal: Principal) -> Hashable:
    """Return whom a client takes turns as; programs of a user whose process is known are apart."""
    return (principal.counts_as, principal.pid)
