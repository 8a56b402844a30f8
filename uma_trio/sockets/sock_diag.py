"""The user at the other end of a TCP connection within this machine, from the Linux kernel.

NETLINK_SOCK_DIAG (sock_diag(7)) looks up one socket by its addresses and ports, and reports the owner
of its inode, in about 20 µs for any owner and any number of sockets. It is the client's socket that is looked up: its
source is the peer, its destination this process.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from attrs import frozen

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_NO_COOKIE: Final = 0xFFFFFFFF
_HEAD: Final = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST: Final = struct.Struct("=BBBBI")  # inet_diag_req_v2 up to its inet_diag_sockid
_PORTS: Final = struct.Struct("!HH")
_INTERFACE_AND_COOKIE: Final = struct.Struct("=III")
# inet_diag_msg: family, state, timer, retransmissions; inet_diag_sockid of 48 bytes; expiry, two
# queues, uid, inode.
_ANSWER: Final = struct.Struct("=BBBB48sIIIII")
_REPLY_BYTES: Final = 4096
# include/net/tcp_states.h: established, and the two after the client ended its sending side.
_CONNECTED: Final = frozenset({1, 4, 5})
_LISTENS: Final = 10
_IPV4_IN_IPV6: Final = b"\0" * 10 + b"\xff\xff"
_EVERY_UID: Final = 0xFFFFFFFF  # the length of a user namespace's map of all uids
_OVERFLOW_UID: Final = 65_534

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientLeft(ConnectionError):
    """The client's end of a connection is closed: no process holds it any more."""


@frozen
class Ends:
    """The two ends of a connection, the client's first. IPv4 in IPv6 is written as IPv4."""

    source: IpAddress
    source_port: int
    destination: IpAddress
    destination_port: int

    @property
    def is_local(self) -> bool:
        """Whether the client's socket can only be one of this machine."""
        return self.source.is_loopback or self.source == self.destination


def ends_of(sock: socket.socket) -> Ends:
    """Return the ends of a connected TCP socket of this process. Raises OSError if it is not connected."""
    theirs, ours = sock.getpeername(), sock.getsockname()
    return Ends(_address(theirs[0]), theirs[1], _address(ours[0]), ours[1])


@lru_cache(maxsize=256)
def _address(text: str) -> IpAddress:
    return _unmapped(ipaddress.ip_address(text.partition("%")[0]))


def _unmapped(address: IpAddress) -> IpAddress:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def ask_kernel(question: bytes) -> bytes:
    """Put one question to the kernel, which answers before the call that sends it returns.

    Raises:
        OSError: the system has no such socket, forbids it, or does not answer.
    """
    if sys.platform != "linux" or not hasattr(socket, "AF_NETLINK"):
        raise OSError("sock_diag is Linux's")
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as asker:
        asker.sendto(question, (0, 0))
        return asker.recv(_REPLY_BYTES)


def uid_of(ends: Ends, ask: Callable[[bytes], bytes] = ask_kernel) -> int | None:
    """Return the user who owns the client's end of a connection; None if the kernel does not report it.

    Never waits. It is not reported for another machine's end, for a user outside this process's user
    namespace, and on systems other than Linux.

    Raises:
        ClientLeft: the client has closed its end.
    """
    if not ends.is_local:
        return None
    try:
        reply = ask(question(ends))
    except OSError:
        return None
    found = _found(reply, ends)
    if found is None:
        return None
    uid, inode = found
    if not inode:  # no process holds it any more, and the kernel reports uid 0
        raise ClientLeft
    return None if uid == unmapped_uid() else uid


def listener_uid(
    address: IpAddress, port: int, ask: Callable[[bytes], bytes] = ask_kernel
) -> int | None:
    """Return the user that listens on a port of this machine; None if the kernel does not report it.

    Never waits. A socket that listens on all addresses counts, too.
    """
    any_address = ipaddress.ip_address("0.0.0.0" if address.version == 4 else "::")  # noqa: S104
    try:
        reply = ask(question(Ends(address, port, any_address, 0)))
    except OSError:
        return None
    if len(reply) < _HEAD.size + _ANSWER.size:
        return None
    _, kind, *_ = _HEAD.unpack_from(reply)
    _, state, _, _, raw, _, _, _, uid, inode = _ANSWER.unpack_from(reply, _HEAD.size)
    if kind != _SOCK_DIAG_BY_FAMILY or state != _LISTENS or not inode:
        return None
    if _PORTS.unpack_from(raw)[0] != port or uid == unmapped_uid():
        return None
    return int(uid)


def question(ends: Ends) -> bytes:
    """Return the request for exactly one socket."""
    family = socket.AF_INET if ends.source.version == 4 else socket.AF_INET6
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    body += _PORTS.pack(ends.source_port, ends.destination_port)
    body += ends.source.packed.ljust(16, b"\0") + ends.destination.packed.ljust(16, b"\0")
    body += _INTERFACE_AND_COOKIE.pack(0, _NO_COOKIE, _NO_COOKIE)
    head = _HEAD.pack(_HEAD.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    return head + body


def _found(reply: bytes, ends: Ends) -> tuple[int, int] | None:
    """Return the owner and the inode of the connected socket with these ends; None if there is none."""
    if len(reply) < _HEAD.size + _ANSWER.size:
        return None
    _, kind, *_ = _HEAD.unpack_from(reply)
    if kind != _SOCK_DIAG_BY_FAMILY:
        return None  # an error: there is no such socket
    family, state, _, _, raw, _, _, _, uid, inode = _ANSWER.unpack_from(reply, _HEAD.size)
    if state not in _CONNECTED or not _is_of(raw, family, ends):
        return None
    return int(uid), int(inode)


def _is_of(raw: bytes, family: int, ends: Ends) -> bool:
    """Whether an inet_diag_sockid has these ends. Compares bytes: parsing addresses takes ten times as long."""
    return (
        _PORTS.unpack_from(raw) == (ends.source_port, ends.destination_port)
        and _packed(raw[4:20], family) == ends.source.packed
        and _packed(raw[20:36], family) == ends.destination.packed
    )


def _packed(address: bytes, family: int) -> bytes:
    """Return the bytes of an address in an inet_diag_sockid; IPv4 in IPv6 as IPv4."""
    if family == socket.AF_INET:
        return address[:4]
    return address.removeprefix(_IPV4_IN_IPV6)


@cache
def unmapped_uid() -> int | None:
    """Return the uid that represents all users outside this user namespace; None if there are none.

    See user_namespaces(7). Such users cannot be distinguished, so that uid identifies none.
    """
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _OVERFLOW_UID
    mapped = sum(int(line.split()[2]) for line in lines)
    return None if mapped >= _EVERY_UID else overflow
