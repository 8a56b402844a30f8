"""The figures of the latency contract."""

from __future__ import annotations

import pytest

from benches.simulation import Simulation
from uma_trio.policy.pipeline import contract
from uma_trio.telemetry.promise import Promise, PromiseFigures


def test_ticks_beyond_their_limit_are_counted_and_unlimited_ones_never() -> None:
    """A tick that nobody waited for cannot be late."""
    figures = PromiseFigures()
    figures.tick(Promise(limit_s=0.010, tokens=4), 0.009)
    figures.tick(Promise(limit_s=0.010, tokens=4), 0.011)
    figures.tick(Promise(tokens=64), 5.0)
    assert figures.values()["ticks_over_budget"] == 1
    assert figures.values()["tokens_per_s_at_cap"] == pytest.approx(8 / 0.020)


def test_bytes_are_told_per_tick_and_per_token() -> None:
    """The sum of bytes moved, as the model's own sizes give it."""
    figures = PromiseFigures()
    figures.tick(Promise(moved_bytes=4e6, tokens=4), 0.01)
    figures.tick(Promise(moved_bytes=2e6, tokens=2), 0.01)
    assert figures.values()["sum_bmt_mb_last"] == 2.0
    assert figures.values()["sum_bmt_mb_per_token"] == 1.0


def test_a_run_under_the_contract_fills_every_figure() -> None:
    """What the policy decided can be read from the metrics while it happens."""
    simulation = Simulation(contract)
    for client in range(3):
        simulation.storm(100 + client)
    simulation.submit(20, 8000, client=1)
    simulation.run(8.0)
    values = simulation.metrics.snapshot()
    assert values["tick_limit_ms"] == pytest.approx(1.2 * float(str(values["solo_ms"])), rel=3)
    assert int(str(values["skipped_prefill_due_to_latency_total"])) > 100
    assert float(str(values["background_share"])) > 0
    assert values["worst_pause_ms"]["count"] == 1  # type: ignore[index]
    assert values["ttf5_ms"]["count"] == 1  # type: ignore[index]
