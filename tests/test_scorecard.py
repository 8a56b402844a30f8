"""The scorecard: what a line is about, and a file that cannot be written stops nobody."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock

from uma_trio.observe.catalogue import COLUMNS
from uma_trio.observe.figures import Promise
from uma_trio.observe.memory import SharedMemory
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.scorecard import Scorecard, ScoreKeeper
from uma_trio.observe.table_file import AnotherTable, TableFile
from uma_trio.policy.cost import CostModel, Staircase

COST = CostModel(Staircase((1, 8), (0.010, 0.018)))


class Machine:
    """Metrics on a clock that is moved by hand, and a scorecard of five seconds."""

    def __init__(self, interval_s: float = 5.0) -> None:
        self.now = 100.0
        self.metrics = Metrics(clock=lambda: self.now)
        self.card = Scorecard(self.metrics, interval_s, wall=lambda: 1_700_000_000 + self.now)

    def work(self, *, tokens: int = 8, took_s: float = 0.020, itl_s: float = 0.020) -> None:
        """Compute one batch of which three rows are sampled, one of them copied."""
        self.metrics.tick(
            decode_tokens=3,
            prefill_tokens=tokens - 3,
            decode_s=took_s - 0.002,
            host_s=0.002,
            sampling_s=0.0,
            rows=3,
            rows_in_place=2,
            lane_tokens={"interactive": 3, "background": tokens - 3},
        )
        promise = Promise(
            limit_s=0.030,
            predicted_s=0.018,
            between_s=0.002,
            tokens=tokens,
            moved_bytes=4e6,
            cost=COST,
        )
        self.metrics.promised(promise, took_s)
        self.metrics.shown(itl_s, "interactive")

    def passes(self, seconds: float) -> dict[str, Any] | None:
        """Let time pass; return the line of the interval, if that is over."""
        self.now += seconds
        line = self.card.update(2_000_000_000)
        return None if line is None else dict(line)

    @property
    def shown(self) -> dict[str, Any]:
        """What the metrics show."""
        card = self.metrics.snapshot()["scorecard"]
        assert isinstance(card, dict)
        return card


def test_a_line_has_the_columns_that_are_declared() -> None:
    """Nothing is written that `uma-trio help metrics` does not explain."""
    line = Machine().passes(6)
    assert line is not None
    assert set(line) == set(COLUMNS)


def test_rates_are_of_the_interval() -> None:
    """Tokens over the seconds that passed, in all and by lane."""
    machine = Machine()
    for _ in range(10):
        machine.work(tokens=8)
    line = machine.passes(8.0)
    assert line is not None
    assert line["time"] == "2023-11-14T22:15:08.000+00:00"
    assert line["interval_s"] == 8.0
    assert line["tokens_per_s"] == pytest.approx(10)
    assert line["interactive_tokens_per_s"] == pytest.approx(3.75)
    assert line["background_tokens_per_s"] == pytest.approx(6.25)
    assert line["tokens_generated_per_s"] == pytest.approx(3.75)
    assert line["busy_ratio"] == pytest.approx(0.025)
    assert line["copy_free_ratio"] == pytest.approx(2 / 3)


def test_the_contracts_figures_are_of_the_intervals_ticks() -> None:
    """At the cap, in bytes, and beside what the staircase allows."""
    machine = Machine()
    machine.work(tokens=8, took_s=0.020)
    machine.work(tokens=12, took_s=0.040)
    line = machine.passes(5.5)
    assert line is not None
    assert line["tokens_per_s_at_cap"] == pytest.approx(20 / 0.060)
    assert line["ticks_over_budget"] == 1
    assert line["sum_bmt_mb_per_token"] == pytest.approx(0.4)
    assert line["sum_bmt_mb_per_tick"] == pytest.approx(4.0)
    assert line["scheduler_efficiency"] == pytest.approx(2 * 0.016 / 0.060)


def test_a_line_says_nothing_about_the_time_before_it() -> None:
    """A slow minute is over when it is over, unlike in a figure since the start."""
    machine = Machine()
    for _ in range(50):
        machine.work(itl_s=0.9)
    slow = machine.passes(6)
    for _ in range(50):
        machine.work(itl_s=0.02)
    quick = machine.passes(6)
    assert slow is not None
    assert quick is not None
    assert slow["interactive_p99_ms"] == pytest.approx(900, rel=0.02)
    assert quick["interactive_p99_ms"] == pytest.approx(20, rel=0.02)
    assert (slow["interactive_gaps"], quick["interactive_gaps"]) == (50, 50)


def test_an_idle_interval_has_rates_of_nothing_and_no_percentiles() -> None:
    """Zero tokens are a fact, a percentile of no gap is none."""
    machine = Machine()
    machine.work()
    machine.passes(6)
    line = machine.passes(6)
    assert line is not None
    assert (line["tokens_per_s"], line["busy_ratio"], line["interactive_gaps"]) == (0, 0, 0)
    for name in ("interactive_p95_ms", "tokens_per_s_at_cap", "copy_free_ratio"):
        assert line[name] is None


def test_an_engine_that_tells_no_lanes_has_no_rate_of_a_lane() -> None:
    """Unknown is not zero."""
    machine = Machine()
    line = machine.passes(6)
    assert line is not None
    assert line["interactive_tokens_per_s"] is None


def test_memory_is_told_twice() -> None:
    """What the process has, and its fair part of that."""
    line = Machine().passes(6)
    assert line is not None
    assert line["pss_gb"] == 2.0
    assert line["rss_gb"] > 0.001


def test_the_metrics_show_the_interval_that_has_just_passed() -> None:
    """It moves on with every update, between the lines too."""
    machine = Machine(interval_s=5.0)
    assert machine.metrics.snapshot()["scorecard"] is None
    machine.work(tokens=10)
    assert machine.passes(1.0) is None
    assert machine.shown["tokens_per_s"] == pytest.approx(10)
    for _ in range(4):
        machine.passes(1.0)
    assert (machine.shown["interval_s"], machine.shown["tokens_per_s"]) == (5.0, 2.0)
    machine.passes(1.0)
    assert (machine.shown["interval_s"], machine.shown["tokens_per_s"]) == (5.0, 0.0)


# --- the file ---


def lines(path: Path) -> list[dict[str, str]]:
    """Return the lines of a table by column."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_names_its_columns_once_and_grows(tmp_path: Path) -> None:
    """Also over several lives of the daemon."""
    path = tmp_path / "card.csv"
    for n in range(2):
        file = TableFile(path, ("a", "b", "c"))
        file.append((n, 1 / 3, None))
        file.close()
    assert path.read_text(encoding="utf-8") == "a,b,c\n0,0.333333,\n1,0.333333,\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_table_goes_on_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    """Whoever wrote it was killed in the middle; the next line is whole."""
    path = tmp_path / "card.csv"
    path.write_text("a,b\n1,", encoding="utf-8")
    file = TableFile(path, ("a", "b"))
    file.append((2, 3))
    file.close()
    assert path.read_text(encoding="utf-8") == "a,b\n1,\n2,3\n"


def test_another_table_is_left_alone(tmp_path: Path) -> None:
    """Lines under the wrong names would be worse than none."""
    path = tmp_path / "card.csv"
    path.write_text("x,y\n1,2\n", encoding="utf-8")
    with pytest.raises(AnotherTable, match="other columns"):
        TableFile(path, ("a", "b"))
    assert path.read_text(encoding="utf-8") == "x,y\n1,2\n"


def test_a_name_with_commas_and_quotes_is_one_cell(tmp_path: Path) -> None:
    """The name of a model comes from its file; a row stays one line."""
    path = tmp_path / "card.csv"
    file = TableFile(path, ("model", "n"))
    file.append(('a, "b"\nc', 1))
    file.close()
    with path.open(newline="") as lines:
        assert [*csv.reader(lines)] == [["model", "n"], ['a, "b" c', "1"]]


def test_a_table_whose_name_says_so_is_lines_of_json(tmp_path: Path) -> None:
    """Every line is a whole object, and what nobody knows is null; other names are CSV."""
    path = tmp_path / "card.jsonl"
    for n in range(2):
        file = TableFile(path, ("a", "b", "c"))
        file.append((n, 1 / 3, None))
        file.close()
    text = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in text] == [
        {"a": n, "b": 0.333333, "c": None} for n in range(2)
    ]
    path.write_text('{"a": 1, "b": 2, "c": 3}\n{"a": 1, "b"', encoding="utf-8")
    file = TableFile(path, ("a", "b", "c"))
    file.append((4, 5, 6))
    file.close()
    assert path.read_text(encoding="utf-8").splitlines()[2] == '{"a": 4, "b": 5, "c": 6}'
    other = TableFile(tmp_path / "card.json.csv", ("a",))
    assert (tmp_path / "card.json.csv").read_text() == "a\n"
    other.close()


@pytest.mark.parametrize("text", ["a,b\n1,2\n", '{"b": 1, "a": 2}\n', "[1]\n", '{"a": 1, "b": 2}'])
def test_lines_of_json_with_other_columns_are_left_alone(tmp_path: Path, text: str) -> None:
    """Nor is anything written behind what is no JSON."""
    path = tmp_path / "card.ndjson"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(AnotherTable, match="other columns"):
        TableFile(path, ("a", "b"))
    assert path.read_text(encoding="utf-8") == text


def test_a_pipe_is_no_table_and_nobody_waits_for_its_reader(tmp_path: Path) -> None:
    """A daemon that hangs at its start is worse than one that says no."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(AnotherTable, match="not a file"):
        TableFile(path, ("a",))


