"""`uma-trio load` and `uma-trio unload`: the memory of the daemon's configured models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from uma_trio.cli.attempt import attempt
from uma_trio.cli.output import OK, SocketFlag, console, say, socket_path
from uma_trio.cli.parser import Parameter
from uma_trio.words import harmless

if TYPE_CHECKING:
    from uma_trio.client import Client

_POLL_S: Final = 0.5
ModelArgument = Annotated[
    str, Parameter(help="A name of a model in the section `models`, or an alias.")
]


def load(model: ModelArgument, /, *, socket: SocketFlag = None) -> int:
    """Load a configured model, and wait until it is there. Ctrl-C ends a load that nothing else waits for.

    For the user that runs the daemon. If memory is short, idle models are unloaded, least recently used first.
    """
    return attempt(_load, socket_path(socket), model)


def unload(model: ModelArgument, /, *, socket: SocketFlag = None) -> int:
    """Unload a configured model that no request uses. The next request that names it loads it again.

    For the user that runs the daemon.
    """
    return attempt(unload_at, socket_path(socket), model)


async def unload_at(path: Path, model: str) -> int:
    """Unload a model of the daemon at `path`."""
    from uma_trio.client import Client

    await Client(path).unload(model)
    say(f"{harmless(model)} is unloaded.")
    return OK


async def _load(path: Path, model: str) -> int:
    import trio

    from uma_trio.client import Client, ConnectionFailed, ServerError

    client = Client(path)
    failure: ServerError | ConnectionFailed | None = None
    async with trio.open_nursery() as nursery:
        if console().is_terminal:
            nursery.start_soon(_show_progress, client, model)
        try:
            await client.load(model)
        except (ServerError, ConnectionFailed) as error:  # a nursery would wrap it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    say(f"{harmless(model)} is loaded.")
    return OK


async def _show_progress(client: Client, model: str) -> None:
    import trio

    from uma_trio.client import ConnectionFailed, ServerError

    with console().status(f"Loading {harmless(model)}") as status:
        while True:
            await trio.sleep(_POLL_S)
            try:
                models = (await client.overview()).models
            except (ServerError, ConnectionFailed):
                continue  # the request itself reports it
            for one in models:
                if one.name == model and one.progress:
                    status.update(f"Loading {harmless(model)}: {one.progress:.0%}")
