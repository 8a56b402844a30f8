"""How much of one kind of work a pass of trio's scheduler holds, however many tasks become ready at once."""

from __future__ import annotations

import trio


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
        """Begin a pass."""
        woken = self._lot.unpark(count=self._most)
        self._left = self._most - len(woken)
        if woken:
            self._renew_soon()
        else:
            self._renews = False
