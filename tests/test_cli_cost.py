"""`doctor --cost`: the staircase of this machine, measured once and told in full."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from uma_trio.backend.base import Backend, ModelError
from uma_trio.cli.cost import (
    MeasuredSize,
    decoders_ms,
    measured_sizes,
    show_cost,
    summary,
    table_of,
)
from uma_trio.cli.doctor import doctor
from uma_trio.config.options import Config
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.costing.calibrate import Measured
from uma_trio_sim.fake import FakeBackend

STAIRS = CostModel(Staircase((1, 2, 3, 4, 8, 64), (0.008, 0.012, 0.016, 0.011, 0.019, 0.094)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what is measured out of the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class Loader:
    """Hands out fake backends and remembers them."""

    def __init__(self) -> None:
        self.loaded: list[FakeBackend] = []

    def __call__(self, config: Config, _progress: object) -> Backend:
        """Load one."""
        self.loaded.append(FakeBackend(n_batch=64, n_slots=config.parallel + 1))
        return self.loaded[-1]


def told(load: Loader, capsys: pytest.CaptureFixture[str], *, fresh: bool = False) -> dict:  # type: ignore[type-arg]
    """Return what the verb says as JSON."""
    assert show_cost(Config(), fresh=fresh, as_json=True, load=load) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_step_down_and_the_plateau_are_pointed_out() -> None:
    """Where more tokens cost less than fewer is what a reader must not miss."""
    notes = {step.tokens: step.note for step in measured_sizes(STAIRS, 64)}
    assert notes == {1: "", 2: "", 3: "", 4: "less than 3", 8: "", 64: "plateau"}


def test_a_step_is_told_per_token_and_per_second() -> None:
    """Eight tokens in 20 ms are 2.5 ms each and 400 a second."""
    step = MeasuredSize(8, 20.0)
    assert (step.ms_per_token, step.per_s) == (2.5, 400.0)


def test_decoders_are_counted_with_their_rows() -> None:
    """Each stream asks for logits, which has a cost of its own."""
    rows = CostModel(STAIRS.computing, output=Staircase((1, 4), (0.0, 0.003)))
    assert decoders_ms(rows, 4)[4] == pytest.approx(14.0)


def test_the_summary_says_that_four_are_quicker_than_three(tmp_path: Path) -> None:
    """The stair is said in words, with both figures."""
    text = " ".join(summary(Measured(STAIRS, recalled=True, file=tmp_path), 64))
    assert "Four decoders (11 ms) cost less than three (16 ms)" in text
    assert "chunks of 64" in text
    assert "Recalled" in text


def test_the_summary_names_both_chunks(tmp_path: Path) -> None:
    """The smallest that is about as fast as any for the background, the fastest for a person."""
    flat = CostModel(Staircase((32, 64, 128), (0.0486, 0.0935, 0.186)))
    text = " ".join(summary(Measured(flat, recalled=True, file=tmp_path), 128))
    assert "background prompts go in chunks of 32:" in text
    assert "A person's prompt then goes in chunks of 128," in text


def test_what_was_measured_is_recalled_and_measured_anew_on_demand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second look costs no time, unless it is told to."""
    load = Loader()
    found = [told(load, capsys)["recalled"], told(load, capsys)["recalled"]]
    found.append(told(load, capsys, fresh=True)["recalled"])
    assert found == [False, True, False]


def test_the_model_is_loaded_once_and_closed(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory for two models may not be there."""
    load = Loader()
    told(load, capsys)
    assert [backend.closed for backend in load.loaded] == [True]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_window(width: int) -> None:
    """The bars give way; no figure and no note is cut or broken."""
    out = Console(file=io.StringIO(), width=width)
    found = measured_sizes(STAIRS, 64)
    out.print(table_of(found))
    heading, *rows = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert heading.split() == ["tokens", "ms", "ms/token", "tokens/s"]
    assert len(rows) == len(found)
    for step, row in zip(found, rows, strict=True):
        assert row.rstrip().endswith(step.note)
        assert row.split()[0] == str(step.tokens)
        assert len(row) <= width
    assert max(row.count("█") for row in rows) >= min(30, width - 50)


def test_each_number_of_slots_has_its_own_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--parallel` here is the daemon's: what is told is what that daemon would use."""
    load = Loader()
    monkeypatch.setattr("uma_trio.app.build.load_backend", load)
    files = []
    for parallel in ("2", "3", "2"):
        assert doctor(cost=True, json=True, parallel=parallel) == 0
        files.append(json.loads(capsys.readouterr().out)["file"])
    assert [backend.limits.n_slots for backend in load.loaded] == [3, 4, 3]
    assert files[0] == files[2] != files[1]


def test_the_table_and_its_bars_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A person sees every step with a bar, and where it is kept."""
    assert show_cost(Config(), fresh=False, as_json=False, load=Loader()) == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out
    assert "█" in out
    assert "Measured now, and kept in" in out


def test_a_model_that_cannot_be_loaded_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence is the backend's, the status that of something that blocks."""

    def broken(_config: Config, _progress: object) -> Backend:
        raise ModelError("no such model")

    assert show_cost(Config(), fresh=False, as_json=False, load=broken) == 1
    assert "no such model" in capsys.readouterr().err


def test_fresh_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --cost there is nothing to measure anew."""
    assert doctor(fresh=True) == 1
    assert "--cost" in capsys.readouterr().err
