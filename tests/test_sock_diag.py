"""Which user owns the other end of a TCP connection: what the kernel is asked, and what is believed."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from attrs import evolve

from uma_trio.sockets import sock_diag
from uma_trio.sockets.peers import principal_of
from uma_trio.sockets.sock_diag import ClientLeft, Ends, ends_of, question, uid_of

ENDS = Ends(ipaddress.ip_address("127.0.0.1"), 40_000, ipaddress.ip_address("127.0.0.1"), 8080)
SIX = Ends(ipaddress.ip_address("::1"), 40_000, ipaddress.ip_address("::1"), 8080)
ESTABLISHED, FIN_WAIT2, TIME_WAIT, LISTEN = 1, 5, 6, 10

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="sock_diag is Linux's")


def reply(
    ends: Ends = ENDS,
    *,
    uid: int = 1000,
    inode: int = 7,
    state: int = ESTABLISHED,
    mapped: bool = False,
) -> bytes:
    """Return what the kernel answers about a socket with these ends."""
    source, destination = ends.source, ends.destination
    packed = [source.packed, destination.packed]
    if mapped:
        packed = [b"\0" * 10 + b"\xff\xff" + each for each in packed]
    family = socket.AF_INET if len(packed[0]) == 4 else socket.AF_INET6
    body = struct.pack("=BBBB", family, state, 0, 0)
    body += struct.pack("!HH", ends.source_port, ends.destination_port)
    body += packed[0].ljust(16, b"\0") + packed[1].ljust(16, b"\0") + struct.pack("=III", 0, 1, 2)
    body += struct.pack("=IIIII", 0, 0, 0, uid, inode)
    return struct.pack("=IHHII", 16 + len(body), 20, 0, 1, 0) + body


def error(number: int) -> bytes:
    """Return the kernel's answer where there is no such socket."""
    return struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -number)


