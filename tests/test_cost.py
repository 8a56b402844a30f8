"""The cost model: what it predicts, what it learns, and when it does not trust itself."""

from __future__ import annotations

import math
import random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.policy.cost import FURTHEST, CostModel, Staircase, Work
from uma_trio.policy.costing.store import implausible
from uma_trio.policy.tuning import TUNING

# Milliseconds of one decode by tokens: a 0.5B Q4_0 model on two AVX-512 cores.
MEASURED = {1: 8.0, 2: 11.7, 3: 16.2, 4: 11.1, 8: 18.8, 16: 25.9, 64: 93.5, 128: 192.0}
STAIRS = Staircase(tuple(MEASURED), tuple(ms / 1e3 for ms in MEASURED.values()))


def test_a_measured_step_is_predicted_as_it_was_measured() -> None:
    """The table is the truth where there is one."""
    assert [STAIRS(n) for n in MEASURED] == [ms / 1e3 for ms in MEASURED.values()]


def test_between_steps_it_is_linear_and_beyond_it_goes_on() -> None:
    """What was not measured lies on the line of its neighbours."""
    assert STAIRS(12) == pytest.approx((18.8 + 25.9) / 2e3)
    assert STAIRS(192) == pytest.approx(1.5 * 0.192), "the line would be steeper than in proportion"
    assert Staircase((1, 64, 128), (0.01, 0.1, 0.19))(192) == pytest.approx(0.28)
    assert STAIRS(0) == 0


def test_the_saw_tooth_is_kept() -> None:
    """Four rows that cost less than three stay so: nothing is smoothed."""
    assert STAIRS(4) < STAIRS(3)


def test_rows_and_host_add_up() -> None:
    """Each part of a tick has its price."""
    model = CostModel(STAIRS, output=Staircase((1, 4), (0.0, 0.003)), host_s=0.001)
    assert model.seconds(Work(4, 4)) == pytest.approx(0.0111 + 0.003 + 0.001)


def test_what_passes_between_decodes_is_learnt_apart_with_and_without_company() -> None:
    """A limit is made of what the streams need alone; a tick with others has to fit with all it takes."""
    model = CostModel(STAIRS)
    for contended in (False, True):
        for _ in range(80):
            passed = 0.0004 if contended else 0.0001
            model = model.learn(Work(4, contended=contended), 0.0111, passed)
    assert model.seconds(Work(4)) == pytest.approx(0.0111 + 0.0001, rel=1e-3)
    assert model.seconds(Work(4, contended=True)) == pytest.approx(0.0111 + 0.0004, rel=1e-3)


def test_a_tick_after_an_idle_time_says_nothing_of_what_passes_between_decodes() -> None:
    """There was no decode before it: a conversation's first tick does not lower the term."""
    model = CostModel(STAIRS, host_s=0.0004)
    for _ in range(10):
        model = model.learn(Work(4), 0.0111, None)
    assert model.between_s(Work(4)) == 0.0004


def test_a_slower_machine_is_learnt_within_a_few_ticks() -> None:
    """When everything takes half as long again, so does the prediction."""
    model = CostModel(STAIRS)
    for _ in range(60):
        model = model.learn(Work(4), 0.0111 * 1.5, 0.0)
    assert model.seconds(Work(4)) == pytest.approx(0.0111 * 1.5, rel=0.02)
    assert model.seconds(Work(64)) == pytest.approx(0.0935 * 1.5, rel=0.3)


def test_noise_is_averaged_and_known() -> None:
    """Predictions settle on the mean, and the error says how far single ticks are off."""
    noise, model = random.Random(1), CostModel(STAIRS)
    for _ in range(400):
        n = noise.choice([1, 2, 4, 8, 16])
        model = model.learn(Work(n), STAIRS(n) * noise.gauss(1, 0.05), 0.0)
    assert model.seconds(Work(8)) == pytest.approx(0.0188, rel=0.05)
    assert 0.02 < model.error < 0.08
    assert model.trusted


def test_one_frozen_tick_teaches_nothing_but_doubt() -> None:
    """An outlier does not move the prediction."""
    model = CostModel(STAIRS)
    after = model.learn(Work(4), 5.0, 0.0)
    assert after.seconds(Work(4)) == model.seconds(Work(4))
    assert after.error > model.error


