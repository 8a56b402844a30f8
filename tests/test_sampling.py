"""Sampling: the candidate sets of llama.cpp's own chain, a random stream each, bad logits."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.sampling import NOT_FINITE, NonFinite, Sampler, choose, greedy

IN_PLACE = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.7, top_k=200),
    SamplingParams(temperature=0.7, top_k=1024),
]
COPIED = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=3000),
    SamplingParams(temperature=1.0, top_k=10**6),
]
SETTINGS = [
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.999),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.5, top_k=1),
    SamplingParams(temperature=2.0, top_k=3000, min_p=0.01),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=0.5),
    SamplingParams(temperature=0.01, top_k=500, top_p=0.99),
]


def normal(seed: int, scale: float, n: int) -> FloatArray:
    """Return a row of random logits, about as spread as `scale`."""
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def peaked(seed: int, n: int) -> FloatArray:
    """Return a row in which a few tokens hold nearly everything."""
    row = normal(seed, 1.0, n)
    row[:7] += np.linspace(8, 16, 7, dtype=np.float32)
    return row


def llama_chain(params: SamplingParams, row: FloatArray) -> dict[int, float]:
    """Return what llama.cpp's own chain leaves of `row`: token to probability."""
    pytest.importorskip("llama_cpp")
    from benches.sampling import chain_of

    kept = chain_of(params, len(row))(row)
    return dict(zip(kept["id"].tolist(), kept["p"].tolist(), strict=True))


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: normal(1, 1.0, 32000),
        lambda: normal(2, 4.0, 32000),
        lambda: peaked(3, 32000),
        lambda: normal(4, 3.0, 259),
        lambda: normal(5, 3.0, 17),
    ],
    ids=["flat", "steep", "peaked", "bytes", "tiny"],
)
def test_candidates_are_those_of_the_llama_chain(
    params: SamplingParams, make: Callable[[], FloatArray]
) -> None:
    """Same tokens and probabilities to 1e-5, but for the rounding of llama.cpp's own sums.

    It adds the whole row up in float32, one by one; we use doubles. So the last tokens of a
    nucleus that holds thousands may be in on one side only, with at most the mass that such a
    sum can be off by: half a unit in the last place for each term.
    """
    row = make()
    theirs = llama_chain(params, row)
    ids, probs = Sampler(params, ()).candidates(row)
    ours = dict(zip(ids.tolist(), probs.tolist(), strict=True))
    rounding = len(row) * 2.0**-24 if params.top_p < 1 and params.top_k == 0 else 0.0
    off = sum({**ours, **theirs}[token] for token in set(ours) ^ set(theirs))
    assert off <= rounding
    both = set(ours) & set(theirs)
    assert max(abs(ours[token] - theirs[token]) for token in both) < 1e-5 + off


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_a_typical_row_has_exactly_the_candidates_of_the_llama_chain(
    params: SamplingParams,
) -> None:
    """On a peaked row, as a trained model gives, the sets are equal token by token."""
    row = peaked(11, 4096)
    ids, _ = Sampler(params, ()).candidates(row)
    assert set(ids.tolist()) == set(llama_chain(params, row))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, scale: float) -> None:
    """Counted in doubles over the full sort, the nucleus is neither too small nor too large."""
    row = normal(9, scale, 40_000)
    ids, _ = Sampler(SamplingParams(temperature=1.0, top_p=top_p), ()).candidates(row)
    order = np.argsort(-row, kind="stable")
    weights = np.exp(row[order].astype(np.float64) - row.max())
    reached = np.cumsum(weights / weights.sum())
    assert ids.tolist() == order[: len(ids)].tolist()
    assert reached[len(ids) - 1] >= top_p - 1e-6
    assert len(ids) == 1 or reached[len(ids) - 2] < top_p + 1e-6


def test_of_equal_logits_top_k_keeps_the_lower_ids() -> None:
    """Where llama.cpp leaves the order of ties open, ours is defined."""
    row = np.zeros(70_000, np.float32)
    for k in (3, 500, 5000):
        ids, probs = Sampler(SamplingParams(temperature=1.0, top_k=k), ()).candidates(row)
        assert ids.tolist() == list(range(k))
        assert probs == pytest.approx(1 / k)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 2**32 - 1), st.booleans())
def test_top_k_is_the_first_k_of_a_full_sort(n: int, k: int, seed: int, ties: bool) -> None:
    """The shortcut by column maxima finds what sorting everything finds."""
    row = normal(seed, 3.0, n)
    row = np.round(row) if ties else row
    ids, _ = Sampler(SamplingParams(temperature=1.0, top_k=k), ()).candidates(row)
    assert ids.tolist() == np.argsort(-row, kind="stable")[:k].tolist()


