"""The socket file: who gets it, what is left alone, what is removed.

Real sockets and files in a temporary directory, whose path is kept short: a socket's may have
some hundred bytes only.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from uma_trio.sockets.listener import SocketTaken, SocketUnusable, claim
from uma_trio.sockets.path import holder_of
from uma_trio.sockets.peers import peer_of
from uma_trio.sockets.port import TcpListener

OWNER = """
import sys
from uma_trio.sockets.listener import SocketTaken, claim
try:
    taken = claim(sys.argv[1])
except SocketTaken as other:
    print("taken by", other.pid, flush=True)
    sys.exit(75)
listener = taken.listen()
print("serving", flush=True)
sys.stdin.read()
listener.close()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a short path for a socket."""
    with tempfile.TemporaryDirectory(prefix="uma") as folder:
        yield Path(folder) / "s"


def owner(path: Path) -> subprocess.Popen[str]:
    """Start a process that serves on `path` until its standard input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    """Wait for what the process says first."""
    if process.stdout is None:
        raise AssertionError
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> int:
    """End the process by its standard input; return its exit code."""
    process.communicate()
    return process.returncode


def leave_stale(path: Path) -> None:
    """Leave a socket file behind that nobody serves."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()


def test_only_the_user_may_connect(path: Path) -> None:
    """The file is a socket of mode 0600, whatever the umask."""
    before = os.umask(0)
    try:
        with claim(path) as mine, mine.listen():
            info = path.lstat()
    finally:
        os.umask(before)
    assert stat.S_ISSOCK(info.st_mode)
    assert stat.S_IMODE(info.st_mode) == 0o600


def test_the_socket_is_removed_at_the_end_and_the_lock_released(path: Path) -> None:
    """What was taken can be taken again."""
    for _ in range(2):
        with claim(path) as mine, mine.listen():
            assert path.exists()
        assert not path.exists()


def test_a_claim_without_a_socket_leaves_no_socket(path: Path) -> None:
    """A daemon whose model does not load has made no socket."""
    with claim(path):
        assert not path.exists()


def test_a_stale_socket_of_ours_is_replaced(path: Path) -> None:
    """A killed daemon's file is in nobody's way."""
    leave_stale(path)
    with claim(path) as mine, mine.listen() as listener:
        assert listener.is_linked()


def test_the_second_claim_learns_who_holds_the_first(path: Path) -> None:
    """Two owners in one process exclude each other as two processes do."""
    with claim(path), pytest.raises(SocketTaken) as caught:
        claim(path)
    assert caught.value.pid == os.getpid()


def test_a_name_whose_owner_is_stopping_is_not_offered_for_use(path: Path) -> None:
    """It takes no more clients, and holds the name until its requests have ended."""
    with claim(path) as mine, mine.listen() as listener:
        listener.stop()
        with pytest.raises(SocketTaken, match=f"pid {os.getpid()}.* is stopping"):
            claim(path)


def test_the_flag_that_chose_the_path_is_the_one_to_change(path: Path) -> None:
    """There is more than one that names a socket."""
    with claim(path, "--other"), pytest.raises(SocketTaken, match="another path with --other"):
        claim(path, "--other")
    with pytest.raises(SocketUnusable, match="another path with --other"):
        claim(path / "none" / "s", "--other")


def test_who_holds_a_name_is_found_without_touching_the_lock(path: Path) -> None:
    """In the kernel's own table; a system without one knows nobody."""
    assert holder_of(str(path)) is None
    with claim(path):
        if sys.platform == "linux":
            assert holder_of(str(path)) == os.getpid()
        lock = path.with_name("s.lock").stat()
        table = path.with_name("table")
        file = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
        table.write_text(
            f"1: POSIX  ADVISORY  READ 7 {file} 0 EOF\n2: FLOCK  ADVISORY  WRITE 9 {file} 0 EOF\n"
        )
        assert (
            holder_of(str(path), table) == os.getpid()
        )  # which the holder wrote: a lock is handed on
        path.with_name("s.lock").write_text("")
        assert holder_of(str(path), table) == 9
        assert holder_of(str(path), path.with_name("no table")) is None
    if sys.platform == "linux":
        assert holder_of(str(path)) is None


def test_a_strangers_server_without_a_lock_is_not_robbed(path: Path) -> None:
    """A socket that answers is taken, also if its server knows no lock file."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        with pytest.raises(SocketTaken) as caught:
            claim(path)
        assert caught.value.pid == os.getpid()
        assert path.exists()


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["file", "folder"])
def test_what_is_no_socket_is_left_alone(path: Path, make: object) -> None:
    """A path typed wrongly costs nobody a file."""
    make(path)  # type: ignore[operator]
    with pytest.raises(SocketUnusable, match="not a socket; choose another path with --socket"):
        claim(path)
    assert path.exists()


def test_a_symbolic_link_is_not_followed(path: Path) -> None:
    """A link at the socket's name leads nowhere, not to somebody's socket."""
    target = path.with_name("t")
    leave_stale(target)
    path.symlink_to(target)
    with pytest.raises(SocketUnusable, match="not a socket"):
        claim(path)
    assert target.exists()


@pytest.mark.parametrize(
    ("link", "told"), [(Path.symlink_to, "symbolic link"), (Path.hardlink_to, "plain file")]
)
def test_a_link_at_the_lock_is_refused(
    path: Path, link: Callable[[Path, Path], None], told: str
) -> None:
    """The lock file is not opened through a link, so the file behind it is not overwritten."""
    target = path.with_name("precious")
    target.write_text("precious")
    link(path.with_name("s.lock"), target)
    with pytest.raises(SocketUnusable, match=told):
        claim(path)
    assert target.read_text() == "precious"


def test_a_path_too_long_is_named_with_its_excess(path: Path) -> None:
    """The operator learns how much shorter it has to be."""
    long = path.with_name("x" * (110 - len(str(path.parent))))
    with pytest.raises(SocketUnusable, match=f"{110 + 1 - 107} bytes too long.* 107 .*--socket"):
        claim(long)


def test_a_missing_folder_is_a_sentence(path: Path) -> None:
    """No traceback for a folder that does not exist."""
    with pytest.raises(SocketUnusable, match="none; create it"):
        claim(path.parent / "none" / "s")


def test_a_replaced_socket_is_not_removed(path: Path) -> None:
    """Another's socket under our name survives our end."""
    with claim(path) as mine, mine.listen() as listener:
        path.unlink()
        leave_stale(path)
        assert not listener.is_linked()
    assert path.exists()


def test_a_deleted_socket_is_no_error(path: Path) -> None:
    """Who removes the file by hand does not spoil the end."""
    with claim(path) as mine, mine.listen() as listener:
        path.unlink()
        assert not listener.is_linked()


async def test_who_listens_learns_that_its_name_was_taken_away(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Nobody can come any more, and only the daemon can notice."""
    with claim(path) as mine, mine.listen() as listener:
        with trio.move_on_after(600) as patience:
            await listener.until_lost()
        assert patience.cancelled_caught
        os.unlink(path)
        with trio.fail_after(60):
            await listener.until_lost()


def test_a_claim_whose_socket_is_gone_is_told_apart(path: Path) -> None:
    """To use what is served there would be no advice."""
    with claim(path) as mine:
        with pytest.raises(SocketTaken, match=f"pid {os.getpid()}, .* no socket there"):
            claim(path)
        with mine.listen(), pytest.raises(SocketTaken, match="already served"):
            claim(path)


def test_the_lock_does_not_reach_child_processes(path: Path) -> None:
    """A program started by the daemon does not hold its name for it."""
    with claim(path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        claim(path).release()
    finally:
        child.communicate(b"\n")


@pytest.mark.daemon
def test_of_many_owners_one_serves(path: Path) -> None:
    """Eight start at once over a stale socket: one serves, seven exit with 75."""
    leave_stale(path)
    owners = [owner(path) for _ in range(8)]
    said = [first_line(process) for process in owners]
    assert sum(line == "serving" for line in said) == 1
    assert path.exists()
    codes = sorted(end(process) for process in owners)
    assert codes == [0] + [75] * 7
    assert not path.exists()


@pytest.mark.daemon
def test_a_killed_owner_leaves_no_false_lock(path: Path) -> None:
    """After kill -9 the next one starts at once, over the socket that was left."""
    process = owner(path)
    assert first_line(process) == "serving"
    process.kill()
    process.communicate()
    assert path.exists()
    with claim(path) as mine, mine.listen() as listener:
        assert listener.is_linked()


def test_the_peer_of_a_pair_is_this_process() -> None:
    """Credentials are read in the kernel's order: process, user, group."""
    one, other = socket.socketpair()
    with one, other:
        peer = peer_of(one)
    assert (peer.uid, peer.pid) == (os.getuid(), os.getpid())


async def test_clients_are_handed_over_in_order(path: Path) -> None:
    """Everybody in the backlog is accepted."""
    got: list[socket.socket] = []
    with claim(path) as mine, mine.listen() as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.accept_forever, got.append, print)
            clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
            for client in clients:
                client.connect(str(path))
            while len(got) < 3:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    for sock in got + clients:
        sock.close()


class Exhausted:
    """A listening socket that is out of descriptors the first two times."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.failures = [errno.EMFILE, errno.ENFILE]

    def accept(self) -> tuple[socket.socket, object]:
        """Fail, or accept."""
        if self.failures:
            raise OSError(self.failures.pop(0), "too many open files")
        return self._sock.accept()

    def fileno(self) -> int:
        """Return the real descriptor, to wait for."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the real one."""
        self._sock.close()


async def test_the_loop_survives_a_lack_of_descriptors(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """It counts, pauses, and accepts the client once there is room again."""
    got: list[socket.socket] = []
    failures: list[OSError] = []
    with claim(path) as mine, mine.listen() as listener:
        listener.sock = Exhausted(listener.sock)  # type: ignore[assignment]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listener.accept_forever, got.append, failures.append)
                await trio.sleep(1)
                nursery.cancel_scope.cancel()
    assert [failure.errno for failure in failures] == [errno.EMFILE, errno.ENFILE]
    assert len(got) == 1
    got[0].close()


# What accept(2) lists, and what trio's SocketListener passes over.
OF_ONE_CLIENT = [
    number
    for name in [
        "EPERM",
        "ECONNABORTED",
        "EPROTO",
        "ENETDOWN",
        "ENOPROTOOPT",
        "EHOSTDOWN",
        "ENONET",
        "EHOSTUNREACH",
        "EOPNOTSUPP",
        "ENETUNREACH",
        "ENOSR",
        "ESOCKTNOSUPPORT",
        "EPROTONOSUPPORT",
        "ETIMEDOUT",
        "ECONNRESET",
    ]
    if (number := getattr(errno, name, None)) is not None
]


async def test_an_error_of_one_client_does_not_end_the_loop(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Neither on a Unix socket nor on a port; the next client is accepted, and no lack is told."""
    got: list[socket.socket] = []
    failures: list[OSError] = []
    port = socket.create_server(("127.0.0.1", 0))
    with claim(path) as mine, mine.listen() as unix, TcpListener(port) as tcp, trio.fail_after(5):
        port.setblocking(False)
        for listener, where in ((unix, str(path)), (tcp, port.getsockname())):
            failing = Exhausted(listener.sock)
            failing.failures = list(OF_ONE_CLIENT)
            listener.sock = failing  # type: ignore[assignment]
            with socket.socket(failing._sock.family) as client:
                client.connect(where)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(listener.accept_forever, got.append, failures.append)
                    await trio.sleep(1)
                    nursery.cancel_scope.cancel()
            assert failing.failures == []
    assert not failures
    assert len(got) == 2
    for sock in got:
        sock.close()


async def test_a_listening_socket_that_is_broken_is_told(path: Path) -> None:
    """An error of the socket itself is not passed over: it would come again for ever."""
    with claim(path) as mine, mine.listen() as listener:
        failing = Exhausted(listener.sock)
        failing.failures = [errno.EINVAL]
        listener.sock = failing  # type: ignore[assignment]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            with pytest.raises(OSError, match="too many"):
                await listener.accept_forever(lambda _: None, lambda _: None)
