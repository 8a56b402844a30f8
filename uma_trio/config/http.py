"""The options of the HTTP side; :mod:`uma_trio.config.options` has all others."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from uma_trio.config.option import option
from uma_trio.sockets.address import LOCALHOST, Address, parse_address
from uma_trio.words import MIB

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
HTTP_OFF = "off"
HTTP_AUTO = "auto"
#: llama-server's port, too.
DEFAULT_PORT = 8080
_HOST = re.compile(r"[^\s/:@\[\]?#]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://(?:{_HOST.pattern})(?::[0-9]{{1,5}})?")


def _http(raw: object) -> object:
    """Read an address, or what YAML makes of ``off``; what comes out can be parsed again."""
    text = str(raw).strip()
    if raw is False or text.lower() in ("off", "false", "no"):
        return HTTP_OFF
    if text.lower() == HTTP_AUTO:
        return HTTP_AUTO
    parse_address(text)
    return text


def _tcp(raw: object) -> object:
    """Read an address of a port, or ``off``."""
    text = _http(raw)
    if text == HTTP_AUTO:
        raise ValueError("a port: HAProxy's agent-check connects to PORT or HOST:PORT")
    if str(text).startswith("unix:"):
        raise ValueError("a port: HAProxy's agent-check connects to PORT or HOST:PORT")
    return text


def _networks(raw: object) -> object:
    """Read networks: a text with commas, or a list in YAML."""
    text = ",".join(map(str, raw)) if isinstance(raw, list) else str(raw)
    networks(text)
    return text


def networks(text: str) -> tuple[Network, ...]:
    """Return the networks in a text such as ``10.0.0.5, fd00::/8``.

    Raises:
        ValueError: one of them is none.
    """
    try:
        return tuple(ipaddress.ip_network(name.strip()) for name in text.split(",") if name.strip())
    except ValueError as error:
        raise ValueError(
            f"addresses or networks such as 10.0.0.5 or 10.0.0.0/24: {error}"
        ) from None


def _origins(raw: object) -> object:
    """Read origins of web pages: a text with commas, or a list in YAML."""
    return _list_of(raw, _check_origin)


def _hosts(raw: object) -> object:
    """Read names of hosts: a text with commas, or a list in YAML."""
    return _list_of(raw, _check_host)


def _list_of(raw: object, check: Callable[[str], None]) -> str:
    names = raw if isinstance(raw, list) else str(raw).split(",")
    found = [str(name).strip() for name in names if str(name).strip()]
    for name in found:
        check(name)
    return ",".join(found)


def _check_origin(origin: str) -> None:
    """Raise ValueError if no browser sends this as the Origin of a page, or if every page can have it sent."""
    if origin == "*":
        raise ValueError(
            "taken: every web page that is open in a browser could use the models and read the answers. List the "
            "pages, as in http://localhost:3000,app://obsidian.md, or give localhost for all pages of this machine"
        )
    if origin.lower() == "null":
        raise ValueError(
            "taken: every page in a sandboxed frame has the origin null. Serve the page by HTTP and list its "
            "address, or give localhost for all pages of this machine"
        )
    if "*" in origin:
        raise ValueError(
            f"an origin: {origin} is a pattern; list each origin, as in app://obsidian.md"
        )
    if origin.lower() != "localhost" and _ORIGIN.fullmatch(origin.rstrip("/")) is None:
        raise ValueError(
            "an origin as browsers send it: SCHEME://HOST or SCHEME://HOST:PORT without a path, such as "
            "http://localhost:3000, or localhost for all pages of this machine"
        )


def _check_host(host: str) -> None:
    """Raise ValueError if this can be no name in a Host header without its port."""
    if "*" in host:
        raise ValueError(
            "taken: every web page could have its own name lead to this address, and use the models. List the names, "
            "as in box.lan, or have a reverse proxy (--http-trusted-proxy) check them"
        )
    if _HOST.fullmatch(host) is None:
        raise ValueError(
            "the name of a host: such as box.lan or [fd00::1], without http:// and without a port"
        )


@frozen(kw_only=True)
class HttpConfig:
    """The settings of HTTP."""

    http: str = option(
        HTTP_AUTO,
        read=_http,
        shown_default="8080 of this machine",
        metavar="[HOST:]PORT",
        help="Where the APIs of OpenAI, Anthropic, llama-server and Ollama and the page are served over HTTP: on a port of this "
        "machine, on HOST:PORT, on a Unix socket, unix:PATH, or nowhere, off. By default on port 8080 of 127.0.0.1 and ::1; if that is "
        "taken, a daemon on a terminal takes the next free port, and any other one serves no HTTP and says so.",
    )
    http_users: str = option(
        "own",
        choices=("own", "all"),
        help="Which users of this machine may use a port of it without a key: own, the one that runs the daemon, by the kernel's word, "
        "or all. Where the kernel does not tell (macOS), own means that a key is made, whose file the start names.",
    )
    http_key_file: Path | None = option(
        None,
        shown_default="none",
        metavar="FILE",
        help="A file with HTTP keys, one a line, readable by this user only. Without it HTTP "
        "requires no key from users that --http-users admits; an address that other machines can reach requires one.",
    )
    http_admin_key_file: Path | None = option(
        None,
        shown_default="none",
        metavar="FILE",
        help="A file with HTTP keys, as of --http-key-file, whose holders may see and change the "
        "requests of all users.",
    )
    http_host: str | None = option(
        None,
        read=_hosts,
        shown_default="none",
        metavar="NAME,...",
        help="Further values of the Host header that HTTP clients may use, besides localhost. All "
        "others are refused, which stops web pages that rebind their name to this address.",
    )
    http_origin: str | None = option(
        None,
        read=_origins,
        shown_default="none",
        metavar="ORIGIN,...",
        help="Origins of web pages that may use HTTP, such as http://localhost:3000; localhost "
        "allows pages of this machine at any port. All others are refused; `*` and patterns cannot be listed.",
    )
    http_strict: bool = option(
        False,
        help="Refuse HTTP requests that name another model or contain a field that would be ignored.",
    )
    http_reasoning: str = option(
        "reasoning_content",
        choices=("reasoning_content", "reasoning", "both"),
        help="The name of the field for the model's reasoning in answers of /v1/chat/completions.",
    )
    http_max_prompt_bytes: int = option(
        2 * MIB,
        within=(1, 64 * MIB, "bytes"),
        help="The maximum length of a prompt over HTTP. A longer prompt is answered with 413.",
    )
    http_max_connections: int = option(
        256,
        within=(1, 65_536, "connections"),
        help="The maximum number of HTTP connections. For a further connection an idle one is closed; "
        "if all are at work, it is answered with 503 and closed.",
    )

    http_trusted_proxy: str | None = option(
        None,
        read=_networks,
        shown_default="none",
        metavar="CIDR,...",
        help="Addresses of reverse proxies, such as 10.0.0.5 or 10.0.0.0/24: their X-Forwarded-For names the client, "
        "any Host is accepted, and a full queue is answered with 503, so that they try another machine.",
    )
    agent: str = option(
        HTTP_OFF,
        read=_tcp,
        metavar="[HOST:]PORT",
        help="Also tell HAProxy's agent-check how much more work this daemon can take: one line for each "
        "connection, `up ready 37%`, `drain` or `down`.",
    )

    @property
    def agent_address(self) -> Address | None:
        """Where the agent answers; None if nowhere."""
        return None if self.agent == HTTP_OFF else parse_address(self.agent)

    @property
    def trusted_proxies(self) -> tuple[Network, ...]:
        """The networks of the listed proxies."""
        return networks(self.http_trusted_proxy or "")

    @property
    def http_address(self) -> Address | None:
        """Where HTTP is served, if the port is free; None if it is not."""
        if self.http == HTTP_AUTO:
            return Address(LOCALHOST, DEFAULT_PORT)
        return None if self.http == HTTP_OFF else parse_address(self.http)
