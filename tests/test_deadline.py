"""The parts of the policy of token deadlines, one by one: slack, sizes, paces."""

from __future__ import annotations

import math

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import COST, decoder, prompt, situation, state, waited_for

from uma_trio.policy.check import check_plan
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.deadline import deadline
from uma_trio.policy.deadline.fill import DEEP_S, SAVING, TOO_LONG
from uma_trio.policy.deadline.slack import LINGER_S, margin
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import (
    Contract,
    GuardMemory,
    SchedulerState,
    SequenceView,
    Served,
)
from uma_trio.policy.tuning import TUNING

DEAR = CostModel(Staircase((1, 2, 4, 16, 32), (0.015, 0.025, 0.038, 0.114, 0.215)))
WIDE = CostModel(Staircase((1, 32, 128, 256, 512), (0.004, 0.009, 0.017, 0.028, 0.046)))
SOLO, STEP = 0.008, 0.0096
NOW = state().now
MARGIN = margin(COST)


def reader(key: int = 1, ahead: float = 0.0, **changes: object) -> SequenceView:
    """Return an old interactive stream whose latest token is shown in `ahead` seconds."""
    found = {"first_token_at": 0.0, "computed": 0, "shown_at": NOW + ahead, "credit": 100}
    return decoder(key, **found | changes)


def batch(key: int = 9, pending: int = 500, **changes: object) -> SequenceView:
    """Return a background prompt."""
    return prompt(key, pending, **{"lane": "background", "client": key} | changes)


def planned(*views: SequenceView, cost: CostModel = COST, **remembered: object) -> Plan:
    """Return the plan of a tick."""
    return deadline(situation(*views, cost=cost, **remembered))


def others(plan: Plan) -> int:
    """Return how many tokens of the plan are no reader's."""
    return plan.n_tokens - 1


# --- slack ---


def test_a_tick_may_take_what_the_reader_is_ahead_and_a_step_less_a_margin() -> None:
    """The words say both numbers."""
    limit = planned(reader(ahead=0.2), batch()).limit
    assert limit.seconds == pytest.approx((0.2 + STEP) / MARGIN)
    assert limit.reason == "the next token is due in 210 ms, this tick may take 193"


def test_the_reader_whose_token_is_due_first_sets_the_limit() -> None:
    """However far ahead the others are."""
    limit = planned(reader(1, 0.3), reader(2, 0.01), reader(3, 0.2), batch()).limit
    step = 1.2 * limit.solo_s
    assert limit.seconds == pytest.approx((0.01 + step) / MARGIN)


def test_the_margin_follows_the_error_of_predictions() -> None:
    """Within bounds: a model that is never wrong can be, and one that always is leaves something."""
    calm, restless, wild = (margin(evolve(COST, error=error)) for error in (0.0, 0.1, 3.0))
    assert 1.05 < calm < restless < wild < 3.0
    assert restless == pytest.approx(math.exp(0.4))


def test_a_looser_target_leaves_more_to_others_and_a_tighter_one_less() -> None:
    """A request's own target is its step; none leaves less than their floor to the others."""
    assert planned(reader(target_itl_s=0.08), batch()).limit.seconds == pytest.approx(0.08 / MARGIN)
    assert planned(reader(target_itl_s=0.009), batch()).limit.seconds < STEP / MARGIN
    assert planned(reader(target_itl_s=0.001), batch()).limit.seconds == pytest.approx(
        SOLO / 0.95 / MARGIN
    )


def test_a_stream_that_holds_tokens_without_credit_is_not_forgotten() -> None:
    """Its places are taken by what is shown later, and what follows that is due all the same."""
    full = reader(ahead=0.1, credit=0)
    assert planned(full, batch()).limit.seconds == pytest.approx((0.1 + STEP) / MARGIN)
    away = reader(ahead=-0.1, credit=0)
    assert math.isinf(planned(away, batch()).limit.seconds)


