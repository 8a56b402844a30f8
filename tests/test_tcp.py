"""The framed protocol on a TCP port of this machine: who shows the token comes in."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from net_kit import Client, House, house

import uma_protocol
from uma_protocol import Error, Generate, ListSessions, Role, Sessions
from uma_trio.client import ConnectionFailed, ServerError, connect, generate_sync
from uma_trio.config import settings
from uma_trio.config.option import ConfigError
from uma_trio.sockets import sock_diag
from uma_trio.sockets.address import parse_framed
from uma_trio.sockets.port import PortClaim, PortUnusable
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.token import TokenUnusable, make_token, read_token, token_file
from uma_trio.uds.server import Server

RIGHT = "5f" * 32


@pytest.fixture(name="secret", autouse=True)
def _secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which clients find the token."""
    path = tmp_path / "token"
    path.write_text(f"{RIGHT}\n")
    path.chmod(0o600)
    monkeypatch.setenv("UMA_TOKEN_FILE", str(path))
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def _served(**options: object) -> AsyncIterator[tuple[House, str]]:
    """Run a daemon on a TCP port; yields it and its address."""
    address = f"tcp:127.0.0.1:{_free_port()}"
    with PortClaim(parse_framed(address), "--socket") as claim, claim.listen() as listener:
        async with house(**options) as daemon:  # type: ignore[arg-type]
            server = Server(daemon.shared, allowed_uids=(), token=RIGHT)
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listener)
                yield daemon, address
                server.stop_accepting()
                server.end_connections()


async def _dial(address: str) -> Client:
    parsed = parse_framed(address)
    sock = socket.create_connection((parsed.host, parsed.port))
    sock.setblocking(False)
    return Client(sock)


async def test_a_client_with_the_token_streams() -> None:
    """The text is what a Unix socket gives; so is an operator's question."""
    async with _served() as (daemon, address), connect(address) as client:
        assert await client.generate("hi", max_tokens=5).text() == daemon.expected("hi", 5)
        assert await client.generate("again", max_tokens=3).text() == daemon.expected("again", 3)
        assert await client.sessions() == ()


async def test_a_script_streams_over_tcp() -> None:
    """The synchronous client reads the same token."""
    # While a thread works virtual time may run.
    async with _served(hello_timeout_s=1e9, idle_timeout_s=1e9) as (daemon, address):

        def script() -> str:
            return "".join(token.text for token in generate_sync("hi", address, max_tokens=5))

        assert await trio.to_thread.run_sync(script) == daemon.expected("hi", 5)


async def test_a_wrong_token_is_told_and_nothing_is_computed(secret: Path) -> None:
    """The error says what to do, and is not worth another attempt."""
    secret.write_text("0" * 64)  # noqa: ASYNC240 - a small local file
    async with _served() as (_, address), connect(address) as client:
        with pytest.raises(ServerError) as caught:
            await client.generate("hi").text()
        assert (caught.value.code, caught.value.retryable) == ("E_AUTH_003", False)


async def test_nothing_is_answered_before_the_token() -> None:
    """A client of the Unix socket's kind is told what is missing."""
    async with _served() as (_, address):
        client = await _dial(address)
        await client.send(ListSessions())
        (error,) = await client.rest()
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == ("E_AUTH_003", True)
        client.close()


async def test_a_client_that_says_nothing_has_five_seconds() -> None:
    """It is told, and it has held no place of a client."""
    async with _served(max_sessions=1) as (daemon, address):
        silent = await _dial(address)
        async with connect(address) as client:
            await client.generate("hi", max_tokens=2).text()
        began = trio.current_time()
        (error,) = await silent.rest()
        assert isinstance(error, Error)
        assert error.code == "E_PROTO_006"
        assert trio.current_time() - began <= daemon.settings.hello_timeout_s
        silent.close()


async def test_strangers_do_not_keep_a_client_out() -> None:
    """With all places before the door taken by silent clients, who shows the token comes in."""
    async with _served(most_unknown=2) as (_, address):
        silent = [await _dial(address) for _ in range(4)]
        async with connect(address) as client:
            await client.generate("hi", max_tokens=2).text()
        first = await silent[0].next()
        assert isinstance(first, Error)
        assert first.code == "E_PROTO_006"
        for one in silent:
            one.close()


async def test_a_client_that_leaves_frees_what_it_had() -> None:
    """The end of a TCP client's stream cancels its request: a client that died looks the same."""
    async with _served() as (daemon, address):
        client = await _dial(address)
        client.protocol = uma_protocol.Connection(Role.CLIENT, token=RIGHT)
        await client.send_bytes(client.protocol.opening())
        await client.send(Generate("a", prompt="hi", max_tokens=1000))
        await client.next()
        client.close()
        await daemon.until_idle()
        daemon.check_idle_engine()


