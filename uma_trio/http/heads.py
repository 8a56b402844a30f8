"""The head of a request, from h11's event to a value, whatever a client writes into it. Pure.

h11 has checked the syntax. The forms that RFC 9112 leaves to a server are decided here, or by h11
within what the RFC allows: a bare line feed ends a line (2.2), a folded header is one line (5.2),
and equal lengths in one list are one length (RFC 9110, 8.6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote

import h11

from uma_trio.http.errors import Fault
from uma_trio.http.message import Head

MOST_QUERY_FIELDS = 32
MOST_LINES = 256
"""Of a head, or behind the last chunk. h11 takes more than a microsecond for each, all at once."""
_VERSIONS = (b"1.0", b"1.1")
_LAST_CHUNK = re.compile(rb"(?:\r?\n)?0+[ \t]*(;[^\n]*)?\r?\n")
_EMPTY_LINES = re.compile(rb"\A(?:\r?\n)+")
_SLASHES = re.compile("//+")
_ABSOLUTE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)


def head_of(event: h11.Request, most_bytes: int) -> Head:
    """Return the head of a request; `most_bytes` is the longest that is taken.

    A target in absolute form, as clients of proxies send it, gives the Host in place of the header
    (RFC 9112, 3.2.2).

    Raises:
        Fault: it is too long, of another version, or its query has too many fields. The connection
            ends after that answer.
    """
    headers: dict[str, str] = {}
    size = len(event.target)
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        size += len(name) + len(value) + 4
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if size > most_bytes:
        raise _refused(431, "its head is too long")
    version = event.http_version.decode("ascii")
    if event.http_version not in _VERSIONS:
        raise _refused(505, f"its version is {version}; send HTTP/1.1")
    target = event.target.decode("latin-1")
    if (absolute := _ABSOLUTE.match(target)) is not None:
        headers["host"] = absolute[1]
        target = target[absolute.end() :]
        target = target if target.startswith("/") else f"/{target}"
    raw, _, query = target.partition("?")
    path = _SLASHES.sub("/", f"/{raw}")  # before it is decoded: %2F is no separator
    if query.count("&") >= MOST_QUERY_FIELDS:
        raise _refused(400, f"its query has more than {MOST_QUERY_FIELDS} fields")
    return Head(
        method=event.method.decode("ascii"),
        path=unquote(path.rstrip("/")) or "/",
        query=dict(parse_qsl(query, keep_blank_values=True)),
        headers=headers,
        version=version,
        app=_label(headers),
        is_folder=path.endswith("/"),
    )


def check_upgrade(head: Head) -> None:
    """Refuse the handshake of a WebSocket; an offer of any other protocol, such as h2c, is ignored (RFC 9110, 7.8).

    Raises:
        Fault: it is one.
    """
    if head.method != "GET" or head.version == "1.0":
        return
    if "upgrade" in _tokens(head, "connection") and "websocket" in _tokens(head, "upgrade"):
        raise Fault(
            426,
            "there are no WebSockets here; send the request as HTTP/1.1: POST, with stream: true for events",
            code="upgrade_required",
            headers=(("Upgrade", "HTTP/1.1"), ("Connection", "Upgrade")),
        )


def without_empty_lines(data: bytes) -> bytes:
    """Return what is behind the empty lines before a request, which are ignored (RFC 9112, 2.2)."""
    return _EMPTY_LINES.sub(b"", data, count=1)


def check_lines(data: bytes) -> None:
    """Refuse more than `MOST_LINES` up to the first empty line of what has not been parsed yet.

    Raises:
        Fault: there are more.
    """
    if len(data) <= MOST_LINES:
        return
    ends = [at for end in (b"\n\r\n", b"\n\n") if (at := data.find(end)) >= 0]
    if data.count(b"\n", 0, min(ends, default=len(data))) > MOST_LINES:
        raise _refused(431, f"its head has more than {MOST_LINES} lines")


def check_trailers(data: bytes) -> None:
    """Refuse too many lines behind the last chunk of a body, if that comes next. `data` begins behind a chunk.

    Raises:
        Fault: there are more than `MOST_LINES`.
    """
    last = _LAST_CHUNK.match(data)
    if last is not None:
        check_lines(data[last.end() :])


def is_ambiguous(head: Head) -> bool:
    """Whether another reader may take something else for the end of the body.

    The coding counts, and the connection must end after the answer (RFC 9112, 6.1).
    """
    if "transfer-encoding" not in head.headers:
        return False
    return "content-length" in head.headers or head.version == "1.0"


def _refused(status: int, why: str) -> Fault:
    message = f"this is not HTTP/1.1 as it should be: {why}"
    return Fault(status, message, code="bad_request", closes=True)


def _tokens(head: Head, name: str) -> set[str]:
    every = head.headers.get(name, "").lower().split(",")
    return {each.strip().partition("/")[0] for each in every}


_LABEL = 64


def _label(headers: Mapping[str, str]) -> str | None:
    """Return what a program calls itself: ``X-UMA-App``, or the first word of its User-Agent."""
    named = headers.get("x-uma-app")
    if named is None:
        named = headers.get("user-agent", "").partition(" ")[0]
    shown = "".join(letter for letter in named if letter.isprintable())[:_LABEL]
    return shown or None
