"""`uma-trio simulate`: what it prints, what it refuses, and what it exits with."""

from __future__ import annotations

import json
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest

from uma_trio.cli.main import main
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.records import TickRecord
from uma_trio.engine.trace import traced
from uma_trio.policy.deadline import deadline
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import Footer, Header, TracedTick, encode
from uma_trio.policy.state import SchedulerState
from uma_trio_sim.guesses import Guesses
from uma_trio_sim.simulation import Simulation
from uma_trio_sim.trace import read, requests_of
from uma_trio_sim.validate import Compared, compare
from uma_trio_sim.workload import WORKLOADS, play, sessions


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command and returns its status, output and complaints."""

    def command(words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["uma-trio", "simulate", *words.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(str(ended.value.code)), said.out, said.err

    return command


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace of a storm, written as a daemon does."""
    ticks: list[TracedTick] = []

    def keep(state: SchedulerState, plan: Plan, record: TickRecord) -> None:
        ticks.append(traced(state, plan, record))

    # A seed for which both runs compute as many guesses: that is chance, and tokens/s follow it.
    world = Simulation(
        deadline, seed=9, recorder=Recorder(keep), guesses=lambda _: Guesses.always(0.5)
    )
    play(world, sessions(WORKLOADS["storm"], 1, 10.0))
    world.run(10.0)
    path = tmp_path / "run.trace"
    lines = (Header("0.1.0", "fake", "deadline"), *ticks, Footer(len(ticks), 0))
    path.write_bytes(b"".join(map(encode, lines)))
    return path


def test_policies_are_compared_in_a_table(run: Any) -> None:
    """A line for each case; the contract reads better than the baseline."""
    words = "--workload storm --policy baseline deadline --seconds 5 --seeds 1 --machine h200"
    status, out, _ = run(words)
    assert status == 0
    assert "1 run of 5 s, seeds from 0" in out
    lines = [line.split() for line in out.splitlines()]
    p95 = {line[0]: line for line in lines if line and line[0] in ("baseline", "deadline")}
    assert float(p95["deadline"][3]) < float(p95["baseline"][2])


def test_json_has_a_line_for_each_case(run: Any) -> None:
    """With the workload, the machine and every figure."""
    words = "--workload storm paste --policy deadline --cap 1.5 3 --seconds 2 --seeds 1 --json"
    status, out, _ = run(words)
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [row["workload"] for row in rows] == ["storm"] * 3 + ["paste"] * 3
    assert [row["case"] for row in rows[:3]] == ["no load", "deadline 1.5", "deadline 3"]
    assert {"machine", "itl_p95_x", "load_tokens_s", "jain", "ticks"} <= rows[0].keys()


def test_a_trace_is_held_against_its_simulation(run: Any, trace: Path) -> None:
    """Measured beside predicted, with how far each is off; 0 if all are within their bounds."""
    status, out, _ = run(f"--trace {trace} --validate --seeds 1")
    assert status == 0
    assert "policy deadline" in out
    assert "ITL p95, ms" in out
    assert " NO" not in out
    recording = read(trace)
    assert f"{len(requests_of(recording.ticks))} requests" in out
    status, out, _ = run(f"--trace {trace} --validate --seeds 1 --json")
    assert [json.loads(line)["within"] for line in out.splitlines()].count(True) == 3