def test_what_a_full_disk_left_of_a_line_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next line that fits stands on a line of its own."""
    path, write = tmp_path / "card.csv", os.write
    file = TableFile(path, ("a",))
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
        with pytest.raises(OSError, match="No space left"):
            file.append(("12345",))
    file.append(("67890",))
    file.close()
    assert path.read_text(encoding="utf-8") == "a\n67890\n"


# --- the task ---


class Disk(TableFile):
    """A table in memory, on a disk that may be full."""

    def __init__(self) -> None:
        self.rows: list[list[object]] = []
        self.full = False

    def append(self, values: Sequence[object]) -> None:
        """Keep a line, or fail as a full disk does."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.rows.append(list(values))


class Keeper:
    """A score keeper in virtual time, moved by hand: autojump does not see its threads."""

    def __init__(self, clock: MockClock) -> None:
        self.disk = Disk()
        self.metrics = Metrics(clock=trio.current_time)
        self._clock = clock
        memory = SharedMemory(lambda: 7, clock.current_time)
        self.task = ScoreKeeper(self.metrics, 5.0, self.disk, memory=memory)

    async def passes(self, seconds: int) -> None:
        """Let so many seconds pass, one by one, each with all that happens in it."""
        for _ in range(seconds):
            before = self.metrics.scorecard
            self._clock.jump(1.0)
            await settled(lambda before=before: self.metrics.scorecard is not before)


