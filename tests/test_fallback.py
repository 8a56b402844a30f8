"""A policy that fails: what it costs, who hears of it, and that nobody's stream ends by it."""

from __future__ import annotations

import pytest
import structlog.testing
from attrs import evolve
from engine_kit import KINDS, Bench
from machine_kit import TRUTH, Clock, Machine
from policy_kit import decoder, state

from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.baseline import baseline
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.check import Fallback
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.portable import TracedTick
from uma_trio.policy.state import Memory, SchedulerState
from uma_trio_sim.fake import FakeBackend
from uma_trio_sim.replay import replay


def broken(_state: SchedulerState) -> Plan:
    """Fail as a policy may that was not tried enough."""
    raise OverflowError("math range error")


def too_much(state_: SchedulerState) -> Plan:
    """Plan more tokens than there are."""
    return Plan(items=(PlanItem(state_.sequences[0].key, 999, "prefill", "all of it"),))


@pytest.mark.parametrize("policy", [broken, too_much])
def test_the_baseline_plans_a_tick_whose_policy_fails(policy: object) -> None:
    """Whether it raises or breaks a rule; what it remembers stays."""
    given = evolve(state(decoder(1), decoder(2)), memory=Memory(decode_cursor=1))
    errors: list[Exception] = []
    plan = Fallback(policy, errors.append)(given)  # type: ignore[arg-type]
    assert plan == baseline(given)
    assert len(errors) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [broken, too_much])
def test_no_stream_ends_by_a_policy_that_always_fails(
    kind: type[FakeBackend], policy: object
) -> None:
    """Every tick is planned by the baseline; it is counted, and logged ever less often."""
    bench = Bench(kind(), policy)  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as said:
        _, sink = bench.submit("hello", 20)
        bench.run()
    assert sink.tokens == bench.expected("hello", 20)
    assert sink.end.reason == "length"
    failures = bench.metrics.snapshot()["irregular_ticks_total"]["policy"]
    assert isinstance(failures, int)
    assert failures >= 20
    assert [line["failures"] for line in said] == [1, 2, 4, 8, 16]


def test_a_policy_that_fails_once_goes_on() -> None:
    """One tick is the price."""

    def sometimes(given: SchedulerState) -> Plan:
        if given.tick == 3:
            raise ZeroDivisionError
        return evolve(baseline(given), predicted_s=1.0)

    bench = Bench(policy=sometimes)
    _, sink = bench.submit("hello", 8)
    with structlog.testing.capture_logs():
        bench.run()
    assert sink.tokens == bench.expected("hello", 8)
    predicted = [tick.predicted_s for tick in bench.explain(ticks=99).ticks]
    assert [s for s in predicted if s != 1.0] == [0.0]


def test_a_failure_is_replayed_as_it_was() -> None:
    """A trace holds the plan that the baseline made instead."""
    given = state(decoder(1))
    assert replay(broken, [TracedTick(given, baseline(given), 0.01, 0.001, 0)]).first is None


def test_a_policy_that_fails_only_in_the_replay_is_a_difference() -> None:
    """The error is what comes out."""
    recorded = evolve(baseline(state(decoder(1))), predicted_s=1.0)
    found = replay(broken, [TracedTick(state(decoder(1)), recorded, 0.01, 0.001, 0)]).first
    assert found is not None
    assert (found.where, found.replayed) == ("plan", "a failure (OverflowError: math range error)")


def test_a_cost_model_at_odds_with_itself_ends_nothing() -> None:
    """Four rows that cost as good as nothing are planned for, and soon cost what they take."""
    clock = Clock()
    spoilt = evolve(
        TRUTH,
        computing=TRUTH.computing.with_size(9, 0.001).with_size(12, 0.001),
        output=TRUTH.output.with_size(4, -0.999 * TRUTH.computing(4)),
    )
    spoilt = evolve(spoilt, measured=spoilt.computing)
    bench = Bench(
        Machine(TRUTH, clock),
        find_policy("deadline"),
        clock=clock,
        settings=EngineSettings(scratch_slots=1, cost=spoilt),
    )
    sinks = [bench.submit([65] * 1900, 50, lane="background")[1]]
    sinks += [bench.submit([66] * 20, 60)[1] for _ in range(4)]
    bench.run()
    assert {sink.end.reason for sink in sinks} == {"length"}
    assert bench.metrics.snapshot()["irregular_ticks_total"]["policy"] == 0