def test_a_machine_that_was_busy_when_measured_is_soon_seen_as_it_is() -> None:
    """A staircase forty times too high comes down with the first real ticks."""
    model = CostModel(STAIRS.times(40.0))
    for _ in range(20):
        model = model.learn(Work(4), 0.0111, 0.0)
    assert model.seconds(Work(4)) == pytest.approx(0.0111, rel=0.15)


def test_a_machine_that_stays_slow_is_believed_in_the_end() -> None:
    """Outliers that never stop are the truth."""
    model = CostModel(STAIRS)
    for _ in range(200):
        model = model.learn(Work(4), 0.0111 * 8, 0.0)
    assert model.seconds(Work(4)) == pytest.approx(0.0111 * 8, rel=0.2)


def test_what_was_learnt_can_be_stored() -> None:
    """The factor of the day becomes part of the table."""
    model = CostModel(STAIRS, scale=1.5)
    assert model.for_storage().seconds(Work(8)) == pytest.approx(model.seconds(Work(8)))


def test_looking_back_and_a_full_cache_cost_their_share() -> None:
    """Each token pays for the cells it looks at, and a little for everyone's."""
    model = CostModel(STAIRS, context_cell_s=1e-6, used_cell_s=1e-7)
    deep = Work(4, 4, context_cells=4 * 1000, used_cells=3000)
    assert model.seconds(deep) == pytest.approx(0.0111 + 0.004 + 4 * 3000e-7)


def test_in_a_wide_tick_looking_back_costs_less_and_is_learnt_apart() -> None:
    """From 64 rows on attention works in tiles; what a narrow tick shows says nothing of that."""
    model = CostModel(STAIRS, context_cell_s=4e-6, wide_context_cell_s=1e-6)
    assert model.seconds(Work(64, context_cells=64_000)) == pytest.approx(0.0935 + 0.064)
    assert model.seconds(Work(16, context_cells=16_000)) == pytest.approx(0.0259 + 0.064)
    wide = model.learn(Work(64, context_cells=64_000), 0.3, 0.0)
    assert wide.wide_context_cell_s > model.wide_context_cell_s
    assert wide.context_cell_s == model.context_cell_s
    narrow = model.learn(Work(16, context_cells=16_000), 0.2, 0.0)
    assert narrow.context_cell_s > model.context_cell_s
    assert narrow.wide_context_cell_s == model.wide_context_cell_s


def test_another_shape_than_the_tick_before_costs_extra_where_graphs_are_captured() -> None:
    """So does the second tick of a shape, but no later one, and no tick of which nothing is known before."""
    model = CostModel(STAIRS, recapture_s=0.002, capture_s=0.003)
    assert model.seconds(Work(4, 2, after=(4, 2))) == pytest.approx(0.0111)
    assert model.seconds(Work(4, 2, after=(4, 2), settled=False)) == pytest.approx(0.0141)
    assert model.seconds(Work(4, 2, after=(4, 1))) == pytest.approx(0.0131)
    assert model.seconds(Work(4, 2)) == pytest.approx(0.0111)


@pytest.mark.parametrize("after", [(1, 1), (4, 1)], ids=["recapture_s", "capture_s"])
def test_a_price_of_changes_that_is_far_too_high_comes_down(after: tuple[int, int]) -> None:
    """A tick that takes a third of what was expected is no accident."""
    model = CostModel(STAIRS, recapture_s=0.03, capture_s=0.03)
    work = Work(4, 1, after=after, settled=False)
    for _ in range(200):
        model = model.learn_change(work, 0.0111 + 0.002)
    other_s, extra_s = 0.03, 0.002
    assert model.change_s == pytest.approx(other_s + extra_s, rel=0.01)


def test_what_a_change_costs_is_told_with_the_scale_factor() -> None:
    """As every other time that is compared with what a tick may take."""
    model = CostModel(STAIRS, recapture_s=0.002, capture_s=0.003)
    assert evolve(model, scale=2.0).change_s == model.times(2.0).change_s == pytest.approx(0.01)


def test_a_change_that_took_many_times_as_long_once_teaches_nothing() -> None:
    """A frozen machine is not what changes cost."""
    model = CostModel(STAIRS, recapture_s=0.002, capture_s=0.003)
    assert model.learn_change(Work(4, 1, after=(1, 1)), 1.0) == model


