"""The engine's task: one worker thread for the life of the daemon, owned by a nursery."""

from __future__ import annotations

from typing import NoReturn

import trio

from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine


class EngineDied(Exception):
    """The engine's thread ended with an exception. Every stream has got its terminal item."""


async def run_engine(engine: Engine, inbox: Inbox) -> None:
    """Run `engine` in a worker thread until ``inbox.close()``.

    Being cancelled closes the inbox and waits for the running tick, which is not
    interrupted. If the thread raises, every stream gets its terminal item
    (``E_RUNTIME_004``) first; then :class:`EngineDied` is raised from the cause, so that the
    nursery ends loudly.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_close_when_cancelled, inbox)
        try:
            # abandon_on_cancel stays False: nobody else may touch the llama_context meanwhile.
            await trio.to_thread.run_sync(engine.run, limiter=trio.CapacityLimiter(1))
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        bury(engine, inbox, failure)


async def _close_when_cancelled(inbox: Inbox) -> None:
    try:
        await trio.sleep_forever()
    finally:
        inbox.close()


def bury(engine: Engine, inbox: Inbox, error: Exception) -> NoReturn:
    """End every request of an engine that raised `error`, then raise :class:`EngineDied`."""
    inbox.close()
    engine.fail_all("E_RUNTIME_004", "the engine has stopped; the daemon is going down")
    raise EngineDied(f"the engine has stopped: {type(error).__name__}: {error}") from error
