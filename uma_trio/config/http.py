"""The options of the HTTP side; :mod:`uma_trio.config.options` has all others."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from uma_trio.config.drafts import DraftConfig
from uma_trio.config.option import option
from uma_trio.sockets.address import Address, parse_address

HTTP_OFF = "off"
_MIB = 1 << 20


def _http(raw: object) -> object:
    """Read an address, or what YAML makes of ``off``; what comes out can be parsed again."""
    text = str(raw).strip()
    if raw is False or text.lower() in ("off", "false", "no"):
        return HTTP_OFF
    parse_address(text)
    return text


@frozen(kw_only=True)
class HttpConfig(DraftConfig):
    """Where HTTP is served, to whom, and how much of it."""

    http: str = option(
        "off",
        flag="--http",
        env=("UMA_HTTP",),
        read=_http,
        metavar="[HOST:]PORT",
        since="0.1",
        help="Serve the APIs of OpenAI and llama-server over HTTP, too: on a port, of this machine "
        "alone unless a host is given, or on a socket, unix:PATH (docs/HTTP.md).",
    )
    http_key_file: Path | None = option(
        None,
        flag="--http-key-file",
        env=("UMA_HTTP_KEY_FILE",),
        yaml=("http_api.key_file",),
        shown_default="none",
        metavar="FILE",
        since="0.1",
        help="Keys that open HTTP, one a line, in a file that only this user can read. Without "
        "it whoever can connect is let in, so an address that others can reach needs one.",
    )
    http_host: str | None = option(
        None,
        flag="--http-host",
        yaml=("http_api.hosts",),
        shown_default="none",
        metavar="NAME,...",
        since="0.1",
        help="Names by which HTTP clients may call this machine besides localhost; any other Host "
        "is refused, which keeps web pages out that rebind their name to this address.",
    )
    http_origin: str | None = option(
        None,
        flag="--http-origin",
        yaml=("http_api.origins",),
        shown_default="none",
        metavar="ORIGIN,...",
        since="0.1",
        help="Web pages that may use HTTP, such as http://localhost:3000, or localhost for those of "
        "this machine at any port; all others are refused.",
    )
    http_strict: bool = option(
        False,
        flag="--http-strict",
        yaml=("http_api.strict",),
        since="0.1",
        help="Refuse HTTP requests that name another model, or a field that would be ignored.",
    )
    http_reasoning: str = option(
        "reasoning_content",
        flag="--http-reasoning",
        yaml=("http_api.reasoning",),
        choices=("reasoning_content", "reasoning", "both"),
        since="0.1",
        help="What an answer of /v1/chat/completions calls the model's reasoning.",
    )
    http_max_prompt_bytes: int = option(
        4 * _MIB,
        flag="--http-max-prompt-bytes",
        yaml=("http_api.max_prompt_bytes",),
        minimum=1,
        maximum=64 * _MIB,
        unit="bytes",
        since="0.1",
        help="The longest prompt by HTTP; a longer one is answered 413.",
    )
    http_max_connections: int = option(
        256,
        flag="--http-max-connections",
        yaml=("http_api.max_connections",),
        minimum=1,
        maximum=65_536,
        unit="connections",
        since="0.1",
        help="HTTP connections at once; one more is answered 503 and closed.",
    )

    @property
    def http_address(self) -> Address | None:
        """Where HTTP is served; None if it is not."""
        return None if self.http == HTTP_OFF else parse_address(self.http)
