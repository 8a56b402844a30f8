"""`uma-trio priority`: move a request that runs or waits to the other lane."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from uma_trio.cli.attempt import attempt
from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import OK, SocketFlag, console, socket_path
from uma_trio.words import Lane


def priority(
    request: Annotated[
        int, Parameter(help="The daemon's handle of a request, as `uma-trio ps` shows it.")
    ],
    lane: Annotated[Lane, Parameter(help="The lane to move it to.")],
    /,
    *,
    socket: SocketFlag = None,
) -> int:
    """Move a request to another lane."""
    return attempt(_priority, socket_path(socket), request, lane)


async def _priority(path: Path, request: int, lane: Lane) -> int:
    from uma_trio.client import Client

    await Client(path).set_priority(request, lane)
    console().print(f"Request {request} is in the {lane} lane.")
    return OK