def test_what_depth_costs_is_learnt_from_ticks_that_are_deep() -> None:
    """A prior that is three times too high comes down, until depths in between are predicted."""
    truth, model = CostModel(STAIRS, context_cell_s=1e-6), CostModel(STAIRS, context_cell_s=3e-6)
    for i in range(600):
        work = Work(16, 1, context_cells=16 * (1000 + 5 * i)) if i % 2 else Work(1)
        model = model.learn(work, truth.seconds(work), 0.0)
    assert model.context_cell_s == pytest.approx(1e-6, rel=0.5)
    unseen = Work(16, 1, context_cells=16 * 3333)
    assert model.seconds(unseen) == pytest.approx(truth.seconds(unseen), rel=0.05)


def test_what_cannot_be_trusted_falls_back_to_the_table() -> None:
    """When corrections did harm and the table does better, the table predicts."""
    bent = CostModel(STAIRS.times(1.5), error=0.4, table_error=0.1, measured=STAIRS)
    assert bent.fell_back
    assert bent.trusted
    assert bent.seconds(Work(8)) == pytest.approx(0.0188)
    assert not CostModel(STAIRS, error=0.1, table_error=0.0).fell_back


def test_a_step_can_be_added() -> None:
    """What is measured later stands beside what was measured first."""
    assert STAIRS.with_size(5, 0.0152)(5) == 0.0152
    assert STAIRS.with_size(5, 0.0152)(8) == STAIRS(8)


def test_a_model_that_is_often_wrong_says_so() -> None:
    """Beyond 15 % its predictions carry no promise."""
    noise, model = random.Random(2), CostModel(STAIRS)
    for _ in range(200):
        model = model.learn(Work(4), 0.0111 * noise.choice([0.5, 2.0]), 0.0)
    assert not model.trusted


def test_nothing_takes_less_than_at_least() -> None:
    """What is left out for its step alone would not have fitted, whatever it looks back at."""
    model = CostModel(
        STAIRS,
        Staircase((1, 4), (0.0, 1e-3)),
        context_cell_s=1e-6,
        used_cell_s=1e-8,
        recapture_s=1e-3,
        host_s=1e-4,
    )
    assert model.seconds(Work(7)) == model.at_least(7)
    for work in (
        Work(7, 4),
        Work(7, context_cells=99),
        Work(7, used_cells=99),
        Work(7, after=(1, 1)),
    ):
        assert model.seconds(work) > model.at_least(7)
    for contended_host_s in (5e-5, 1e-4, 2e-4):
        beside = evolve(model, contended_host_s=contended_host_s)
        assert beside.seconds(Work(7, contended=True)) >= beside.at_least(7)
        assert beside.seconds(Work(7)) >= beside.at_least(7)
    fours = CostModel(STAIRS, Staircase((1, 3, 4), (0.0, 2e-3, -1e-3)), host_s=1e-4)
    assert fours.seconds(Work(7, 4)) == pytest.approx(fours.at_least(7))


@pytest.mark.parametrize("last_s", [0.09, 0.096, 0.1, 0.125, 0.3])
def test_two_steps_that_lie_close_together_promise_nothing_wild(last_s: float) -> None:
    """Beyond the last: no less than there, and no more than in proportion to it."""
    stairs = Staircase((1, 32, 33), (0.01, 0.1, last_s))
    assert last_s <= stairs(66) <= 2 * last_s


def test_the_plateau_is_the_smallest_chunk_at_full_rate() -> None:
    """A prefill gains nothing beyond it, and a newcomer waits least."""
    assert CostModel(STAIRS).plateau(512) == 64
    slow_once = CostModel(STAIRS.with_size(512, 2.0))  # one bad sample shrinks no chunk
    assert slow_once.plateau(512) == 64
    flat = CostModel(Staircase((1, 8, 64), (0.01, 0.011, 0.09)))
    assert flat.plateau(512) == 8


TRUE = CostModel(
    STAIRS.with_size(512, 0.77),
    output=Staircase((1, 4, 16), (0.0, -0.004, 0.003)),
    context_cell_s=2e-7,
    wide_context_cell_s=5e-8,
    used_cell_s=5e-8,
)


def tick_of(draw: random.Random) -> tuple[Work, dict[str, float]]:
    """Return a tick as a storm makes them, and the rates by which it is learnt from."""
    streams, cells = draw.randrange(7), draw.randrange(1000)
    if draw.random() < 0.5:
        n, rates = max(1, streams), {"scale_rate": 0.2, "step_rate": 0.05} if streams else {}
        return Work(n, n, n * cells, draw.randrange(4000)), rates
    n = streams + draw.choice((8, 16, 60, 128, 506))
    rows = max(1, streams + draw.randrange(2))
    rates = {"scale_rate": 0.02, "step_rate": 0.15} if streams else {}
    return Work(n, rows, n * cells, draw.randrange(4000), contended=streams > 0), rates


