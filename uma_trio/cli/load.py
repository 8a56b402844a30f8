"""`uma-trio load`: have the daemon load one of its configured models, and show how far that is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from uma_trio.cli.attempt import attempt
from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import OK, SocketFlag, console, socket_path
from uma_trio.words import harmless

if TYPE_CHECKING:
    from uma_trio.client import Client

_LOOK_S: Final = 0.5


def load(
    model: Annotated[
        str, Parameter(help="A name of a model in the section `models`, or an alias.")
    ],
    /,
    *,
    socket: SocketFlag = None,
) -> int:
    """Load a configured model, and wait until it is there. Ctrl-C ends a loading that nobody else waits for.

    For the user that runs the daemon. Where memory is short, idle models make room, least recently used first.
    """
    return attempt(_load, socket_path(socket), model)


async def _load(path: Path, model: str) -> int:
    import trio

    from uma_trio.client import Client, ConnectionFailed, ServerError

    client = Client(path)
    failure: ServerError | ConnectionFailed | None = None
    async with trio.open_nursery() as nursery:
        if console().is_terminal:
            nursery.start_soon(_show, client, model)
        try:
            await client.load(model)
        except (ServerError, ConnectionFailed) as error:  # a nursery would wrap it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    console().print(f"{harmless(model)} is loaded.")
    return OK


async def _show(client: Client, model: str) -> None:
    """Show how far the loading is, until cancelled."""
    import trio

    from uma_trio.client import ConnectionFailed, ServerError

    with console().status(f"Loading {harmless(model)}") as status:
        while True:
            await trio.sleep(_LOOK_S)
            try:
                models = (await client.overview()).models
            except (ServerError, ConnectionFailed):
                continue  # the request itself will tell
            for one in models:
                if one.name == model and one.progress:
                    status.update(f"Loading {harmless(model)}: {one.progress:.0%}")
