"""Waiting for the engine's answer to a question, as long as there is an engine."""

from __future__ import annotations

import trio

from uma_trio.engine.inbox import EngineStopped, Inbox


class Answered:
    """An answer of the engine that somebody, or several, wait for."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._is_there = False

    def set(self) -> None:
        """Note that it is there."""
        self._is_there = True
        self._event.set()

    async def wait(self, inbox: Inbox) -> None:
        """Wait until it is there.

        Raises:
            EngineStopped: the inbox is closed, now or before the answer came, so that none comes.
        """
        with inbox.when_closed(self._event.set):
            await self._event.wait()
        if not self._is_there:
            raise EngineStopped
