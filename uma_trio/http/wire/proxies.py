"""Requests that come by a proxy which the operator listed: whose they are, and how they are refused. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from attrs import evolve

from uma_trio.http.wire.errors import Fault
from uma_trio.http.wire.message import Head
from uma_trio.http.wire.settings import Network
from uma_trio.sockets.principal import Principal

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_FORWARDED: Final = "x-forwarded-for"
#: Addresses of one header that are looked at, from the right: proxies behind proxies.
MOST_HOPS: Final = 16


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
