"""Chat templates of llama.cpp's source archive, where ``scripts/foreign_server_tests.py`` has unpacked it."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT / "scripts"))

from setup import CACHE, LLAMA  # noqa: E402


@cache
def archive() -> Path:
    """Return the folder of the archive, which may not be there."""
    return CACHE / "sources" / f"{LLAMA}-{version(LLAMA)}"


def archived_templates() -> list[Path]:
    """Return the files of all its templates."""
    return sorted((archive() / "models" / "templates").glob("*.jinja"))
