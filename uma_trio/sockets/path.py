"""The default path of the socket, its lock file, and the process that holds the lock."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# Clients try this path without their environment. The daemon serves on it as well.
SHARED_SOCKET: Final = "/tmp/uma.sock"  # noqa: S108 - both ends check the other's uid
# In the user's runtime directory, which only this user may enter (XDG Base Directory Specification).
_IN_RUNTIME_FOLDER: Final = "uma-trio/uma.sock"
DEFAULT_TEXT: Final = (
    f"$XDG_RUNTIME_DIR/{_IN_RUNTIME_FOLDER}, without that variable {SHARED_SOCKET}"
)


def default_socket(env: Mapping[str, str] | None = None) -> str:
    """Return the path where a daemon serves by default."""
    folder = (os.environ if env is None else env).get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(folder) and os.path.isdir(folder):
        return os.path.join(folder, _IN_RUNTIME_FOLDER)
    return SHARED_SOCKET


def socket_to_connect(env: Mapping[str, str] | None = None) -> str:
    """Return the path where a client connects by default: the default path, or the shared one.

    The shared path is taken if it alone has a socket: a daemon that was started in another session
    may have no runtime directory, or another one.
    """
    default = default_socket(env)
    return SHARED_SOCKET if not _is_socket(default) and _is_socket(SHARED_SOCKET) else default


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def lock_of(path: str) -> str:
    """Return the lock file of the socket at `path`; the process that holds its lock owns the name."""
    return f"{path}.lock"


def holder_of(path: str, table: Path = Path("/proc/locks")) -> int | None:
    """Return the process that owns the name of a socket; None if none does, or it is unknown.

    Read from the kernel's table of locks (proc_locks(5), Linux alone): to try the lock would hold
    it for a moment, in which a daemon that starts would be refused.
    """
    try:
        lock = os.stat(lock_of(path))
        lines = table.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    file = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    for fields in map(str.split, lines):
        # 1: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF; waiting processes have "->" in front.
        if fields[1:2] == ["FLOCK"] and fields[5:6] == [file]:
            return _written(lock_of(path)) or int(fields[4])
    return None


def _written(lock_file: str) -> int | None:
    """Return the process in the lock file: the one that took the lock may have handed it over and ended."""
    try:
        return int(Path(lock_file).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