async def settled(condition: Callable[[], object]) -> None:
    """Wait for a helper thread to have done its work; virtual time would not see that it hangs."""
    for _ in range(1_000_000):
        if condition():
            return
        await trio.lowlevel.checkpoint()
    raise AssertionError("it never happened")


async def test_a_line_is_written_each_interval_and_a_last_one_at_the_end(
    mock_clock: MockClock,
) -> None:
    """Stopped two seconds after the second line, it tells of these two seconds."""
    keeper = Keeper(mock_clock)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.task.run)
        await trio.testing.wait_all_tasks_blocked()
        for n in range(1, 3):
            await keeper.passes(5)
            await settled(lambda n=n: len(keeper.disk.rows) == n)
        await keeper.passes(2)
        nursery.cancel_scope.cancel()
    spans = [row[COLUMNS.index("interval_s")] for row in keeper.disk.rows]
    assert spans == pytest.approx([5.0, 5.0, 2.0])


async def test_a_full_disk_is_told_of_once_and_the_task_goes_on(mock_clock: MockClock) -> None:
    """Lines are lost while it is full and come again when it is not."""
    keeper = Keeper(mock_clock)
    with structlog.testing.capture_logs() as logged:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.task.run)
            await trio.testing.wait_all_tasks_blocked()
            keeper.disk.full = True
            await keeper.passes(11)
            keeper.disk.full = False
            await keeper.passes(5)
            await settled(lambda: keeper.disk.rows)
            nursery.cancel_scope.cancel()
    assert [(line["log_level"], line["why"]) for line in logged] == [
        ("warning", "No space left on device")
    ]
    assert len(keeper.disk.rows) == 2


async def test_each_loaded_model_has_a_scorecard(mock_clock: MockClock) -> None:
    """Of its own figures, for as long as it is loaded; lines are about the default one."""
    keeper = Keeper(mock_clock)
    other = Metrics(clock=trio.current_time)
    loaded = [keeper.metrics, other]
    keeper.task = ScoreKeeper(keeper.metrics, 5.0, keeper.disk, every=lambda: loaded)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.task.run)
        await trio.testing.wait_all_tasks_blocked()
        await keeper.passes(2)
        assert other.scorecard is not None
        loaded.remove(other)
        await keeper.passes(1)
        assert other.scorecard is None
        nursery.cancel_scope.cancel()
    assert len(keeper.disk.rows) == 1


async def test_without_a_file_the_metrics_have_a_scorecard_all_the_same(
    mock_clock: MockClock,
) -> None:
    """It costs nothing to ask for one later."""
    keeper = Keeper(mock_clock)
    keeper.task = ScoreKeeper(keeper.metrics, 5.0, None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.task.run)
        await trio.testing.wait_all_tasks_blocked()
        await keeper.passes(1)
        nursery.cancel_scope.cancel()
    assert keeper.metrics.scorecard is not None
