"""Who asks, and who may come in, judged by the head of a request before a byte of its body is read. Pure.

A port of this machine is open to every program on it, and to every web page in its browser. The
order of the checks: the name that was asked for (against DNS rebinding), the page that asks
(against other sites), the key, the kind of the body (a page can post text/plain, a form or a body without a type
unasked, but no browser hides that it is a page).
A request that comes by a proxy which the operator listed is whose the proxy says.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Literal

from attrs import evolve

from uma_trio.http.encodings import codings_of
from uma_trio.http.errors import Fault
from uma_trio.http.message import Head, Headers
from uma_trio.http.settings import Network, Settings, matching
from uma_trio.sockets.principal import Principal

Access = Literal["open", "key", "own", "operator"]
"""What a path asks for: nothing, a key if there are keys, the same but of no web page, an operator."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"([^:\[\]]*|\[[^\[\]]*\])(:[0-9]*)?")
_LOCAL_PAGES = "localhost"  # in place of an origin: a page of this machine, at any port
_LOCAL_PAGE = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_JSON = "application/json"
#: What clients send that were told no type: nothing, or what `curl -d` does. Browsers name the page beside either.
_BY_DEFAULT = frozenset({"", "application/x-www-form-urlencoded"})
_METHODS = "GET, HEAD, POST, OPTIONS"
_MAX_AGE_S = "600"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_MOST_NAMED = 64
_FORWARDED = "x-forwarded-for"
#: Addresses of one header that are looked at, from the right: proxies behind proxies.
MOST_HOPS = 16
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def enter(head: Head, settings: Settings, *, any_name: bool) -> Headers:
    """Check by which name the daemon was called and which page asks.

    Return the headers that let a listed page read the answer.

    Args:
        head: the request's.
        settings: names and pages that are known.
        any_name: whether it may ask for any name: it came by a Unix socket, which no page can reach, or by a
            listed proxy.

    Raises:
        Fault: it may not come in.
    """
    if not any_name:
        _check_host(head, settings)
    return _check_page(head, settings)


def admit(
    head: Head, settings: Settings, access: Access, peer: Principal, *, any_user: bool = False
) -> Principal:
    """Check the key, the user and the kind of the body; return whom the request is for.

    That is the key's principal if it gives one, else `peer`, whom the kernel names. It may be of `any_user` if it came by a Unix socket,
    whose mode decides, or by a listed proxy.

    Raises:
        Fault: it may not come in.
    """
    principal = peer if access == "open" else _check_key(head, settings, peer)
    if access != "open" and principal is peer and not any_user:
        _check_user(settings, peer)
    if access in ("own", "operator") and "origin" in head.headers:
        raise Fault(403, "web pages may not use this endpoint", code="forbidden", closes=True)
    if access == "operator" and not principal.is_operator:
        raise Fault(
            403,
            "this endpoint needs an admin key (--http-admin-key-file), or the user that runs the daemon",
            code="forbidden",
            closes=True,
        )
    if head.method == "POST":
        _check_kind(head)
        codings_of(head)
    # A page acts with its reader's rights, who may be the operator and did not ask for what it does.
    return evolve(principal, is_operator=False) if "origin" in head.headers else principal


def preflight(head: Head, settings: Settings) -> Headers:
    """Return the headers that answer a browser's question whether it may ask.

    Raises:
        Fault: the page may not.
    """
    asked = _names_in(head.headers.get("access-control-request-headers", ""))
    headers = _check_page(head, settings)
    if not headers:
        return ()
    more = [("Access-Control-Allow-Methods", _METHODS), ("Access-Control-Max-Age", _MAX_AGE_S)]
    if asked:
        more.append(("Access-Control-Allow-Headers", asked))
    if head.headers.get("access-control-request-private-network") == "true":
        more.append(("Access-Control-Allow-Private-Network", "true"))
    return (*headers, *more)


def _check_host(head: Head, settings: Settings) -> None:
    host = head.headers.get("host")
    if host is None:
        if head.version == "1.0":
            return
        raise Fault(400, "the Host header is missing", code="missing_host", closes=True)
    name = _without_port(host).lower()
    if name not in _LOOPBACK and name not in settings.hosts:
        raise Fault(
            403,
            "the Host header does not name this daemon; use localhost, or start it with --http-host",
            code="host_not_allowed",
            closes=True,
        )