def test_temperature_zero_is_greedy_whatever_the_filters() -> None:
    """The likeliest token is taken without a draw."""
    row = normal(3, 2.0, 1000)
    sampler = Sampler(SamplingParams(top_k=5, top_p=0.1, min_p=0.3, seed=4), ())
    assert sampler.greedy
    assert {sampler(row) for _ in range(3)} == {int(row.argmax())}


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    """A tie goes to the lower id in every row."""
    rows = np.array([[0, 5, 5, 1], [2, 2, 2, 2]], np.float32)
    assert greedy(rows).tolist() == [1, 0]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_greedy_marks_rows_that_are_not_finite(bad: float, place: int) -> None:
    """NaN and +inf anywhere in a row are found; the other rows keep their tokens."""
    rows = np.stack([normal(1, 2.0, 1000), normal(2, 2.0, 1000)])
    rows[1, place] = bad
    assert greedy(rows).tolist() == [int(rows[0].argmax()), NOT_FINITE]


def test_greedy_marks_a_row_of_minus_infinity() -> None:
    """Nothing can be chosen when every token is impossible."""
    assert greedy(np.full((1, 10), -np.inf, np.float32)).tolist() == [NOT_FINITE]


@pytest.mark.parametrize("params", [SamplingParams(), *SETTINGS], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 17, 4999])
def test_a_sampler_refuses_a_row_that_is_not_finite(
    params: SamplingParams, bad: float, place: int
) -> None:
    """NaN or +inf anywhere is an error of that row, whatever the settings."""
    row = normal(1, 2.0, 5000)
    row[place] = bad
    with pytest.raises(NonFinite):
        Sampler(params, ())(row)


@pytest.mark.parametrize("params", [SamplingParams(), *SETTINGS], ids=str)
def test_a_sampler_refuses_a_row_of_minus_infinity(params: SamplingParams) -> None:
    """A row without a possible token is an error, not token 0."""
    with pytest.raises(NonFinite):
        Sampler(params, ())(np.full(5000, -np.inf, np.float32))


@pytest.mark.parametrize("params", [SamplingParams(), *SETTINGS], ids=str)
def test_ignore_eos_never_draws_an_end_token(params: SamplingParams) -> None:
    """End tokens are masked, and the caller's row is left as it was."""
    row = peaked(5, 2000)
    before = row.copy()
    ends = {6, 5, 4}
    ignoring = SamplingParams(
        params.temperature, params.top_p, params.top_k, params.min_p, seed=1, ignore_eos=True
    )
    sampler = Sampler(ignoring, ends)
    assert not ends & {sampler(row) for _ in range(50)}
    assert not ends & set(sampler.candidates(row)[0].tolist()[:3])
    assert np.array_equal(row, before)


def one_by_one(logits: FloatArray, samplers: Sequence[Sampler]) -> list[int]:
    """Return what each sampler gives for its row alone."""
    tokens = []
    for row, sampler in zip(logits, samplers, strict=True):
        try:
            tokens.append(sampler(row))
        except NonFinite:
            tokens.append(NOT_FINITE)
    return tokens


a_row_of_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 0.8, 1.0, 5.0, 1e-9]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([40, 40, 40, 1, 7, 0, 400, 10**6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 99),
    ignore_eos=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(a_row_of_params, min_size=1, max_size=9),
    st.sampled_from([5, 64, 259, 2561, 4096, 32_003]),
    st.sampled_from(["spread", "ties", "few", "zeros", "bad"]),
    st.integers(0, 2**32 - 1),
)
def test_a_tick_gives_each_row_the_token_it_gets_alone(
    params: list[SamplingParams], n_vocab: int, kind: str, seed: int
) -> None:
    """Whatever the company, parameters, ties and bad rows; and the rows are left as they were."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(params), n_vocab)) * 3).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "few":
        logits[:, rng.random(n_vocab) < rng.choice([0.5, 0.999, 1.0])] = -np.inf
    elif kind == "zeros":
        logits[:] = 0.0
    elif kind == "bad":
        logits[rng.integers(len(params)), 2] = rng.choice([np.nan, np.inf, -np.inf])
    before = logits.copy()
    ends = {0, n_vocab // 2, n_vocab - 1}
    together = [Sampler(p, ends) for p in params]
    apart = [Sampler(p, ends) for p in params]
    for _ in range(3):
        assert choose(logits, together) == one_by_one(logits, apart)
    assert np.array_equal(logits, before, equal_nan=True)


def test_no_top_p_keeps_what_weighs_nothing_beside_the_likeliest() -> None:
    """A neighbour's top_p does not cut a row that has none: heat may make its tokens likely."""
    logits = np.zeros((3, 5000), np.float32)
    logits[:, 7] = 50.0
    params = [SamplingParams(temperature=100.0, top_k=40, top_p=p, seed=1) for p in (1.0, 0.9, 1.0)]
    together, apart = ([Sampler(p, ()) for p in params] for _ in range(2))
    drawn = [choose(logits, together) for _ in range(10)]
    assert drawn == [one_by_one(logits, apart) for _ in range(10)]
    assert {tokens[1] for tokens in drawn} == {7}
    assert len({tokens[0] for tokens in drawn}) > 1


