"""`uma-trio simulate`: what it prints, what it refuses, and what it exits with."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from uma_trio.cli.main import main


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


def test_answers_are_guessed_at_with_the_given_probability(run: Any) -> None:
    """And not at all without one."""
    for drafts, guessed in (("--drafts 0.7", True), ("", False)):
        words = f"--workload storm --policy deadline --seconds 3 --seeds 1 --json {drafts}"
        status, out, _ = run(words)
        assert status == 0
        assert (json.loads(out.splitlines()[-1])["draft_accepted_ratio"] is not None) == guessed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--drafts many", "many"),
        ("--drafts 0", "not 0"),
        ("--policy luck", "no policy is called 'luck'"),
        ("--workload lunch", "no workload is called 'lunch'"),
        ("--machine abacus", "no machine is called 'abacus'"),
        ("--noise 2", "not 2"),
        ("--cap 0.5", "above 1"),
        ("--seconds 0", "at least 1"),
        ("--seeds 0", "at least 1"),
        ("--cost nowhere.json", "no cost model"),
        ("--cost nowhere.json --machine h200", "give one of them"),
        ("--luck", "--luck"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Any, words: str, said: str) -> None:
    """In one sentence that says what would; status 2."""
    status, out, err = run(words)
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    "words", ["simulate --workload storm", "replay ticks.jsonl", "simulate", "cluster status"]
)
def test_without_its_distribution_a_verb_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """Who has uma-trio alone is told where the command is, whatever its arguments."""
    verb = words.split()[0]
    extra = "cluster" if verb == "cluster" else "sim"
    monkeypatch.delitem(sys.modules, f"uma_trio_{extra}.commands.{verb}", raising=False)
    monkeypatch.delitem(sys.modules, f"uma_trio_{extra}.commands", raising=False)
    monkeypatch.setitem(sys.modules, f"uma_trio_{extra}", None)
    monkeypatch.setattr(sys, "argv", ["uma-trio", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"{verb} is not installed: pip install 'uma-trio[{extra}]'." in capsys.readouterr().err
