"""HAProxy itself: checking its file, starting it, loading the file again, and stopping it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final

from uma_trio_cluster.haproxy import Files, configuration, key_map
from uma_trio_cluster.nodes import Cluster

_CHECK_S: Final = 30.0
PROGRAM: Final = "haproxy"


class CannotRun(Exception):
    """HAProxy is not there, refuses the file, or does not start; the message says which."""


def write(cluster: Cluster, files: Files, keys: tuple[bytes, ...]) -> None:
    """Write HAProxy's files into their folder, which only this user can read. Each is replaced at once.

    Raises:
        OSError: they cannot be written.
    """
    files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if keys:
        _replace(files.keys, key_map(keys))
    _replace(files.configuration, configuration(cluster, files).encode())


def check(files: Files) -> None:
    """Have HAProxy check its file. Raises CannotRun with what it says."""
    _run("-c", "-f", str(files.configuration))


def start(files: Files) -> bool:
    """Start HAProxy in the background, or have the running one load its file again; whether it ran.

    A reload closes no connection: the old process finishes its streams, and the pins are handed over.

    Raises:
        CannotRun: it is not installed, or does not start.
    """
    pid = running(files)
    if pid is not None:
        os.kill(pid, signal.SIGUSR2)
        return True
    _run("-W", "-D", "-f", str(files.configuration), "-p", str(files.pid))
    return False


def stop(files: Files) -> bool:
    """Have HAProxy end after its streams; False if it does not run."""
    pid = running(files)
    if pid is not None:
        os.kill(pid, signal.SIGUSR1)
    return pid is not None


def running(files: Files) -> int | None:
    """Return the master process that was started with these files; None if it is gone."""
    try:
        pid = int(files.pid.read_text(encoding="ascii").split()[0])
        os.kill(pid, 0)
        is_it = PROGRAM in Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
    except (OSError, ValueError, IndexError):
        return None
    return pid if is_it else None


def _run(*arguments: str) -> None:
    program = shutil.which(PROGRAM, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise CannotRun("HAProxy is not installed here; on Debian: apt install haproxy")
    try:
        done = subprocess.run(  # noqa: S603 - the program and paths of our own
            [program, *arguments], capture_output=True, text=True, timeout=_CHECK_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(f"haproxy {arguments[0]} has not ended within {_CHECK_S:g} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "[ALERT]" in line] or [done.stderr]
        raise CannotRun(f"haproxy refuses the file: {said[0].strip()}")


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)
