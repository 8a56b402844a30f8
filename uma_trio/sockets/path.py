"""Where the daemon and its clients meet, unless told otherwise."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Final

# Every client knows this path without looking at its environment. The daemon serves on it, too.
SHARED_SOCKET: Final = "/tmp/uma.sock"  # noqa: S108 - both ends check the other's uid
# In the user's runtime directory, which only this user may enter (XDG Base Directory Specification).
_IN_RUNTIME_FOLDER: Final = "uma-trio/uma.sock"
DEFAULT_TEXT: Final = (
    f"$XDG_RUNTIME_DIR/{_IN_RUNTIME_FOLDER}, without that variable {SHARED_SOCKET}"
)


def default_socket(env: Mapping[str, str] | None = None) -> str:
    """Return where a daemon serves that is told nothing."""
    folder = (os.environ if env is None else env).get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(folder) and os.path.isdir(folder):
        return os.path.join(folder, _IN_RUNTIME_FOLDER)
    return SHARED_SOCKET


def socket_to_ask(env: Mapping[str, str] | None = None) -> str:
    """Return where a client asks that is told nothing: the default path, or the shared one.

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
