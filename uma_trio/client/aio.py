"""The client for asyncio: the names of :mod:`uma_trio.client`, without trio.

    async with connect() as client:
        async with client.generate("Once upon a time", max_tokens=50) as story:
            async for token in story:
                print(token.text, end="")

The same classes, parameters, errors and guarantees under cancellation. Two generations at once on
one connection raise RuntimeError.
"""

from uma_trio.client import names
from uma_trio.client.names import *  # noqa: F403
from uma_trio.client.on_asyncio import Client, connect

__all__ = ["Client", "connect"]
__all__ += names.__all__
