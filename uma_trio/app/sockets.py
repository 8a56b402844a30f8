"""The names that the daemon serves under: made, inherited from a supervisor, or taken over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attrs import evolve, frozen

from uma_trio.app.http import HttpPort, http_port
from uma_trio.config.option import ConfigError
from uma_trio.config.options import Config
from uma_trio.observe import log
from uma_trio.sockets.address import FRAMED_TCP, Address, parse_framed
from uma_trio.sockets.handover import Handed, HandoverFailed, Role, offers_handover
from uma_trio.sockets.inherited import NONE, Inherited
from uma_trio.sockets.listener import (
    Claim,
    Listeners,
    SocketTaken,
    SocketUnusable,
    claim,
    handed_claim,
)
from uma_trio.sockets.path import SHARED_SOCKET, default_socket, holder_of
from uma_trio.sockets.port import PortClaim, PortUnusable, TcpListener, bound
from uma_trio.sockets.token import TokenUnusable, make_token, token_file


@frozen
class Fronts:
    """Where clients come in: `listen` makes the sockets of the framed protocol.

    `agent` is where HAProxy reads the load. A supervisor keeps its sockets open when the daemon has ended,
    and sockets are not ours to give.
    """

    listen: Callable[[], Listeners]
    http: HttpPort
    agent: TcpListener | None
    supervised: bool


def with_inherited_addresses(inherited: Inherited, config: Config) -> Config:
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
def fronts_taken(
    config: Config, inherited: Inherited = NONE, handed: Sequence[Handed] = ()
) -> Iterator[Fronts]:
    """Hold the daemon's names until the block ends.

    What another daemon has `handed` over is used for the same names, and closed for others.

    Raises:
        uma_trio.sockets.listener.SocketTaken: another daemon serves on the first name.
        uma_trio.sockets.listener.SocketUnusable: it cannot be had.
        uma_trio.sockets.port.PortUnusable: the port of the framed protocol is taken, or cannot be had.
        uma_trio.config.option.ConfigError: the address of HTTP cannot be had, or needs a key.
    """
    with ExitStack() as stack:
        left = {each.role: each for each in handed}
        http = {each.name: each for each in handed if each.role == "http"}
        framed, shared = left.pop("framed", None), left.pop("shared", None)
        listen = stack.enter_context(names_taken(config, inherited, framed, shared))
        port = stack.enter_context(http_port(config, inherited.http, http))
        agent = stack.enter_context(
            agent_port(config, _same(left.pop("agent", None), config.agent_address))
        )
        yield Fronts(listen, port, agent, supervised=inherited != NONE)


def _same(handed: Handed | None, address: Address | None) -> Handed | None:
    """Return a socket that was handed over if the settings serve its address, too; else close it."""
    if handed is not None and (address is None or handed.name != address.url):
        handed.close()
        return None
    return handed


@contextmanager
def agent_port(config: Config, handed: Handed | None) -> Iterator[TcpListener | None]:
    """Listen where HAProxy's agent-check asks, if that is configured, until the block ends.

    Raises:
        ConfigError: the port cannot be had.
    """
    address = config.agent_address
    if address is None:
        yield None
        return
    try:
        sock = bound(address, "--agent") if handed is None else handed.sock
    except PortUnusable as error:
        raise ConfigError(str(error)) from error
    with TcpListener(sock, address.url) as listener:
        yield listener


async def can_be_replaced(config: Config) -> bool:
    """Whether a daemon serves on the configured socket; it would hand that over. False if none does.

    Raises:
        uma_trio.sockets.handover.HandoverFailed: there is one, and it hands nothing over.
    """
    path = str(config.socket)
    if await offers_handover(path):
        return True
    pid = None if path.startswith(FRAMED_TCP) else holder_of(path)
    if pid is not None:
        raise HandoverFailed(
            f"pid {pid}, which has {path}, hands nothing over: it is starting or stopping, or its sockets are a"
            " supervisor's; try again, use `uma-trio service restart`, or stop it with `uma-trio stop`"
        )
    return False


def handed_by(
    listener: Listeners,
    http: HttpPort,
    agent: TcpListener | None = None,
) -> list[Handed]:
    """Return what a daemon hands over: each of its listening sockets."""
    roles: tuple[Role, ...] = ("framed", "shared")
    handed = [
        Handed(role, each.path, each.sock, each.lock_fd)
        for role, each in zip(roles, listener.all, strict=False)
    ]
    if http.listeners is not None and http.url is not None:
        names = [http.url, *(each.path for each in http.listeners.all[1:])]
        handed += [
            Handed("http", name, each.sock, each.lock_fd)
            for name, each in zip(names, http.listeners.all, strict=True)
        ]
    if agent is not None:
        handed.append(Handed("agent", agent.path, agent.sock, agent.lock_fd))
    return handed


def token_of(config: Config) -> str | None:
    """Return the token that clients have to show; None where none is asked for.

    Raises:
        ConfigError: its file cannot be used.
    """
    if not str(config.socket).startswith(FRAMED_TCP):
        return None
    try:
        return make_token(config.token_file or token_file())
    except TokenUnusable as error:
        raise ConfigError(str(error)) from error


@contextmanager
def names_taken(
    config: Config,
    inherited: Inherited,
    framed: Handed | None = None,
    shared: Handed | None = None,
) -> Iterator[Callable[[], Listeners]]:
    """Hold the names of the framed protocol until the block ends; what it yields makes their sockets.

    A daemon without a configured path, or with an inherited socket on the default one, serves on the shared path, too, if
    that is free.
    """
    if inherited.framed is None and str(config.socket).startswith(FRAMED_TCP):
        address, handed = parse_framed(str(config.socket)), None if framed is None else framed.sock
        with PortClaim(address, "--socket", handed) as port:
            yield lambda: Listeners(port.listen())
        return
    is_configured = "socket" in config.sources and not _is_default(inherited)
    with ExitStack() as stack:
        if not is_configured:
            _make_folder(config.socket.parent)
        if framed is not None:
            first = handed_claim(framed.name, framed.sock, framed.lock_fd)
        else:
            first = claim(config.socket, inherited=inherited.framed)
        stack.enter_context(first)
        second: Claim | None = None
        if shared is not None:
            second = stack.enter_context(handed_claim(shared.name, shared.sock, shared.lock_fd))
        elif not is_configured and str(config.socket) != SHARED_SOCKET:
            second = _shared_name(stack)
        yield lambda: _listening(first, second)


def _is_default(inherited: Inherited) -> bool:
    """Whether a supervisor passed the socket of the default path."""
    path = inherited.path
    return path is not None and os.path.realpath(path) == os.path.realpath(default_socket())


def _listening(first: Claim, second: Claim | None) -> Listeners:
    listener = first.listen()
    try:
        return Listeners(listener, *(() if second is None else (second.listen(),)))
    except SocketUnusable as error:
        _log_not_shared(error)
        return Listeners(listener)


def _shared_name(stack: ExitStack) -> Claim | None:
    try:
        return stack.enter_context(claim(SHARED_SOCKET))
    except (SocketTaken, SocketUnusable) as error:
        _log_not_shared(error)
        return None


def _log_not_shared(why: Exception) -> None:
    log.get("daemon").info(f"{SHARED_SOCKET} is not served", why=str(why))


def _make_folder(folder: Path) -> None:
    """Make the folder of the default path; a failure comes to light when the name is taken."""
    if not folder.is_dir() and folder.parent.is_dir() and os.access(folder.parent, os.W_OK):
        folder.mkdir(mode=0o700, exist_ok=True)
