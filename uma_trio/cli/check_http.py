"""What `doctor` finds out about HTTP: whether the port is free, and whether it may be opened."""

from __future__ import annotations

from pathlib import Path

from uma_trio.cli.checks import Finding, check_socket
from uma_trio.cli.launch import unreachable
from uma_trio.config.errors import ConfigError
from uma_trio.config.options import Config
from uma_trio.sockets.address import Address


def check_http(config: Config) -> list[Finding]:
    """See whether HTTP could be served as the settings say, or is being served."""
    address = config.http_address
    if address is None:
        return [Finding("http", "ok", "off; --http 8080 serves programs that use OpenAI's API")]
    if address.path:
        (found,) = check_socket(Path(address.path))
        return [Finding("http", found.weight, found.what, found.fix)]
    from uma_trio.wiring_http import http_settings

    if not address.is_loopback and config.http_key_file is None:
        what = f"other machines can reach {address.url}, and there is no key"
        return [Finding("http", "blocks", what, "set --http-key-file, or omit the host")]
    try:
        http_settings(config)
    except ConfigError as error:
        return [Finding("http", "blocks", str(error))]
    return [_port(address)]


def _port(address: Address) -> Finding:
    from uma_trio.http.wire.listener import listening
    from uma_trio.sockets.port import PortUnusable

    try:
        with listening(address):
            return Finding("http", "ok", f"{address.url} is free")
    except PortUnusable as error:
        if unreachable(address) is None:
            return Finding("http", "ok", f"{address.url} is served by a daemon")
        return Finding(
            "http", "blocks", str(error), "choose another --http, or stop the program that uses it"
        )
