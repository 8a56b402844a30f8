"""What tests of the client library are built from: a daemon in virtual time, over a real socket file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio
from net_kit import TICK_S, House, house

from uma_trio.client import Client, connect
from uma_trio.sockets.listener import claim

T = TypeVar("T")
R = TypeVar("R")


@asynccontextmanager
async def served(path: Path, *args: Any, **options: Any) -> AsyncIterator[House]:
    """Run a daemon on `path`."""
    with claim(path) as mine, mine.listen() as listener:
        async with house(*args, listener=listener, **options) as daemon:
            yield daemon


@asynccontextmanager
async def client_of(path: Path, *args: Any, **options: Any) -> AsyncIterator[tuple[Client, House]]:
    """Run a daemon on `path` and connect to it."""
    async with served(path, *args, **options) as daemon, connect(path) as client:
        yield client, daemon


async def works(client: Client, daemon: House) -> bool:
    """Whether the engine is idle and the connection good for another request."""
    await trio.sleep(2 * TICK_S)
    daemon.check_idle_engine()
    return await client.generate("again", max_tokens=7).text() == daemon.expected("again", 7)


@contextmanager
def in_thread(daemon: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[tuple[T, Aside]]:
    """Run a daemon in real time, in a thread of its own, for clients of any event loop.

    Yields it and what calls a function in its thread. At the end it must be idle, or its error is raised.
    """
    ready: Future[tuple[T, trio.lowlevel.TrioToken, trio.Event]] = Future()

    async def serve() -> None:
        async with daemon() as served_here:
            ended = trio.Event()
            ready.set_result((served_here, trio.lowlevel.current_trio_token(), ended))
            await ended.wait()

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(trio.run, serve)
        served.add_done_callback(lambda done: done.exception() and _give_up(ready, done))
        found, token, ended = ready.result()

        def aside(call: Callable[[], R]) -> R:
            answer: Future[R] = Future()
            token.run_sync_soon(lambda: answer.set_result(call()))
            return answer.result()

        try:
            yield found, aside
        finally:
            aside(ended.set)
            served.result()


def _give_up(ready: Future[Any], done: Future[None]) -> None:
    if not ready.done():
        ready.set_exception(done.exception())


class Aside(Protocol):
    """Calls a function in the thread of a daemon and returns what it returns."""

    def __call__(self, call: Callable[[], R], /) -> R:
        """Call it."""