def _names_in(listed: str) -> str:
    """Return those of a list that can be names of headers: what a client sends is not echoed as it is."""
    names = (name.strip() for name in listed.split(",", _MOST_NAMED)[:_MOST_NAMED])
    return ", ".join(name for name in names if _HEADER_NAME.fullmatch(name))


def _without_port(host: str) -> str:
    """Return the name in a Host header; all of it where it is no name with or without a port."""
    found = _HOST.fullmatch(host)
    return host if found is None else found[1]


def _check_page(head: Head, settings: Settings) -> Headers:
    """Refuse other web pages; return the headers that let a listed one read the answer."""
    origin = head.headers.get("origin")
    if origin is not None and _is_listed(origin.lower(), settings.origins):
        return (("Access-Control-Allow-Origin", origin), ("Vary", "Origin"))
    own = origin is not None and origin.lower() == f"http://{head.headers.get('host', '')}".lower()
    cross = head.headers.get("sec-fetch-site") == "cross-site"
    if (origin is not None and not own) or cross:
        raise Fault(
            403,
            "web pages of that origin may not use this daemon; allow it with --http-origin",
            code="origin_not_allowed",
            closes=True,
        )
    return ()


def _is_listed(origin: str, origins: frozenset[str]) -> bool:
    if _LOCAL_PAGES in origins and _LOCAL_PAGE.fullmatch(origin):
        return True
    return origin != _LOCAL_PAGES and origin in origins


def _check_key(head: Head, settings: Settings, peer: Principal) -> Principal:
    scheme, _, token = head.headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else head.headers.get("x-api-key", "")
    every = (*settings.keys, *settings.admin_keys)
    key = matching(every, given.encode("latin-1", "replace"))
    if key is None and settings.keys:
        raise Fault(
            401,
            "a key of the daemon's --http-key-file is needed, as Authorization: Bearer or x-api-key",
            code="invalid_api_key",
            kind="authentication_error",
            headers=(("WWW-Authenticate", "Bearer"),),
            closes=True,
        )
    if key is None:
        return peer
    return peer.holding(key, is_operator=key >= len(settings.keys))


def _check_user(settings: Settings, peer: Principal) -> None:
    if settings.own_user is not None and peer.uid != settings.own_user:
        raise Fault(
            403,
            "only programs of the user that runs the daemon may use this port; start it with --http-users all, or with --http-key-file "
            "and a key for this user",
            code="forbidden",
            closes=True,
        )


def _check_kind(head: Head) -> None:
    kind = head.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_browser = "origin" in head.headers or "sec-fetch-site" in head.headers
    if kind != _JSON and (kind not in _BY_DEFAULT or is_browser):
        raise Fault(
            415,
            "send the body as Content-Type: application/json; without a type, or as curl -d sends it, JSON is read only "
            "where neither Origin nor Sec-Fetch-Site is sent, since a web page can send such a body to any host",
            code="unsupported_media_type",
            closes=True,
        )


def is_listed(host: str, networks: Sequence[Network]) -> bool:
    """Whether an address is within one of the networks. An IPv4 address in an IPv6 one counts as IPv4."""
    found = _ip(host)
    return found is not None and any(found in network for network in networks)


def behind(head: Head, peer: Principal, networks: Sequence[Network]) -> Principal:
    """Return whom a request is for that a listed proxy passed on, as far as no key says it.

    That is the rightmost address in X-Forwarded-For that is not a listed proxy's: what stands left of it was
    written by the client. The user of the proxy's process is nobody's, so that it gives no rights.
    """
    nobody = evolve(peer, uid=None, pid=None, is_operator=False)
    named = [name.strip() for name in head.headers.get(_FORWARDED, "").split(",")]
    for name in named[: -MOST_HOPS - 1 : -1]:
        found = _ip(name)
        if found is None:
            return nobody
        if not is_listed(str(found), networks):
            return evolve(nobody, host=str(found), is_forwarded=True)
    return nobody


def for_proxy(fault: Fault) -> Fault:
    """Answer 503 where it was 429: proxies send a request to another machine for that."""
    if fault.status == 429:
        fault.status = 503
    return fault


def _ip(text: str) -> _Ip | None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped
