"""What the prefix cache counts, as one value that the engine's thread replaces."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen


@frozen
class PrefixFigures:
    """Since the start, but for `bytes`, `pages`, `leaves`, `leaf_tokens` and `disk_bytes`, which are of now."""

    hits: Mapping[str, int] = field(factory=dict)  # by where the beginning was
    failures: Mapping[str, int] = field(factory=dict)  # by what failed; each is a miss
    tokens: int = 0
    rent_s: float = 0.0
    moved: int = 0
    evicted: int = 0
    ghost_hits: int = 0
    bytes: int = 0
    pages: int = 0
    leaves: int = 0
    leaf_tokens: int = 0
    disk_bytes: int = 0
    disk_written: int = 0

    def values(self) -> dict[str, object]:
        """Return them by the names of the catalogue."""
        return {
            "prefix_hits_total": dict(self.hits),
            "prefix_tokens_total": self.tokens,
            "prefix_failures_total": dict(self.failures),
            "prefix_rent_seconds_total": self.rent_s,
            "prefix_moved_cells_total": self.moved,
            "prefix_evicted_total": self.evicted,
            "prefix_ghost_hits_total": self.ghost_hits,
            "prefix_bytes": self.bytes,
            "prefix_pages": self.pages,
            "prefix_leaves": self.leaves,
            "prefix_leaf_tokens": self.leaf_tokens,
            "prefix_disk_bytes": self.disk_bytes,
            "prefix_disk_written_bytes_total": self.disk_written,
        }
