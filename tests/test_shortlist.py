"""Short lists: what a full sort of each row starts with, found by looking at few columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.backend.base import FloatArray
from uma_trio.engine.sampling.shortlist import Shortlist, is_short


def normal(seed: int, n: int, n_vocab: int) -> FloatArray:
    """Return rows of random logits."""
    return (np.random.default_rng(seed).standard_normal((n, n_vocab)) * 3).astype(np.float32)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(64, 20_000),
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_a_list_is_the_first_k_of_a_full_sort(
    n_vocab: int, shares: list[float], seed: int, ties: bool
) -> None:
    """Any size of vocabulary, a k for each row, the lower id first on a tie; then -inf."""
    ks = [1 + int(share * (n_vocab // 64 - 1)) for share in shares]
    logits = normal(seed, len(ks), n_vocab)
    logits = np.round(logits) if ties else logits
    ids, values = Shortlist(n_vocab, ks)(logits)
    for row, k in enumerate(ks):
        assert is_short(k, n_vocab)
        assert ids[row, :k].tolist() == np.argsort(-logits[row], kind="stable")[:k].tolist()
        assert values[row, :k].tolist() == logits[row, ids[row, :k]].tolist()
        assert (values[row, k:] == -np.inf).all()


@pytest.mark.parametrize("first", [0, 1900])
@pytest.mark.parametrize("step", [1, 7, 178])
def test_the_largest_may_lie_side_by_side_or_in_few_columns(first: int, step: int) -> None:
    """Where they lie decides how long it takes, not what is found."""
    logits = normal(1, 2, 10_007)  # 1,429 columns of 7 make 178 parts
    places = first + step * np.arange(45)
    logits[:, places] = np.linspace(50, 90, 45, dtype=np.float32)
    ids, _ = Shortlist(logits.shape[1], [40, 20])(logits)
    assert ids[0].tolist() == places[:-41:-1].tolist()
    assert ids[1, :20].tolist() == places[:-21:-1].tolist()


def test_of_equal_zeros_the_lower_id_is_first_whatever_their_sign() -> None:
    """-0.0 is no less than 0.0."""
    logits = np.zeros((1, 6400), np.float32)
    logits[0, ::2] = -0.0
    assert Shortlist(logits.shape[1], [100])(logits)[0].tolist() == [list(range(100))]


def test_minus_infinity_is_not_listed() -> None:
    """A row with fewer possible tokens than k has a shorter list."""
    logits = np.full((2, 5000), -np.inf, np.float32)
    logits[0, [7, 4999, 1]] = [1, 3, 2]
    ids, values = Shortlist(logits.shape[1], [40, 40])(logits)
    assert ids[0, :3].tolist() == [4999, 1, 7]
    assert (values[0, 3:] == -np.inf).all()
    assert (values[1] == -np.inf).all()


@pytest.mark.parametrize("place", [0, 1423, 1424, 1428, 1429, 5000, 10_002, 10_003, 10_006])
def test_nan_leaves_nothing_of_its_row_only(place: int) -> None:
    """Wherever it is; +inf is listed first.

    There are 1,429 columns of 7, of which 5 are left over by the parts, and 4 logits by the columns.
    """
    logits = normal(3, 3, 10_007)
    logits[0, place], logits[1, place] = math.nan, math.inf
    ids, values = Shortlist(logits.shape[1], [40, 40, 40])(logits)
    assert (values[0] == -np.inf).all()
    assert (ids[1, 0], values[1, 0]) == (place, math.inf)
    assert ids[2].tolist() == np.argsort(-logits[2], kind="stable")[:40].tolist()
