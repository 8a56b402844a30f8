"""The latency contract in figures: what each tick was allowed, what it took, what it cost other work.

The engine records one :class:`Promise` per tick; policies without a limit leave most of it empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import astuple, define, evolve, frozen

from uma_trio.policy.cost import CostModel

_SHARE_S = (
    10.0  # background work is computed in few large ticks: its share is smoothed over several
)


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


@define
class PromiseTotals:
    """Sums since the start; the difference of two is an interval."""

    ticks: int = 0
    tokens: int = 0
    moved_bytes: float = 0.0
    over_budget: int = 0
    granted: int = 0
    infeasible: int = 0
    protected_tokens: int = 0
    protected_s: float = 0.0
    ideal_s: float = 0.0
    judged_s: float = 0.0  # the time of the ticks in `ideal_s`

    def since(self, earlier: PromiseTotals) -> PromiseTotals:
        """Return the sums after `earlier`."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return PromiseTotals(*(now - before for now, before in pairs))

    def values(self) -> dict[str, object]:
        """Return the figures that exist for an interval, too."""
        return {
            "tokens_per_s_at_cap": ratio(self.protected_tokens, self.protected_s),
            "ticks_over_budget": self.over_budget,
            "sum_bmt_mb_per_token": ratio(self.moved_bytes / 1e6, self.tokens),
            "scheduler_efficiency": ratio(self.ideal_s, self.judged_s),
        }


class PromiseFigures:
    """The latest promise and the sums of all. Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.last = NO_PROMISE
        self._totals = PromiseTotals()
        #: Share of machine time of background work, smoothed over ten seconds.
        self.background_share = 0.0

    @property
    def moved_ratio(self) -> float | None:
        """Bytes that the last tick moved, divided by its budget; None without a budget."""
        return ratio(self.last.moved_bytes, self.last.budget_bytes)

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """The largest rate of prompt tokens in the cost table; None without one."""
        cost = self.last.cost
        return None if cost is None else prompt_rate(cost.table(), cost.scale)

    def measured(self, cost: CostModel) -> None:
        """Record the cost model that was measured before the first tick."""
        self.last = evolve(self.last, cost=cost)

    def tick(self, promise: Promise, took_s: float) -> None:
        """Record a tick that took `took_s` from decode to decode."""
        if promise is NO_PROMISE:
            return
        self.last, totals = promise, self._totals
        totals.ticks += 1
        totals.tokens += promise.tokens
        totals.granted += promise.granted
        totals.infeasible += promise.infeasible
        totals.moved_bytes += promise.moved_bytes
        if took_s > 0:
            share = max(0.0, 1.0 - promise.solo_s / took_s) * promise.background
            weight = 1.0 - math.exp(-took_s / _SHARE_S)
            self.background_share += weight * (share - self.background_share)
        if math.isfinite(promise.limit_s):
            totals.over_budget += took_s > promise.limit_s
            totals.protected_s += took_s
            totals.protected_tokens += promise.tokens
        if promise.cost is not None and promise.predicted_s > 0:
            # Ballast is predicted where it makes the batch cheaper; host time is not part of the ideal.
            totals.ideal_s += max(0.0, promise.predicted_s - promise.between_s)
            totals.judged_s += took_s

    def totals(self) -> PromiseTotals:
        """Return a copy of the sums."""
        return evolve(self._totals)

    def values(self) -> dict[str, object]:
        """Return the metrics of the contract by name."""
        last, cost = self.last, self.last.cost
        limited = math.isfinite(last.limit_s)
        return {
            **self._totals.values(),
            "step_ms": last.step_s * 1e3 if limited and last.step_s else None,
            "prefill_guard_active": int(last.skipped > 0),
            "guard_infeasible_total": self._totals.infeasible,
            "cost_error": None if cost is None else cost.error,
            "cost_others_share": None if cost is None else cost.others,
            "cost_scale": None if cost is None else cost.scale,
            "sum_bmt_mb_last": last.moved_bytes / 1e6,
            "sum_bmt_budget_mb_last": last.budget_bytes / 1e6 if last.bmt_budget else None,
        }


def prompt_rate(table: Mapping[int, float], scale: float) -> float | None:
    """Return the largest rate in tokens/s of a cost table, seconds by tokens of a batch, times `scale`."""
    rates = [n / (seconds * scale) for n, seconds in table.items() if seconds * scale > 0]
    return max(rates, default=None)


def ratio(part: float, whole: float) -> float | None:
    """Return a quotient; None where the divisor is 0."""
    return part / whole if whole else None
