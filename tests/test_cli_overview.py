"""The eight lines of `uma-trio metrics`."""

from __future__ import annotations

import pytest

from uma_trio.cli.metrics import overview
from uma_trio.observe.metrics import Metrics

_BUSY = {
    "ttft_ms": {"p50": 40.17, "p95": 1234.0},
    "interactive_shown_ms": {"count": 1400, "p50": 8.87, "p95": 9.05},
    "late_tokens_total": {"planned": 1, "mispredicted": 2, "left_out": 0},
    "scorecard": {
        "tokens_generated_per_s": 30.0,
        "tokens_per_s": 80.0,
        "interactive_tokens_per_s": 60.0,
        "background_tokens_per_s": 20.0,
    },
    "active_sessions": 3,
    "slots_total": 8,
    "parked_sessions": 1,
    "queued_sessions": 2,
    "queue_ms": {"p50": 0.2, "p95": 812.0},
    "kv_cells_used": 1024,
    "kv_cells_total": 4096,
    "prefix_tokens_total": 900,
    "prompt_tokens_total": 300,
    "loop_lag_ms": {"p50": 0.19, "p95": 3.1, "max": 12.0},
}


def test_eight_lines_say_how_the_daemon_does() -> None:
    """A person reads them in a few seconds."""
    assert overview(_BUSY) == [
        "first token     p50 40.2 ms, p95 1.2 s",
        "between tokens  p50 8.9 ms, p95 9.1 ms shown; 3 of 1,400 later than promised beside other work",
        "tokens/s        30.0 generated; 80.0 computed with prompts (interactive 60.0, background 20.0)",
        "slots           3 of 8 taken, 1 of them wait for their readers",
        "queue           2 waiting; waited p50 0.20 ms, p95 812 ms",
        "KV cache        1,024 of 4,096 cells used (25%)",
        "cached          75% of 1,200 prompt tokens",
        "loop lag        p50 0.19 ms, p95 3.1 ms, at most 12.0 ms",
    ]


def test_several_models_have_lines_of_their_own() -> None:
    """Under their names; the lag of the event loop is the daemon's."""
    lines = overview({**_BUSY, "models": {"chat": _BUSY, "code": Metrics().snapshot()}})
    assert [line for line in lines if line.endswith(":")] == ["chat:", "code:"]
    assert len(lines) == 2 * 8 + 1
    assert lines[3] == (
        "  tokens/s        30.0 generated; 80.0 computed with prompts (interactive 60.0, background 20.0)"
    )
    assert lines[-1].startswith("loop lag          p50 0.19 ms")


def test_a_policy_that_promises_nothing_has_no_late_tokens() -> None:
    """Its gaps are shown all the same."""
    line = overview({**_BUSY, "late_tokens_total": None})[1]
    assert line == "between tokens  p50 8.9 ms, p95 9.1 ms"


@pytest.mark.parametrize("found", [{}, Metrics().snapshot()])
def test_a_daemon_that_has_done_nothing_has_eight_lines(found: dict[str, object]) -> None:
    """What is not known yet is a dash."""
    lines = overview(found)
    assert len(lines) == 8
    assert "None" not in "\n".join(lines)
