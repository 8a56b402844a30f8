"""Measuring the staircase: what is found, in what time, and what is left behind."""

from __future__ import annotations

import pytest
from attrs import define

from uma_trio.backend.base import Aside, nothing
from uma_trio.backend.fake import FakeBackend
from uma_trio.engine.calibrate import DENSE, WIDE, Calibration, Refinement
from uma_trio.policy.cost import CostModel, Staircase, Work

TRUTH = CostModel(
    Staircase((1, 3, 4, 16, 512), (0.008, 0.016, 0.011, 0.026, 0.770)),
    output=Staircase((1, 16), (0.0, 0.003)),
    depth_s=2e-7,
    crowd_s=5e-8,
)


@define
class Clock:
    """Virtual seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class Machine(FakeBackend):
    """A fake whose decodes take as long as a cost model says."""

    def __init__(self, truth: CostModel, clock: Clock, n_batch: int = 512) -> None:
        super().__init__(n_ctx=4096, n_slots=17, n_batch=n_batch)
        self.truth, self.clock = truth, clock
        self.eager_s = self.captures_s = 0.0
        self.shapes = [(0, 0), (0, 0)]

    def decode(self, n_tokens: int, aside: Aside = nothing) -> int:
        """Compute, and let the time pass."""
        slots = self.batch.slot[:n_tokens].tolist()
        before = {slot: self.kv_length(slot) for slot in range(17)}
        work = Work(
            tokens=n_tokens,
            rows=int(self.batch.want[:n_tokens].sum()),
            looked=sum(before[slot] for slot in slots),
            resident=sum(before.values()),
        )
        self.clock.now += self.truth.seconds(work)
        if work.shape != self.shapes[-1]:
            self.clock.now += self.eager_s
        elif self.shapes[-2] != work.shape:
            self.clock.now += self.captures_s
        self.shapes.append(work.shape)
        return super().decode(n_tokens, aside)


def measured(deadline_s: float, truth: CostModel = TRUTH) -> tuple[CostModel, Machine]:
    """Return the model that a session of so many seconds finds."""
    clock = Clock()
    machine = Machine(truth, clock)
    return Calibration(machine, clock).measure(deadline_s), machine


def test_with_time_enough_every_step_is_found_as_it_is() -> None:
    """The saw-tooth, what rows add, and what looking back costs."""
    cost, _ = measured(60.0)
    assert cost.steps == (*DENSE, *WIDE)
    for n in (1, 3, 4, 17, 128, 512):
        assert cost.computing(n) == pytest.approx(TRUTH.computing(n))
    assert cost.output(16) == pytest.approx(0.003)
    assert cost.depth_s == pytest.approx(TRUTH.depth_s, rel=0.01)
    assert cost.crowd_s == pytest.approx(TRUTH.crowd_s, rel=0.01)


@pytest.mark.parametrize("slower", [1.0, 10.0, 100.0])
def test_it_ends_soon_after_its_deadline(slower: float) -> None:
    """However slow the machine is, one decode more at the most."""
    _, machine = measured(2.0, TRUTH.times(slower))
    assert machine.clock.now <= 2.0 * 1.2 + 2 * 0.030 * slower


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
    assert cost.switch_s == pytest.approx(eager_s, rel=0.01)
    assert measured(60.0)[0].switch_s == 0


def test_the_most_useful_steps_come_first() -> None:
    """A short session knows small ticks and a chunk, and not every width between."""
    cost, _ = measured(0.5)
    assert {1, 2, 4, 8, 16} <= set(cost.steps)
    assert 512 not in cost.steps


def test_it_leaves_every_slot_empty() -> None:
    """The first request finds the cache as if nothing had been."""
    _, machine = measured(2.0)
    assert [machine.kv_length(slot) for slot in range(17)] == [0] * 17


def test_a_rest_is_used_for_the_steps_that_are_missing() -> None:
    """One after another, and none that would let somebody wait noticeably."""
    clock = Clock()
    machine = Machine(TRUTH, clock)
    cost: CostModel | None = CostModel(Staircase((1, 4, 16), (0.008, 0.011, 0.026)), scale=2.0)
    refinement = Refinement(machine, clock)
    found = cost
    while (cost := refinement.refine(found)) is not None:  # type: ignore[arg-type]
        assert len(cost.steps) == len(found.steps) + 1  # type: ignore[union-attr]
        found = cost
    assert found is not None
    assert found.seconds(Work(3)) == pytest.approx(TRUTH.computing(3))
    assert 2.0 * found.measured(3) == pytest.approx(TRUTH.computing(3))
    assert max(found.steps) == 64  # the next, 96 tokens, is believed to take more than 0.1 s
    assert machine.kv_length(0) == 0
