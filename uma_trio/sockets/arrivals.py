"""Clients that have connected and are not let in yet, in turns by user: a flood of one delays no other."""

from __future__ import annotations

import socket
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Final

import trio

from uma_trio.sockets.principal import Principal

# The kernel's backlog goes on where this ends; each client in here holds a descriptor.
MOST: Final = 256


class Arrivals:
    """A queue of connected sockets, one lane for each user. For trio's thread only."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[Hashable, deque[tuple[socket.socket, Principal]]] = OrderedDict()
        self._length = 0
        self._some = trio.Event()
        self._room = trio.Event()
        self._room.set()
        self._none = trio.Event()
        self._none.set()

    @property
    def is_full(self) -> bool:
        """Whether no more should be added."""
        return self._length >= MOST

    def __len__(self) -> int:
        return self._length

    def add(self, sock: socket.socket, principal: Principal) -> None:
        """Put a client behind those of its user."""
        self._lanes.setdefault(_user(principal), deque()).append((sock, principal))
        self._length += 1
        self._some.set()
        if self._length == 1:
            self._none = trio.Event()
        if self._length == MOST:
            self._room = trio.Event()

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
        if self._length == MOST // 2:
            self._room.set()
        return first

    async def wait(self) -> None:
        """Wait until there is a client."""
        await self._some.wait()

    async def until_empty(self) -> None:
        """Wait until nobody is left."""
        await self._none.wait()

    async def wait_for_room(self) -> None:
        """Wait until many more clients may be added, if it was full."""
        await self._room.wait()

    def close(self) -> None:
        """Close the sockets of all who wait."""
        while self._length:
            self.take()[0].close()


def _user(principal: Principal) -> Hashable:
    """Return whom a client takes turns as; programs of a user whose process is known are apart."""
    return (principal.counts_as, principal.pid)
