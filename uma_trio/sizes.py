"""Bytes in binary units, as memory is counted."""

from __future__ import annotations

from typing import Final

MIB: Final = 1 << 20


def mib(n_bytes: int) -> str:
    """Return bytes in whole MiB: 1,024 MiB."""
    return f"{n_bytes / MIB:,.0f} MiB"
