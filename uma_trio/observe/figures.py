"""Values that the metrics are given: the promise of a tick, and figures that are counted elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define, field, frozen

from uma_trio.policy.cost import CostModel


@frozen
class Promise:
    """What the plan of one tick promises. Seconds and bytes; 0 where the policy sets none.

    `limit_s` is infinite without protected streams. `step_s` is the promised time between two shown tokens.
    `skipped` prompts were left out to keep the limit. `between_s` is the part of `predicted_s` outside
    llama_decode. `solo_s` is the predicted time of the interactive streams alone. A tick is `granted` to the
    background floor, and `infeasible` if a
    stream's token took longer than the cap although nothing else was computed. `background` is the share of
    background work in the time above `solo_s`.
    """

    limit_s: float = math.inf
    step_s: float = 0.0
    solo_s: float = 0.0
    predicted_s: float = 0.0
    between_s: float = 0.0
    moved_bytes: float = 0.0
    tokens: int = 0
    skipped: int = 0
    granted: bool = False
    infeasible: bool = False
    background: float = 0.0
    bmt_budget: float = 0.0
    cost: CostModel | None = None

    @property
    def budget_bytes(self) -> float:
        """Bytes that the tick may move in its predicted time."""
        return self.bmt_budget * self.predicted_s


NO_PROMISE = Promise()


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


def prompt_rate(table: Mapping[int, float], scale: float) -> float | None:
    """Return the largest rate in tokens/s of a cost table, seconds by tokens of a batch, times `scale`."""
    rates = [n / (seconds * scale) for n, seconds in table.items() if seconds * scale > 0]
    return max(rates, default=None)


def ratio(part: float, whole: float) -> float | None:
    """Return a quotient; None where the divisor is 0."""
    return part / whole if whole else None
