"""When a running tick is given up for a newcomer: the pure part."""

from __future__ import annotations

import pytest
from attrs import evolve
from policy_kit import decoder, prompt, state

from uma_trio.policy.abort import LONG_S, Abortable, Newcomer, abortable, should_abort
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.state import FirstToken, SequenceView

TICK = Abortable(predicted_s=1.0, free_cells=1000)
PERSON = Newcomer("interactive", cells=100)
BATCH = prompt(1, 500, lane="background")


def planned(*views: SequenceView, predicted_s: float = 1.0) -> Plan:
    """Return a plan with everything that is pending of each."""
    items = tuple(
        PlanItem(view.key, view.pending, "decode" if view.decoding else "prefill", "")
        for view in views
    )
    return Plan(items, predicted_s=predicted_s)


def test_a_tick_of_background_prompts_alone_may_be_given_up() -> None:
    """Its prediction and the room for a newcomer are what there is to know of it."""
    views = (BATCH, prompt(2, 5, lane="background"))
    assert abortable(state(*views), planned(*views), 1) == Abortable(1.0, 1000)


def test_a_tick_that_somebody_reads_never_is() -> None:
    """No token of a reader's is lost."""
    assert abortable(state(BATCH, decoder(2)), planned(BATCH, decoder(2)), 1) is None


def test_a_tick_without_a_prompt_never_is() -> None:
    """Answers take one token a tick."""
    answer = decoder(2, awaits="answer")
    assert abortable(state(answer), planned(answer), 1) is None


@pytest.mark.parametrize(
    "other",
    [prompt(2), prompt(2, computed=600, started=True), decoder(2, awaits="answer")],
    ids=["a prompt", "one that is computed again", "an answer"],
)
def test_a_tick_with_interactive_work_is_given_up_for_short_prompts(other: SequenceView) -> None:
    """To a long one it makes no difference."""
    tick = abortable(state(BATCH, other), planned(BATCH, other), 1)
    assert tick is not None
    assert should_abort(tick, 0.1, Newcomer("interactive", 600, 512))
    assert not should_abort(tick, 0.1, Newcomer("interactive", 700, 513))


def test_a_tick_with_a_short_prompt_never_is() -> None:
    """Or short prompts would delay each other."""
    short = prompt(2, first=FirstToken(99.0, 0.1, (99.1,), short=True))
    assert abortable(state(BATCH, short), planned(BATCH, short), 1) is None


def test_others_who_run_and_have_no_part_in_the_tick_do_not_matter() -> None:
    """What is not computed cannot be lost."""
    parked = decoder(2, credit=0)
    assert abortable(state(BATCH, parked), planned(BATCH), 1) is not None


@pytest.mark.parametrize("predicted_s", [0.0, LONG_S])
def test_a_short_tick_is_not_given_up_nor_one_that_nobody_predicted(predicted_s: float) -> None:
    """To wait for its end is nothing, or nothing is known of it."""
    assert abortable(state(BATCH), planned(BATCH, predicted_s=predicted_s), 1) is None


def test_it_is_not_given_up_for_somebody_who_would_get_no_slot() -> None:
    """A newcomer that has to queue gains nothing."""
    tick = abortable(state(BATCH), planned(BATCH), 0)
    assert tick is not None
    assert not should_abort(tick, 0.0, Newcomer("interactive", cells=10, tokens=5))
    assert should_abort(tick, 0.0, Newcomer("interactive", cells=0, tokens=5))  # of another model


@pytest.mark.parametrize(
    ("elapsed_s", "given_up"),
    [(0.0, True), (0.49, True), (0.69, True), (0.71, False), (3.0, False)],
)
def test_late_in_a_tick_it_is_given_up_only_for_a_wait_that_is_noticed(
    elapsed_s: float, given_up: bool
) -> None:
    """More is lost then."""
    assert should_abort(TICK, elapsed_s, PERSON) is given_up


@pytest.mark.parametrize(("elapsed_s", "given_up"), [(0.02, True), (0.035, False)])
def test_it_is_given_up_only_if_the_rest_is_long(elapsed_s: float, given_up: bool) -> None:
    """A wait that nobody notices is let be, also early in a tick."""
    assert should_abort(evolve(TICK, predicted_s=1.6 * LONG_S), elapsed_s, PERSON) is given_up


@pytest.mark.parametrize(
    "newcomer",
    [Newcomer("background", 100), Newcomer("interactive", 1001)],
    ids=["background", "no room"],
)
def test_it_is_given_up_for_a_person_who_can_be_served(newcomer: Newcomer) -> None:
    """Not for other background work, and not for a request that would have to wait for cells."""
    assert not should_abort(TICK, 0.0, newcomer)
