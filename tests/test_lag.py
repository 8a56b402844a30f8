"""How late trio's thread runs is measured, counted and told."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from uma_trio.cli.doctor import check_running
from uma_trio.observe.metrics import Metrics
from uma_trio.service.loop import BUSY_S, IDLE_S, LagWatch
from uma_trio.service.timer import TrioTimer


@pytest.mark.parametrize(("busy", "period"), [(True, BUSY_S), (False, IDLE_S)])
async def test_a_thread_that_is_held_up_is_seen(
    autojump_clock: MockClock, busy: bool, period: float
) -> None:
    """The lag is the time from when the watch should have run until it did."""
    lags: list[float] = []
    watch = LagWatch(trio.current_time, TrioTimer(trio.current_time), lags.append, lambda: busy)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(period / 2)
        autojump_clock.jump(3.0)  # as a call does that takes three seconds
        await trio.sleep(period * 2.5)
        nursery.cancel_scope.cancel()
    assert lags[0] == pytest.approx(3.0 - period / 2)
    assert lags[1:] == pytest.approx([0.0] * len(lags[1:]))
    assert len(lags) >= 2


def test_the_lag_is_in_the_metrics() -> None:
    """As a histogram, and the longest of all."""
    metrics = Metrics(lambda: 0.0)
    for seconds in (0.001, 0.4, 0.002):
        metrics.loop_lagged(seconds)
    told: Any = metrics.snapshot()
    assert told["loop_lag_ms"]["count"] == 3
    assert told["loop_lag_ms"]["max"] == 400


def test_doctor_says_when_the_loop_is_late() -> None:
    """Not for one long wait, but if one in a hundred is longer than a reader should notice."""
    metrics = Metrics(lambda: 0.0)
    assert [*check_running({}), *check_running(metrics.snapshot())] == []
    for _ in range(1000):
        metrics.loop_lagged(0.001)
    metrics.loop_lagged(0.5)
    assert [*check_running(metrics.snapshot())] == []
    for _ in range(100):
        metrics.loop_lagged(0.05)
    (found,) = check_running(metrics.snapshot())
    assert found.weight == "slow"
    assert found.fix
