"""The daemon's part in being replaced: it gives its sockets to a daemon that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol

import trio

from uma_trio.observe import log
from uma_trio.service.front import FrontListener
from uma_trio.sockets.handover import Giver, Handed


class Pauses(Protocol):
    """A front end that can leave new clients in the backlog for a while."""

    def pause_accepting(self) -> None:
        """Leave further clients in the backlog."""

    def resume_accepting(self) -> None:
        """Accept clients again."""


class Replacing:
    """Waits for a daemon that wants to take over, and gives it `handed`. :attr:`replaced` says that it has them.

    `given` is called then. Until then this daemon serves on, whatever becomes of the others.
    """

    def __init__(
        self,
        path: str,
        handed: Sequence[Handed],
        sockets: Sequence[FrontListener],
        fronts: Sequence[Pauses],
        given: Callable[[], None],
    ) -> None:
        self._path = path
        self._handed = handed
        self._sockets = sockets
        self._fronts = fronts
        self._given = given
        self._log = log.get("daemon")
        self._asking = trio.CancelScope()
        self._over = trio.Event()
        self.busy = False
        self.replaced = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve daemons that ask for the sockets, one after the other, until one has them or :meth:`end` is called.

        It is started when it can be asked, or cannot ever: that is logged. While sockets are given
        (15 s at most) it is not cancelled.
        """
        try:
            with closing(Giver.at(self._path)) as giver:
                task_status.started()
                with self._asking:
                    while not self.replaced:
                        await self._serve(giver)
        except OSError as error:
            self._log.warning(
                "this daemon cannot be replaced while it runs (`serve --replace`)",
                why=f"{error.filename or self._path}: {error.strerror}",
                fix="stop it, and start the next one",
            )
            task_status.started()
        finally:
            self._over.set()

    async def end(self) -> None:
        """Accept no further daemon; wait for one that is receiving the sockets."""
        self._asking.cancel()
        await self._over.wait()

    async def _serve(self, giver: Giver) -> None:
        asked = await giver.asked()
        with trio.CancelScope(shield=True):
            self.busy = True
            for front in self._fronts:
                front.pause_accepting()
            self.replaced = await asked.give(self._handed)
            if self.replaced:
                giver.disown()
                for each in self._sockets:
                    each.disown()
                self._log.info("another daemon serves here now; finishing the running requests")
                self._given()
            else:
                for front in self._fronts:
                    front.resume_accepting()
                self._log.warning("the daemon that was to replace this one has ended; serving on")
            self.busy = False
