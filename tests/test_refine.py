"""Filling the gaps of the staircase while the daemon rests."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from engine_kit import Doze, Sink, compute
from machine_kit import TRUTH, Clock, Machine

from uma_trio.backend.base import DecodeStatus
from uma_trio.engine.idle import IDLE_S
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import SamplingParams, Submit
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.costing.calibrate import Calibration
from uma_trio.policy.costing.refine import UNNOTICED_S, Refinement
from uma_trio.policy.deadline import deadline
from uma_trio_sim.fake import InjectedFault

KNOWN = CostModel(
    Staircase((1, 4, 16), (0.008, 0.011, 0.026)), output=Staircase((1, 16), (0.0, 0.003))
)


def refined(machine: Machine, cost: CostModel) -> list[CostModel]:
    """Return the model after each call, until there is no gap left."""
    refinement = Refinement(machine, machine.clock)
    models = [cost]
    while (found := refinement.refine(models[-1])) is not None:
        models.append(found)
    return models


def test_a_rest_is_used_for_the_steps_that_are_missing() -> None:
    """All that are worth knowing are found, with what rows add, and nothing is left behind."""
    machine = Machine(TRUTH, Clock())
    found = refined(machine, KNOWN)[-1]
    for n in (2, 3, 7, 12, 17, 32):
        assert found.seconds(Work(n)) == pytest.approx(TRUTH.seconds(Work(n)))
        assert found.measured(n) == pytest.approx(TRUTH.computing(n))
    assert found.seconds(Work(3, 3)) == pytest.approx(TRUTH.seconds(Work(3, 3)))
    assert machine.used_cells == 0


def test_who_comes_waits_for_one_decode_that_nobody_notices() -> None:
    """Each call is one decode, and none is expected to take longer than a tenth of a second."""
    machine = Machine(TRUTH, Clock())
    models = refined(machine, KNOWN)
    assert len(machine.took) == len(models) - 1
    assert max(machine.took) <= 1.01 * UNNOTICED_S
    assert max(models[-1].sizes) == 64  # the next, 96 tokens, takes longer


def test_the_most_useful_gaps_are_filled_first() -> None:
    """Pairs, eights, threes and twelves before fives and sevens."""
    models = refined(Machine(TRUTH, Clock()), KNOWN)
    news = [set(after.sizes) - set(before.sizes) for before, after in pairwise(models)]
    assert [n for new in news for n in new][:6] == [8, 2, 3, 32, 12, 24]


def test_the_mood_of_the_machine_does_not_get_into_a_step() -> None:
    """All took twice as long when it was measured, and the ticks since knew nothing of that."""
    found = refined(Machine(TRUTH.times(2.0), Clock()), KNOWN)[-1]
    for n in (3, 8, 12, 32):
        assert found.computing(n) == pytest.approx(TRUTH.computing(n))
    assert found.output(8) == pytest.approx(TRUTH.output(8))


def test_a_step_that_was_disturbed_is_timed_again() -> None:
    """Somebody used the processor during every third decode."""
    machine = Machine(TRUTH, Clock())
    machine.noise = lambda: 1.8 if len(machine.took) % 3 == 0 else 1.0
    found = refined(machine, KNOWN)[-1]
    for n in (2, 3, 8, 12, 32):
        assert found.computing(n) == pytest.approx(TRUTH.computing(n))


def test_a_step_that_was_disturbed_when_it_was_measured_is_put_right() -> None:
    """Eight tokens looked as dear as sixty; what was right stays as it is, to the last bit."""
    right = KNOWN.computing.with_size(12, 0.021)
    found = refined(Machine(TRUTH, Clock()), CostModel(right.with_size(8, 0.080)))[-1]
    assert found.computing(8) == found.measured(8) == pytest.approx(TRUTH.computing(8))
    assert found.computing(12) == 0.021


def test_while_others_are_at_work_no_step_is_put_right() -> None:
    """Wide decodes suffer less from a neighbour who takes the memory: that is a mood, no truth."""
    beside = Staircase((1, 4, 16, 512), (0.016, 0.018, 0.030, 0.800))
    found = refined(Machine(CostModel(beside), Clock()), KNOWN)[-1]
    assert [found.computing(n) for n in (1, 4, 16)] == [0.008, 0.011, 0.026]
    assert 12 in found.sizes


def test_a_wrong_time_of_one_token_is_put_right() -> None:
    """It was measured while others were at work: one token takes less than that now."""
    found = refined(Machine(TRUTH, Clock()), CostModel(Staircase((1,), (0.040,))))[-1]
    for n in (1, 2, 3, 4, 16):
        assert found.computing(n) == pytest.approx(TRUTH.computing(n), rel=0.1)


@pytest.mark.parametrize("slower", [1.3, 3.0, 6.0])
def test_a_table_of_a_busy_machine_is_that_of_a_quiet_one_after_a_rest(slower: float) -> None:
    """A first start beside a compilation: others took from each shape another part."""
    steps = (1, 2, 4, 8, 16, 32)
    took = tuple(TRUTH.computing(n) * slower * (1.0 + 0.1 * i) for i, n in enumerate(steps))
    found = refined(Machine(TRUTH, Clock()), CostModel(Staircase(steps, took)))[-1].for_storage()
    for n in steps:
        assert found.computing(n) == pytest.approx(TRUTH.computing(n), rel=0.1), n


def test_what_cannot_be_computed_is_left_alone() -> None:
    """A step that fails is not tried for ever, and is not in the table."""
    machine = Machine(TRUTH, Clock())
    machine._faults = {n: InjectedFault(DecodeStatus.INVALID) for n in range(2000)}
    assert refined(machine, KNOWN)[-1] == KNOWN


def test_where_graphs_are_captured_refined_steps_are_what_a_tick_costs() -> None:
    """The decodes that launch and capture do not count here either."""
    machine = Machine(TRUTH, Clock())
    machine.eager_s, machine.captures_s = 0.002, 0.006
    found = refined(machine, CostModel(KNOWN.computing, recapture_s=0.002))[-1]
    assert found.computing(3) == pytest.approx(TRUTH.computing(3))


class Door(Inbox):
    """An inbox at which the engine sleeps in virtual time, until `closes`.

    `waits` are the sleeps that it was asked for. At `comes` a message arrives, once.
    """

    def __init__(self, clock: Clock, closes: float, comes: float = float("inf")) -> None:
        super().__init__(8, bell=Doze(self.wait))
        self.clock, self.closes, self.comes = clock, closes, comes
        self.waits: list[float | None] = []
        self.noticed = 0.0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let the time pass; True if the message came meanwhile or before."""
        self.waits.append(timeout_s)
        until = self.closes if timeout_s is None else self.clock.now + timeout_s
        came = self.comes <= until
        if came:
            self.clock.now = self.noticed = max(self.clock.now, self.comes)
            self.comes = float("inf")
        else:
            self.clock.now = until
        if self.clock.now >= self.closes:
            self.close()
        return came


