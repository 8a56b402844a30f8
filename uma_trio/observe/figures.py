"""Figures that other parts of the daemon count by themselves, and that the metrics show."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field, frozen


@frozen(kw_only=True)
class Outlook:
    """Figures that headroom is computed from; None where nothing was measured or the policy promises nothing.

    `shown_ratio_p95` and `latency_cap` are the metrics of these names. `moved_ratio` is the number of bytes that
    the last tick moved, divided by its budget.
    """

    shown_ratio_p95: float | None = None
    latency_cap: float | None = None
    moved_ratio: float | None = None
    prompt_tokens_per_s: float | None = None


@frozen
class PrefixFigures:
    """The prefix cache: sums since the start, and its present size. The engine's thread replaces the value."""

    hits: Mapping[str, int] = field(factory=dict)  # by source
    failures: Mapping[str, int] = field(factory=dict)  # by operation; each is a miss
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
        """Return the metrics by name."""
        return {
            "prefix_hits_total": dict(self.hits),
            "prefix_tokens_total": self.tokens,
            "prefix_failures_total": dict(self.failures),
            "prefix_ghost_hits_total": self.ghost_hits,
            "prefix_bytes": self.bytes,
            "prefix_disk_written_bytes_total": self.disk_written,
        }


@define
class EncodingFigures:
    """Tokens of all encoders. Written by the engine's thread."""

    tokens: int = 0
