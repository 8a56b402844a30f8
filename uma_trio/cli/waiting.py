"""A line on the terminal about what a request of this process waits for, until its first token comes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from uma_trio.words import harmless

if TYPE_CHECKING:
    from uma_protocol import Sessions

PATIENCE_S: Final = 1.5
_AGAIN_S: Final = 1.0
_CLEAR: Final = "\r\x1b[K"


def wait_of(found: Sessions, pid: int) -> str:
    """Return what the requests of a process wait for, "" if nothing keeps them."""
    return next((one.waits for one in found.sessions if one.pid == pid and one.waits), "")


class WaitLine:
    """The line. :meth:`run` keeps it up to date until :meth:`end`; without a terminal there is none."""

    def __init__(self, socket: Path) -> None:
        import trio

        self._socket, self._told = socket, ""
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Say what this process's request waits for, from :data:`PATIENCE_S` on."""
        import trio

        from uma_trio.client import Client, ConnectionFailed, ServerError

        if not sys.stderr.isatty():
            return
        client = Client(self._socket)
        with self._scope:
            await trio.sleep(PATIENCE_S)
            while True:
                try:
                    self._tell(wait_of(await client.overview(), os.getpid()))
                except (ConnectionFailed, ServerError):
                    self._tell("")  # the request itself will tell
                await trio.sleep(_AGAIN_S)

    def end(self) -> None:
        """Remove the line: something else is printed from here on. Idempotent."""
        self._scope.cancel()
        self._tell("")

    def _tell(self, wait: str) -> None:
        if wait != self._told:
            self._told = wait
            sys.stderr.write(f"{_CLEAR}{harmless(wait)}")
            sys.stderr.flush()