def request(sink: Sink, credit: int) -> Submit:
    """Return a request of three tokens, for eight."""
    prompt = np.array([1, 2, 3], np.int32)
    params = SamplingParams()
    return Submit(
        1, prompt, 8, params, (), "interactive", client=0, credit=credit, sink=sink, submitted=0.0
    )


def rest(machine: Machine, door: Door, cost: CostModel = KNOWN) -> Engine:
    """Run an engine that nobody asks for anything, until the door closes."""
    engine = Engine(
        machine,
        deadline,
        door,
        Outlet(lambda deliver: deliver()),
        Metrics(),
        machine.clock,
        settings=EngineSettings(cost=cost, scratch_slots=1),
    )
    compute(engine, machine.clock)
    return engine


@pytest.mark.parametrize("slower", [0.3, 1.0, 3.6])
def test_a_daemon_that_rested_for_five_seconds_knows_its_staircase(slower: float) -> None:
    """All that takes a tenth of a second at most, as it is."""
    machine = Machine(TRUTH.times(slower), Clock(), n_slots=5)
    cost = Calibration(machine, machine.clock).measure()
    door = Door(machine.clock, closes=machine.clock.now + 5.0)
    found = rest(machine, door, cost).memory.cost
    assert found is not None
    assert set(range(1, 18)) <= set(found.sizes)
    for n in range(1, 18):
        assert found.computing(n) == pytest.approx(slower * TRUTH.computing(n))


def test_when_all_is_known_the_engine_sleeps_until_somebody_comes() -> None:
    """In the end it knows wide steps, too, and rests like the processor."""
    machine = Machine(TRUTH, Clock())
    door = Door(machine.clock, closes=120.0)
    cost = rest(machine, door).memory.cost
    assert cost is not None
    assert {96, 256, 512} <= set(cost.sizes)
    assert door.waits[-1] is None


def test_who_comes_while_a_step_is_timed_interrupts_it() -> None:
    """The step is timed again later, and nothing is learnt from the decode that was given up."""
    machine = Machine(TRUTH, Clock())
    door = Door(machine.clock, closes=2.0)
    sink = Sink()

    def come() -> None:
        if machine.decodes == 4:
            door.submit(request(sink, credit=8))

    machine.meanwhile = come
    machine.noise = lambda: 0.1 if machine.decodes == 3 else 1.0  # how far that one got
    cost = rest(machine, door).memory.cost
    assert machine.sizes[3:6] == [8, 3, 1]  # a step, then the prompt, then the answer
    assert len(sink.tokens) == 8
    assert cost is not None
    assert cost.computing(8) == pytest.approx(TRUTH.computing(8), rel=0.05)


@pytest.mark.parametrize("comes", [0.55, 0.7, 1.1, 1.3])
def test_who_comes_while_it_refines_is_noticed_after_the_decode_that_runs(comes: float) -> None:
    """And the engine rests again before it goes on."""
    machine = Machine(TRUTH, Clock())
    door = Door(machine.clock, closes=comes + 0.4, comes=comes)
    rest(machine, door)
    assert machine.took  # it had begun
    assert door.noticed - comes <= UNNOTICED_S
    assert door.waits[-1] == IDLE_S


def test_while_somebody_holds_a_slot_nothing_is_refined() -> None:
    """Who is parked may go on at any time, and has cells in the cache."""
    machine = Machine(TRUTH, Clock())
    door = Door(machine.clock, closes=60.0)
    door.submit(request(Sink(), credit=1))
    rest(machine, door)
    assert machine.sizes == [3]
    assert min(door.waits) == pytest.approx(IDLE_S)  # no more often
