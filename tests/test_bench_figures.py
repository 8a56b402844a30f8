"""The charts of the documents: one command draws them, the same each time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benches import driver
from benches.scenes import figures
from uma_trio_sim.latency import median
from uma_trio_sim.machine import built_in, gaussian

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES = ["pareto.png", "pareto.svg", "staircase.png", "staircase.svg"]


def test_one_command_draws_the_charts_of_the_documents(tmp_path: Path) -> None:
    """Under their plain names, in both formats."""
    pytest.importorskip("matplotlib")
    assert driver.main(["figures", "--dry-run", "--into", str(tmp_path / "new")]) == 0
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == NAMES


def test_the_same_figures_give_the_same_files(tmp_path: Path) -> None:
    """No date, no chance: who draws them again has nothing to commit."""
    pytest.importorskip("matplotlib")
    first, again = figures.staircases(tmp_path / "1"), figures.staircases(tmp_path / "2")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in again]


def test_without_matplotlib_the_tables_are_printed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chart is not what the figures are for."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert driver.main(["figures", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"deadline +\| +1\.2 ", shown.out)
    assert "every 5 s" in shown.out
    assert "no chart" in shown.err


def test_a_looser_cap_costs_the_reader_more_and_gives_the_load_more() -> None:
    """The knob does what the chart says it does."""
    profile = built_in("q4_0")
    tight, loose = (figures.storm(profile, "deadline", 20.0, cap=cap) for cap in (1.5, 5.0))
    assert tight.p95_x <= 1.5001 < loose.p95_x <= 5.0001
    assert tight.prompts_s < loose.prompts_s


def test_a_run_that_would_outlast_its_reader_is_refused() -> None:
    """Afterwards nobody is protected, and the load would get the whole machine."""
    with pytest.raises(SystemExit, match="--seconds is from 1 to 120, not 300"):
        driver.main(["figures", "--seconds", "300"])


def test_a_question_beside_a_young_stream_takes_longer_and_makes_more_gaps_late() -> None:
    """Few long gaps instead of many of twice solo, once a stream has found its pace."""
    profile = built_in("q4_0")
    young, older = (figures.visits(profile, [at], 12.0) for at in figures.ONCE_S)
    assert young.startup_x <= 2.0 < older.worst_x <= 4.0
    assert young.late > older.late
    assert young.ttft_s is not None
    assert older.ttft_s is not None
    assert young.ttft_s > older.ttft_s


def test_each_picture_that_the_documents_show_is_there_and_small() -> None:
    """An SVG that a page can carry, with nothing of the machine that drew it."""
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    shown = set(re.findall(r"\]\((images/[^)]+)\)", pages))
    assert {f"images/{name}" for name in NAMES if name.endswith(".svg")} <= shown
    for name in shown:
        text = (DOCS / name).read_text(encoding="utf-8")
        assert len(text) < 100_000
        assert not re.search(r"/(home|root|work|tmp)/", text)


def test_settings_are_compared_on_two_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a reading pace a stream is read faster, and others get less, than by default."""
    assert driver.main(["figures", "--dry-run", "--settings"]) == 0
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| --reading-pace 80 ")
    ]
    assert len(lines) == 2
    profile = built_in("q4_0-slow", gaussian(0.02))
    (default, more), (quick, less) = (
        figures.setting(profile, figures.SETTINGS[name], 20.0)
        for name in ("the defaults", "--reading-pace 0")
    )
    assert median(quick.itl) < 0.6 * median(default.itl)
    assert less < more
