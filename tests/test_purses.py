"""What a stream may lose by guesses, whatever is believed of them."""

from __future__ import annotations

import pytest
from drafts_kit import FLAT, SIZES, STAIRS
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import decoder

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.deadline.drafts import (
    MOST_PURSES,
    PURSE_EARNED,
    PURSE_MOST,
    add_drafts,
    settled,
)
from uma_trio.policy.deadline.shape import ballast_for
from uma_trio.policy.decode import one_token_each
from uma_trio.policy.plan import NO_LIMIT, Plan
from uma_trio.policy.state import Contract, Memory, Purse, SchedulerState, SequenceView
from uma_trio.policy.tuning import TUNING

# Two rows take twice the time of one here, three guesses cost a stream 1.6 tokens: as with Q8_0.
DEAR = CostModel(
    Staircase(SIZES, (0.016, 0.032, 0.038, 0.0415, 0.052, 0.048, 0.06, 0.062, 0.07, 0.111))
)


class Told:
    """Streams that are told tick by tick which of their guesses are right; it adds up what that took."""

    def __init__(self, cost: CostModel, streams: int) -> None:
        self.known = dict.fromkeys(range(streams), 100)
        self.memory = Memory(cost=cost)
        self.seconds = self.plain_s = self.token_s = self.largest_stake = 0.0
        self.drafted = 0

    def tick(self, chances: list[float], right: list[int]) -> Plan:
        """Plan a tick with 15 guesses each, each as likely behind those before; so many are right."""
        views = [self._view(key, chance) for key, chance in enumerate(chances)]
        state = SchedulerState(
            now=0.0, tick=1, sequences=tuple(views), n_batch=512, free_cells=4000,
            n_rows=64, spare_rows=40, memory=self.memory,
        )  # fmt: skip
        plain = Plan(items=one_token_each(views), limit=NO_LIMIT, memory=self.memory)
        plan = add_drafts(state, plain)
        cost = plan.memory.cost
        assert cost is not None
        one_s = ballast_for(cost, planned_work(state, plain), 3)[1]
        took_s = ballast_for(cost, planned_work(state, plan), 3)[1]
        self.seconds += took_s
        came = [1 + min(item.n_drafts, n) for item, n in zip(plan.items, right, strict=True)]
        self.token_s = one_s / len(came)
        self.largest_stake = max(self.largest_stake, (took_s - one_s) / self.token_s)
        self.plain_s += self.token_s * sum(came)  # what these tokens take without guesses
        for key, n in enumerate(came):
            self.known[key] += n
        self.drafted += sum(item.n_drafts for item in plan.items)
        self.memory = plan.memory
        return plan

    def _view(self, key: int, chance: float) -> SequenceView:
        survival = tuple(chance**n for n in range(1, 16))
        return decoder(key, pending=16, drafted=15, survival=survival, computed=self.known[key] - 1)


@settings(max_examples=40, deadline=None)
@given(
    cost=st.sampled_from([STAIRS, DEAR]),
    streams=st.integers(1, 4),
    chance=st.sampled_from([0.5, 0.8, 0.95]),
    right=st.lists(st.sampled_from([0, 0, 0, 0, 1, 3]), min_size=1, max_size=7),
)
def test_guesses_lose_no_more_than_what_a_purse_begins_with_and_earns(
    cost: CostModel, streams: int, chance: float, right: list[int]
) -> None:
    """Whatever is believed, and in whichever order some of them are right."""
    told = Told(cost, streams)
    for n in range(400):
        told.tick([chance] * streams, [right[(n + key) % len(right)] for key in range(streams)])
    tokens = sum(told.known.values()) - 100 * streams
    lost = (told.seconds - told.plain_s) / told.token_s
    # Each stream may lose what is in its purse, by a last stake that is larger than that.
    assert (
        lost
        <= streams * (TUNING.purse_at_start + told.largest_stake) + PURSE_EARNED * tokens + 1e-6
    )
    assert told.largest_stake <= streams * (Contract().pause_cap - 1.0) + 1e-6


@pytest.mark.parametrize("cost", [STAIRS, DEAR], ids=["cheap", "dear"])
def test_guesses_that_are_believed_and_always_wrong_cost_a_stream_little(cost: CostModel) -> None:
    """Of 1,000 tokens the time of 15, and it is tried again and again."""
    told = Told(cost, 1)
    for _ in range(1000):
        told.tick([0.9], [0])
    assert told.seconds <= 1.015 * told.plain_s
    before = told.drafted
    for _ in range(1000):
        told.tick([0.9], [0])
    assert told.drafted > before > 0


def test_a_stream_that_was_unlucky_at_first_drafts_again_once_its_guesses_are_right() -> None:
    """One right guess pays for the next ones."""
    told = Told(STAIRS, 1)
    while told.tick([0.9], [0]).items[0].n_drafts:
        pass
    for _ in range(500):
        told.tick([0.9], [3])
    ticks = [told.tick([0.9], [3]).items[0].n_drafts for _ in range(20)]
    assert all(ticks)


def test_an_empty_purse_costs_nobody_else_his_guesses() -> None:
    """Each stream has its own."""
    told = Told(STAIRS, 2)
    for _ in range(100):
        told.tick([0.9, 0.9], [0, 3])
    drafts = [told.tick([0.9, 0.9], [0, 3]).items for _ in range(20)]
    assert sum(items[1].n_drafts for items in drafts) > 10 * sum(i[0].n_drafts for i in drafts)


def test_rows_that_cost_nothing_are_no_stake() -> None:
    """A stream may be wrong for ever where a tick takes as long without its guesses."""
    told = Told(FLAT, 1)
    ticks = [told.tick([0.5], [0]) for _ in range(100)]
    assert all(plan.items[0].n_drafts for plan in ticks)
    assert not told.memory.purses


def test_what_was_won_is_bounded_and_those_that_ended_are_forgotten() -> None:
    """A long copy is no reason to lose as much behind it."""
    views = (decoder(1, computed=1000),)
    state = SchedulerState(now=0.0, tick=1, sequences=views, n_batch=512, free_cells=4000)
    assert settled(state, {1: Purse(1.0, 10)})[1] == Purse(PURSE_MOST, 1001)
    away = {key: Purse(-1.0, 10) for key in range(100, 101 + MOST_PURSES)}
    assert settled(state, dict(list(away.items())[:MOST_PURSES])).keys() == set(
        list(away)[:MOST_PURSES]
    )
    assert not settled(state, {**away, 200: Purse(0.0, 1)})