@pytest.mark.parametrize("params", [SamplingParams(), *SETTINGS], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 17, 4999])
def test_a_bad_row_is_marked_and_the_others_keep_their_tokens(
    params: SamplingParams, bad: float, place: int
) -> None:
    """NaN or +inf anywhere concerns one row of a tick only."""
    logits = np.stack([peaked(seed, 5000) for seed in range(4)])
    good = choose(logits, [Sampler(params, ()) for _ in range(4)])
    logits[2, place] = bad
    tokens = choose(logits, [Sampler(params, ()) for _ in range(4)])
    assert tokens == [*good[:2], NOT_FINITE, good[3]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_is_found_where_it_is_masked(temperature: float, bad: float) -> None:
    """A row is not sane because its NaN is at an end token that must not be drawn."""
    params = SamplingParams(temperature=temperature, top_k=40, ignore_eos=True)
    logits = np.stack([peaked(seed, 5000) for seed in range(4)])
    logits[1, 3] = bad
    tokens = choose(logits, [Sampler(params, {3}) for _ in range(4)])
    assert [token == NOT_FINITE for token in tokens] == [False, True, False, False]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_draws_follow_the_probabilities(params: SamplingParams) -> None:
    """4000 draws come within five standard deviations of what the candidates say."""
    row = peaked(6, 3000)
    sampler = Sampler(params, ())
    ids, probs = sampler.candidates(row)
    drawn = Counter(sampler(row) for _ in range(4000))
    expected = dict(zip(ids.tolist(), probs.tolist(), strict=True))
    assert set(drawn) <= set(expected)
    for token, p in expected.items():
        assert abs(drawn[token] - 4000 * p) <= 5 * math.sqrt(4000 * p * (1 - p)) + 3


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_seed_decides_the_tokens(params: SamplingParams) -> None:
    """Equal seeds give equal tokens, also with another sampler's draws in between."""
    rows = [normal(seed, 2.0, 3000) for seed in range(20)]
    one, two, other = Sampler(params, ()), Sampler(params, ()), Sampler(SETTINGS[1], ())
    first = [one(row) for row in rows]
    second = [(other(row), two(row))[1] for row in rows]
    assert first == second


def test_a_greedy_row_whose_likeliest_token_is_an_end_is_not_copied_either() -> None:
    """It is masked where it lies for the second look, and left as it was."""
    row = peaked(1, 65_536)
    sampler = Sampler(SamplingParams(ignore_eos=True), {int(row.argmax())})
    before = row.copy()
    tracemalloc.start()
    try:
        token = sampler(row)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert token == np.argsort(-before, kind="stable")[1]
    assert most < row.nbytes
    assert np.array_equal(row, before)


@pytest.mark.parametrize("temperature", [1e-40, 1e-9, 1e-6, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Dividing by almost nothing neither overflows nor chooses another token."""
    row = normal(8, 3.0, 2000)
    assert Sampler(SamplingParams(temperature=temperature), ())(row) == int(row.argmax())


def test_a_huge_temperature_draws_from_everything() -> None:
    """Flat as it gets, every token has its share."""
    row = normal(8, 3.0, 1000)
    _, probs = Sampler(SamplingParams(temperature=1e30), ()).candidates(row)
    assert probs == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.9}, {"top_k": 3}])
def test_logits_far_apart_do_not_overflow(filters: dict[str, Any]) -> None:
    """Differences beyond float32 are impossible tokens, without a warning."""
    row = np.array([3e38, -3e38, 0.0], np.float32)
    assert Sampler(SamplingParams(temperature=0.5, **filters), ())(row) == 0


@pytest.mark.parametrize("params", [*IN_PLACE, *COPIED], ids=repr)
def test_a_row_is_in_place_when_nothing_as_large_is_made_of_it(params: SamplingParams) -> None:
    """What the metrics call copy-free is what the allocator sees."""
    row = peaked(1, 65_536)
    sampler = Sampler(params, ())
    rows = np.stack([row] * 4)
    sampler(row)
    choose(rows, [sampler] * len(rows))
    tracemalloc.start()
    try:
        sampler(row)
        _, alone = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        choose(rows, [sampler] * len(rows))
        _, together = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    most = max(alone, together / len(rows))
    assert sampler.in_place(len(row)) == (params in IN_PLACE) == (most < row.nbytes)
