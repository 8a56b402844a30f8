"""`uma-trio top`: what it shows in windows of any size, its keys, and a terminal that is as before."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from client_kit import client_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen
from terminal_kit import Terminal
from trio.testing import MockClock

from uma_protocol import ItemInfo, MemoryInfo, ModelInfo, SessionInfo, Sessions, TickInfo
from uma_trio.cli.top import document, keys_of, top
from uma_trio.cli.top_view import SORTS, Shown, render, spark
from uma_trio.client import ServerError

HERE = Path(__file__).resolve().parent


def info(request: int, **more: Any) -> SessionInfo:
    """Return a request; one without a handle is another user's."""
    named: dict[str, Any] = {"id": "a", "app": "editor", "state": "decode", "lane": "interactive"}
    counts = {"prompt_tokens": 1758, "computed_tokens": 316, "completion_tokens": 9}
    times = {"tokens_per_s": 40.0, "age_ms": 2500.0}
    return SessionInfo(request=request, **{**named, **counts, **times, **more})


def shown(*requests: SessionInfo, **more: Any) -> Shown:
    """Return what there is to show of some requests."""
    ticks = tuple(
        TickInfo(tick=n, age_ms=1.0, measured_ms=5.0 + n, items=(ItemInfo(1, "decode", n + 1, ""),))
        for n in range(40)
    )
    found = Sessions(
        requests,
        waiting=3,
        memory=MemoryInfo(cells_used=100, cells_reserved=300, cells_total=1000, leaves=2),
        models=(ModelInfo(name="storyteller", size_bytes=7_540_000, n_ctx=2048),),
        ticks=ticks,
    )
    figures: dict[str, Any] = {
        "scorecard": {"interactive_p95_ms": 31.26, "tokens_generated_per_s": 50.0},
        "step_ms": 40.0,
        "late_tokens_total": {"planned": 2},
        "interactive_shown_ms": {"count": 1000},
        "slots_total": 4,
        "active_sessions": 1,
    }
    return Shown(found=found, figures=figures, **more)


def frame(shown: Shown, width: int, height: int) -> list[str]:
    """Return the lines that fill a window of this size."""
    screen = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )
    with screen.capture() as captured:
        screen.print(Screen(render(shown, height=height)))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_model_of_a_request_is_shown_where_there_are_several() -> None:
    """One model needs no column; an encoder is none that writes."""
    one = shown(info(1, model="storyteller"))
    assert "MODEL" not in "\n".join(frame(one, 160, 24))
    assert one.found is not None
    encoder = ModelInfo(name="e5", gives="vectors", size_bytes=1, n_ctx=512)
    more = (*one.found.models, encoder)
    one.found = replace(one.found, models=more)
    assert "MODEL" not in "\n".join(frame(one, 160, 24))
    one.found = replace(one.found, models=(*more, ModelInfo(name="b", size_bytes=1, n_ctx=512)))
    row = next(line for line in frame(one, 160, 24) if "editor" in line)
    assert "storyteller" in row


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (20, 5), (1, 1)])
def test_a_picture_fits_its_window(width: int, height: int) -> None:
    """Of any size, in all views, and without a daemon."""
    many = shown(*(info(n, app="名前" * 20, waits="x" * 300) for n in range(1, 90)))
    many.story = ["y" * 500] * 30
    for many.view in ("requests", "models", "story"):
        lines = frame(many, width, height)
        assert len(lines) <= height
        assert all(cell_len(line) <= width for line in lines)
    nobody = frame(Shown(message="cannot reach it " * 20), width, height)
    assert len(nobody) <= height


def test_it_says_what_readers_got_of_what_is_promised() -> None:
    """The figures of /metrics: p95 of the latest second against the step."""
    text = "\n".join(frame(shown(info(7)), 120, 24))
    for words in (
        "p95 31.3 of 40.0 ms",
        "2 of 1,000 late",
        "1 of 4 taken   3 waiting",
        "100 of 1,000 cells (10%)",
        "tick 39: 40 tokens in 44.0 ms",
        "316/1,758",
    ):
        assert words in text


def test_the_figures_of_several_models_are_told_together() -> None:
    """Rates and counts are added up; promises and first tokens are those of the model where they are worst, which is named."""
    several = shown(info(7))
    code = {
        "scorecard": {
            "interactive_p95_ms": 45.0,
            "tokens_generated_per_s": 10.0,
            "tokens_per_s": 12.0,
        },
        "step_ms": 50.0,
        "late_tokens_total": {"planned": 5},
        "interactive_shown_ms": {"count": 500},
        "ttft_ms": {"p50": 20.0, "p95": 90.0},
        "slots_total": 2,
        "active_sessions": 1,
    }
    idle = {"scorecard": {"interactive_p95_ms": None, "tokens_generated_per_s": 0.0}}
    chat = dict(several.figures)
    several.figures = {**chat, "models": {"chat": chat, "code": code}}
    text = "\n".join(frame(several, 140, 24))
    for words in (
        "p95 45.0 of 50.0 ms (code)",
        "7 of 1,500 late",
        "60.0 generated, 12.0 with prompts",
        "p95 90.0 ms (code)",
        "2 of 6 taken",
    ):
        assert words in text
    assert document(several)["figures_of_models"]["code"]["tokens_generated_per_s"] == 10.0
    several.figures = {**chat, "models": {"chat": idle, "code": idle}}
    assert "no readers" in "\n".join(frame(several, 140, 24))


def test_another_users_request_cannot_be_chosen() -> None:
    """It has a state and a lane, and nothing to ask about."""
    both = shown(info(0, app="another user", id=""), info(8))
    assert both.selected() == both.rows()[1]
    row = next(line for line in frame(both, 100, 24) if "another user" in line)
    assert "1,758" not in row


