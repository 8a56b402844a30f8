"""A daemon and clients that are told no path: the real ones, where users have them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from uma_trio.client import ConnectionFailed
from uma_trio.client.reach import DaemonAddress
from uma_trio.sockets.path import SHARED_SOCKET

pytestmark = pytest.mark.daemon

HERE = Path(__file__).parent
# As it was published, with its path.
QUICK_START = (HERE / "data" / "quick_start_client.txt").read_text(encoding="utf-8")
_OURS = """
from uma_trio.client import generate_sync
print("".join(token.text for token in generate_sync("hi", max_tokens=3)))
"""
TAKEN = 75


@pytest.fixture(name="env")
def _env(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose runtime directory is new."""
    told = {name: text for name, text in os.environ.items() if name != "UMA_SOCK"}
    return told | {"XDG_RUNTIME_DIR": str(tmp_path)}


@contextmanager
def _daemon(env: dict[str, str]) -> Iterator[None]:
    command = [sys.executable, str(HERE / "fake_daemon.py"), "-"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if line != "ready" and process.wait(60) == TAKEN:
                pytest.skip(line)
            assert line == "ready"
            yield
        finally:
            process.terminate()
            process.wait(60)


def _client(script: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _free() -> bool:
    """Whether no daemon holds the path that every client knows."""
    try:
        place = DaemonAddress(SHARED_SOCKET)
        with place.new_socket() as sock:
            place.connect(sock)
    except ConnectionFailed as error:
        return error.holder is None and "not by you" not in str(error)
    return False


def test_clients_that_are_told_no_path_are_served(env: dict[str, str]) -> None:
    """The published client, word for word, at /tmp/uma.sock; ours finds the runtime directory first.

    One test, since two at once would want the same path.
    """
    if not _free():
        pytest.skip(f"another daemon holds {SHARED_SOCKET}")
    assert SHARED_SOCKET in QUICK_START
    with _daemon(env):
        assert Path(env["XDG_RUNTIME_DIR"], "uma-trio", "uma.sock").is_socket()
        printed = _client(QUICK_START, env)
        assert printed.count('"event": "eos"') == 1
        assert _client(_OURS, env).strip()