def test_newcomers_may_make_a_token_later_than_slack_allows() -> None:
    """Up to the pause cap after the one before it, twice solo in a stream's first seconds."""
    asked = prompt(2, 400, arrived=NOW - 0.05)
    assert planned(reader(), asked).limit.newcomer_s == pytest.approx(4 * SOLO)
    assert planned(reader(ahead=0.1), asked).limit.newcomer_s == pytest.approx(0.1 + 4 * SOLO)
    fresh = reader(first_token_at=NOW - 1.0)
    assert planned(fresh, asked).limit.newcomer_s == pytest.approx(2 * SOLO)
    many = planned(reader(), asked, newcomers=0.5)
    assert many.limit.newcomer_s == pytest.approx(max(many.limit.seconds, 1.2 * SOLO))


def test_a_tick_that_nobody_reads_and_cannot_be_aborted_is_brief() -> None:
    """It takes a tenth of a second, or up to three if prompts are computed at a lower rate in shorter ticks."""
    seconds = [planned(batch(pending=900), cost=evolve(WIDE, scale=n)) for n in (4.0, 8.0)]
    assert [plan.n_tokens for plan in seconds] == [512, 256]
    assert all(plan.predicted_s <= DEEP_S for plan in seconds)
    level = CostModel(Staircase((1, 32, 256, 512), (0.01, 0.1, 0.8, 1.6)))
    assert planned(batch(pending=900), cost=level).predicted_s <= TUNING.unread_s


def test_a_tick_that_can_be_given_up_has_the_chunk_of_the_best_rate() -> None:
    """However long it takes: a prompt with an earlier deadline interrupts it."""
    slow = evolve(WIDE, scale=4.0)
    now = evolve(situation(batch(pending=900), cost=slow), interruptible=True)
    assert deadline(now).n_tokens == slow.plateau(512)


def test_where_no_tick_is_short_the_least_goes_on() -> None:
    """Short ticks never keep anybody waiting for ever."""
    deep = evolve(COST, context_cell_s=1e-4, wide_context_cell_s=1e-4)
    plan = planned(batch(computed=20_000), cost=deep)
    assert plan.n_tokens == 1


def test_a_deep_chunk_is_no_smaller_than_the_best_size() -> None:
    """Attention in narrow ticks costs three times as much as in wide ones, so four tokens take half as long as sixty-four."""
    deep = evolve(COST, context_cell_s=3e-6, wide_context_cell_s=1e-6)
    prompts = [prompt(key, 500, computed=4000, arrived=99.0, awaits="answer") for key in (1, 2)]
    now = evolve(waited_for(situation(*prompts, cost=deep)), interruptible=True)
    assert deadline(now).n_tokens == 64


def test_a_newcomer_is_computed_whole_where_the_slack_suffices() -> None:
    """Its reader does not see it."""
    plan = planned(reader(ahead=0.2), prompt(2, 40))
    assert others(plan) == 40
    assert plan.predicted_s <= plan.limit.seconds


def test_prompts_that_wait_together_are_computed_together() -> None:
    """A stream has no deadline while somebody waits who came before its first token."""
    came = NOW - 0.2
    begun = reader(first_token_at=NOW - 0.1)
    waiting = [prompt(key, 40, arrived=came) for key in (2, 3, 4)]
    plan = planned(begun, *waiting)
    assert math.isinf(plan.limit.seconds)
    assert plan.n_tokens == COST.plateau(512)
    late = [prompt(key, 40, arrived=NOW - 0.05) for key in (2, 3, 4)]
    assert planned(begun, *late).limit.newcomer_s == pytest.approx(2 * SOLO)
    long_ago = reader(first_token_at=NOW - 3.1)
    assert not math.isinf(planned(long_ago, *waiting).limit.seconds)


def test_work_that_no_slack_suffices_for_gets_its_floor() -> None:
    """A tick as long as the pause cap allows; what it had is taken off what it was owed."""
    plan = planned(reader(), batch(), owed_s=0.025)
    assert plan.limit.grant
    assert others(plan) > 0
    assert plan.predicted_s <= 4 * SOLO
    assert plan.memory.guard.owed_s < 0.01