def test_the_chosen_request_stays_while_others_come_and_go() -> None:
    """It is chosen by its handle; the ends of the list are ends."""
    three = shown(info(1), info(2), info(3))
    three.move(1)
    three.move(5)
    assert three.chosen == 3
    three.move(-9)
    assert three.chosen == 1
    gone = shown(info(2), chosen=1)
    selected = gone.selected()
    assert selected is not None
    assert selected.request == 2


def test_requests_are_sorted_as_one_likes() -> None:
    """The order of their arrival is the first."""
    rows = (info(1, age_ms=1.0), info(2, age_ms=5.0, tokens_per_s=9.0, app="a"))
    found = {SORTS[n]: shown(*rows, sort=n).rows()[0].request for n in range(len(SORTS))}
    assert found == {"arrival": 1, "age": 2, "tokens/s": 1, "prompt": 1, "program": 2}


@given(st.lists(st.floats(0, 1e9)), st.integers(1, 100))
def test_a_line_of_bars_has_a_bar_for_each_value(values: list[float], width: int) -> None:
    """The latest ones; the highest of them fills its bar."""
    line = spark(values, width)
    assert len(line) == min(len(values), width)
    if any(values[-width:]):
        assert "█" in line


def test_keys_are_told_apart() -> None:
    """Arrows are sequences; what else comes in one read is letter by letter."""
    assert keys_of("\x1b[Ak\x1b[By\x1bOAq\x1b") == ["up", "k", "down", "y", "up", "q", "escape"]


@pytest.mark.parametrize("is_unicode", [True, False])
def test_the_last_line_gives_no_key_two_meanings(is_unicode: bool) -> None:
    """On a terminal without arrows, too: k ends a request there as everywhere."""
    foot = frame(shown(info(1), is_unicode=is_unicode), 120, 24)[-1]
    keys = [key for each in foot.split("  ") for key in each.split()[0].split("/")]
    assert len(set(keys)) == len(keys) > 5
    assert "k end" in foot


def test_controls_in_names_steer_no_terminal() -> None:
    """A program calls itself what it likes."""
    wild = shown(info(1, app="\x1b[2Jwild\x07", waits="\x1b]0;x\x07"))
    assert not any(ord(letter) < 32 for line in frame(wild, 100, 24) for letter in line)


def test_wrong_flags_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With what to do."""
    assert top(json=True) == 1
    assert top(every=0.01) == 1
    assert "--once" in capsys.readouterr().err


async def test_a_request_is_ended_by_its_handle(autojump_clock: MockClock) -> None:
    """From another connection; one that does not run any more is told."""
    with tempfile.TemporaryDirectory() as folder:
        async with client_of(Path(folder) / "s") as (client, _):
            async with client.generate("hello", max_tokens=900) as generation:
                await anext(generation)
                found = await client.overview(ticks=5)
                await client.cancel(found.sessions[0].request)
                await generation.text()
            assert generation.eos is not None
            assert generation.eos.reason == "cancelled"
            with pytest.raises(ServerError, match="not running"):
                await client.cancel(found.sessions[0].request)


# --- the terminal ---


@contextmanager
def served(folder: Path, **options: str) -> Iterator[Path]:
    """Serve the fake model on a socket."""
    path = folder / "s"
    given_ = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, HERE / "fake_daemon.py", path, *given_]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == "ready\n"
            yield path
        finally:
            daemon.terminate()
            daemon.communicate(timeout=60)


@pytest.mark.daemon
def test_it_is_used_at_a_terminal(tmp_path: Path) -> None:
    """A request is explained, moved and ended; a window changes; at the end the terminal is as before."""
    with served(tmp_path, cost="0.05") as path:
        where = ("--socket", str(path))
        asking = subprocess.Popen(
            [sys.executable, "-m", "uma_trio", "run", *where, "--max-tokens", "450", "hello"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        terminal = Terminal(sys.executable, "-m", "uma_trio", "top", *where, home=tmp_path)
        terminal.until("interactive")
        terminal.press("p")
        terminal.until("background")
        terminal.press("e")
        terminal.until("Request 1 (")
        terminal.resize(50, 200)
        terminal.press("e")
        terminal.until("WAITS FOR")
        terminal.press("m")
        terminal.until("gives text")
        terminal.press("mk")
        terminal.until("End request 1? y or n")
        terminal.press("y")
        asking.communicate(timeout=50)
        terminal.until("Nothing is running.")
        once = subprocess.run(
            [sys.executable, "-m", "uma_trio", "top", "--once", "--json", *where],
            capture_output=True,
            check=True,
        )
        printed = json.loads(once.stdout)
        assert printed["schema"] == "uma-trio.top/1"
        assert printed["memory"]["cells_total"] > 0
        assert printed["ticks"]
        terminal.press("q")
        terminal.until("\x1b[?1049l")
        assert terminal.process.wait(20) == 0
        assert terminal.modes == terminal.before


@pytest.mark.daemon
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_gives_the_terminal_back(tmp_path: Path, number: int) -> None:
    """As q does."""
    with served(tmp_path) as path:
        command = (sys.executable, "-m", "uma_trio", "top", "--socket", str(path))
        terminal = Terminal(*command, home=tmp_path)
        terminal.until("Nothing is running.")
        os.kill(terminal.process.pid, number)
        terminal.until("\x1b[?1049l")
        terminal.process.wait(20)
        assert terminal.modes == terminal.before


def test_a_picture_for_programs_has_the_figures_of_the_daemon() -> None:
    """Under a name that changes with its form."""
    found = document(shown(info(7)))
    assert found["figures"]["step_ms"] == 40.0
    assert found["figures"]["interactive_p95_ms"] == 31.26
    assert found["sessions"][0]["request"] == 7
