"""Whether anybody serves on a socket, for commands that wait for a daemon."""

from __future__ import annotations

from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket


def accepts(path: Path) -> bool:
    """Whether somebody accepts connections at `path`."""
    with socket(AF_UNIX, SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its backlog is full: it serves
        except OSError:
            return False
    return True
