"""The compute task: one worker thread for the life of the daemon, owned by a nursery."""

from __future__ import annotations

import trio

from uma_trio.engine.compute import ComputeTask
from uma_trio.engine.computed import Computed


class EngineDied(Exception):
    """An engine ended with an exception. Every stream of it has got its terminal item."""


async def run_compute(compute: ComputeTask) -> None:
    """Run `compute` in a worker thread until ``compute.close()``.

    Being cancelled closes it and waits for the running tick, which is not interrupted.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_close_when_cancelled, compute)
        # abandon_on_cancel stays False: nobody else may touch the llama_context meanwhile.
        await trio.to_thread.run_sync(compute.run, limiter=trio.CapacityLimiter(1))
        nursery.cancel_scope.cancel()


async def _close_when_cancelled(compute: ComputeTask) -> None:
    try:
        await trio.sleep_forever()
    finally:
        compute.close()


def bury(engine: Computed, error: Exception, message: str) -> EngineDied:
    """End every request of an engine that raised `error`, with E_RUNTIME_004 and `message`; return what to tell.

    Called on trio's thread, when the engine is computed no more.
    """
    engine.inbox.close()
    engine.fail_all("E_RUNTIME_004", message)
    died = EngineDied(f"the engine has stopped: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
