"""The driver and its scenes: their arithmetic, and the whole way of each on a fake model."""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benches import beside, chart, contest, driver, report, servers
from benches.clients import NotServed
from benches.contest import Row, System
from benches.driver import Comparison, Table
from benches.scenes import micro
from uma_trio.policy.deadline import deadline


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a benchmark writes."""
    monkeypatch.setattr(report, "OUT", tmp_path)
    return tmp_path


def system(family: str, knob: str = "", **figures: float) -> System:
    """A system that measures the same each time."""
    return System(family, knob, lambda _seed: dict(figures))


def failing(_seed: str) -> Row:
    """A server that refuses."""
    raise NotServed("no slot")


EFFORT = contest.Effort(repetitions=2, seconds=0.0, minutes=1.0)


def test_repetitions_are_interleaved_and_share_their_prompts() -> None:
    """Every system of a repetition is given the same seed, and no two repetitions the same."""
    asked: list[tuple[str, str]] = []

    def measure(name: str) -> Callable[[str], Row]:
        return lambda seed: asked.append((name, seed)) or {}  # type: ignore[func-returns-value]

    compared = [System(name, "", measure(name)) for name in "abc"]
    contest.run(compared, EFFORT, seed=7)
    names, seeds = zip(*asked, strict=True)
    assert names[:3] == names[:2:-1]
    assert seeds == ("7/0",) * 3 + ("7/1",) * 3


def test_what_fails_is_a_row_and_not_the_end() -> None:
    """A losing run is told; the others are measured all the same, and the status says it."""
    compared = [System("broken", "", failing), system("sound", x=2.0)]
    rows = contest.run(compared, EFFORT, seed=1)
    assert [row.get("error") for row in rows if row["family"] == "broken"] == ["no slot"] * 2
    text = contest.Medians(compared, rows).table((("x", "x", 1),))
    assert text is not None
    assert [line.split()[1] for line in text.splitlines()[2:]] == ["broken", "sound"]


def driven(comparison: Comparison) -> int:
    """Run a comparison as a scene and return the exit status."""
    given = driver.load()["agents"].parser().parse_args(["--dry-run", "--seed", "1"])
    return driver.compare("x", lambda _given, _here: comparison, given)


def test_a_scene_prints_a_table_and_writes_every_measurement(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of the CSV says who was measured in which case; failures are in the exit status."""
    table = Table("Times", (("x", "x", 1),))
    sound, broken = system("sound", "-b 4", x=2.0), System("broken", "", failing)
    assert driven(Comparison([sound], 0, [table], verdicts=lambda _medians: ["fine"])) == 0
    said = capsys.readouterr().out
    assert "Times" in said
    assert "| sound -b 4 |   1 | 2.0 |" in said
    assert "fine" in said
    (path,) = out.glob("x-*.csv")
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    (row,) = csv.DictReader(lines)
    assert (row["family"], row["knob"], row["case"], row["x"]) == ("sound", "-b 4", "", "2")
    assert driven(Comparison([sound, broken], 0, [table])) == 1


