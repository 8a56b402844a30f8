"""The HTTP side, made from the options. Who does not use it never imports it."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from uma_trio.config.errors import ConfigError
from uma_trio.config.http import DEFAULT_PORT, HTTP_AUTO, HTTP_OFF
from uma_trio.config.options import Config
from uma_trio.observe import log
from uma_trio.observe.log import FaultLog
from uma_trio.service.fair import HELPERS, in_threads
from uma_trio.service.service import Service
from uma_trio.sockets import listener as unix
from uma_trio.sockets.address import LOCALHOST, Address, parse_address
from uma_trio.sockets.handover import Handed
from uma_trio.sockets.peers import attests_users
from uma_trio.sockets.port import PortUnusable, TcpListener, bound, other_loopback
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.token import TokenUnusable, make_token, token_file

if TYPE_CHECKING:
    from uma_trio.http.server import Server as HttpServer
    from uma_trio.http.settings import Settings as HttpSettings

#: Ports that are tried for a person who starts the daemon on a terminal.
_PORTS: Final = 100
_REASONING_FIELDS = {"both": ("reasoning_content", "reasoning")}


@frozen
class HttpPort:
    """The address that HTTP is served on, if it is; `missing` says why not, or why not on both loopback addresses."""

    listeners: unix.Listeners | None = None
    missing: str = ""

    @property
    def url(self) -> str | None:
        """The address for clients; None if HTTP is not served."""
        if self.listeners is None:
            return None
        path = self.listeners.path
        return path if path.startswith("http://") else f"unix:{path}"


def settings_of(port: HttpPort, config: Config) -> dict[str, str]:
    """Return the settings by which other commands find the port that a daemon took by itself, and the key that it made."""
    found = {}
    if config.http == HTTP_AUTO:
        found["http"] = HTTP_OFF if port.url is None else port.url.removeprefix("http://")
    if config.http_key_file is not None:
        found["http_key_file"] = str(config.http_key_file)
    return found


@contextmanager
def http_port(
    config: Config,
    inherited: socket.socket | None = None,
    handed: Mapping[str, Handed] = MappingProxyType({}),
) -> Iterator[HttpPort]:
    """Take the address that HTTP is to be served on, if it is, until the block ends.

    A port of one loopback address is taken at the other, too, if the machine has both. An `inherited` socket listens on the address
    already, and so do those that another daemon has `handed` over, by their names; they are closed if they are not used.

    Raises:
        ConfigError: it needs a key and there is none, or the port cannot be had.
        uma_trio.sockets.listener.SocketTaken: the Unix socket is another daemon's.
        uma_trio.sockets.listener.SocketUnusable: it cannot be made there.
    """
    address = config.http_address
    if address is not None and not address.is_loopback and config.http_key_file is None:
        raise ConfigError(
            f"{config.source('http')} {config.http}: others can reach that address, so it needs "
            "--http-key-file"
        )
    left = dict(handed)
    with ExitStack() as stack:
        try:
            if address is None:
                port = HttpPort()
            elif config.http == HTTP_AUTO and inherited is None:
                port = _default_port(left, stack)
            else:
                listeners = _listeners(address, inherited, left, stack)
                port = HttpPort(listeners, listeners.missing)
        except PortUnusable as error:
            raise ConfigError(str(error)) from error
        finally:
            for each in left.values():
                each.close()
        yield port


def _default_port(handed: MutableMapping[str, Handed], stack: ExitStack) -> HttpPort:
    """Listen on the default port, where nobody named one; if it is taken, on the next free one for a person who sees which.

    A port is free if no other process has it at either loopback address: a client that takes `localhost` for the other one would
    send its prompts there.
    """
    old = next((name for name in handed if name.startswith(f"http://{LOCALHOST}:")), None)
    if old is not None:
        address = parse_address(old.removeprefix("http://"))
        return HttpPort(_listeners(address, None, handed, stack))
    for port in range(DEFAULT_PORT, DEFAULT_PORT + (_PORTS if _is_watched() else 1)):
        with ExitStack() as attempt:
            try:
                listeners = _listeners(Address(LOCALHOST, port), None, handed, attempt)
            except PortUnusable:
                continue
            if not listeners.missing:
                stack.push(attempt.pop_all())
                taken = "" if port == DEFAULT_PORT else f"port {DEFAULT_PORT} is another program's"
                return HttpPort(listeners, taken)
    return HttpPort(
        missing=f"HTTP is not served: port {DEFAULT_PORT} is another program's; choose one with --http PORT"
    )


def _is_watched() -> bool:
    """Whether a person sees what the daemon prints."""
    return sys.stderr.isatty()


def _listeners(
    address: Address,
    inherited: socket.socket | None,
    handed: MutableMapping[str, Handed],
    stack: ExitStack,
) -> unix.Listeners:
    """Listen on an address; what is used of `handed` is taken out. Raises :class:`PortUnusable` and the like."""
    old = handed.pop(address.url, None)
    if old is not None:
        inherited = old.sock
    if address.path:
        if old is not None and old.lock_fd != -1:
            claim = unix.handed_claim(address.path, old.sock, old.lock_fd)
        else:
            claim = unix.claim(address.path, "--http unix:PATH", inherited=inherited)
        return unix.Listeners(stack.enter_context(stack.enter_context(claim).listen()))
    sock = bound(address, "--http") if inherited is None else inherited
    first = stack.enter_context(TcpListener(sock, address.url))
    other = other_loopback(sock)
    if other is None:
        return unix.Listeners(first)
    old = handed.pop(other.url, None)
    try:
        sock = bound(other, "--http") if old is None else old.sock
    except PortUnusable as error:
        why = "" if error.is_missing else f"HTTP is served on {address.url} alone: {error}"
        return unix.Listeners(first, missing=why)
    return unix.Listeners(first, stack.enter_context(TcpListener(sock, other.url)))


def http_server(config: Config, service: Service) -> HttpServer:
    """Build the HTTP side. Raises :class:`ConfigError` if the file of keys cannot be used."""
    from uma_trio.api.context import Context
    from uma_trio.api.routes import router
    from uma_trio.http.server import Server
    from uma_trio.http.settings import ServerContext

    settings = evolve(http_settings(config), own_user=_own_user(config))
    name, run_blocking = secrets.token_hex(4), in_threads(HELPERS)
    handlers = Context(
        settings=settings,
        service=service,
        name=name,
        started=int(time.time()),
        run_blocking=run_blocking,
    )
    context = ServerContext(
        settings=settings,
        log=FaultLog(log.get("http")),
        name=name,
        bodies=settings.bodies(),
        answers=settings.answers(),
        run_blocking=run_blocking,
        thread_share=service.thread_share,
        queries=service.questions,
        metrics=service.telemetry,
    )
    return Server(context, router(handlers), os.geteuid())


def _own_user(config: Config) -> int | None:
    """Return the only user whose programs may use the port without a key; None where that is not checked."""
    address = config.http_address
    is_port = address is not None and not address.path
    return os.geteuid() if is_port and config.http_users == "own" else None


def with_own_key(config: Config) -> Config:
    """Return the settings with a key that only this user can read, where the port is for this user and the kernel does not tell users.

    Raises:
        ConfigError: its file cannot be used.
    """
    if _own_user(config) is None or config.http_key_file is not None or attests_users():
        return config
    path = token_file({}).with_name("http-key")
    try:
        make_token(path)
    except TokenUnusable as error:
        raise ConfigError(str(error)) from error
    return evolve(config, http_key_file=path)


def http_settings(config: Config) -> HttpSettings:
    """Put the options into the words of the HTTP side. Raises :class:`ConfigError`."""
    from uma_trio.http.settings import Settings

    address = config.http_address
    own = address.host if address is not None else ""
    return Settings(
        hosts=frozenset({own.lower(), *_listed(config.http_host)} - {""}),
        origins=frozenset(origin.rstrip("/") for origin in _listed(config.http_origin)),
        keys=_keys(config, "http_key_file", config.http_key_file),
        admin_keys=_keys(config, "http_admin_key_file", config.http_admin_key_file),
        strict=config.http_strict,
        proxies=config.trusted_proxies,
        reasoning_fields=_REASONING_FIELDS.get(config.http_reasoning, (config.http_reasoning,)),
        max_prompt_bytes=config.http_max_prompt_bytes,
        max_connections=config.http_max_connections,
        idle_timeout_s=min(config.idle_timeout_s, Settings().idle_timeout_s),
    )


def credentials(config: Config) -> dict[str, bytes]:
    """Return the API keys by the principals that they prove. Raises :class:`ConfigError`."""
    own = _keys(config, "http_key_file", config.http_key_file)
    admin = _keys(config, "http_admin_key_file", config.http_admin_key_file)
    return {Principal(connection=0, key=n).shares_as: key for n, key in enumerate((*own, *admin))}


def _keys(config: Config, option: str, path: Path | None) -> tuple[bytes, ...]:
    from uma_trio.http.settings import KeyFileUnusable, read_keys

    if path is None:
        return ()
    try:
        return read_keys(path)
    except KeyFileUnusable as error:
        raise ConfigError(f"{config.source(option)}: {error}") from error


def _listed(text: str | None) -> list[str]:
    return [name.strip().lower() for name in (text or "").split(",") if name.strip()]
