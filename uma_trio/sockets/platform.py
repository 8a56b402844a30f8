"""What differs between POSIX systems and Windows. On Windows nothing of it was run."""

from __future__ import annotations

import os
import socket
from typing import Final

HAS_UNIX_SOCKETS: Final = hasattr(socket, "AF_UNIX")
NO_UID: Final = -1
"""The user where users have no number: equal to no uid that a kernel attests."""


def own_uid() -> int:
    """Return the user of this process."""
    return os.geteuid() if hasattr(os, "geteuid") else NO_UID


def is_tcp(sock: socket.socket) -> bool:
    """Whether a stream socket is one of TCP, and not a Unix socket."""
    return sock.family in (socket.AF_INET, socket.AF_INET6)
