"""Drawing from lists: many together are each drawn from as if alone, and a draw always hits."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.sampling import Sampler
from uma_trio.engine.sampling.drawing import Filters, Numbers, column, draw

THE_LARGEST = math.nextafter(1.0, 0.0)  # that random() gives


@given(st.lists(st.floats(2.0**-20, 1.0, width=32), min_size=1, max_size=50), st.integers(0, 5))
def test_the_largest_number_draws_the_last_token_that_weighs_something(
    weights: list[float], n_nothing: int
) -> None:
    """However the sum was rounded, no draw goes past what can be drawn."""
    list_ = np.array([*weights, *[0.0] * n_nothing], np.float32)
    assert draw(list_, THE_LARGEST) == len(weights) - 1
    assert draw(list_, 0.0) == 0


def test_filters_of_many_lists_are_each_for_its_own() -> None:
    """A column of them leaves of each list, and weighs it, just as the list's own would."""
    each = [
        Filters.of(SamplingParams(temperature=0.8, top_k=40, top_p=0.9)),
        Filters.of(SamplingParams(temperature=1.3, top_k=40)),
        Filters.of(SamplingParams(temperature=1.0, top_k=40, min_p=0.1)),
    ]
    values = -np.sort(np.random.default_rng(1).exponential(3.0, (3, 40))).astype(np.float32)
    values[1, 25:] = -np.inf  # a shorter list
    together = Filters.together(each)
    for row, filters in enumerate(each):
        alone = filters.weights(values[row], values[row, 0])
        assert together.weights(values, values[:, :1])[row].tolist() == alone.tolist()
        assert 0 < np.count_nonzero(alone) < len(alone)


def test_each_list_is_drawn_from_by_its_own_number() -> None:
    """The numbers are a column beside the lists."""
    weights = np.array([[1.0, 1.0], [1.0, 3.0], [3.0, 1.0]], np.float32)
    assert draw(weights, column([0.4, 0.4, 0.8], np.float64)).tolist() == [0, 1, 1]


def test_the_numbers_of_a_seed_are_spread_evenly_and_by_their_place() -> None:
    """Each is the same whenever it is asked for; neighbouring places and seeds have nothing in common."""
    n, bins = 20_000, 100
    one, two = (np.array([Numbers(seed)(place) for place in range(n)]) for seed in (1, 2))
    assert Numbers(1)(777) == one[777]
    # 99 degrees of freedom: more than 148.2 happens once in a thousand, and the seeds are fixed.
    for numbers in (one, two):
        counts = np.histogram(numbers, bins, (0.0, 1.0))[0]
        assert float(((counts - n / bins) ** 2 / (n / bins)).sum()) < 148.2
    pairs = ((one[:-1], one[1:]), (one, two), (one[1:], two[:-1]))
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.025 for a, b in pairs)
    assert not set(one) & set(two)


def test_a_row_that_was_drawn_from_in_vain_uses_no_number_up() -> None:
    """The number of a token is that of its place in the answer, whatever was looked at before."""
    sampler = Sampler(SamplingParams(1.0, seed=5), ())
    first = [sampler.random() for _ in range(4)]
    sampler.given(1)
    assert [sampler.random() for _ in range(3)] == first[1:]
    sampler.given(0)
    assert sampler.random() == first[1]