@contextmanager
def connection(
    host: str, family: int = socket.AF_INET
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection to a port of this machine, the client's first."""
    with socket.create_server((host, 0), family=family) as listening:
        port = listening.getsockname()[1]
        ours = socket.create_connection((host if family == socket.AF_INET else "::1", port))
        theirs, _ = listening.accept()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("ends", [ENDS, SIX], ids=["IPv4", "IPv6"])
def test_the_owner_of_a_connected_socket_is_told(ends: Ends) -> None:
    """Also after the client has ended its sending side, as long as a process holds the socket."""
    assert uid_of(ends, lambda _: reply(ends)) == 1000
    assert uid_of(ends, lambda _: reply(ends, state=FIN_WAIT2)) == 1000


def test_a_socket_of_ipv6_that_speaks_ipv4_is_the_same() -> None:
    """A client may open it either way."""
    assert uid_of(ENDS, lambda _: reply(mapped=True)) == 1000


@pytest.mark.parametrize(
    "answer",
    [
        reply(state=TIME_WAIT),
        reply(state=LISTEN),
        reply(evolve(ENDS, source_port=1)),
        reply(evolve(ENDS, destination_port=1)),
        reply(SIX),
        error(errno.ENOENT),
        reply()[:-1],
        b"",
    ],
)
def test_nobody_is_believed_in_doubt(answer: bytes) -> None:
    """A listening or another socket is not the client's."""
    assert uid_of(ENDS, lambda _: answer) is None


@pytest.mark.parametrize("state", [ESTABLISHED, FIN_WAIT2])
def test_a_socket_that_no_process_holds_is_nobodys(state: int) -> None:
    """The kernel gives its owner as root."""
    with pytest.raises(ClientLeft):
        uid_of(ENDS, lambda _: reply(uid=0, inode=0, state=state))


def test_another_machines_end_is_not_asked_for() -> None:
    """Its user is not one of ours, whatever the number."""
    asked: list[bytes] = []

    def ask(what: bytes) -> bytes:
        asked.append(what)
        return reply(far)

    far = evolve(ENDS, source=ipaddress.ip_address("10.0.0.7"))
    assert uid_of(far, ask) is None
    assert not asked


def test_where_the_system_does_not_answer_nobody_is_named() -> None:
    """As under a filter of system calls, or on another system."""

    def forbidden(_: bytes) -> bytes:
        raise PermissionError

    assert uid_of(ENDS, forbidden) is None
    assert uid_of(ENDS, lambda _: reply(uid=7)) == 7


def test_a_user_outside_the_user_namespace_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them have the same number there."""
    monkeypatch.setattr(sock_diag, "unmapped_uid", lambda: 65_534)
    assert uid_of(ENDS, lambda _: reply(uid=65_534)) is None
    assert uid_of(ENDS, lambda _: reply(uid=7)) == 7


def test_the_question_is_about_one_socket() -> None:
    """Its length is that of the kernel's structure, and it asks for no list."""
    asked = question(SIX)
    length, kind, flags, *_ = struct.unpack_from("=IHHII", asked)
    assert (length, kind, flags) == (len(asked), 20, 1)
    assert len(asked) == 16 + 56


@needs_linux
@pytest.mark.parametrize(
    ("host", "family"),
    [("127.0.0.1", socket.AF_INET), ("127.0.0.2", socket.AF_INET), ("::1", socket.AF_INET6)],
)
def test_the_kernel_names_this_process(host: str, family: int) -> None:
    """For the exact connection, on each family."""
    with connection(host, family) as (ours, theirs):
        assert uid_of(ends_of(theirs)) == os.geteuid()
        ours.shutdown(socket.SHUT_WR)
        assert uid_of(ends_of(theirs)) == os.geteuid()


@needs_linux
def test_the_kernel_names_who_speaks_ipv4_to_a_port_of_ipv6() -> None:
    """Its address reads as IPv6, and its socket is of IPv4."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        ours = socket.create_connection(("127.0.0.1", listening.getsockname()[1]))
        theirs, _ = listening.accept()
    with ours, theirs:
        assert theirs.getpeername()[0] == "::ffff:127.0.0.1"
        assert uid_of(ends_of(theirs)) == os.geteuid()


@needs_linux
def test_who_closed_at_once_has_left() -> None:
    """And is not root, as the kernel's answer has it."""
    with connection("127.0.0.1") as (ours, theirs):
        ends = ends_of(theirs)
        ours.close()
        with pytest.raises(ClientLeft):
            uid_of(ends)


@needs_linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_another_principal_and_no_operator() -> None:
    """The kernel's word for a process of user 65534, on the port that we use ourselves."""
    program = (
        "import os, socket, sys; os.setuid(65534);"
        "s = socket.socket(); s.connect(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)
        port = listening.getsockname()[1]
        child = subprocess.Popen([sys.executable, "-c", program, str(port)], stdin=subprocess.PIPE)
        theirs, _ = listening.accept()
        with theirs, socket.create_connection(("127.0.0.1", port)):
            mine, _ = listening.accept()
            with mine:
                other, own = principal_of(theirs, 0), principal_of(mine, 0)
        child.communicate()
    assert (other.uid, other.is_operator) == (65_534, False)
    assert (own.uid, own.is_operator) == (0, True)
    assert not other.may_change(own)
    assert own.may_change(other)


def test_a_unix_socket_and_the_port_name_the_same_principal() -> None:
    """So an editor on the port uses what the command line computed."""
    ours, theirs = socket.socketpair()
    with ours, theirs, connection("127.0.0.1") as (_, by_port):
        one, other = principal_of(theirs, os.geteuid()), principal_of(by_port, os.geteuid())
    assert one.shares_as == other.shares_as
    assert one.pid == os.getpid()
    assert one.connection != other.connection


def test_a_user_outside_the_user_namespace_is_nobody_on_a_unix_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor an operator: two of them would share their caches and requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert principal_of(ours, os.getuid()).uid == os.getuid()
        monkeypatch.setattr(sock_diag, "unmapped_uid", os.getuid)
        stranger = principal_of(ours, os.getuid())
    assert (stranger.uid, stranger.is_operator) == (None, False)
