"""An engine in virtual time: without a thread, because an autojump clock cannot see threads."""

from __future__ import annotations

from collections.abc import Callable

import trio

from uma_trio.engine.encoder import LOOK_S, EncoderEngine
from uma_trio.engine.inbox import Inbox, bury
from uma_trio.engine.loop import Engine
from uma_trio.machine.background import BackgroundScheduler


async def run_inline(
    engine: Engine, inbox: Inbox, wakeup: Wakeup, cost: Callable[[], float]
) -> None:
    """Run `engine`; `cost` of a tick is slept on trio's clock. An engine that raises is buried, and its end raised."""
    background = BackgroundScheduler(trio.current_time)
    try:
        while not inbox.closed:
            tick = engine.next_tick()
            if tick is None:
                if background.idle([engine.background], trio.current_time()) != 0:
                    await wakeup.wait()
                continue
            status = engine.compute(tick)
            await trio.sleep(cost())
            engine.finish(tick, status)
        engine.publish()
    except Exception as error:
        raise bury(engine, error, "the engine has stopped") from error


async def run_encoder_inline(engine: EncoderEngine, wakeup: Wakeup) -> None:
    """Run an encoder for 5 ms of trio's clock at a time. One that raises is buried, and its end raised."""
    try:
        while not engine.inbox.closed:
            if engine.claim(0.0).has_work:
                engine.queue.advance(LOOK_S)
                await trio.sleep(LOOK_S)
            else:
                await wakeup.wait()
    except Exception as error:
        raise bury(engine, error, "the engine has stopped") from error


class Wakeup:
    """What an :class:`Inbox` wakes when the engine runs inline; pass :meth:`set` as its wake."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the engine."""
        self._event.set()

    async def wait(self) -> None:
        """Sleep until :meth:`set`, also if it was called before."""
        await self._event.wait()
        self._event = trio.Event()
