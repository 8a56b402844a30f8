"""The items of one answer, on their way from the engine to its reader.

This is the hot path of every front end. The reader takes all items of a tick in one call, made by
the task that delivers them, so no task is scheduled for a token. Nothing waits, takes a lock or
looks anything up per token.

A token that is due later is held, together with all items behind it. An item that is shown at once
(a token without a pace, or the end of a request) releases all tokens held before it. Cancellation,
drain and the end of the engine therefore need no code for held tokens: the terminal item releases
them.

If a token arrives that is due before the last held one, the held tokens are moved forward, at even
intervals. A stream thereby catches up when its pace ends, and continues when it has no place for
further held tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import trio

from uma_trio.engine.messages import PromptProgress, StreamItem, TokenOut
from uma_trio.engine.playout import moved_forward
from uma_trio.service.playout import Playout

Take = Callable[[], bool]
"""Takes what is to be shown; says whether it wants to be called again."""
Look = Callable[[StreamItem], StreamItem | None]
"""Reads an item that arrives; returns the item to take instead, if any."""


def _nothing() -> bool:
    return False


class Reader:
    """The reader of one or several pipes: a function, called while its task is in :meth:`read`.

    `due` says that items are due that were not taken.
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
        except Exception as error:  # that of this reader, and of nobody else
            self._error = error
        task, self._task, self._take = self._task, None, None
        if task is not None:  # it may have been cancelled by what `take` did
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
    not taken, the first and the latest stay. `look`, if set, is called with each item when it
    arrives, and returns what is taken instead; what it raises is raised in the reader.
    """

    __slots__ = ("_closed", "_held", "_items", "_playout", "_shown_at", "look", "reader")

    def __init__(self, playout: Playout, reader: Reader) -> None:
        self.reader = reader
        self.look: Look | None = None
        self._playout = playout
        self._items: list[StreamItem] = []
        self._held: deque[tuple[float, TokenOut]] = deque()  # and when each is due, ascending
        self._shown_at = -math.inf  # when the latest of those that were held was due
        self._closed = False

    def send_nowait(self, item: StreamItem) -> None:
        """Append `item`. The reader takes it at :meth:`flush`, or when it is due."""
        if self._closed:
            return
        if self.look is not None:
            try:
                looked_at = self.look(item)
            except Exception as error:  # that of this request, and of no other
                self.close()
                self.reader.fail(error)
                return
            if looked_at is None:
                return
            item = looked_at
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
        """Show what is due by `until`; see :class:`uma_trio.service.playout.PacedStream`."""
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
        """Drop what is there and what comes. Idempotent."""
        self._closed = True
        if self._held:
            self._release_held()
        self._items.clear()

    def _replaces(self, item: PromptProgress) -> bool:
        """Put `item` in place of an older one that its reader has not taken, if it may."""
        items = self._items
        if len(items) < 2 or not isinstance(items[-1], PromptProgress):
            return False
        items[-1] = item
        return True

    def _hold(self, token: TokenOut) -> bool:
        """Hold a token until it is due. False if it may go now, and then nothing is held."""
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
        """Have the tokens that are held come evenly from now on, and before `due`."""
        dues, tokens = zip(*self._held, strict=True)
        moved = moved_forward(dues, due, self._playout.clock(), self._shown_at)
        self._held = deque(zip(moved, tokens, strict=True))

    def _release_held(self) -> None:
        held = self._held
        self._items += [token for _, token in held]
        self._playout.held -= len(held)
        held.clear()
        self._playout.forget(self)