def test_figures_are_written_before_anything_is_drawn(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured for an hour is not lost by a picture that fails."""

    def fail(*_: object) -> list[Path]:
        assert list(out.glob("x-*.csv"))
        raise ValueError("no picture")

    monkeypatch.setattr(chart, "bars", fail)
    with pytest.raises(ValueError, match="no picture"):
        driven(Comparison([system("a", x=1.0)], 0, [], bars={"x": "x"}))


def test_a_case_has_medians_of_its_own() -> None:
    """One measurement may have several, and none is mixed with another."""

    def measure(_seed: str) -> list[Row]:
        return [{"case": f"ctx={n}", "tps": 10.0 * n} for n in (1, 2)]

    compared = [System("a", "b", measure)]
    medians = contest.Medians(compared, contest.run(compared, EFFORT, seed=1))
    assert [(s.case, medians(s, "tps")) for s in medians.systems] == [
        ("ctx=1", 10.0),
        ("ctx=2", 20),
    ]
    assert medians.by_case("tps") == {"a b": [(1.0, 10.0), (2.0, 20.0)]}


def test_the_command_lists_its_scenes(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with the first sentence of what it says of itself; an unknown one is refused."""
    assert driver.main(["list"]) == 0
    said = capsys.readouterr().out
    assert {"throughput", "storm", "agents", "micro"} <= {
        line.split(" ")[0] for line in said.split("\n")
    }
    assert driver.main(["lunch"]) == 2
    assert "no scene 'lunch'" in capsys.readouterr().err


def test_what_takes_too_long_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A run ends when it said it would, and says what is missing."""
    rows = contest.run([system("a")], contest.Effort(3, seconds=120.0, minutes=1.0), seed=1)
    assert rows == []
    assert "3 of 3 measurements were left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "at_most", "word"), [(1.2, True, "met"), (1.2, False, "MISSED"), (None, True, "not")]
)
def test_a_target_is_a_bound_above_or_below(value: float, at_most: bool, word: str) -> None:
    """A slowdown must stay below its target, a rate above it."""
    assert word in contest.verdict("x", value, 1.5, at_most=at_most)


def test_all_programs_spin_alike_and_hear_nothing_of_our_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenMP's threads wait in the same way in every server; a user's own setting wins."""
    monkeypatch.setenv("UMA_POLICY", "deadline")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    env = servers.environment()
    assert env["GOMP_SPINCOUNT"] == "1000"
    assert "UMA_POLICY" not in env
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert servers.environment()["GOMP_SPINCOUNT"] == "5"


def test_charts_are_written_in_both_formats(out: Path) -> None:
    """A picture for pages and one that scales, of each kind; a panel without data is left out."""
    pytest.importorskip("matplotlib")
    files = chart.lines("l", {"x": {"a": [(1, 2.0), (4, 3.0)]}}, ("n", "t/s"), "machine")
    files += chart.bars("b", {"x": {"a": 1.0}}, {"x": 1.5}, "")
    assert [file.suffix for file in files] == [".png", ".svg"] * 2
    assert all(file.parent == out and file.stat().st_size > 1000 for file in files)
    assert chart.bars("none", {"x": {}}, {}, "") == []
    assert chart.lines("none", {"x": {"a": []}}, ("n", "t/s"), "") == []


def test_without_matplotlib_there_is_a_word_instead_of_a_chart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A measurement is not lost because nothing can be drawn."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert chart.bars("b", {"x": {"a": 1.0}}, {}, "") == []
    assert "matplotlib is not installed" in capsys.readouterr().err


DRY = {
    "storm": "--caps 1.2 --no-baseline",
    "throughput": "--k 2 --gen-tokens 12",
    "speculation": "--n 1 2",
    "overhead": "--k 1 --gen-tokens 8",
    "agents": "--agents 2 --person",
    "bursts": "--sizes 2 --answer 8",
    "attacks": "--attacks multipleOf questions",
}


@pytest.mark.daemon
@pytest.mark.parametrize("name", sorted({*driver.load()} - {"micro"}))
def test_each_scene_goes_the_whole_way_without_a_model(
    name: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command starts the daemon, measures, prints a table and writes its CSV."""
    assert driver.main([name, "--dry-run", "--seed", "1", *shlex.split(DRY.get(name, ""))]) == 0
    assert "uma-trio" in capsys.readouterr().out
    (path,) = out.glob(f"{name}-2*.csv")
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert rows
    assert {"repetition", "case", "family", "knob"} <= rows[0].keys()


def test_the_longest_lag_is_exact_or_the_edge_of_its_step() -> None:
    """A new longest one is told as it is; otherwise the first step that has all that came."""

    def snapshot(longest: float, *counts: int) -> dict[str, object]:
        steps = dict(zip(("1", "5.5", "100"), counts, strict=True))
        return {"loop_lag_ms": {"max": longest, "buckets": steps}}

    before = snapshot(60.0, 10, 11, 12)
    assert beside.longest_lag(before, snapshot(71.5, 20, 21, 23)) == 71.5
    assert beside.longest_lag(before, snapshot(60.0, 20, 22, 23)) == 5.5
    assert beside.longest_lag(before, snapshot(60.0, 20, 21, 23)) == 60.0
    assert beside.longest_lag(before, before) == 0.0


def test_planning_counts_the_round_that_was_disturbed_least() -> None:
    """Everything that disturbs only adds, so the least median is the policy's own."""
    rounds = iter([180.0, 140.0, 160.0])
    found = micro.best(3, lambda: {"what": "deadline, mixed, 16 sequences", "us": next(rounds)})
    assert micro.verdict([found], "mixed").endswith("140.00 (target at most 150: met)")
    assert micro.verdict([found], "readers").endswith("not measured")


def test_planning_is_measured_without_any_server(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The simulated engine is enough, for each number of sequences."""
    words = "micro planning --n 1 4 --ticks 20 --rounds 1 --policies deadline"
    assert driver.main(words.split()) == 0
    said = capsys.readouterr().out
    assert (said.count("mixed, 1 "), said.count("readers, 4 ")) == (1, 1)
    assert list(out.glob("micro-*.csv"))


def test_the_crowd_whose_ticks_are_timed_is_as_large_as_it_says() -> None:
    """Planning costs by the sequences, so there must be that many."""
    for crowd in micro.TARGETS_US:
        world = micro.crowd_of(deadline, "q4_0", 16, crowd)
        assert sum(request.end is None for request in world.requests) == 16


@pytest.mark.parametrize("name", driver.load())
def test_help_says_what_is_measured_and_how_long_it_takes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has to start a scene to learn what it is."""
    with pytest.raises(SystemExit) as ended:
        driver.main([name, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"python -m benches {name}" in said
    assert "minute" in said or "--seconds" in said


def test_a_setting_of_llama_server_that_names_its_slots_is_used_as_it_is() -> None:
    """Without `-np` each client gets a slot and all share one KV cache."""
    assert servers.peer_flags("-b 64", 3) == ("--parallel", "3", "--kv-unified", "-b", "64")
    assert servers.peer_flags("-kvu -b 4 -np 4", 8) == ("-kvu", "-b", "4", "-np", "4")
    assert servers.peer_flags("default", 8) == ()
