"""What the bytes of clients may cost trio's thread: a share for each user, and turns for those who exceed it.

Reading a head or a chunk takes microseconds, but a client can send thousands in one write. Its connection
gives way to other tasks after each head, and after each millisecond of chunks. While answers are generated, a user may
spend :data:`SHARE` of the thread; what users send beyond that waits in one queue, program by
program, and gets one part in 1 + :data:`PAUSE` of the thread for all of them together. What is within the share is
spread over passes of the scheduler, :data:`AT_ONCE` pieces in each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import trio
from attrs import define, field

from uma_trio.service.fair import UserProgram
from uma_trio.service.questions import Questions


class Passes:
    """Lets `most` tasks go on in one pass of the scheduler; the others follow in later passes, in order.

    A pass in which a new count begins may hold twice as many.

    trio runs every task that is ready before it looks at sockets and timers again. When hundreds of connections
    close or send a request at the same moment, one pass would hold the work of all of them, and a token that
    comes meanwhile would be written behind it. For trio's thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most
        self._lot = trio.lowlevel.ParkingLot()
        self._renews = False

    async def turn(self) -> None:
        """Wait until a pass has room. Always a checkpoint. Cancelled, it leaves its place to the next one."""
        if not self._renews:
            self._renews = True
            self._renew_soon()
        if self._left:
            self._left -= 1
            await trio.lowlevel.checkpoint()
        else:
            await self._lot.park()

    def _renew_soon(self) -> None:
        trio.lowlevel.current_trio_token().run_sync_soon(self._renew)

    def _renew(self) -> None:
        woken = self._lot.unpark(count=self._most)
        self._left = self._most - len(woken)
        if woken:
            self._renew_soon()
        else:
            self._renews = False


HEAD_S: Final = 0.0005
"""What a request is taken to cost with its head, its tasks and a short answer. Measured: 0.3 to 0.6 ms."""
CHUNK_S: Final = 0.00001
"""What a chunk of a body is taken to cost. h11 takes 5 µs."""
SLICE_S: Final = 0.001
"""After so much other tasks have their turn."""
SHARE: Final = 0.2
"""Of the thread, for each user: 400 requests a second."""
BURST_S: Final = 0.1
"""Of the thread, that a user who was quiet may spend at once: 200 requests."""
PAUSE: Final = 3
"""Pauses of those beyond their share are so many times as long as their work."""
AT_ONCE: Final = 4
"""Heads, or ends of connections, in one pass of trio's scheduler: about 2 ms."""
MOST_USERS: Final = 256
"""That are remembered. Who is forgotten begins anew."""


@define
class _Account:
    """What a user may still spend, at a time."""

    left_s: float
    at: float


class ThreadShare:
    """The accounts of all users. For trio's thread. `busy` says whether requests run."""

    def __init__(self, clock: Callable[[], float], busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._queue = Questions(clock, busy, pause=PAUSE)
        self._passes = Passes(AT_ONCE)

    async def spend(self, client: UserProgram, seconds: float) -> None:
        """Count work for a client that was done, and let other tasks run; wait if its user did too much.

        Cancelled, it is counted all the same.
        """
        within = self._count(client.user, seconds)
        if within or not self._busy():
            await self._passes.turn()
        else:
            await self._queue.wait(client, seconds)

    async def turn(self) -> None:
        """Wait until a pass has room for work that is not counted, such as the end of a connection."""
        await self._passes.turn()

    def _count(self, user: str, seconds: float) -> bool:
        """Take from a user's account; whether it had enough."""
        now = trio.current_time()
        account = self._accounts.get(user)
        if account is None:
            account = self._accounts[user] = _Account(BURST_S, now)
            if len(self._accounts) > MOST_USERS:
                self._accounts.popitem(last=False)
        self._accounts.move_to_end(user)
        account.left_s = min(BURST_S, account.left_s + SHARE * (now - account.at))
        account.at = now
        within = account.left_s >= seconds
        if within:
            account.left_s -= seconds
        return within


@define
class Meter:
    """The chunks of one connection, which are counted together: an account for each would cost as much."""

    share: ThreadShare
    _spent_s: float = field(default=0.0, init=False)

    async def chunk(self, client: UserProgram) -> None:
        """Count a chunk that was read; other tasks have their turn once a slice is full."""
        self._spent_s += CHUNK_S
        if self._spent_s >= SLICE_S:
            spent, self._spent_s = self._spent_s, 0.0
            await self.share.spend(client, spent)