async def test_a_request_in_the_same_packet_as_the_hello_is_served() -> None:
    """What came behind the token is not lost when the client is let in."""
    async with _served() as (_, address):
        client = await _dial(address)
        client.protocol = uma_protocol.Connection(Role.CLIENT, token=RIGHT)
        await client.send_bytes(client.protocol.opening() + client.protocol.send(ListSessions()))
        assert isinstance(await client.next(), Sessions)
        client.close()


async def test_a_client_does_not_show_its_token_to_another_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who took the port while no daemon ran learns nothing: the kernel tells whose it is."""
    monkeypatch.setattr("uma_trio.client.reach.listener_uid", lambda *_: os.geteuid() + 1)
    async with _served() as (_, address):
        with pytest.raises(ConnectionFailed, match="nothing was sent"):
            async with connect(address):
                pass


@pytest.mark.skipif(not hasattr(socket, "AF_NETLINK"), reason="sock_diag is Linux's")
def test_the_kernel_tells_who_listens() -> None:
    """On one address, or on all; of a port on which nobody listens it tells nothing."""
    for host in ("127.0.0.1", "0.0.0.0"):  # noqa: S104
        with socket.socket() as sock:
            sock.bind((host, 0))
            port = sock.getsockname()[1]
            ours = sock_diag.ipaddress.ip_address("127.0.0.1")
            assert sock_diag.listener_uid(ours, port) is None
            sock.listen()
            assert sock_diag.listener_uid(ours, port) == os.geteuid()


async def test_without_a_daemon_a_client_is_told_how_to_start_one() -> None:
    """The command has the address."""
    address = f"tcp:127.0.0.1:{_free_port()}"
    with pytest.raises(ConnectionFailed, match=f"uma-trio serve --socket {address}"):
        async with connect(address):
            pass


async def test_without_a_token_file_a_client_is_told_where_it_is(secret: Path) -> None:
    """The message names the file, and what makes it."""
    secret.unlink()  # noqa: ASYNC240 - a small local file
    with pytest.raises(ConnectionFailed, match=str(secret)):
        async with connect("tcp:127.0.0.1:9"):
            pass


def test_a_port_has_one_daemon() -> None:
    """The second one learns it before it loads a model."""
    address = parse_framed(f"tcp:127.0.0.1:{_free_port()}")
    with PortClaim(address, "--socket"), pytest.raises(PortUnusable, match="--socket"):
        PortClaim(address, "--socket")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "example.org", "[::]"])  # noqa: S104
def test_only_this_machine_is_served(host: str) -> None:
    """The reason is the token, which would cross a network unencrypted."""
    with pytest.raises(ConfigError, match="unencrypted"):
        settings.load({"socket": f"tcp:{host}:8620"}, {})


@pytest.mark.parametrize("text", ["tcp:127.0.0.1:8620", "tcp:[::1]:8620", "tcp:localhost:8620"])
def test_an_address_is_kept_as_it_was_typed(text: str) -> None:
    """What a client is told is what it can use."""
    assert str(settings.load({"socket": text}, {}).socket) == text
    assert parse_framed(text).framed == text


def test_a_token_is_made_once(tmp_path: Path) -> None:
    """256 random bits, for this user only; the next daemon keeps it."""
    path = tmp_path / "new" / "token"
    text = make_token(path)
    assert len(bytes.fromhex(text)) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_token(path) == text == read_token(path).text
    assert text not in repr(read_token(path))


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_daemon_does_not_trust_a_token_that_others_know(secret: Path, mode: int) -> None:
    """The message is the command that mends it."""
    secret.chmod(mode)
    with pytest.raises(TokenUnusable, match="chmod 600"):
        make_token(secret)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 257, b"\xff" * 64, b"a b" * 20])
def test_what_holds_no_token_is_refused(secret: Path, content: bytes) -> None:
    """A file that was cut or is another one makes no guessable token."""
    secret.write_bytes(content)
    with pytest.raises(TokenUnusable, match="holds no token"):
        make_token(secret)


def test_a_pipe_in_place_of_a_token_does_not_hang(tmp_path: Path) -> None:
    """Nothing waits for a writer."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(TokenUnusable):
        read_token(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"UMA_TOKEN_FILE": "/x/t"}, "/x/t"),
        ({"XDG_CONFIG_HOME": "/c"}, "/c/uma-trio/token"),
    ],
)
def test_both_ends_look_in_the_same_place(env: dict[str, str], expected: str) -> None:
    """The file beside the settings, unless another is named."""
    assert str(token_file(env)) == expected


def test_a_token_speaks_for_whom_the_kernel_does_not_know() -> None:
    """The attested user is kept; without one all who have the token are one, and none is an operator."""
    known = Principal(connection=1, host="127.0.0.1", uid=7).with_token()
    unknown = Principal(connection=2, host="127.0.0.1").with_token()
    assert (known.shares_as, unknown.shares_as) == ("uid 7", "token")
    assert unknown.counts_as == "token"
    assert not unknown.is_operator
    assert not unknown.may_change(known)
