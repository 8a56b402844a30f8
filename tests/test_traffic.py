"""What a model moves, and how much of it the machine moves in a second."""

from __future__ import annotations

import pytest

from uma_trio.policy.cost import Traffic

DENSE = Traffic(weight_bytes=300e6)
MIXTURE = Traffic(weight_bytes=100e6, expert_bytes=40e6, experts=8, experts_used=2)
#: Seconds measured with a mixture of these proportions, on two cores.
TOOK = {1: 0.0163, 2: 0.0189, 4: 0.0226, 8: 0.0316, 128: 0.309}


def test_a_dense_model_shows_the_bandwidth_with_one_token() -> None:
    """More tokens take longer and read the same weights."""
    assert DENSE.bandwidth({1: 0.030, 4: 0.045, 64: 0.9}) == pytest.approx(10e9)


def test_a_mixture_shows_it_where_it_moves_the_most() -> None:
    """Four tokens reach more experts than one and move them faster."""
    assert MIXTURE.bandwidth(TOOK) == pytest.approx(MIXTURE.moved(4, 0) / 0.0226)


def test_no_tick_that_was_measured_moves_more_than_the_bandwidth() -> None:
    """So none of them would be trimmed for what the machine has shown that it can do."""
    budget = MIXTURE.bandwidth(TOOK)
    assert all(MIXTURE.moved(n, 0) <= budget * took * 1.000001 for n, took in TOOK.items())


def test_what_was_never_measured_has_no_bandwidth() -> None:
    """Zero, which stands for no budget."""
    assert DENSE.bandwidth({}) == 0.0
    assert Traffic().bandwidth({1: 0.030}) == 0.0