def test_a_figure_that_was_not_measured_has_no_share(
    run: Any, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the table nor in JSON, which knows no infinity."""
    guess = Compared("accepted", 0.0, 0.5, None)
    wanted = [Compared(one.name, 0.0, 0.5, None) for one in compare(read(trace), [1])]
    monkeypatch.setattr("uma_trio_sim.validate.compare", lambda *_, **__: wanted)
    assert guess.off == inf
    _, out, _ = run(f"--trace {trace} --validate --seeds 1")
    assert "inf" not in out
    _, out, _ = run(f"--trace {trace} --validate --seeds 1 --json")
    assert {json.loads(line, parse_constant=str)["off"] for line in out.splitlines()} == {None}


def test_the_machine_of_a_trace_can_be_simulated(run: Any, trace: Path) -> None:
    """With its own noise or another."""
    words = f"--trace {trace} --workload storm --policy deadline --seconds 2 --seeds 1 --noise"
    for noise in ("trace", "none"):
        status, out, _ = run(f"{words} {noise}")
        assert status == 0
        assert "a trace of" in out


@pytest.mark.parametrize(
    ("drafts", "there"), [("", True), ("--drafts trace", True), ("--drafts none", False)]
)
def test_answers_can_be_guessed_at_as_those_of_a_trace(
    run: Any, trace: Path, drafts: str, there: bool
) -> None:
    """They are unless it is said otherwise; without a trace by a chance, or not at all."""
    words = "--workload storm --policy deadline --seconds 3 --seeds 1 --json"
    status, out, _ = run(f"--trace {trace} {drafts} {words}")
    found = json.loads(out.splitlines()[-1])["draft_accepted_ratio"]
    assert status == 0
    assert (found is not None) == there
    chance = "--drafts 0.7" if there else ""
    _, out, _ = run(f"{chance} {words}")
    row = json.loads(out.splitlines()[-1])
    assert (row["draft_accepted_ratio"] is not None) == there


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--drafts trace", "name it by --trace"),
        ("--drafts many", "not many"),
        ("--drafts 0", "not 0"),
        ("--policy luck", "no policy is called 'luck'"),
        ("--workload lunch", "no workload is called 'lunch'"),
        ("--machine abacus", "no machine is called 'abacus'"),
        ("--noise trace", "name it by --trace"),
        ("--noise loud", "not loud"),
        ("--cap 0.5", "above 1"),
        ("--seconds 0", "at least 1"),
        ("--seeds 0", "at least 1"),
        ("--cost nowhere.json", "no cost model"),
        ("--trace nowhere.trace", "No such file"),
        ("--trace nowhere.trace --machine h200", "give one of them"),
        ("--validate", "name it by --trace"),
        ("--luck", "--luck"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Any, words: str, said: str) -> None:
    """In one sentence that says what would; status 2."""
    status, out, err = run(words)
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"hello\n", "line 1: it is not JSON"), (b"", "does not begin")],
)
def test_what_is_no_trace_is_refused(run: Any, tmp_path: Path, content: bytes, said: str) -> None:
    """In one sentence, with the file."""
    path = tmp_path / "run.trace"
    path.write_bytes(content)
    status, _, err = run(f"--trace {path} --validate")
    assert status == 2
    assert str(path) in err
    assert said in err


@pytest.mark.parametrize("words", ["simulate --workload storm", "replay ticks.jsonl", "simulate"])
def test_without_its_distribution_a_verb_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """Who has uma-trio alone is told where the command is, whatever its arguments."""
    verb = words.split()[0]
    monkeypatch.delitem(sys.modules, f"uma_trio_sim.commands.{verb}", raising=False)
    monkeypatch.delitem(sys.modules, "uma_trio_sim.commands", raising=False)
    monkeypatch.setitem(sys.modules, "uma_trio_sim", None)
    monkeypatch.setattr(sys, "argv", ["uma-trio", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"{verb} is not installed: pip install 'uma-trio[sim]'." in capsys.readouterr().err


def test_help_and_completion_do_without_the_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both list every verb."""
    monkeypatch.delitem(sys.modules, "uma_trio_sim.commands.simulate", raising=False)
    monkeypatch.delitem(sys.modules, "uma_trio_sim.commands", raising=False)
    monkeypatch.setitem(sys.modules, "uma_trio_sim", None)
    for words in (["--help"], ["completion", "bash"]):
        monkeypatch.setattr(sys, "argv", ["uma-trio", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert "simulate" in capsys.readouterr().out
