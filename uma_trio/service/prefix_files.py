"""The files of saved prefixes, as the service sees them."""

from __future__ import annotations

from typing import Protocol


class PrefixFiles(Protocol):
    """The saved prefixes of all models on disk. `budget` and sizes are in bytes."""

    @property
    def budget(self) -> int:
        """How much they may take."""

    @property
    def n_bytes(self) -> int:
        """How much they take."""

    def held_by(self, principal: str) -> int:
        """Return how much of it is of a principal."""

    def clear(self, principal: str) -> None:
        """Remove the files of a principal. Blocks on the disk."""