def learnt_amid_noise(seed: int, ticks: int) -> CostModel:
    """Return what is learnt of a machine whose ticks vary widely and often take far too long."""
    draw, model = random.Random(seed), TRUE
    for _ in range(ticks):
        work, rates = tick_of(draw)
        took = TRUE.seconds(work) * draw.lognormvariate(0.0, 0.6)
        if draw.random() < 0.05:
            took *= draw.uniform(2.0, 5.0)
        model = model.learn(work, took, 0.0004, **rates)
    return model


@pytest.mark.parametrize("seed", range(20))
def test_heavy_noise_does_not_lead_the_model_away(seed: int) -> None:
    """What it predicts stays within four times of the truth, however long that goes on."""
    model = learnt_amid_noise(seed, 2000)
    for n in (1, 2, 3, 4, 8, 16):
        for rows in (1, n):
            work = Work(n, rows, 300 * n, 2000)
            assert 1 / 4 < model.seconds(work) / TRUE.seconds(work) < 4
    assert implausible(evolve(model, scale=1.0)) is None


@pytest.mark.parametrize("decode_s", [1e-12, 1e-6, 1e6, math.inf, math.nan, 0.0, -1.0])
def test_no_single_time_leads_the_model_away(decode_s: float) -> None:
    """A clock that jumps, or a decode that returned at once, is not the machine."""
    model = TRUE.learn(Work(4, 4), decode_s, 0.0)
    assert 1 / FURTHEST <= model.seconds(Work(4)) / TRUE.seconds(Work(4)) <= FURTHEST


def test_a_quick_tick_takes_a_slow_spell_back_first() -> None:
    """Where a machine is slow today, one that is as quick as ever says nothing of the table."""
    slow = evolve(TRUE, scale=3.0)
    after = slow.learn(Work(4), TRUE.seconds(Work(4)), 0.0)
    assert after.scale == pytest.approx(1.0)
    assert after.computing(4) == pytest.approx(TRUE.computing(4))


@pytest.mark.parametrize(
    "rates",
    [
        (None, None),
        (TUNING.alone_scale_rate, TUNING.alone_step_rate),
        (TUNING.mixed_scale_rate, TUNING.mixed_step_rate),
    ],
    ids=["both", "alone", "mixed"],
)
@pytest.mark.parametrize("used", [(1,), (1, 4), (1, 4, 8)], ids=str)
def test_steps_that_are_not_used_stay_while_the_machine_comes_and_goes(
    rates: tuple[float | None, float | None], used: tuple[int, ...]
) -> None:
    """Forty spells in which it is 3 to 10 times slower: when it is back, all steps are what they were."""
    draw, model = random.Random(1), CostModel(STAIRS)
    for _ in range(40):
        for slower in (draw.uniform(3.0, 10.0), 1.0):
            for _ in range(300):
                n = draw.choice(used)
                took = STAIRS(n) * slower * draw.lognormvariate(0.0, 0.02)
                model = model.learn(Work(n), took, None, *rates)
    stored = model.for_storage()
    for n in STAIRS.at:
        assert stored.computing(n) == pytest.approx(STAIRS(n), rel=0.1), n


def test_rows_never_cost_less_than_nothing() -> None:
    """However low the step of its tokens has been learnt, a tick takes time."""
    model = CostModel(STAIRS, output=Staircase((1, 4), (0.0, -0.999 * STAIRS(4))))
    lower = evolve(model, computing=STAIRS.times(0.5))
    for each in (model, lower):
        assert each.seconds(Work(4, 4)) == pytest.approx(0.25 * each.computing(4))
        assert each.at_least(4) <= each.seconds(Work(4, 4))


@given(
    n=st.integers(1, 600),
    took=st.floats(1e-4, 1.0),
    host=st.floats(0, 0.1),
    contended=st.booleans(),
)
def test_learning_keeps_the_model_sane(
    n: int, took: float, host: float, *, contended: bool
) -> None:
    """Whatever is measured, predictions stay finite and positive."""
    model = CostModel(STAIRS)
    for _ in range(30):
        model = model.learn(Work(n, contended=contended), took, host)
    assert 0 < model.seconds(Work(n)) <= model.seconds(Work(n, contended=True)) < 60
    assert 0 <= model.error < 2