def test_no_target_and_no_cap_leaves_less_than_the_floor() -> None:
    """A step is so long that the others have their part of it."""
    for floor in (0.05, 0.5, 0.9):
        for cap, target in ((1.01, None), (1.2, 0.001)):
            now = situation(reader(target_itl_s=target), batch())
            rules = Contract(latency_cap=cap, background_floor=floor)
            plan = deadline(evolve(now, contract=rules))
            assert 1 - plan.limit.solo_s / plan.limit.step_s >= floor - 1e-9
            assert plan.paces[1] == plan.limit.step_s


# --- what it is spent on ---


def test_readers_go_on_alone_until_the_best_size_fits() -> None:
    """One row costs as much as a third of sixteen where rows are dear."""
    saving = planned(reader(ahead=0.02), batch(), cost=DEAR)
    assert others(saving) == 0
    assert [skip.reason for skip in saving.skipped] == [SAVING]
    spending = planned(reader(ahead=0.15), batch(), cost=DEAR)
    assert others(spending) == 15
    assert spending.predicted_s <= spending.limit.seconds


def test_no_size_is_waited_for_that_slack_can_never_reach() -> None:
    """What may be shown later, and how many places a stream has, bound what readers are ahead."""
    assert others(planned(reader(ahead=0.03, credit=100), batch(), cost=DEAR)) == 0
    few = planned(reader(ahead=0.03, credit=1), batch(), cost=DEAR)
    assert 0 < others(few) < 15
    now = situation(reader(ahead=0.03), batch(), cost=DEAR)
    assert 0 < others(deadline(evolve(now, contract=Contract(playout_s=0.03)))) < 15
    none = evolve(situation(reader(), batch(), cost=DEAR), contract=Contract(playout_s=0.001))
    assert [skip.reason for skip in deadline(none).skipped] == [TOO_LONG]


def test_a_reader_that_can_be_no_further_ahead_is_not_waited_for() -> None:
    """Then the best of what fits is taken."""
    last = planned(reader(ahead=0.1, credit=0), batch(), cost=DEAR)
    assert last.n_tokens == 4
    assert [item.key for item in last.items] == [9]


def test_decoders_are_served_as_often_as_slack_allows() -> None:
    """Three rows beside a reader cost less than a step here, so they are in every tick."""
    cheap = CostModel(Staircase((1, 2, 4, 8), (0.0100, 0.0102, 0.0106, 0.0125)))
    background = [decoder(key, lane="background", client=9) for key in (5, 6, 7)]
    plan = planned(reader(ahead=0.05), *background, cost=cheap)
    assert others(plan) == 3


def test_decoders_that_had_less_than_prompts_get_ticks_of_their_own() -> None:
    """A large tick has one token for each of them; by machine time that is next to nothing."""
    background = [decoder(key, lane="background", client=5, computed=0) for key in (5, 6)]
    now = situation(reader(ahead=0.15), *background, batch(), cost=DEAR)
    used = {0: 0.0, 5: 0.0, 9: 0.1}
    fair = deadline(evolve(now, memory=evolve(now.memory, used_s=used)))
    assert {item.key for item in fair.items} == {1, 5, 6, 9}
    used[9] = 30.0
    owed = deadline(evolve(now, memory=evolve(now.memory, used_s=used)))
    assert {item.key for item in owed.items} == {1, 5, 6}


def test_where_a_change_of_shape_costs_mixed_ticks_come_in_rows() -> None:
    """From little slack none begins, but a row of them goes on."""
    captured = evolve(COST, recapture_s=0.004)
    now = situation(reader(ahead=0.1), batch(), cost=captured)
    assert others(deadline(now)) == 0
    going = GuardMemory(mixed=True)
    memory = evolve(now.memory, guard=going, served=Served(tokens=16))
    before = evolve(now.before, tokens=16, rows=2)
    assert others(deadline(evolve(now, memory=memory, before=before))) == 15
    assert others(planned(reader(ahead=0.39), batch(), cost=captured)) > 0


