"""The secret of a TCP port of the framed protocol: made by the daemon, read by its clients.

Any process of the machine can connect to a port, so that clients there must present a secret that only this
user, and those that the user shares it with, can read.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

TOKEN_FILE_ENV: Final = "UMA_TOKEN_FILE"  # noqa: S105 - the name of a variable
_N_BYTES: Final = 32
_MOST_BYTES: Final = 256  # uma_protocol's longest token
_LEAST_BYTES: Final = 32  # 128 bits in hexadecimal, for tokens that were written by hand
DEFAULT_TEXT: Final = "token beside the user's config.yaml"


class TokenUnusable(Exception):
    """The token cannot be had; the message is one sentence that names the next step."""


class Secret(NamedTuple):
    """A token, and the owner of its file; None where files have no owner."""

    text: str
    owner: int | None

    def __repr__(self) -> str:
        """A secret has no place in a log."""
        return "Secret(...)"


def token_file(env: Mapping[str, str] | None = None) -> Path:
    """Return where the token is: in ``UMA_TOKEN_FILE``, or in the folder of the user's settings."""
    env = os.environ if env is None else env
    if path := env.get(TOKEN_FILE_ENV):
        return Path(path).expanduser()
    if sys.platform == "win32":
        return Path(env.get("LOCALAPPDATA") or Path.home(), "uma-trio", "token")
    folder = env.get("XDG_CONFIG_HOME", "")
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".config"
    return base / "uma-trio" / "token"


def make_token(path: Path) -> str:
    """Return the token in a file, which is made with 256 random bits and mode 0600 if it is not there.

    Raises:
        TokenUnusable: it cannot be made or read, or others than this user could read or change it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOEXEC, 0o600)
    except FileExistsError:
        return _own(path)
    except OSError as error:
        raise TokenUnusable(
            f"cannot make the token file {path}: {error.strerror}; choose another with --token-file"
        ) from None
    text = secrets.token_hex(_N_BYTES)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(f"{text}\n")
    return text


def read_token(path: Path) -> Secret:
    """Return the token that a client shows. It may be another user's file, as in a container.

    Raises:
        TokenUnusable: it cannot be read, or holds no token.
    """
    text, info = _read(path)
    return Secret(text, None if sys.platform == "win32" else info.st_uid)


def _own(path: Path) -> str:
    text, info = _read(path)
    if sys.platform != "win32" and (info.st_uid != os.geteuid() or info.st_mode & 0o077):
        raise TokenUnusable(
            f"others than this user can read or change the token file {path}; remove it, or run: "
            f"chmod 600 {path}"
        )
    return text


def _read(path: Path) -> tuple[str, os.stat_result]:
    try:
        # A pipe in its place would make the open wait for a writer.
        fd = os.open(path, os.O_RDONLY | _CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(file.fileno())
            raw = file.read(_MOST_BYTES + 2) if stat.S_ISREG(info.st_mode) else b""
    except OSError as error:
        raise TokenUnusable(
            f"cannot read the token file {path}: {error.strerror}; a daemon with --socket tcp:... makes "
            f"it, and {TOKEN_FILE_ENV} names another"
        ) from None
    text = raw.strip().decode("ascii", "replace")
    if not _LEAST_BYTES <= len(text) <= _MOST_BYTES or not text.isascii() or not text.isalnum():
        raise TokenUnusable(
            f"{path} holds no token ({_LEAST_BYTES} to {_MOST_BYTES} letters and digits); remove it, and "
            "start the daemon again"
        )
    return text, info


_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)
