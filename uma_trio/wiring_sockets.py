"""The names that the framed protocol is served under, taken before the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import evolve

from uma_trio.config.options import Config
from uma_trio.sockets.inherited import Inherited
from uma_trio.sockets.listener import Claim, Listeners, SocketTaken, SocketUnusable, claim
from uma_trio.sockets.path import SHARED_SOCKET
from uma_trio.telemetry import log


def told_by(inherited: Inherited, config: Config) -> Config:
    """Return the settings with the addresses of the sockets that a supervisor passed."""
    sources = dict(config.sources)
    if (path := inherited.path) is not None:
        config = evolve(config, socket=Path(path))
        sources["socket"] = "LISTEN_FDS"
    if (address := inherited.http_address) is not None:
        config = evolve(config, http=address)
        sources["http"] = "LISTEN_FDS"
    return evolve(config, sources=sources)


@contextmanager
def names_taken(config: Config, inherited: Inherited) -> Iterator[Callable[[], Listeners]]:
    """Hold the daemon's names until the block ends; what it yields makes their sockets.

    A daemon that was told no path serves on the shared one, too, if it can have that.

    Raises:
        uma_trio.sockets.listener.SocketTaken: another daemon serves on the first name.
        uma_trio.sockets.listener.SocketUnusable: it cannot be had.
    """
    told = "socket" in config.sources
    with ExitStack() as stack:
        if not told:
            _make_folder(config.socket.parent)
        first = stack.enter_context(claim(config.socket, inherited=inherited.framed))
        wanted = not told and str(config.socket) != SHARED_SOCKET
        shared = _shared_name(stack) if wanted else None

        def listen() -> Listeners:
            listener = first.listen()
            try:
                others = () if shared is None else (shared.listen(),)
            except SocketUnusable as error:
                _say_not_shared(error)
                others = ()
            return Listeners(listener, *others)

        yield listen


def _shared_name(stack: ExitStack) -> Claim | None:
    try:
        return stack.enter_context(claim(SHARED_SOCKET))
    except (SocketTaken, SocketUnusable) as error:
        _say_not_shared(error)
        return None


def _say_not_shared(why: Exception) -> None:
    log.get("daemon").info(f"{SHARED_SOCKET} is not served", why=str(why))


def _make_folder(folder: Path) -> None:
    """Make the folder of the default path; a failure comes to light when the name is taken."""
    if not folder.is_dir() and folder.parent.is_dir() and os.access(folder.parent, os.W_OK):
        folder.mkdir(mode=0o700, exist_ok=True)
