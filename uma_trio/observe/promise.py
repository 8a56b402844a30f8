"""The figures of the latency contract: what was allowed, what it took, what it cost others.

Recorded by the engine once a tick, from values the policy's plan carries; policies without a
limit leave most of it empty. A part of :class:`uma_trio.observe.metrics.Metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from attrs import astuple, define, evolve, frozen

from uma_trio.observe.histogram import Histogram, Recent, bounds_ms
from uma_trio.observe.outlook import prompt_rate

_RECENT_TICKS = 1024
_SHARE_S = 10.0  # slack is spent in few large ticks: a share is that of several of them


class CostFigures(Protocol):
    """What a cost model tells of itself. An immutable value: it is read when somebody asks."""

    @property
    def error(self) -> float:
        """The smoothed error of its predictions."""

    @property
    def others(self) -> float:
        """The part of the machine that other programs used when it was measured, 0 if it was quiet."""

    @property
    def scale(self) -> float:
        """The scale factor on all its sizes."""

    @property
    def trusted(self) -> bool:
        """Whether its recent error is small."""

    def table(self) -> Mapping[int, float]:
        """Return the seconds by tokens, without the factor."""


@frozen
class Promise:
    """One tick by the plan's own numbers. Seconds and bytes; 0 where the policy says nothing.

    `limit_s` is infinite when nobody is protected. `step_s` is the promised time between two shown tokens. `skipped` counts the prompts that this tick
    left out so as to stay within the limit. `between_s` is the part of `predicted_s` outside
    llama_decode. `solo_s` is what the interactive streams alone would cost, `alone_s` what one of
    them would. A tick is `granted` to the background floor, and `infeasible` if a stream's token took
    longer than the cap allows although nothing else was computed. `background` is the part of what the
    tick takes more than `solo_s` that background work has. `cost` is the model that predicted.
    """

    limit_s: float = math.inf
    step_s: float = 0.0
    solo_s: float = 0.0
    predicted_s: float = 0.0
    between_s: float = 0.0
    moved_bytes: float = 0.0
    tokens: int = 0
    ballast: int = 0
    skipped: int = 0
    granted: bool = False
    infeasible: bool = False
    background: float = 0.0
    bmt_budget: float = 0.0
    alone_s: float = 0.0
    cost: CostFigures | None = None


NO_PROMISE = Promise()


@define
class PromiseTotals:
    """What has added up since the start; two of them make an interval."""

    ticks: int = 0
    tokens: int = 0
    ballast: int = 0
    skipped: int = 0
    moved_bytes: float = 0.0
    budget_bytes: float = 0.0
    over_budget: int = 0
    granted: int = 0
    infeasible: int = 0
    protected_tokens: int = 0
    protected_s: float = 0.0
    ideal_s: float = 0.0
    judged_s: float = 0.0  # the time of the ticks that `ideal_s` is of

    def since(self, earlier: PromiseTotals) -> PromiseTotals:
        """Return what has added up after `earlier`."""
        then = astuple(earlier)
        return PromiseTotals(*(now - was for now, was in zip(astuple(self), then, strict=True)))

    @property
    def tokens_per_s_at_cap(self) -> float | None:
        """All tokens of ticks that had a limit, over their time."""
        return ratio(self.protected_tokens, self.protected_s)

    @property
    def efficiency(self) -> float | None:
        """What the staircase allows for the batches there were, over what they took."""
        return ratio(self.ideal_s, self.judged_s)

    @property
    def moved_mb_per_token(self) -> float | None:
        """Megabytes moved for each token."""
        return ratio(self.moved_bytes / 1e6, self.tokens)


class PromiseFigures:
    """What is kept of it. Called on the engine's thread; read by anybody."""

    def __init__(self) -> None:
        self._last = NO_PROMISE
        self._totals = PromiseTotals()
        self._violations = {"ttft": 0, "tbt": 0}
        self._background_share = 0.0
        self._solo_ratios = Recent(_RECENT_TICKS)
        self._alone_ratios = Recent(_RECENT_TICKS)
        self._misses = Recent(_RECENT_TICKS)
        self._startup_itl_ms = Histogram(bounds_ms(0.1, 100_000))
        self._ttf5_ms = Histogram(bounds_ms(1, 1_000_000))

    @property
    def solo_s(self) -> float:
        """Predicted time of the last tick with the interactive streams only; 0 without any."""
        return self._last.solo_s

    @property
    def moved_ratio(self) -> float | None:
        """The bytes that the last tick moved, divided by its budget; None without a budget."""
        return ratio(self._last.moved_bytes, _budget_bytes(self._last))

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """The rate of prompts by the cost model; None without one."""
        cost = self._last.cost
        return None if cost is None else prompt_rate(cost.table(), cost.scale)

    def measured(self, cost: CostFigures) -> None:
        """Note what was measured before the first tick."""
        self._last = evolve(self._last, cost=cost)

    def tick(self, promise: Promise, took_s: float) -> None:
        """Record one tick that took `took_s` from decode to decode."""
        if promise is NO_PROMISE:
            return
        self._last, totals = promise, self._totals
        totals.ticks += 1
        totals.tokens += promise.tokens
        totals.ballast += promise.ballast
        totals.skipped += promise.skipped
        totals.granted += promise.granted
        totals.infeasible += promise.infeasible
        totals.moved_bytes += promise.moved_bytes
        totals.budget_bytes += _budget_bytes(promise)
        if took_s > 0:
            share = max(0.0, 1.0 - promise.solo_s / took_s) * promise.background
            moves = 1.0 - math.exp(-took_s / _SHARE_S)
            self._background_share += moves * (share - self._background_share)
        if math.isfinite(promise.limit_s):
            self._protected(promise, took_s)
        if promise.cost is not None and promise.predicted_s > 0:
            # Ballast is in the prediction where it makes the batch cheaper, host time is not.
            totals.ideal_s += max(0.0, promise.predicted_s - promise.between_s)
            totals.judged_s += took_s
            self._misses.record(abs(took_s / promise.predicted_s - 1.0))

    def _protected(self, promise: Promise, took_s: float) -> None:
        """Record a tick that somebody waited for."""
        totals = self._totals
        totals.over_budget += took_s > promise.limit_s
        totals.protected_s += took_s
        totals.protected_tokens += promise.tokens
        if promise.solo_s > 0:
            self._solo_ratios.record(took_s / promise.solo_s)
        if promise.alone_s > 0:
            self._alone_ratios.record(took_s / promise.alone_s)

    def compare(self, kind: str, seconds: float, target_s: float | None) -> None:
        """Count a first token ("ttft") or a later one ("tbt") that came later than was asked for."""
        if target_s is not None and seconds > target_s:
            self._violations[kind] += 1

    def startup_itl(self, seconds: float) -> None:
        """Record the longest inter-token latency of a stream in its start-up window."""
        self._startup_itl_ms.record(seconds * 1e3)

    def first_five(self, seconds: float) -> None:
        """Record how long a request took to its fifth token."""
        self._ttf5_ms.record(seconds * 1e3)

    def totals(self) -> PromiseTotals:
        """Return what has added up until now."""
        return evolve(self._totals)

    def values(self) -> dict[str, object]:
        """Return every figure by its name in the catalogue."""
        return {**self._guard_values(), **self._cost_values(), **self._traffic_values()}

    def _guard_values(self) -> dict[str, object]:
        last = self._last
        limited = math.isfinite(last.limit_s)
        (solo_p95,) = self._solo_ratios.quantiles((0.95,))
        (alone_p95,) = self._alone_ratios.quantiles((0.95,))
        return {
            "tick_limit_ms": last.limit_s * 1e3 if limited else None,
            "step_ms": last.step_s * 1e3 if limited and last.step_s else None,
            "solo_ms": last.solo_s * 1e3 if limited else None,
            "alone_ms": last.alone_s * 1e3 if limited and last.alone_s else None,
            "solo_ratio_p95": solo_p95,
            "alone_ratio_p95": alone_p95,
            "ticks_over_budget": self._totals.over_budget,
            "prefill_guard_active": int(last.skipped > 0),
            "skipped_prefill_due_to_latency_total": self._totals.skipped,
            "floor_grants_total": self._totals.granted,
            "guard_infeasible_total": self._totals.infeasible,
            "background_share": self._background_share,
            "ballast_rows_total": self._totals.ballast,
            "slo_violations_total": dict(self._violations),
            "tokens_per_s_at_cap": self._totals.tokens_per_s_at_cap,
            "worst_pause_ms": self._startup_itl_ms,
            "ttf5_ms": self._ttf5_ms,
        }

    def _cost_values(self) -> dict[str, object]:
        last, cost = self._last, self._last.cost
        p50, p95 = self._misses.quantiles((0.50, 0.95))
        by_size = {} if cost is None else cost.table()
        return {
            "predicted_ms_last": last.predicted_s * 1e3,
            "cost_error": None if cost is None else cost.error,
            "cost_error_p50": p50,
            "cost_error_p95": p95,
            "cost_trusted": None if cost is None else int(cost.trusted),
            "cost_others_share": None if cost is None else cost.others,
            "cost_scale": None if cost is None else cost.scale,
            "cost_staircase_ms": None
            if cost is None
            else {str(n): seconds * cost.scale * 1e3 for n, seconds in by_size.items()},
            "scheduler_efficiency": self._totals.efficiency,
        }

    def _traffic_values(self) -> dict[str, object]:
        last, totals = self._last, self._totals
        budget = last.bmt_budget
        return {
            "sum_bmt_mb_last": last.moved_bytes / 1e6,
            "sum_bmt_mb_per_token": totals.moved_mb_per_token,
            "bmt_budget_gbps": budget / 1e9 if budget else None,
            "sum_bmt_budget_mb_last": _budget_bytes(last) / 1e6 if budget else None,
            "sum_bmt_budget_mb_per_token": (
                ratio(totals.budget_bytes / 1e6, totals.tokens) if budget else None
            ),
        }


def ratio(part: float, whole: float) -> float | None:
    """Return a quotient, or None where there is nothing to divide by."""
    return part / whole if whole else None


def _budget_bytes(promise: Promise) -> float:
    """Return what a tick may move in the time that it is expected to take, as the guard has it."""
    return promise.bmt_budget * promise.predicted_s
