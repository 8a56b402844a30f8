"""Where the daemon and its clients meet, unless told otherwise."""

from __future__ import annotations

from typing import Final

DEFAULT_SOCKET: Final = "/tmp/uma.sock"  # noqa: S108 - both ends check the other's uid
