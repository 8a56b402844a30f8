"""Tables of a busy machine: how they are noticed, and measured again when it is quiet."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import structlog.testing
from attrs import evolve
from engine_kit import compute
from machine_kit import TRUTH, Clock, Machine
from test_refine import Door

from uma_trio.app.build import engine_settings
from uma_trio.backend.base import Traits
from uma_trio.cli.doctor import check_running
from uma_trio.config.options import Config
from uma_trio.engine.loop import Engine
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.observe.metrics import Metrics
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.costing.calibrate import Calibration, measured_cost
from uma_trio.policy.costing.neighbours import (
    CpuTimes,
    QuietWatch,
    cpu_times,
    in_words,
    others_share,
)
from uma_trio.policy.costing.store import recall, remember
from uma_trio.policy.deadline import deadline
from uma_trio_sim.fake import FakeBackend

STEPS = (1, 2, 4, 8, 16, 32, 64, 128)
ROWS = (1, 2, 4, 8)


class Gpu(FakeBackend):
    """A backend that computes beside the host."""

    @property
    def traits(self) -> Traits:
        """It overlaps."""
        return Traits(overlaps=True)


def neighbours(clock: Clock, share: Callable[[float], float]) -> Callable[[], CpuTimes]:
    """Return a reader of two processors, of which others use `share` at a time; read often."""
    state = [clock.now, 0.0]

    def read() -> CpuTimes:
        passed = clock.now - state[0]
        state[1] += 2 * passed * share(clock.now - passed / 2)
        state[0] = clock.now
        return CpuTimes(clock.now, 0.0, state[1], 2 * clock.now)

    return read


def idle(
    machine: Machine,
    cost: CostModel,
    share: Callable[[float], float] = lambda _now: 0.0,
) -> tuple[CostModel, list[CostModel]]:
    """Let an engine be idle for ten minutes; return what it knows then, and what it gave away to keep."""
    kept: list[CostModel] = []
    engine = Engine(
        machine,
        deadline,
        Door(machine.clock, closes=machine.clock.now + 600.0),
        Outlet(lambda deliver: deliver()),
        Metrics(),
        machine.clock,
        settings=EngineSettings(cost=cost, scratch_slots=1),
    )
    engine.refining.keep = kept.append
    engine.refining.read = neighbours(machine.clock, share)
    compute(engine, machine.clock)
    assert engine.memory.cost is not None
    return engine.memory.cost, kept


def disturbed(slower: float) -> CostModel:
    """Return a marked table; each size was disturbed by another part."""
    parts = [slower * (1.0 + 0.1 * (i % 3)) for i in range(len(STEPS))]
    took = tuple(TRUTH.computing(n) * part for n, part in zip(STEPS, parts, strict=True))
    rows = tuple(TRUTH.output(n) * slower for n in ROWS)
    return CostModel(Staircase(STEPS, took), output=Staircase(ROWS, rows), others=0.7)


@pytest.mark.parametrize("interruptible", [True, False])
@pytest.mark.parametrize("slower", [1.3, 3.0, 6.0, 9.0])
def test_after_ten_quiet_minutes_a_busy_machines_table_is_that_of_a_quiet_one(
    slower: float, interruptible: bool
) -> None:
    """Every size, with its rows, and the ones that the table lacked; the mark is gone, the file written."""
    machine = Machine(TRUTH, Clock())
    machine._interruptible = interruptible
    found, kept = idle(machine, disturbed(slower))
    for n in (*STEPS[:7], 3, 12, 24):
        assert 1 / 1.1 <= found.computing(n) / TRUTH.computing(n) <= 1.1, n
    for n in (2, 4, 8):
        both = found.computing(n) + found.output(n)
        assert both == pytest.approx(TRUTH.computing(n) + TRUTH.output(n), rel=0.1)
    assert (found.others, found.scale, len(kept)) == (0.0, 1.0, 1)
    assert kept[0].others == 0.0
    assert machine.used_cells == 0


def test_nothing_is_measured_while_other_programs_are_busy() -> None:
    """The table stays as it is, and marked."""
    machine = Machine(TRUTH, Clock())
    found, kept = idle(machine, disturbed(3.0), lambda _now: 0.3)
    assert (machine.sizes, kept) == ([], [])
    assert found == disturbed(3.0)


def test_samples_of_a_second_that_was_not_quiet_are_dropped() -> None:
    """A compilation of three seconds comes back every seven; decodes take four times as long meanwhile."""
    machine = Machine(TRUTH, Clock())

    def compiling(now: float) -> bool:
        return now % 7.0 < 3.0

    machine.noise = lambda: 4.0 if compiling(machine.clock.now) else 1.0
    found, kept = idle(machine, disturbed(3.0), lambda now: 0.8 * compiling(now))
    assert len(kept) == 1
    for n in STEPS[:7]:
        assert 1 / 1.1 <= found.computing(n) / TRUTH.computing(n) <= 1.1, n


def test_calibration_beside_other_programs_marks_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, kept and recalled with the mark; beside a GPU, which others leave alone, nothing is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Calibration, "measure", lambda _self: TRUTH)
    busy = (CpuTimes(float(n), 0.5 * n, 1.9 * n, 2.0 * n) for n in count())
    backend = FakeBackend()
    found = measured_cost(backend, read=lambda: next(busy))
    again = measured_cost(backend)
    with structlog.testing.capture_logs() as said:
        engine_settings(Config(), backend)
    assert found.cost.others == again.cost.others == pytest.approx(0.7)
    assert again.recalled
    assert "other programs used 70 % of the machine" in said[0]["event"]
    assert measured_cost(Gpu(), fresh=True, read=lambda: next(busy)).cost.others == 0.0


def test_a_file_without_a_mark_is_one_of_a_quiet_machine(tmp_path: Path) -> None:
    """Files of older versions have no such field; the mark of newer ones survives."""
    path = tmp_path / "cost.json"
    remember(path, evolve(TRUTH, others=0.25))
    marked = recall(path)
    path.write_text(path.read_text().replace(',"others":0.25', ""))
    unmarked = recall(path)
    assert marked is not None
    assert unmarked is not None
    assert (marked.others, unmarked.others) == (0.25, 0.0)


def test_the_share_of_others_is_what_is_busy_less_our_own() -> None:
    """Between 0 and 1, whatever the counters' grain; without them what one processor did not give us."""
    began = CpuTimes(10.0, 4.0, 100.0, 200.0)
    assert others_share(began, CpuTimes(12.0, 6.0, 103.0, 204.0)) == pytest.approx(0.25)
    assert others_share(began, CpuTimes(12.0, 8.0, 103.9, 204.0)) == 0.0
    assert others_share(began, began) == 0.0
    assert others_share(CpuTimes(0.0, 0.0), CpuTimes(2.0, 0.5)) == pytest.approx(0.75)
    assert others_share(CpuTimes(0.0, 0.0), CpuTimes(2.0, 4.0)) == 0.0


