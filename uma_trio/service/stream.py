"""The stream of items of one answer, from the engine to its reader.

This is the hot path of every front end. The reader takes all items of a tick in one call, made by
the task that delivers them, so no task is scheduled for a token. Nothing waits, takes a lock or
looks anything up per token.

A token that is due later is held, together with all items behind it. An item that is shown at once
(a token without a pace, or the end of a request) releases all tokens held before it. Cancellation,
drain and the end of the engine therefore need no code for held tokens: the terminal item releases
them.

If a token arrives that is due before the last held one, the held tokens are moved forward, at even
intervals. A stream thereby catches up when its pace ends, and continues when it has no place for
further held tokens. One timer serves all streams: streams with the same pace are usually due
together and share one wake of trio's loop, where a deadline for each token costs 1.7 times as much.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from uma_trio.engine.messages import PromptProgress, StreamItem, TokenOut
from uma_trio.engine.playout import moved_forward
from uma_trio.service.timer import Timer, TrioTimer

Take = Callable[[], bool]
"""Takes the due items; returns whether to call it again."""
OnItem = Callable[[StreamItem], StreamItem | None]
"""Receives each item as it arrives; returns the item to take instead, if any."""


def _nothing() -> bool:
    return False


class Reader:
    """The reader of one or several pipes: a function, called while its task is in :meth:`read`.

    `due`: items are due that were not taken.
    """

    __slots__ = ("_error", "_take", "_task", "due")

    def __init__(self) -> None:
        self.due = False
        self._take: Take | None = None
        self._task: trio.lowlevel.Task | None = None
        self._error: Exception | None = None

    def flush(self) -> None:
        """Deliver the due items to the waiting reader, or to the next one that waits."""
        take = self._take
        if take is None or not self.due:
            return
        self.due = False
        try:
            if take():
                return
        except Exception as error:  # raised in this reader alone
            self._error = error
        task, self._task, self._take = self._task, None, None
        if task is not None:  # `take` may have cancelled it
            trio.lowlevel.reschedule(task)

    def fail(self, error: Exception) -> None:
        """Raise an exception in the waiting reader, or in the next one that waits."""
        self._error, self.due = error, True
        self._take = None if self._take is None else _nothing

    async def read(self, take: Take) -> None:
        """Call `take` each time that items of one of its pipes are due, until it returns False.

        `take` is called on trio's thread by the task that shows the items, and must not wait. Its
        exceptions are raised here. For one task. After cancellation `take` is not called again.
        """
        while self.due:
            await trio.lowlevel.checkpoint()
            self.due = False
            self._raise()
            if not take():
                return
        self._take, self._task = take, trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._give_up)
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self._take = self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Pipe:
    """A stream between the outlet and one reader. Credit bounds it, so it has no bound of its own.

    Both ends are used on trio's thread. After :meth:`close` further items are dropped. Pipes that
    one task reads share its `reader`. Progress of a prompt uses no credit: of the items that are
    not taken, the first and the latest stay. `on_item`, if set, is called with each arriving item,
    and returns the item to take instead; its exceptions are raised in the reader.
    """

    __slots__ = ("_closed", "_held", "_items", "_playout", "_shown_at", "on_item", "reader")

    def __init__(self, playout: Playout, reader: Reader) -> None:
        self.reader = reader
        self.on_item: OnItem | None = None
        self._playout = playout
        self._items: list[StreamItem] = []
        self._held: deque[tuple[float, TokenOut]] = deque()  # with due times, ascending
        self._shown_at = -math.inf  # when the latest of those that were held was due
        self._closed = False

    def send_nowait(self, item: StreamItem) -> None:
        """Append `item`. The reader takes it at :meth:`flush`, or when it is due."""
        if self._closed:
            return
        if self.on_item is not None:
            try:
                replacement = self.on_item(item)
            except Exception as error:  # raised in this request alone
                self.close()
                self.reader.fail(error)
                return
            if replacement is None:
                return
            item = replacement
        if isinstance(item, TokenOut) and item.show_at:
            if self._hold(item):
                return
        elif self._held:
            self._release_held()
        elif isinstance(item, PromptProgress) and self._replaces(item):
            return
        self._items.append(item)
        self.reader.due = True

    def flush(self) -> None:
        """Have the reader take the due items."""
        self.reader.flush()

    def take(self) -> list[StreamItem]:
        """Return all due items, in order."""
        items, self._items = self._items, []
        return items

    def show(self, until: float) -> float:
        """Release the tokens that are due by `until`; return the next due time, or infinity."""
        held, n = self._held, 0
        while held and held[0][0] <= until:
            self._shown_at, token = held.popleft()
            self._items.append(token)
            n += 1
        if n:
            self._playout.held -= n
            self.reader.due = True
        return held[0][0] if held else math.inf

    def close(self) -> None:
        """Drop all present and further items. Idempotent."""
        self._closed = True
        if self._held:
            self._release_held()
        self._items.clear()

    def _replaces(self, item: PromptProgress) -> bool:
        """Replace an older progress item that the reader has not taken, unless it is the first."""
        items = self._items
        if len(items) < 2 or not isinstance(items[-1], PromptProgress):
            return False
        items[-1] = item
        return True

    def _hold(self, token: TokenOut) -> bool:
        """Hold a token until it is due; False if it is due now and nothing is held."""
        due, held = token.show_at, self._held
        if not held and due <= self._playout.clock():
            return False
        sooner = bool(held) and due < held[-1][0]
        if sooner:
            self._spread(due)
        self._held.append((due, token))
        self._playout.held += 1
        if sooner or len(self._held) == 1:
            self._playout.expect(self, self._held[0][0])
        return True

    def _spread(self, due: float) -> None:
        """Reschedule the held tokens evenly from now until `due`."""
        dues, tokens = zip(*self._held, strict=True)
        moved = moved_forward(dues, due, self._playout.clock(), self._shown_at)
        self._held = deque(zip(moved, tokens, strict=True))

    def _release_held(self) -> None:
        held = self._held
        self._items += [token for _, token in held]
        self._playout.held -= len(held)
        held.clear()
        self._playout.forget(self)


GRAIN_S: Final = 0.0001
"""Tokens that are due within so many seconds are released together: a wake of trio's loop takes as long."""


