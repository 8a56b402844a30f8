"""Bytes moved by a tick, and background work trimmed to a budget of them."""

from __future__ import annotations

import pytest
from attrs import evolve
from policy_kit import decoder, prompt, state

from uma_trio.policy.accounting import account
from uma_trio.policy.cost import CostModel, Staircase, Traffic
from uma_trio.policy.deadline.bandwidth import guard_bandwidth
from uma_trio.policy.plan import Limit, Plan, PlanItem
from uma_trio.policy.state import Contract, Memory, SchedulerState

DENSE = Traffic(weight_bytes=1e9, cell_bytes=1e5)


def limited(budget: float | None, *views: object, traffic: Traffic = DENSE) -> SchedulerState:
    """Return a state with a budget in bytes per second; a tick has 30 ms."""
    base = state(*views)  # type: ignore[arg-type]
    return evolve(base, traffic=traffic, contract=Contract(bmt_budget=budget))


def test_a_dense_model_moves_its_weights_once_and_the_cells_it_looks_at() -> None:
    """More tokens of one tick read the same weights."""
    assert DENSE.moved(1, 100) == 1e9 + 1e7
    assert DENSE.moved(8, 800) == 1e9 + 8e7


def test_a_mixture_moves_more_experts_the_more_tokens_there_are() -> None:
    """128 experts, 8 of them used: 8 for one token, not quite 16 for two, nearly all for many."""
    mixture = Traffic(expert_bytes=1.0, experts=128, experts_used=8)
    assert mixture.distinct_experts(1) == pytest.approx(8)
    assert mixture.distinct_experts(2) == pytest.approx(15.5)
    assert mixture.distinct_experts(200) == pytest.approx(128, rel=0.01)


PLAN = Plan(
    items=(
        PlanItem(1, 1, "decode", "d"),
        PlanItem(2, 1, "decode", "d"),
        PlanItem(3, 64, "prefill", "p"),
    )
)
VIEWS = (
    decoder(1),
    decoder(2, lane="background", computed=4000),
    prompt(3, 100, lane="background"),
)


def test_within_the_budget_nothing_changes() -> None:
    """Neither does it where there is no budget."""
    assert guard_bandwidth(limited(1e12, *VIEWS), PLAN) == PLAN
    assert guard_bandwidth(limited(None, *VIEWS), PLAN) == PLAN


def test_the_bytes_of_the_finished_tick_are_reported() -> None:
    """With or without a budget, and before anything is known of its time."""
    assert account(limited(None, *VIEWS), PLAN).moved_bytes == 1e9 + (11 + 4001 + 64) * 1e5


def test_ballast_reaches_experts_too() -> None:
    """Of a mixture a row that is thrown away reads its share; of a dense model, nothing more."""
    mixture = Traffic(expert_bytes=1.0, experts=8, experts_used=2)
    plan = evolve(PLAN, items=PLAN.items[:1], ballast=3)
    assert account(limited(None, *VIEWS, traffic=mixture), plan).moved_bytes == mixture.moved(4, 11)
    assert account(limited(None, *VIEWS), plan).moved_bytes == DENSE.moved(1, 11)


def test_over_the_budget_background_is_trimmed_first() -> None:
    """Prefill shrinks, then background decoders wait; the person's token stays."""
    plan = guard_bandwidth(limited(35e9, *VIEWS), PLAN)
    assert plan.items[0] == PLAN.items[0]
    assert [item.key for item in plan.items] == [1]
    assert {skip.key for skip in plan.skipped} == {2, 3}


def test_a_lone_token_is_never_trimmed() -> None:
    """A budget below a single token's need does not stop the machine."""
    alone = Plan(items=PLAN.items[:1])
    assert guard_bandwidth(limited(1.0, decoder(1)), alone).items == alone.items


def test_bytes_are_held_against_the_time_that_the_tick_takes() -> None:
    """Not against the limit of its streams: a newcomer's tick takes longer and may move more."""
    cost = CostModel(Staircase((1, 8), (0.029, 0.042)))
    views = (decoder(1), prompt(2, 7))
    newcomer = Plan(
        items=(PlanItem(1, 1, "decode", "d"), PlanItem(2, 7, "prefill", "p")),
        limit=Limit(0.029, "within 1.0x", 0.029),
        memory=Memory(cost=cost),
    )
    probed = DENSE.moved(1, 0) / 0.029
    assert guard_bandwidth(limited(probed, *views), newcomer).items == newcomer.items


def test_a_prompt_that_is_waited_for_is_not_trimmed() -> None:
    """Somebody waits for it, however long it is and whatever of it is computed."""
    plan = Plan(items=(PlanItem(1, 1, "decode", "d"), PlanItem(2, 64, "prefill", "p")))
    newcomer, paste = prompt(2, 100), prompt(2, 100, computed=600)
    assert guard_bandwidth(limited(1.0, decoder(1), newcomer), plan).items == plan.items
    assert guard_bandwidth(limited(1.0, decoder(1), paste), plan).items == plan.items
    job = evolve(paste, lane="background")
    assert guard_bandwidth(limited(1.0, decoder(1), job), plan).items == plan.items[:1]


def test_a_trim_that_would_move_more_a_second_is_left_undone() -> None:
    """Weights are read once a tick: four decoders for the price of one are less traffic, not more."""
    cost = CostModel(Staircase((1, 4), (0.008, 0.009)))
    views = [decoder(i, lane="background") for i in range(4)]
    plan = Plan(
        items=tuple(PlanItem(i, 1, "decode", "d") for i in range(4)), memory=Memory(cost=cost)
    )
    tight = DENSE.moved(4, 44) / 0.018
    assert guard_bandwidth(limited(tight, *views), plan).items == plan.items
