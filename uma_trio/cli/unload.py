"""`uma-trio unload`: have the daemon free the memory of one of its configured models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from uma_trio.cli.attempt import attempt
from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import OK, SocketFlag, console, socket_path
from uma_trio.words import harmless


def unload(
    model: Annotated[
        str, Parameter(help="A name of a model in the section `models`, or an alias.")
    ],
    /,
    *,
    socket: SocketFlag = None,
) -> int:
    """Unload a configured model that no request uses. The next request that names it loads it again.

    For the user that runs the daemon.
    """
    return attempt(_unload, socket_path(socket), model)


async def _unload(path: Path, model: str) -> int:
    from uma_trio.client import Client

    await Client(path).unload(model)
    console().print(f"{harmless(model)} is unloaded.")
    return OK
