"""What the scene token_path makes of time stamps."""

from __future__ import annotations

import pytest

from benches import driver
from benches.scenes.token_path import Times, parts


def stamps(cycles: int) -> Times:
    """Return the stamps of cycles of 10 ms: 1 ms in the call, 2 aside, 4 waiting, 1 choosing, 2 until the next."""
    starts = [0.01 * n for n in range(cycles)]
    offsets = {
        "decode": 0.0,
        "decoded": 0.001,
        "waited": 0.003,
        "computed": 0.007,
        "sampled": 0.008,
        "handed": 0.009,
        "sent": 0.0095,
    }
    found = {name: [at + offset for at in starts] for name, offset in offsets.items()}
    return found | {"collected": [], "reused": [float(n) for n in range(cycles)]}


def test_the_parts_of_a_cycle_add_up_to_it() -> None:
    """A part that is counted twice, or not at all, would send whoever reads it the wrong way."""
    row = parts(stamps(20), 0.0, 1.0)
    found = {name: row[name] for name in ("call_us", "aside_us", "wait_us", "choose_us", "rest_us")}
    expected = {"call_us": 1e3, "aside_us": 2e3, "wait_us": 4e3, "choose_us": 1e3, "rest_us": 2e3}
    assert found == pytest.approx(expected)
    assert row["cycle_us"] == pytest.approx(sum(expected.values()))


def test_the_way_to_the_client_begins_with_the_choice_of_the_tokens() -> None:
    """It lies in the next cycle, beside the next decode."""
    row = parts(stamps(20), 0.0, 1.0)
    assert (row["hand_us"], row["write_us"]) == pytest.approx((1e3, 500))


def test_a_slow_cycle_is_told_by_what_it_was_slow_in() -> None:
    """The mean has beyond the median what one cycle in twenty waited longer, in which a graph was built anew."""
    found = stamps(21)
    for name in ("computed", "sampled"):
        found[name][5] += 0.010
    for times in found.values():
        times[6:] = [at + 0.010 for at in times[6:]] if times else []
    found["reused"] = [float(n - (n >= 5)) for n in range(21)]
    found["collected"] = [0.051]
    row = parts(found, 0.0, 1.0)
    assert (row["cycle_more_us"], row["wait_more_us"], row["rest_more_us"]) == pytest.approx(
        (500, 500, 0), abs=1e-6
    )
    assert (row["slow_pct"], row["anew_pct"], row["collected_pct"]) == pytest.approx((5, 5, 5))
    assert row["anew_us"] == pytest.approx(20e3)


def test_where_nothing_was_computed_there_are_no_parts() -> None:
    """An empty row shows a stream that was too short, not zeros."""
    assert parts(stamps(20), 5.0, 6.0) == {}


def test_without_a_model_there_is_nothing_to_stamp() -> None:
    """The scene says so, and does not print an empty table."""
    with pytest.raises(SystemExit, match="no dry run"):
        driver.main(["token_path", "--dry-run"])
