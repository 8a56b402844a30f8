"""What a token's logprobs say: of the row as the model gave it, whatever it was chosen from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.sampling import NOT_FINITE, Sampler, TickSampler
from uma_trio.engine.sampling.logprobs import Describer


def log_softmax(row: FloatArray) -> FloatArray:
    """Return every token's logarithmic probability, in doubles."""
    row = row.astype(np.float64)
    top = row.max()
    return row - top - math.log(np.exp(row - top).sum())


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 2, 17, 259, 4096, 16_384, 40_000]),
    st.integers(0, 20),
    st.sampled_from(["spread", "ties", "few", "far"]),
    st.sampled_from([1, 4]),
    st.integers(0, 2**32 - 1),
)
def test_scores_are_those_of_a_log_softmax(
    n_vocab: int, n_top: int, kind: str, n_rows: int, seed: int
) -> None:
    """To 1e-4, the likeliest first and the lower id on a tie, without what is impossible."""
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(n_vocab) * 4).astype(np.float32)
    if kind == "ties":
        row = np.round(row)
    elif kind == "few":
        row[rng.random(n_vocab) < 0.99] = -np.inf
        row[0] = 0.0
    elif kind == "far":
        row[0] = 3e38
    token = int(rng.choice(np.flatnonzero(row > -np.inf)))
    expected = log_softmax(row)
    rows = np.stack([row] * n_rows)
    described = Describer(dict.fromkeys(range(n_rows), n_top), n_vocab)(rows, [token] * n_rows)
    assert len(described) == n_rows
    scores = described[n_rows - 1]
    order = np.argsort(-row, kind="stable")
    likeliest = [i for i in order[:n_top].tolist() if row[i] > -np.inf]
    assert scores.logprob == pytest.approx(expected[token], rel=1e-4, abs=1e-4)
    assert [i for i, _ in scores.top] == likeliest
    for i, logprob in scores.top:
        assert logprob == pytest.approx(expected[i], rel=1e-4, abs=1e-4)


def test_only_rows_that_ask_are_described() -> None:
    """Others cost nothing, and the tokens are those that they would be without."""
    rows = np.random.default_rng(1).standard_normal((3, 500)).astype(np.float32)
    params = [SamplingParams(), SamplingParams(logprobs=0), SamplingParams(logprobs=3)]
    choices = TickSampler([Sampler(p, ()) for p in params], 500)(rows)
    silent = [Sampler(evolve(p, logprobs=None), ()) for p in params]
    assert choices.tokens == TickSampler(silent, 500)(rows).tokens
    assert {row: len(said.top) for row, said in choices.logprobs.items()} == {1: 0, 2: 3}


def test_logprobs_are_of_the_row_that_the_model_gave() -> None:
    """Neither bias, penalties, filters nor temperature show in them."""
    (row,) = np.random.default_rng(2).standard_normal((1, 500)).astype(np.float32)
    params = SamplingParams(
        3.0,
        top_k=1,
        logprobs=2,
        logit_bias=((9, 100.0),),
        presence_penalty=2.0,
        repeat_penalty=9.0,
        min_tokens=5,
    )
    sampler = Sampler(params, {4}, np.arange(500, dtype=np.int32))
    sampler.accept(9)
    choices = TickSampler([sampler], 500)(row[np.newaxis])
    assert choices.tokens == [9]
    expected = log_softmax(row)
    assert choices.logprobs[0].logprob == pytest.approx(expected[9], abs=1e-4)
    assert [i for i, _ in choices.logprobs[0].top] == np.argsort(-row)[:2].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_logprobs(bad: float) -> None:
    """There is no distribution to speak of; the other rows are described."""
    rows = np.random.default_rng(3).standard_normal((2, 50)).astype(np.float32)
    if bad == -math.inf:
        rows[0] = bad
    rows[0, 7] = bad
    samplers = [Sampler(SamplingParams(logprobs=1), ()) for _ in rows]
    choices = TickSampler(samplers, 50)(rows)
    assert choices.tokens[0] == NOT_FINITE
    assert set(choices.logprobs) == {1}


def test_a_description_survives_the_rows_of_the_next_tick() -> None:
    """It may be read beside the next decode, or after the choice that follows that."""
    first, second = np.random.default_rng(4).standard_normal((2, 4, 300)).astype(np.float32)
    params = SamplingParams(logprobs=2)
    choice = TickSampler([Sampler(params, ()) for _ in range(4)], 300)
    expected = dict(
        TickSampler([Sampler(params, ()) for _ in range(4)], 300)(first.copy()).logprobs
    )
    logits = first.copy()
    early = choice(logits)
    logits[:] = second  # as the backend does
    late = choice(logits)
    assert dict(early.logprobs) == expected
    assert dict(late.logprobs) != expected
