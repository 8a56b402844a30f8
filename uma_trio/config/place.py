"""Where settings are found besides flags: the prefix of variables, and the user's file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CONFIG_FLAG = "--config"
CONFIG_ENV = "UMA_CONFIG"
ENV_PREFIX = "UMA_"


def users_file(env: Mapping[str, str]) -> Path | None:
    """Return where a user's settings are read from (XDG Base Directory Specification), if anywhere."""
    folder = env.get("XDG_CONFIG_HOME") or (f"{env['HOME']}/.config" if env.get("HOME") else "")
    return Path(folder, "uma-trio", "config.yaml") if os.path.isabs(folder) else None