class Playout:
    """Releases the held tokens of all streams when they are due, while :meth:`run` is active.

    `clock` is the clock of the engine, of the tokens' times, and of `timer`. For trio's thread
    only.
    """

    def __init__(self, clock: Callable[[], float], timer: Timer | None = None) -> None:
        self.clock = clock
        #: Tokens that all streams hold.
        self.held = 0
        self._timer = timer or TrioTimer(clock)
        self._due: dict[Pipe, float] = {}
        self._next = math.inf  # what the timer is set to

    def expect(self, holder: Pipe, due: float) -> None:
        """Call :meth:`Pipe.show` of the stream at `due`; replaces an earlier time."""
        self._due[holder] = due
        if due < self._next:
            self._set(due)

    def forget(self, holder: Pipe) -> None:
        self._due.pop(holder, None)

    async def run(self) -> None:
        """Release tokens when they are due, until cancelled."""
        try:
            while True:
                await self._timer.wait()
                self._show(self.clock() + GRAIN_S)
        finally:
            self._timer.close()

    def _show(self, until: float) -> None:
        waiting = self._due
        holders = [holder for holder, due in waiting.items() if due <= until]
        for holder in holders:
            due = holder.show(until)
            if due == math.inf:
                del waiting[holder]
            else:
                waiting[holder] = due
        self._set(min(waiting.values(), default=math.inf))
        for holder in holders:
            holder.flush()

    def _set(self, due: float) -> None:
        self._next = due
        self._timer.set(due)
