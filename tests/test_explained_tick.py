"""The tick that docs/internals/policy.md explains by hand is planned as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from uma_trio.policy.deadline import deadline
from uma_trio.policy.deadline.slack import margin
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import TracedTick, decode

ROOT = Path(__file__).resolve().parent.parent
LINE = ROOT / "tests" / "data" / "explained_tick.trace"


@pytest.fixture
def traced() -> TracedTick:
    """Return the line of the trace."""
    line = decode(LINE.read_bytes())
    assert isinstance(line, TracedTick)
    return line


@pytest.fixture
def plan(traced: TracedTick) -> Plan:
    """Return what the policy plans from it today."""
    return deadline(traced.state)


@pytest.fixture
def section() -> str:
    """Return what the document says of it."""
    page = (ROOT / "docs" / "internals" / "policy.md").read_text(encoding="utf-8")
    return page.split("## One tick, by hand")[1].split("\n## ")[0]


def test_the_contract_still_plans_the_explained_tick_like_that(
    traced: TracedTick, plan: Plan
) -> None:
    """Who changes the policy explains the tick again; the last bit may differ between machines."""
    assert plan.items == traced.plan.items
    assert {skip.key for skip in plan.skipped} == {skip.key for skip in traced.plan.skipped}
    assert plan.predicted_s == pytest.approx(traced.plan.predicted_s)
    assert plan.limit.seconds == pytest.approx(traced.plan.limit.seconds)


def test_the_explanation_has_the_figures_of_its_tick(
    traced: TracedTick, plan: Plan, section: str
) -> None:
    """What was seen, what was made of it, and what it took."""
    cost, guard, before = plan.memory.cost, plan.memory.guard, traced.state.memory.guard
    assert cost is not None
    for figure in (
        f"tick {traced.state.tick} of",
        f"guard      owed {1e3 * before.owed_s:.1f};",
        f"scale {cost.scale:.4f}, T(1) {1e3 * cost.table()[1]:.3f}, error {cost.error:.4f}",
        f"| owed {1e3 * guard.owed_s:.1f} |",
        f"| solo {1e3 * plan.limit.solo_s:.2f} |",
        f"| step {1e3 * plan.limit.step_s:.2f} |",
        f"| slack {1e3 * margin(cost) * plan.limit.seconds:.2f} |",
        f"| limit {1e3 * plan.limit.seconds:.2f} |",
        f"exp(4 * 0.02) = {margin(cost):.3f} |",
        f"predicted {1e3 * plan.predicted_s:.2f}, ballast 0, pace of 1: {1e3 * plan.paces[1]:.2f}",
        f"| client 2: {plan.memory.used_s[2]:.4f} s |",
        f"decode {1e3 * traced.decode_s:.2f}, host {1e3 * traced.host_s:.2f}",
        *(
            f"{item.key}  {item.n_tokens} tokens {item.reason}"
            for item in plan.items
            if item.n_tokens > 1
        ),
    ):
        assert figure in section
