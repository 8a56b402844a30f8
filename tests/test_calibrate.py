"""Measuring the staircase: what is found, in what time, and what is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from machine_kit import TRUTH, Clock, Machine

from uma_trio.backend.base import DecodeStatus, Traits
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.costing.calibrate import (
    LEAST_USED_SHARE,
    LONGER,
    ORDER,
    Calibration,
    assume_looking_back,
)
from uma_trio_sim.fake import InjectedFault

EVERY = tuple(sorted(s.tokens for s in ORDER if s.rows == 1 and s.tokens <= 512))
# Milliseconds of a 0.5B Q4_0 model on two slow cores, where a token takes four times as long as above.
SLOW = Staircase(
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 32, 64, 512),
    tuple(ms / 1e3 for ms in (29, 33, 36, 28, 35, 40, 47, 41, 50, 52, 58, 60, 115, 209, 1600)),
)
# The same of an 8B model on an H200.
GPU = Staircase(
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    tuple(ms / 1e3 for ms in (3.8, 4.1, 4.6, 6.3, 7.8, 9.4, 11.8, 16.9, 28.2, 45.7)),
)


def measured(
    deadline_s: float, truth: CostModel = TRUTH, noise: Callable[[], float] = lambda: 1.0
) -> tuple[CostModel, Machine]:
    """Return the model that a session of so many seconds finds."""
    clock = Clock()
    machine = Machine(truth, clock, noise=noise)
    return Calibration(machine, clock).measure(deadline_s), machine


def busy(seed: int) -> Callable[[], float]:
    """Return the noise of a machine that somebody else uses: a fifth of all decodes take longer."""
    draw = random.Random(seed)
    return lambda: 1.0 + (draw.uniform(0.2, 2.0) if draw.random() < 0.2 else 0.0)


def test_with_time_enough_every_step_is_found_as_it_is() -> None:
    """The saw-tooth, what rows add, and what looking back costs."""
    cost, _ = measured(60.0)
    assert cost.sizes == EVERY
    for n in (1, 3, 4, 17, 128, 512):
        assert cost.computing(n) == pytest.approx(TRUTH.computing(n))
    assert cost.output(16) == pytest.approx(0.003)
    assert cost.context_cell_s == pytest.approx(TRUTH.context_cell_s, rel=0.01)
    assert cost.used_cell_s == pytest.approx(TRUTH.used_cell_s, rel=0.01)


@pytest.mark.parametrize("slower", [0.1, 1.0, 3.6, 10.0, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_it_ends_by_its_deadline_or_one_decode_later(slower: float, seed: int) -> None:
    """Whoever else is using the machine; where a token takes 0.8 s, the deadline is later."""
    _, machine = measured(2.0, TRUTH.times(slower), busy(seed))
    in_time = 2.0 if slower < 100.0 else 2.0 * LONGER
    assert machine.clock.now - machine.took[-1] <= in_time


@pytest.mark.parametrize("slower", [30.0, 60.0, 100.0])
def test_a_machine_that_is_slow_or_busy_still_knows_a_chunk_worth_computing(slower: float) -> None:
    """One token takes 0.25 to 0.8 s: prompts have chunks of sixteen tokens at least from the start."""
    truth = TRUTH.times(slower)
    cost, machine = measured(2.0, truth)
    assert {1, 4, 8, 16} <= set(cost.sizes)
    assert cost.computing(16) == pytest.approx(truth.computing(16))
    assert machine.clock.now <= 2.0 * LONGER


@given(
    takes=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=300),
    deadline_s=st.floats(0.0, 3.0),
    n_slots=st.integers(1, 5),
    n_batch=st.sampled_from([1, 2, 24, 96]),
)
def test_whatever_decodes_take_there_is_a_table_in_time(
    takes: list[float], deadline_s: float, n_slots: int, n_batch: int
) -> None:
    """One decode after the deadline at the most, and one token at least is known."""
    clock, times = Clock(), iter(takes)
    last = takes[-1]
    machine = Machine(
        CostModel(Staircase((1,), (1.0,))), clock, n_batch, lambda: next(times, last), n_slots
    )
    cost = Calibration(machine, clock).measure(deadline_s)
    assert clock.now - machine.took[-1] <= LONGER * deadline_s + 1e-9 or len(machine.took) == 1
    assert cost.sizes[0] == 1
    assert all(0 < seconds < 6.0 for seconds in cost.computing.seconds)


def test_what_fails_is_not_in_the_table() -> None:
    """A decode that the backend refuses has no time; the model does without."""
    clock = Clock()
    machine = Machine(TRUTH, clock)
    machine._faults = {n: InjectedFault(DecodeStatus.INVALID) for n in range(2000)}
    assert Calibration(machine, clock).measure().table() == {1: pytest.approx(0.008)}


@pytest.mark.parametrize(("eager_s", "captures_s"), [(0.002, 0.006), (0.005, 0.0051)])
def test_where_graphs_are_captured_the_first_decodes_of_a_shape_do_not_count(
    eager_s: float, captures_s: float
) -> None:
    """An eager launch, then the capture, then what a tick really costs; the switch is known, too."""
    clock = Clock()
    machine = Machine(TRUTH, clock)
    machine.eager_s, machine.captures_s = eager_s, captures_s
    cost = Calibration(machine, clock).measure(60.0)
    for n in (1, 4, 16, 512):
        assert cost.computing(n) == pytest.approx(TRUTH.computing(n), rel=0.01)
    assert cost.recapture_s == pytest.approx(eager_s, rel=0.01)
    assert cost.capture_s == pytest.approx(captures_s, rel=0.01)


def test_where_graphs_are_captured_a_tick_pays_for_the_cells_that_it_spans() -> None:
    """Once, however many tokens it has; few cells would be lost in noise."""
    clock = Clock()
    machine = Machine(evolve(TRUTH, used_cell_s=0.0, spanned_cell_s=5e-8), clock)
    machine.eager_s, machine.captures_s = 0.002, 0.006
    cost = Calibration(machine, clock).measure(60.0)
    assert cost.spanned_cell_s == pytest.approx(5e-8, rel=0.01)
    assert cost.used_cell_s == 0.0
    shallow, deep = (cost.seconds(Work(16, 1, used_cells=n)) for n in (0, 10_000))
    assert deep - shallow == pytest.approx(5e-4, rel=0.01)


def test_a_busy_machine_is_not_taken_for_one_that_captures_graphs() -> None:
    """Noise is no price of changing the shape."""
    assert [measured(2.0, noise=busy(seed))[0].recapture_s for seed in range(20)] == [0.0] * 20


def test_where_no_graphs_are_captured_a_slow_change_of_shape_is_somebody_elses_work() -> None:
    """A CPU has no graphs, so whatever else kept it busy switches no drafts off."""
    clock = Clock()

    class Cpu(Machine):
        @property
        def traits(self) -> Traits:
            return evolve(super().traits, shape_costs=False)

    machine = Cpu(TRUTH, clock)
    machine.eager_s = 0.004
    cost = Calibration(machine, clock).measure(60.0)
    assert (cost.recapture_s, cost.capture_s) == (0.0, 0.0)


def test_the_most_useful_steps_come_first() -> None:
    """A short session knows small ticks, and not every width between."""
    cost, _ = measured(0.5)
    assert {1, 2, 4, 8, 16} <= set(cost.sizes)
    assert cost.seconds(Work(512)) == pytest.approx(512 / 64 * cost.seconds(Work(64)))


def test_a_slow_machine_knows_the_sizes_that_a_tick_with_a_stream_may_have() -> None:
    """Two seconds are enough for the fours and eights that a limit of a few tokens allows."""
    cost, _ = measured(2.0, CostModel(SLOW))
    assert {1, 2, 3, 4, 8, 12, 16, 24, 32, 64} <= set(cost.sizes)
    assert {1, 2, 3, 4, 8} <= set(cost.output.at)
    for n in (1, 3, 4, 8, 12, 16, 32):
        assert cost.computing(n) == pytest.approx(SLOW(n))


def test_where_wide_chunks_are_cheap_they_are_known_too() -> None:
    """A GPU whose graphs are captured: nobody measures its wide chunks later, they take too long."""
    clock = Clock()
    machine = Machine(CostModel(GPU), clock)
    machine.eager_s, machine.captures_s = 0.001, 0.004
    cost = Calibration(machine, clock).measure()
    assert {1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512} <= set(cost.sizes)
    for n in (1, 4, 32, 512):
        assert cost.computing(n) == pytest.approx(GPU(n), rel=0.03)


def test_one_decode_in_five_that_takes_longer_does_no_harm() -> None:
    """What is timed twice is timed again where the two do not agree; the least is believed."""
    wrong = 0
    for seed in range(20):
        cost, _ = measured(2.0, noise=busy(seed))
        wrong += sum(
            abs(cost.computing(n) / TRUTH.computing(n) - 1.0) > 0.1 for n in (1, 2, 4, 8, 12, 16)
        )
    assert wrong <= 4  # of 120: two samples may be disturbed alike


def test_what_was_badly_disturbed_is_not_in_the_table() -> None:
    """Others take the processor for a tenth of a second, again and again: better a gap than a wall."""
    for seed in range(10):
        draw, tiny = random.Random(seed), CostModel(Staircase((1, 512), (0.0005, 0.06)))
        clock = Clock()
        machine = Machine(tiny, clock)
        machine.noise = lambda draw=draw: 100.0 if draw.random() < 0.3 else 1.0  # type: ignore[misc]
        cost = Calibration(machine, clock).measure()
        assert len(cost.sizes) > 1
        for before, after in pairwise(cost.computing.seconds):
            assert before <= 2.0 * after


def test_one_token_that_was_disturbed_is_known_by_what_is_wider() -> None:
    """All that is refined later is held against it."""
    clock = Clock()
    machine = Machine(TRUTH, clock)
    machine.noise = lambda: 9.0 if machine.sizes[-1] == 1 else 1.0
    cost = Calibration(machine, clock).measure()
    assert cost.computing(1) == pytest.approx(TRUTH.computing(4))


def test_the_first_decodes_of_a_tiny_model_are_not_believed() -> None:
    """It is warm only after some milliseconds, and one decode is too short to tell from noise."""
    tiny = CostModel(Staircase((1, 16, 512), (0.0005, 0.002, 0.06)))
    clock = Clock()
    machine = Machine(tiny, clock)
    machine.noise = lambda: 3.0 if clock.now < 0.015 else 1.0
    cost = Calibration(machine, clock).measure()
    for n in (1, 2, 4, 16):
        assert cost.computing(n) == pytest.approx(tiny.computing(n))


def test_it_leaves_every_slot_empty() -> None:
    """The first request finds the cache as if nothing had been, wherever the time was up."""
    for deadline_s in (0.2, 0.9, 1.3, 1.5, 1.7, 2.0):
        _, machine = measured(deadline_s, CostModel(SLOW, context_cell_s=1e-6), busy(1))
        assert machine.used_cells == 0


@pytest.mark.parametrize("whole_cache", [True, False])
def test_a_cell_that_was_not_looked_at_is_assumed_to_take_its_reading(whole_cache: bool) -> None:
    """One's own always, everyone else's where attention runs over all; what was measured stays."""
    cost = assume_looking_back(CostModel(SLOW), 1e-6, whole_cache=whole_cache)
    assert cost.context_cell_s + cost.used_cell_s == pytest.approx(1e-6)
    assert cost.used_cell_s == pytest.approx(1e-6 if whole_cache else LEAST_USED_SHARE * 1e-6)
    measured_before = CostModel(SLOW, used_cell_s=2e-6)
    assert assume_looking_back(measured_before, 1e-6, whole_cache=whole_cache) is measured_before


def test_where_graphs_are_captured_a_cell_is_assumed_to_be_read_once_a_tick() -> None:
    """One's own costs a little besides, which ticks correct: from nothing they could not."""
    captured = CostModel(SLOW, recapture_s=1e-3)
    cost = assume_looking_back(captured, 1e-6, whole_cache=True)
    assert (cost.spanned_cell_s, cost.used_cell_s) == (1e-6, 0.0)
    assert 0.0 < cost.wide_context_cell_s < cost.context_cell_s < 1e-6
    measured_before = evolve(captured, spanned_cell_s=2e-6)
    assert assume_looking_back(measured_before, 1e-6, whole_cache=True) is measured_before


def test_who_waits_for_the_measuring_sees_how_far_it_is() -> None:
    """The part of the session that has passed, which never goes back."""
    shown: list[float] = []
    clock = Clock()
    Calibration(Machine(TRUTH, clock), clock, shown.append).measure()
    assert shown == sorted(shown)
    assert len(shown) > 10
    assert 0.0 <= shown[0] < 0.5 < shown[-1] <= 1.0
