"""The recorded traces: every plan in them comes out again, and the engine makes the same ticks."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from scene_kit import play
from trace_fixtures import SCENES, fixtures, read, shown

from uma_trio_sim.ablation import ablated
from uma_trio_sim.replay import replay

# What the fixtures must show together, so that recording them again loses nothing.
KINDS = (
    "prepared beside another",
    "computed again",
    "parked",
    "ballast",
    "extra rows",
    "isolated",
    "granted",
    "paced",
    "a reader is ahead",
    "begins together",
    "saving",
    "newcomer",
    "trimmed for bandwidth",
    "left out",
    "smaller batch",
    "status 0",
    "status 1",
    "status 2",
    "status -1",
    "status -3",
)

fixture = cache(read)


@pytest.mark.parametrize("name", fixtures())
def test_a_recorded_plan_comes_out_again_to_the_last_bit(name: str) -> None:
    """The policy that was traced makes the same plan of the same state."""
    header, ticks = fixture(name)
    found = replay(ablated(header.policy), ticks)
    assert (found.first, found.ticks, found.missing) == (None, len(ticks), 0)


@pytest.mark.parametrize("name", SCENES)
def test_the_engine_makes_the_same_ticks_again(name: str) -> None:
    """The same requests on the same machine give the same states, plans, times and outcomes."""
    _, recorded = fixture(name)
    again = play(SCENES[name])
    for before, now in zip(recorded, again, strict=False):
        assert now == before, f"tick {before.state.tick}"
    assert len(again) == len(recorded)


def test_the_fixtures_show_every_kind_of_plan() -> None:
    """A kind that no fixture shows is not guarded by them."""
    found: Counter[str] = Counter()
    for name in fixtures():
        found.update(shown(fixture(name)[1]))
    assert [kind for kind in KINDS if not found[kind]] == []
