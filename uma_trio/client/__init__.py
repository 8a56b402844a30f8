"""The client that applications import: stream text from the local daemon.

    async with connect() as client:
        async with client.generate("Once upon a time", max_tokens=50) as story:
            async for token in story:
                print(token.text, end="")

Scripts without trio use :func:`generate_sync`, and asyncio programs :mod:`uma_trio.client.aio`. Trio is
imported when :func:`connect` or :class:`Client` is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uma_trio.client import names
from uma_trio.client.names import *  # noqa: F403

if TYPE_CHECKING:
    from uma_trio.client.on_trio import Client, connect

__all__ = ["Client", "connect"]
__all__ += names.__all__


def __getattr__(name: str) -> Any:
    if name not in ("Client", "connect"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from uma_trio.client import on_trio

    globals()[name] = found = getattr(on_trio, name)
    return found
