"""What the listing verbs show in a narrow window, in a wide one and in a pipe."""

from __future__ import annotations

import io
import os
from typing import Any

import msgspec
import pytest
from rich.console import Console

from uma_protocol import SessionInfo
from uma_trio.cli import demo, doctor, metrics, output, ps
from uma_trio.cli.doctor import Finding, Report
from uma_trio.cli.output import console
from uma_trio.observe.metrics import Metrics
from uma_trio_sim.commands import simulate

FIGURES: dict[str, Any] = {
    "decode_ms_last": 3.927,
    "decode_ms_avg": 8.5,
    "prefill_guard_active": 0,
    "requests_total": {"stop": 39, "length": 50, "cancelled": 0, "error": 0},
}
SESSION = SessionInfo(
    request=1234,
    id="r-1",
    app="a label of some length",
    pid=None,
    uid=0,
    state="prefill",
    lane="interactive",
    prompt_tokens=16_800,
    computed_tokens=16_000,
    completion_tokens=0,
    tokens_per_s=1234.5,
    age_ms=98_000.0,
)


class Window:
    """A terminal of a known width that remembers what was printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
        self._file = io.StringIO()
        screen = Console(
            file=self._file, width=width, force_terminal=True, color_system=None, highlight=False
        )
        for module in (demo, doctor, metrics, output, ps, simulate):
            monkeypatch.setattr(module, "console", lambda: screen)

    def lines(self) -> list[str]:
        """Return what was printed, without trailing blanks."""
        return [line.rstrip() for line in self._file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_metrics_are_never_cut(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Names and figures are whole at any width; what they mean takes the room that is left."""
    window = Window(monkeypatch, width)
    metrics._show(FIGURES, clear=False)
    *rows, last = window.lines()
    whole = " ".join([*rows, last])
    for name in FIGURES:
        assert name in whole
    assert "stop 39  length 50  cancelled 0  error 0" in whole
    assert all(len(row) <= width for row in rows)
    assert ("uma-trio help metrics" in last) == (width == 80)
    assert ("The last call." in whole) == (width == 120)


def test_a_unit_that_says_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch is shown as 0 or 1, not as "0 0 or 1"."""
    window = Window(monkeypatch, 120)
    metrics._show({"prefill_guard_active": 0}, clear=False)
    assert window.lines()[0].split()[:2] == ["prefill_guard_active", "0"]
    assert "0 or 1" not in window.lines()[0]


def test_a_scorecard_is_shown_column_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its unit and its own explanation, not as one long line."""
    window = Window(monkeypatch, 120)
    card = {"tokens_per_s": 81.25, "interactive_p95_ms": None}
    metrics._show({"sessions": 1, "scorecard": card}, clear=False)
    _, rate, gap = window.lines()
    assert rate.split()[:3] == ["scorecard.tokens_per_s", "81.25", "Tokens"]
    assert "prompts included" in rate
    assert gap.split()[:2] == ["scorecard.interactive_p95_ms", "-"]


def test_a_histogram_without_a_value_is_a_dash() -> None:
    """A unit behind three dashes says nothing."""
    assert metrics._text(Metrics().snapshot()["ttft_ms"], "ms") == "-"
    assert metrics._text({"p50": None, "p95": None, "p99": None}, "ms") == "-"
    assert metrics._text({"p50": 1.5, "p95": None, "p99": None}, "ms") == "p50 1.5  p95 -  p99 - ms"


def test_a_pane_breaks_between_words_and_shows_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A story is read while it comes; only what is longer than a line is broken."""
    window = Window(monkeypatch, 40)
    pane = demo.Pane("client 1", "Tell", text="gone " * 200 + "one two three\n\nfour\n" + "x" * 20)
    out = demo.console()
    out.print(demo._grid([pane] * 4, out))
    shown = " ".join(window.lines())
    assert "client 1" in shown
    assert "four" in shown
    assert "x" * 16 in shown


def test_ps_cuts_no_figure_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long label is cut before a state, a lane or a number loses a character."""
    window = Window(monkeypatch, 80)
    ps._table((SESSION,), several_models=False)
    heading, row = window.lines()
    shown = f"{heading} {row}"
    for word in ("1234", "prefill", "interactive", "16000/16800", "1234.5", "98.0 s", "TOKENS/S"):
        assert word in shown
    assert row.count("…") == 1
    assert "PROCESS" not in heading
    assert max(len(heading), len(row)) <= 80


def test_doctor_breaks_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding goes on under its beginning, and its fix too."""
    window = Window(monkeypatch, 40)
    finding = Finding("model", "blocks", "word " * 12, "mend " * 12)
    doctor._show(Report((), False, (finding,)), {})
    first, *more = window.lines()
    assert first.startswith("BLOCKS  model: word")
    assert all(len(line) <= 40 for line in (first, *more[:-1]))
    assert all(line.startswith("        ") for line in more[:-1])
    assert more[-1] == "1 of these must be fixed before the daemon can run."


def test_doctor_says_the_line_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flags it was given, or, where a daemon runs, a question to that."""
    window = Window(monkeypatch, 120)
    doctor._show(Report((), False, ()), {"model": "my model.gguf", "n_ctx": "512", "config": None})
    doctor._show(Report((), True, ()), {})
    doctor._show(Report((), True, ()), {"socket": "/run/my socket"})
    assert window.lines()[0] == (
        "The daemon can run: uma-trio serve --model 'my model.gguf' --n-ctx 512"
    )
    question = '"Tell me a story about a fox and a lantern"'
    assert window.lines()[1] == f"A daemon is running: uma-trio run {question}"
    assert window.lines()[-1].endswith(f"uma-trio run --socket '/run/my socket' {question}")


def test_a_pipe_has_no_edge(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not a terminal gets every line whole."""
    console().print("word " * 100)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("width", [80, 120])
def test_ps_shows_a_usual_label_whole(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """At 80 columns the name of the process makes room for it; its id stays."""
    window = Window(monkeypatch, width)
    usual = {"app": "uma-trio", "prompt_tokens": 120, "computed_tokens": 120, "pid": os.getpid()}
    ps._table((msgspec.structs.replace(SESSION, **usual),), several_models=False)
    heading, row = window.lines()
    assert "uma-trio" in row
    assert str(os.getpid()) in row
    assert ("PROCESS" in heading) == (width == 120)
    assert "…" not in row


@pytest.mark.parametrize(("width", "tables"), [(40, 4), (80, 2), (92, 1)])
def test_simulate_cuts_no_figure(monkeypatch: pytest.MonkeyPatch, width: int, tables: int) -> None:
    """Columns without room go into a table below, which begins with the case again."""
    window = Window(monkeypatch, width)
    figures = [f"{1000 + i}.25" for i in range(8)]
    simulate._print(("CASE", *(f"FIGURE {i}" for i in range(8))), [["deadline 1.2", *figures]])
    lines = window.lines()
    assert " ".join(lines[1::2]).replace("deadline 1.2", "").split() == figures
    assert [line.split()[0] for line in lines] == ["CASE", "deadline"] * tables
    assert all(len(line) <= width for line in lines)
