"""The figures of the latency contract: what was allowed, what it took, what it cost others.

Recorded by the engine once a tick, from values the policy's plan carries; policies without a
limit leave most of it empty. A part of :class:`uma_trio.telemetry.metrics.Metrics`.
"""

from __future__ import annotations

import math

from attrs import frozen

from uma_trio.telemetry.histogram import Histogram, bounds_ms

YOUNG_S = 3.0  # a reader's first impression


@frozen
class Promise:
    """One tick by the plan's own numbers. Seconds and bytes; 0 where the policy says nothing.

    `limit_s` is infinite when nobody is protected. `held_back` counts the prompts that this tick
    left out so as to stay within the limit.
    """

    limit_s: float = math.inf
    solo_s: float = 0.0
    predicted_s: float = 0.0
    moved_bytes: float = 0.0
    tokens: int = 0
    ballast: int = 0
    held_back: int = 0
    floor_grants: int = 0
    infeasible: int = 0
    background_share: float = 0.0
    cost_error: float = 0.0
    bmt_budget: float = 0.0


NO_PROMISE = Promise()


class PromiseFigures:
    """What is kept of it. Called on the engine's thread; read by anybody."""

    def __init__(self) -> None:
        self._last = NO_PROMISE
        self._over = self._held_back = self._ballast = 0
        self._violations = {"ttft": 0, "tbt": 0}
        self._moved = 0.0
        self._tokens = 0
        self._protected_tokens = 0
        self._protected_s = 0.0
        self._young_pause_ms = Histogram(bounds_ms(0.1, 100_000))
        self._ttf5_ms = Histogram(bounds_ms(1, 1_000_000))

    def tick(self, promise: Promise, took_s: float) -> None:
        """Record one tick that took `took_s` from token to token."""
        if promise is NO_PROMISE:
            return
        self._last = promise
        self._held_back += promise.held_back
        self._ballast += promise.ballast
        self._moved += promise.moved_bytes
        self._tokens += promise.tokens
        if math.isfinite(promise.limit_s):
            self._over += took_s > promise.limit_s
            self._protected_s += took_s
            self._protected_tokens += promise.tokens

    def compare(self, kind: str, seconds: float, target_s: float | None) -> None:
        """Count a first token ("ttft") or gap ("tbt") that came later than was asked for."""
        if target_s is not None and seconds > target_s:
            self._violations[kind] += 1

    def young_pause(self, seconds: float) -> None:
        """Record the longest gap of a stream's first three seconds."""
        self._young_pause_ms.record(seconds * 1e3)

    def first_five(self, seconds: float) -> None:
        """Record how long a request took to its fifth token."""
        self._ttf5_ms.record(seconds * 1e3)

    def values(self) -> dict[str, object]:
        """Return every figure by its name in the catalogue."""
        last = self._last
        limited = math.isfinite(last.limit_s)
        return {
            "tick_limit_ms": last.limit_s * 1e3 if limited else None,
            "solo_ms": last.solo_s * 1e3 if limited else None,
            "predicted_ms_last": last.predicted_s * 1e3,
            "ticks_over_budget": self._over,
            "prefill_guard_active": int(last.held_back > 0),
            "skipped_prefill_due_to_latency_total": self._held_back,
            "floor_grants_total": last.floor_grants,
            "guard_infeasible_total": last.infeasible,
            "background_share": last.background_share,
            "ballast_rows_total": self._ballast,
            "slo_violations_total": dict(self._violations),
            "cost_error": last.cost_error,
            "sum_bmt_mb_last": last.moved_bytes / 1e6,
            "sum_bmt_mb_per_token": self._moved / 1e6 / self._tokens if self._tokens else None,
            "bmt_budget_gbps": last.bmt_budget / 1e9 if last.bmt_budget else None,
            "tokens_per_s_at_cap": (
                self._protected_tokens / self._protected_s if self._protected_s else None
            ),
            "worst_pause_ms": self._young_pause_ms,
            "ttf5_ms": self._ttf5_ms,
        }
