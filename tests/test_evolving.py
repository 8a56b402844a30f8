"""A quicker `attrs.evolve` for the values of a policy."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from attrs.exceptions import FrozenInstanceError

from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Limit, Plan, PlanItem
from uma_trio.policy.state import GuardMemory, Memory

COST = CostModel(Staircase((1, 2), (0.1, 0.2)), measured=Staircase((1,), (0.3,)))
VALUES = (Plan(items=(PlanItem(1, 2, "decode", "d"),)), Memory(), GuardMemory(), COST)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_it_does_what_attrs_does(value: Any) -> None:
    """Each field alone, and nothing else changes, whatever its default is made of."""
    assert evolve(value) == value
    for field in attrs.fields(type(value)):
        changes = {field.name: f"another {field.name}"}
    assert evolve(value, **changes) == attrs.evolve(value, **changes)


def test_what_it_makes_is_frozen_and_what_it_was_made_of_stays() -> None:
    """A plan that a stage was given is still the plan that it was given."""
    limit = Limit(1.0, "r")
    changed = evolve(limit, seconds=2.0)
    assert (limit.seconds, changed.seconds) == (1.0, 2.0)
    with pytest.raises(FrozenInstanceError):
        changed.seconds = 3.0  # type: ignore[misc]


def test_a_field_that_there_is_not_is_refused() -> None:
    """A misspelt name changes nothing silently."""
    with pytest.raises(KeyError, match="second"):
        evolve(Limit(1.0, "r"), second=2.0)  # type: ignore[call-arg]