def test_rows_are_not_thrown_in_to_keep_the_shape_of_a_mixed_tick() -> None:
    """Readers alone would be as slow as with others from then on."""
    flat = CostModel(Staircase((1, 4, 8), (0.008, 0.0095, 0.012)), recapture_s=0.004)
    now = evolve(situation(reader(), cost=flat), spare_rows=16)
    after = evolve(now.before, tokens=4, rows=4)
    assert deadline(evolve(now, before=after)).ballast == 0


# --- how it is shown ---


def test_tokens_are_paced_while_others_have_a_use_for_the_machine() -> None:
    """Each stream by its own step."""
    plan = planned(reader(1), reader(2, target_itl_s=0.08), batch())
    assert plan.paces == {1: pytest.approx(1.2 * plan.limit.solo_s), 2: 0.08}
    assert planned(reader(1)).paces == {}


def test_pacing_goes_on_for_a_moment_after_the_others_have_left() -> None:
    """Who asks again and again is away between two requests."""
    assert planned(reader(1), company_at=NOW - LINGER_S / 2).paces == {1: pytest.approx(STEP)}
    assert planned(reader(1), company_at=NOW - 2 * LINGER_S).paces == {}


# --- any state ---

aheads = st.floats(-0.05, 0.4)
readers = st.builds(
    reader,
    st.integers(1, 3),
    aheads,
    credit=st.integers(0, 16),
    first_token_at=st.floats(NOW - 10, NOW),
    target_itl_s=st.none() | st.floats(0.001, 0.2),
)
jobs = st.builds(
    batch, st.integers(4, 6), st.integers(1, 600), started=st.booleans(), credit=st.integers(0, 3)
)
asked = st.builds(prompt, st.integers(7, 9), st.integers(1, 600), arrived=st.floats(NOW - 1, NOW))


def _of(views: list[SequenceView], cost: CostModel, owed_s: float, mixed: bool) -> SchedulerState:
    return situation(*views, cost=cost, owed_s=owed_s, mixed=mixed)


states = st.builds(
    _of,
    st.lists(st.one_of(readers, jobs, asked), max_size=8, unique_by=lambda view: view.key),
    st.sampled_from([COST, DEAR, evolve(COST, recapture_s=0.004, error=0.1)]),
    st.floats(-0.15, 0.1),
    st.booleans(),
)


@given(states)
def test_any_plan_keeps_the_rules_and_is_made_again(now: SchedulerState) -> None:
    """The same state gives the same plan, and the engine can compute it."""
    plan = deadline(now)
    check_plan(now, plan)
    assert deadline(now) == plan


@given(states)
def test_no_work_that_nobody_waits_for_makes_a_token_late(now: SchedulerState) -> None:
    """A tick with background work ends by its limit: when a token is due, or what is granted."""
    plan = deadline(now)
    extra = {item.key for item in plan.items} & set(now.best_effort)
    waited_for = any(item.reason.startswith("newcomer") for item in plan.items)
    if extra and not waited_for:
        assert plan.predicted_s <= plan.limit.seconds * (1 + 1e-9)


def test_no_more_slack_is_saved_than_a_prompt_needs_whose_answer_will_be_read() -> None:
    """Its own stream begins without slack, so what is saved beyond its end is worth nothing then."""
    captured = evolve(WIDE, recapture_s=0.001, capture_s=0.001)
    long = {"computed": 600, "pending": 450}
    ahead = reader(ahead=0.1)
    assert others(planned(ahead, prompt(9, **long), cost=captured)) > 0
    assert others(planned(ahead, batch(**long), cost=captured)) == 0
    # A program waits for the end of it: many ticks follow, whose shape is not to change.
    waits = prompt(9, awaits="answer", **long)
    assert others(planned(ahead, waits, cost=captured)) == 0
