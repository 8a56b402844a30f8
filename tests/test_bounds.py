"""Cost models that no machine can have are told from those that one has."""

from __future__ import annotations

import math

import pytest
from attrs import evolve

from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.costing.store import implausible
from uma_trio_sim.machine import TABLES, staircase

GOOD = CostModel(
    Staircase((1, 2, 3, 4, 16), (0.008, 0.0117, 0.0162, 0.0111, 0.026)),
    output=Staircase((1, 4, 16), (0.0, -0.002, 0.003)),
    context_cell_s=1e-6,
)


@pytest.mark.parametrize("name", TABLES)
def test_measured_machines_are_plausible(name: str) -> None:
    """Saw-teeth and flat beginnings are real."""
    assert implausible(CostModel(staircase(TABLES[name])), weight_bytes=4e9) is None
    assert implausible(GOOD) is None


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (evolve(GOOD, computing=Staircase((), ())), "no batch size"),
        (evolve(GOOD, computing=Staircase((0, 1), (0.008, 0.008))), "less than one token"),
        (evolve(GOOD, computing=GOOD.computing.with_size(4, math.nan)), "not finite"),
        (evolve(GOOD, context_cell_s=math.inf), "not finite"),
        (evolve(GOOD, computing=GOOD.computing.with_size(1, 0.0)), "1 tokens take 0 s"),
        (evolve(GOOD, computing=GOOD.computing.with_size(512, 1e4)), "512 tokens take 10000 s"),
        (evolve(GOOD, computing=GOOD.computing.with_size(9, 0.005)), "fewer take 0.0162"),
        (evolve(GOOD, output=GOOD.output.with_size(4, -0.999 * 0.0111)), "4 logits rows add"),
        (evolve(GOOD, output=GOOD.output.with_size(4, 1.0)), "4 logits rows add"),
        (evolve(GOOD, wide_context_cell_s=-1e-9), "wide_context_cell_s is -1e-09"),
    ],
)
def test_what_no_machine_does_is_named(bad: CostModel, why: str) -> None:
    """The phrase says which figure it is."""
    assert why in str(implausible(bad))


def test_no_token_is_computed_before_its_weights_are_read() -> None:
    """A terabyte is not read in ten milliseconds."""
    assert "1 tokens take 0.008 s" in str(implausible(GOOD, weight_bytes=1e12))