def test_the_counters_are_those_of_the_processors_that_we_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time that a hypervisor gave to others is busy; what is no number is as if it were not there."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda _name: 100)
    (tmp_path / "proc").mkdir()
    file = tmp_path / "proc" / "stat"
    file.write_text("cpu 1 1 1 1 1 1\ncpu0 9 9 9 9 9 9\ncpu1 100 0 50 200 50 0 0 100 7 0\nintr 5\n")
    found = cpu_times(tmp_path)
    assert (found.busy_s, found.all_s) == (2.5, 5.0)
    file.write_text("cpu1 many\n")
    assert cpu_times(tmp_path).busy_s is None
    assert cpu_times(tmp_path / "none").busy_s is None


def test_where_the_kernel_does_not_tell_every_window_is_quiet() -> None:
    """The least of several samples has to do there; a window that did not end in time is none."""
    verdicts, clock = [], Clock()
    watch = QuietWatch(lambda: CpuTimes(clock.now, 0.0))
    for clock.now in (0.0, 0.5, 1.0, 1.5, 2.0, 90.0):
        verdicts.append(watch.verdict())
    assert verdicts == [None, None, True, None, True, False]


def test_doctor_says_that_a_daemons_table_is_one_of_a_busy_machine() -> None:
    """And nothing where it is not, or no daemon runs."""
    (finding,) = check_running({"cost_others_share": 0.7})
    assert finding.what == in_words(0.7)
    assert finding.fix
    assert [*check_running({"cost_others_share": 0.0}), *check_running({})] == []


def test_what_was_timed_in_a_second_that_became_busy_is_not_believed() -> None:
    """It was quiet for a moment, in which some sizes were timed; others then stay for good."""
    machine = Machine(TRUTH, Clock())
    found, kept = idle(machine, disturbed(3.0), lambda now: 0.8 * (now > 1.6))
    assert machine.sizes
    assert (found, kept) == (disturbed(3.0), [])
