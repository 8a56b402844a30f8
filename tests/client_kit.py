"""What tests of the client library are built from: a daemon in virtual time, over a real socket file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from net_kit import TICK_S, House, house

from uma_trio.client import Client, connect
from uma_trio.sockets.listener import claim


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
