"""The figures of the latency contract."""

from __future__ import annotations

import pytest

from uma_trio.observe.figures import Promise
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.deadline import deadline
from uma_trio_sim.simulation import Simulation

COST = CostModel(Staircase((1, 4, 16), (0.010, 0.020, 0.040)), scale=1.5)


def test_ticks_beyond_their_limit_are_counted_and_unlimited_ones_never() -> None:
    """A tick that nobody waited for cannot be late."""
    figures = Metrics()
    figures.promised(Promise(limit_s=0.010, tokens=4), 0.009)
    figures.promised(Promise(limit_s=0.010, tokens=4), 0.011)
    figures.promised(Promise(tokens=64), 5.0)
    assert figures.snapshot()["ticks_over_budget"] == 1
    assert figures.snapshot()["tokens_per_s_at_cap"] == pytest.approx(8 / 0.020)


def test_bytes_are_told_per_tick_and_per_token() -> None:
    """The sum of bytes moved, as the model's own sizes give it."""
    figures = Metrics()
    figures.promised(Promise(moved_bytes=4e6, tokens=4), 0.01)
    figures.promised(Promise(moved_bytes=2e6, tokens=2), 0.01)
    assert figures.snapshot()["sum_bmt_mb_last"] == 2.0
    assert figures.snapshot()["sum_bmt_mb_per_token"] == 1.0


def test_the_budget_of_bytes_is_what_fits_into_the_time_a_tick_is_expected_to_take() -> None:
    """As the bandwidth guard has it, which asks for no limit; also for each token."""
    figures = Metrics()
    figures.promised(Promise(bmt_budget=1e9, limit_s=0.010, predicted_s=0.005, tokens=4), 0.005)
    assert figures.snapshot()["sum_bmt_budget_mb_last"] == pytest.approx(5.0)
    figures.promised(Promise(bmt_budget=1e9, predicted_s=0.030, tokens=6), 0.030)
    assert figures.snapshot()["sum_bmt_budget_mb_last"] == pytest.approx(30.0)


def test_totals_that_were_read_stay_as_they_were() -> None:
    """The scorecard takes an interval from two of them, while ticks go on."""
    figures = Metrics()
    figures.promised(Promise(limit_s=0.010, tokens=4), 0.009)
    before = figures.totals()
    figures.promised(Promise(limit_s=0.010, tokens=2), 0.011)
    within = figures.totals().since(before)
    assert (within.ticks, within.tokens, within.over_budget) == (1, 2, 1)


def test_what_readers_are_shown_is_compared_with_the_promise() -> None:
    """`solo_ratio_p95` is about ticks: a long one is no fault if its reader saw an even pace."""
    metrics = Metrics()
    metrics.shown(0.5, "interactive")
    assert metrics.snapshot()["shown_ratio_p95"] is None, "nobody knows what the stream takes alone"
    metrics.promised(Promise(limit_s=0.1, solo_s=0.010), 0.08)
    for _ in range(20):
        metrics.shown(0.012, "interactive")
        metrics.shown(0.5, "background")
    snapshot = metrics.snapshot()
    assert snapshot["shown_ratio_p95"] == pytest.approx(1.2)
    metrics.promised(Promise(), 5.0)
    metrics.shown(0.5, "interactive")
    assert metrics.snapshot()["shown_ratio_p95"] == pytest.approx(1.2), "that tick had no stream"


def test_the_cost_models_scale_and_error_are_shown_from_the_first_measurement() -> None:
    """Before the first tick, too."""
    figures = Metrics()
    figures.cost_measured(COST)
    values = figures.snapshot()
    assert (values["cost_scale"], values["cost_error"]) == (1.5, 0.0)


def test_without_a_cost_model_nothing_is_said_about_one() -> None:
    """A policy that predicts nothing has no error, and no efficiency either."""
    values = Metrics().snapshot()
    for name in ("cost_error", "cost_scale", "cost_others_share"):
        assert values[name] is None
    assert values["scheduler_efficiency"] is None


def test_efficiency_is_what_the_staircase_allows_over_what_ticks_took() -> None:
    """Time between decodes is lost, whether the model expected it or not."""
    figures = Metrics()
    figures.promised(Promise(predicted_s=0.022, between_s=0.002, cost=COST), 0.025)
    assert figures.snapshot()["scheduler_efficiency"] == pytest.approx(0.8)


def test_a_run_under_the_contract_fills_every_figure() -> None:
    """What the policy decided can be read from the metrics while it happens."""
    simulation = Simulation(deadline)
    for client in range(3):
        simulation.storm(100 + client)
    simulation.submit(20, 8000, client=1)
    simulation.run(8.0)
    values = simulation.metrics.snapshot()
    assert simulation.metrics.background_share > 0
    assert values["worst_pause_ms"]["count"] == 1  # type: ignore[index]
    assert values["ttf5_ms"]["count"] == 1  # type: ignore[index]
