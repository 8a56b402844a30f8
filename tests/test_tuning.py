"""The constants of the policy are one value: a trace has it, and plans follow it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import evolve, fields
from policy_kit import COST, decoder, prompt, situation

from uma_trio.policy.by_name import find_policy
from uma_trio.policy.cost import Work
from uma_trio.policy.deadline import deadline
from uma_trio.policy.deadline.slack import margin
from uma_trio.policy.portable import Header, TracedTick, decode, encode
from uma_trio.policy.state import Memory
from uma_trio.policy.tuning import TUNING, Tuning
from uma_trio_sim.replay import replay

ROOT = Path(__file__).resolve().parent.parent
CAREFUL = evolve(TUNING, margin_errors=12.0)


def now_of() -> float:
    """Return the time of the states that the kit makes."""
    return situation().now


def traced(tuning: Tuning) -> TracedTick:
    """Return a tick that was planned with `tuning`."""
    memory = Memory(cost=evolve(COST, tuning=tuning))
    reader = decoder(1, first_token_at=0.0, shown_at=now_of() + 0.01)
    state = evolve(situation(reader, prompt(2, 500, lane="background")), memory=memory)
    return TracedTick(state, deadline(state), 0.01, 0.001, 0)


def test_a_tick_is_planned_with_the_constants_of_its_cost_model() -> None:
    """Nothing else tells the policy of them, so a simulation can try others."""
    usual, careful = traced(TUNING).plan, traced(CAREFUL).plan
    assert careful.limit.seconds < usual.limit.seconds
    assert usual.limit.seconds * margin(COST) == pytest.approx(
        careful.limit.seconds * margin(evolve(COST, tuning=CAREFUL))
    )


def test_a_trace_is_planned_again_with_the_constants_in_its_header() -> None:
    """However the constants of this version have changed since."""
    header = decode(encode(Header("0", "m", "deadline", tuning=CAREFUL)))
    tick = decode(encode(traced(CAREFUL)))
    assert isinstance(header, Header)
    assert isinstance(tick, TracedTick)
    assert header.tuned(tick) == traced(CAREFUL)
    assert replay(find_policy("deadline"), [header.tuned(tick)]).first is None
    assert replay(find_policy("deadline"), [tick]).first is not None


def test_a_tick_of_a_trace_does_not_repeat_the_constants() -> None:
    """They are in the header, once."""
    assert b"margin_errors" in encode(Header("0", "m", "deadline"))
    assert b"margin_errors" not in encode(traced(TUNING))


def test_each_constant_says_what_it_is_and_is_in_the_table() -> None:
    """docs/internals/policy.md tells of each what halving and doubling it moves."""
    text = (ROOT / "docs" / "internals" / "policy.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", text.split("## Constants")[1], re.MULTILINE)
    assert listed == [field.name for field in fields(Tuning)]


def test_a_rate_of_learning_is_that_of_the_tuning() -> None:
    """A cost model that follows twice as quickly has gone twice as far after a tick."""
    slow = COST.learn(Work(1), 1.1 * COST.seconds(Work(1)), None)
    quick = evolve(COST, tuning=evolve(TUNING, scale_rate=0.2)).learn(
        Work(1), 1.1 * COST.seconds(Work(1)), None
    )
    assert quick.scale == pytest.approx(slow.scale**2)
