"""Which process holds the lock beside a socket's name, found out without touching the lock."""

from __future__ import annotations

import os
from pathlib import Path


def lock_of(path: str) -> str:
    """Return the lock file of the socket at `path`; who holds its lock owns the name."""
    return f"{path}.lock"


def holder_of(path: str, table: Path = Path("/proc/locks")) -> int | None:
    """Return the process that owns the name of a socket; None if nobody does or nobody can tell.

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
        # 1: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF; those who wait have "->" in front.
        if fields[1:2] == ["FLOCK"] and fields[5:6] == [file]:
            return _written(lock_of(path)) or int(fields[4])
    return None


def _written(lock_file: str) -> int | None:
    """Return the process that the holder wrote into its lock file; None if it has not yet.

    The kernel tells who took the lock, who may have handed it to another process and ended.
    """
    try:
        return int(Path(lock_file).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
