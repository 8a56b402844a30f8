"""What `doctor` finds out about the socket and the HTTP address: free, served by a daemon, or unusable."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from uma_trio.cli.checks import Finding
from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config
from uma_trio.sockets.address import FRAMED_TCP, Address, parse_framed


def check_socket(path: Path, about: str = "socket") -> list[Finding]:
    """See whether the socket is free, held by a daemon, or left behind by one; `about` is its option, too."""
    if str(path).startswith(FRAMED_TCP):
        return [_port(parse_framed(str(path)), "socket", lambda: _framed(str(path)))]
    from uma_trio.sockets.holder import holder_of
    from uma_trio.sockets.listener import too_long

    def blocks(what: str, fix: str) -> list[Finding]:
        return [Finding(about, "blocks", what, fix)]

    folder, other = path.parent, f"choose another --{about}"
    if problem := too_long(path):
        return blocks(problem, f"choose a shorter --{about}")
    if not folder.is_dir():
        return blocks(f"the folder {folder} does not exist", f"mkdir -p {folder}, or {other}")
    if not os.access(folder, os.W_OK | os.X_OK):
        what = f"this user cannot write to the folder {folder}"
        return blocks(what, f"change its permissions, or {other}")
    holder = holder_of(str(path))
    if not os.path.lexists(path):
        if holder is None:
            return [Finding(about, "ok", f"{path} is free")]
        what = (
            f"{path} does not exist but is locked: a daemon is starting, or its socket was removed"
        )
        return blocks(what, f"wait a moment; if the message stays, restart process {holder}")
    info = path.lstat()
    if not stat.S_ISSOCK(info.st_mode):
        return blocks(f"{path} exists and is not a socket", f"move it away, or {other}")
    if info.st_uid != os.geteuid():
        return blocks(f"{path} belongs to user {info.st_uid}", other)
    told = _answer(path)
    if holder is not None and told == _STALE:
        what = f"{path} is held by a daemon that is stopping"
        return blocks(what, f"wait until process {holder} has ended")
    return [Finding(about, "ok", f"{path} {told}")]


_STALE = "is stale; serve will replace it"


def _answer(path: Path) -> str:
    """Say who answers on a socket."""
    from uma_trio.sockets.peers import peer_of

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1)
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            return _STALE
        except OSError as error:
            return f"does not answer: {error.strerror or error}"
        return f"is served by a daemon, pid {peer_of(sock).pid}"


def check_http(config: Config) -> list[Finding]:
    """See whether HTTP could be served as the settings say, or is being served."""
    from uma_trio.app.wiring_http import http_settings
    from uma_trio.cli.launch import unreachable

    address = config.http_address
    if address is None:
        return [Finding("http", "ok", "off; --http 8080 serves programs that use OpenAI's API")]
    if address.path:
        return check_socket(Path(address.path), "http")
    if not address.is_loopback and config.http_key_file is None:
        what = f"other machines can reach {address.url}, and there is no key"
        return [Finding("http", "blocks", what, "set --http-key-file, or omit the host")]
    try:
        http_settings(config)
    except ConfigError as error:
        return [Finding("http", "blocks", str(error))]
    return [_port(address, "http", lambda: unreachable(address))]


def _port(address: Address, about: str, why_not: Callable[[], str | None]) -> Finding:
    """See whether a TCP port is free, or served by a daemon; `why_not` asks it, and says why it is none."""
    from uma_trio.sockets.port import PortUnusable, bound, other_loopback

    url = address.url if about == "http" else address.framed
    fix = f"choose another --{about}, or stop the program that uses it"
    missing = ""
    try:
        with bound(address, f"--{about}") as sock:
            other = other_loopback(sock) if about == "http" else None
        if other is not None:
            missing = _not_free(other)
    except PortUnusable as error:
        problem: str | None = str(error)
        if "something else" in str(error):
            problem = why_not()
        if problem is not None:
            return Finding(about, "blocks", problem, fix)
        return Finding(about, "ok", f"{url} is served by a daemon")
    return Finding(about, "ok", f"{url} is free{missing}")


def _not_free(other: Address) -> str:
    """Say why a daemon could not listen at the other loopback address, too; "" if it could, or there is none."""
    from uma_trio.sockets.port import PortUnusable, bound

    try:
        bound(other, "--http").close()
    except PortUnusable as error:
        return "" if error.is_missing else f", but not {other.url}: some clients ask there"
    return ""


def _framed(address: str) -> str | None:
    """Say why this user cannot reach the daemon on a port; None if it can."""
    from uma_trio.client import ConnectionFailed
    from uma_trio.client.reach import DaemonAddress

    try:
        place = DaemonAddress(address)
        with place.new_socket() as sock:
            sock.settimeout(1)
            place.connect(sock)
    except ConnectionFailed as error:
        return str(error)
    return None
