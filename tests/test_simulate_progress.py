"""The line or bar that says how far a long command is."""

from __future__ import annotations

import io
import sys

import pytest

from uma_trio.cli import serve
from uma_trio_sim.commands.progress import RunsDone
from uma_trio_sim.compare import cases, compare
from uma_trio_sim.machine import built_in
from uma_trio_sim.workload import WORKLOADS


class Screen(io.StringIO):
    """A terminal, or something else."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        """Whether it is one."""
        return self.terminal


def _progress(
    monkeypatch: pytest.MonkeyPatch, step_s: float, *, terminal: bool = True
) -> tuple[RunsDone, Screen]:
    """Return the progress of four runs that take `step_s` each, and where it is shown."""
    screen = Screen(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    now = iter(step_s * step for step in range(9))
    return RunsDone(4, "run", lambda: next(now)), screen


def test_a_person_sees_how_far_it_is_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean of those that are done."""
    progress, screen = _progress(monkeypatch, 10.0)
    progress.one_more()
    assert screen.getvalue().endswith("1 of 4 runs, about 30.0 s left")
    progress.one_more()
    assert screen.getvalue().endswith("2 of 4 runs, about 20.0 s left")
    progress.hide()
    assert screen.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("step_s", "terminal"), [(10.0, False), (0.1, True)])
def test_a_file_and_a_quick_command_get_no_line(
    monkeypatch: pytest.MonkeyPatch, step_s: float, terminal: bool
) -> None:
    """Nobody reads it there, or could."""
    progress, screen = _progress(monkeypatch, step_s, terminal=terminal)
    for _ in range(4):
        progress.one_more()
    progress.hide()
    assert screen.getvalue() == ""


def test_each_run_of_a_comparison_is_counted() -> None:
    """As many as cases times seeds, or the estimate would be wrong."""
    counted: list[None] = []
    compared = cases(["baseline"], [1.2])
    rows = compare(
        WORKLOADS["desk"],
        compared,
        built_in("q4_0"),
        seconds=1.0,
        seeds=range(2),
        each=lambda: counted.append(None),
    )
    assert len(list(rows)) * 2 == len(counted) == len(compared) * 2


def test_measuring_has_a_bar_of_its_own_behind_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person sees one after the other, and none is left."""
    screen = Screen(terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(serve, "_SLOW_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    progress = serve.LoadProgress()
    for show in (progress.show, progress.measuring):
        show(0.0)
        show(1.0)
    progress.stop()
    shown = screen.getvalue()
    assert 0 <= shown.index("Loading the model") < shown.index("Measuring this machine")
    assert shown.rindex("Loading the model") < shown.index("Measuring this machine")
    assert shown.endswith("\x1b[2K")


def test_a_file_has_one_line_of_the_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is told how far that is."""
    screen = Screen(terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    progress = serve.LoadProgress()
    for share in (0.0, 0.5, 1.0):
        progress.measuring(share)
    progress.stop()
    assert screen.getvalue() == "Measuring this machine.\n"
