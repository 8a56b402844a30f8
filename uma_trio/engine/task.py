"""The end of an engine that raised."""

from __future__ import annotations

from typing import Protocol

from uma_trio.engine.inbox import Inbox


class EngineDied(Exception):
    """An engine ended with an exception. Every stream of it has got its terminal item."""


class Failing(Protocol):
    """What an engine has that its end needs."""

    inbox: Inbox

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error, when the engine is computed no more."""


def bury(engine: Failing, error: Exception, message: str) -> EngineDied:
    """End every request of an engine that raised `error`, with E_RUNTIME_004 and `message`; return what to tell.

    Called on trio's thread, when the engine is computed no more.
    """
    engine.inbox.close()
    engine.fail_all("E_RUNTIME_004", message)
    died = EngineDied(f"the engine has stopped: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
