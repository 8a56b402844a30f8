"""The items of one request on their way from the engine to whoever reads them.

This is the hot path of every front: the items of a tick for one stream wake its reader once, and
:meth:`Pipe.take` gives them all. Nothing waits, locks or is looked up per token.

A token that is to be shown later is held, and with it what comes behind it. Whatever is to be shown
at once takes along all that is held before it: a token that is not paced, and the end of a request,
however it comes about. A token that is due before the last one held moves those forward, evenly: so a
stream catches up once its pace ends, and goes on where no place is left to hold more. So nothing has to be done about held tokens when a request is cancelled, the
daemon drains or the engine dies: the terminal item follows, and they go before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from uma_trio.engine.messages import StreamItem, TokenOut

GRAIN_S: Final = 0.0005
"""Tokens that are due so close together are shown together; timers are no finer."""

Held = Callable[[int], None]
"""Is told by how many the tokens that are held have become more, or fewer."""


def nobody(_change: int) -> None:
    """Count nothing."""


class Pipe:
    """A stream between the outlet and one task; it needs no bound of its own, credit is one.

    Both ends live on trio's thread. After :meth:`close` what comes is dropped. `clock` is the
    engine's, by which tokens say when they are to be shown. While tokens are held, the reader's task
    waits with a deadline; otherwise there is no timer.
    """

    __slots__ = (
        "_clock",
        "_closed",
        "_count",
        "_held",
        "_items",
        "_paced",
        "_reader",
        "_shown_at",
        "_timer",
    )

    def __init__(self, clock: Callable[[], float], count: Held = nobody) -> None:
        self._clock = clock
        self._count = count
        self._items: list[StreamItem] = []
        self._held: deque[tuple[float, TokenOut]] = deque()  # and when each is due, ascending
        self._paced = False  # the latest token was; the reader then waits ready for a deadline
        self._shown_at = -math.inf  # when tokens that were held were last let go
        self._timer: trio.CancelScope | None = None
        self._reader: trio.lowlevel.Task | None = None
        self._closed = False

    def send_nowait(self, item: StreamItem) -> None:
        """Put `item` behind the others, and wake the reader if it is to be shown now; never blocks."""
        if self._closed:
            return
        if isinstance(item, TokenOut) and item.show_at:
            self._paced = True
            if self._hold(item):
                return
        elif self._paced:
            self._paced = False
            self._let_go(len(self._held))
        self._items.append(item)
        self._wake()

    async def take(self) -> list[StreamItem]:
        """Return everything that is to be shown, in order; wait until something is.

        For one task. Cancelled, it has taken nothing.
        """
        self._let_go_due()
        if self._items:
            await trio.lowlevel.checkpoint()
        while not self._items:
            if self._paced:
                await self._wait_until_due()
            else:
                self._reader = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._give_up)
            self._let_go_due()
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Drop what is there and what comes. Idempotent."""
        self._closed = True
        self._let_go(len(self._held))
        self._items.clear()

    def _hold(self, token: TokenOut) -> bool:
        """Hold a token until it is due. False if it may go now, and then nothing is held."""
        due, held = token.show_at, self._held
        if not held and due <= self._clock():
            return False
        sooner = bool(held) and due < held[-1][0]
        if sooner:
            self._spread(due)
        held.append((due, token))
        self._count(1)
        if sooner or len(held) == 1:
            self._set_timer()
        return True

    def _spread(self, due: float) -> None:
        """Have the tokens that are held come evenly from now on, and before `due`."""
        held, n = self._held, len(self._held)
        now = self._clock()
        first = min(max(now, self._shown_at + (due - now) / n), due)
        step = (due - first) / n
        for place, (at, token) in enumerate(held):
            held[place] = min(at, first + place * step), token

    def _let_go_due(self) -> None:
        """Show what is due by now."""
        held = self._held
        if held:
            now = self._clock()
            n = sum([at <= now + GRAIN_S for at, _ in held])
            if n:
                self._shown_at = now
                self._let_go(n)

    def _let_go(self, n: int) -> None:
        """Show the first `n` of the tokens that are held."""
        if n:
            held = self._held
            self._items += [held.popleft()[1] for _ in range(n)]
            self._count(-n)

    def _wake(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            trio.lowlevel.reschedule(reader)

    def _set_timer(self) -> None:
        """Have a reader that waits go on when the first of the tokens that are held is due."""
        if self._timer is not None:
            self._timer.deadline = self._deadline()
        else:
            self._wake()  # it waits without one

    def _deadline(self) -> float:
        """When the first token that is held is due, on trio's clock."""
        if not self._held:
            return math.inf
        return trio.current_time() + self._held[0][0] - self._clock()

    async def _wait_until_due(self) -> None:
        """Wait until :meth:`_wake`, or until a token is due."""
        self._reader = trio.lowlevel.current_task()
        try:
            with trio.CancelScope(deadline=self._deadline()) as self._timer:
                await trio.lowlevel.wait_task_rescheduled(self._due_or_give_up)
        finally:
            self._timer = None

    def _due_or_give_up(self, _: object) -> trio.lowlevel.Abort:
        """Go on where the timer has gone off, which is cheaper than to raise and catch it."""
        if self._timer is None or not self._timer.cancel_called:
            return self._give_up(None)
        self._wake()
        return trio.lowlevel.Abort.FAILED

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED
