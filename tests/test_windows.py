"""The client can be imported where POSIX's modules are not. Windows itself is not here: nothing ran there."""

from __future__ import annotations

import subprocess
import sys

import pytest

# trio, and what it needs, is loaded first: on Windows it has other modules of its own.
_WITHOUT_POSIX = """
import sys, importlib.abc, os, socket, select
import trio, msgspec, attrs, uuid, tempfile, subprocess

class Absent(importlib.abc.MetaPathFinder):
    names = {"fcntl", "termios", "resource", "pwd", "grp", "tty", "pty", "curses", "readline"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in Absent.names:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Absent())
for module, names in {
    os: ("geteuid", "getuid", "fchmod", "mkfifo", "sched_getaffinity", "sysconf", "pread", "pwrite"),
    socket: ("AF_UNIX", "AF_NETLINK", "SCM_RIGHTS", "SO_PEERCRED", "SO_REUSEPORT"),
    select: ("poll", "epoll"),
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""


def _run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_POSIX + script],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "uma_protocol",
        "uma_trio",
        "uma_trio.client",
        "uma_trio.config.settings",
        "uma_trio.uds.server",
        "uma_trio.sockets.port",
        "uma_trio.sockets.token",
    ],
)
def test_a_module_is_imported_without_posix(module: str) -> None:
    """None of fcntl, termios, resource, pwd, geteuid, AF_UNIX and poll is needed for it."""
    _run(f"import {module}")


def test_a_client_is_told_what_to_use_instead_of_a_unix_socket() -> None:
    """The message names an address that works there."""
    script = """
from uma_trio.client import ConnectionFailed, generate_sync
try:
    list(generate_sync("hi", "/tmp/uma.sock"))
except ConnectionFailed as error:
    print(error)
"""
    assert "tcp:127.0.0.1:" in _run(script)


def test_a_port_is_served_without_posix() -> None:
    """A client there streams over TCP: nothing on its way needs what is missing."""
    script = """
import pathlib, secrets, socket, struct, tempfile, threading, json, os
from uma_trio.client import generate_sync

def serve(listening):
    sock, _ = listening.accept()
    received = b""
    while received.count(b'"type"') < 2:
        received += sock.recv(4096)
    assert b'"hello"' in received[:30]
    for event in (
        {"id": "%", "event": "token", "text": "hi", "token_id": 1},
        {"id": "%", "event": "eos", "reason": "stop", "usage": {"prompt_tokens": 1, "completion_tokens": 1},
         "timings": {"queue_ms": 0.0, "total_ms": 1.0, "tokens_per_s": 1.0}, "request": 1},
    ):
        request = json.loads(received[received.index(b'{"type":"generate"'):])
        payload = json.dumps(event | {"id": request["id"]}).encode()
        sock.sendall(struct.pack("<I", len(payload)) + payload)

listening = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(listening,), daemon=True).start()
path = pathlib.Path(tempfile.mkdtemp(), "token")
path.write_text(secrets.token_hex(32))
os.environ["UMA_TOKEN_FILE"] = str(path)
print("".join(t.text for t in generate_sync("hi", f"tcp:127.0.0.1:{listening.getsockname()[1]}")))
path.unlink()
path.parent.rmdir()
"""
    assert _run(script) == "hi\n"
