"""Rows whose answers are constrained: what is refused is chosen again, and nobody else notices."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from attrs import evolve
from constraint_kit import Only

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.sampling import IMPOSSIBLE, NOT_FINITE, Sampler, TickSampler, choose

N_VOCAB = 4096
SETTINGS = [
    SamplingParams(seed=1),
    SamplingParams(1.0, seed=1),
    SamplingParams(0.8, 0.95, 40, seed=1),
    SamplingParams(0.8, min_p=0.05, seed=1),
    SamplingParams(0.8, presence_penalty=1.0, seed=1),
]


def rows(seed: int, n: int = 1, spread: float = 3.0) -> FloatArray:
    """Return `n` rows of logits."""
    return (np.random.default_rng(seed).standard_normal((n, N_VOCAB)) * spread).astype(np.float32)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_only_allowed_tokens_are_chosen(params: SamplingParams) -> None:
    """Whatever the settings; and the rows are left as they were."""
    logits = rows(1, 3)
    before = logits.copy()
    samplers = [Sampler(params, (), constraint=Only(7, 8, 9)) for _ in logits]
    for _ in range(30):
        assert set(choose(logits, samplers)) <= {7, 8, 9}
    assert np.array_equal(logits, before)


def test_a_greedy_row_gets_the_likeliest_that_is_allowed() -> None:
    """Masking first would give the same."""
    (row,) = rows(2)
    allowed = [5, 70, 900]
    sampler = Sampler(SamplingParams(), (), constraint=Only(*allowed))
    assert sampler(row) == max(allowed, key=lambda token: row[token])


def test_a_token_that_is_allowed_costs_no_mask() -> None:
    """The mask is made when a token was refused, and not before."""
    (row,) = rows(3)
    constraint = Only(int(row.argmax()))
    assert Sampler(SamplingParams(), (), constraint=constraint)(row) == int(row.argmax())
    assert constraint.masks == 0


def test_draws_from_all_follow_the_probabilities_of_what_is_allowed() -> None:
    """A refusal and a second draw leave the law of the masked distribution as it is."""
    (row,) = rows(4, spread=1.0)
    row[:6] += 6.0
    allowed = [0, 2, 4, 100]
    weights = np.exp(row[allowed].astype(np.float64))
    expected = dict(zip(allowed, weights / weights.sum(), strict=True))
    sampler = Sampler(SamplingParams(1.0, seed=5), (), constraint=Only(*allowed))
    drawn = Counter(sampler(row) for _ in range(4000))
    for token, p in expected.items():
        assert abs(drawn[token] - 4000 * p) <= 5 * math.sqrt(4000 * p * (1 - p)) + 3


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_a_seed_gives_the_same_tokens_in_any_company(params: SamplingParams) -> None:
    """Second draws come from the sequence's own second stream; neighbours keep their tokens."""
    plain = evolve(params, presence_penalty=0.0, seed=9)
    alone = Sampler(params, (), constraint=Only(*range(0, N_VOCAB, 3)))
    free = Sampler(plain, ())
    together = [Sampler(params, (), constraint=Only(*range(0, N_VOCAB, 3))), Sampler(plain, ())]
    choice = TickSampler(together, N_VOCAB)
    for tick in range(20):
        logits = rows(tick, 2)
        tokens = choice(logits).tokens
        assert tokens == [alone(logits[0]), free(logits[1])]
        for sampler in together:
            sampler.given(1)
        for sampler, token in zip([*together, alone, free], tokens * 2, strict=True):
            sampler.accept(token)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_a_constraint_without_a_way_on_is_told_apart(params: SamplingParams) -> None:
    """It is not the model's fault, and no other row's; nothing is described."""
    logits = rows(6, 3)
    logits[2, 5] = np.nan
    asked = evolve(params, logprobs=1)
    samplers = [
        Sampler(asked, (), constraint=Only()),
        Sampler(asked, (), constraint=Only(*range(N_VOCAB))),
        Sampler(asked, (), constraint=Only(5)),
    ]
    choices = TickSampler(samplers, N_VOCAB)(logits)
    assert choices.tokens[0] == IMPOSSIBLE
    assert choices.tokens[1] >= 0
    assert choices.tokens[2] == NOT_FINITE
    assert set(choices.logprobs) == {1}


def test_allowed_tokens_that_the_model_rules_out_are_no_way_on() -> None:
    """-inf stays impossible, also where it is all that the constraint allows."""
    logits = rows(7)
    logits[0, 5] = -np.inf
    assert choose(logits, [Sampler(SamplingParams(), (), constraint=Only(5))]) == [IMPOSSIBLE]


def test_what_is_accepted_reaches_the_constraint() -> None:
    """Beside the penalties' history, in the same order."""
    constraint = Only(1)
    sampler = Sampler(SamplingParams(presence_penalty=1.0), (), constraint=constraint)
    for token in (4, 1, 4):
        sampler.accept(token)
    assert constraint.told == [4, 1, 4]


def test_each_refused_token_is_counted_with_its_time() -> None:
    """And none that was drawn well, or in a row that nothing constrains."""
    logits = rows(3, 3)
    liked = int(logits[0].argmax())
    samplers = [
        Sampler(SamplingParams(), (), constraint=constraint)
        for constraint in (Only(liked), Only(int(logits[1].argmin())), None)
    ]
    found = TickSampler(samplers, N_VOCAB)(logits)
    (seconds,) = found.masks_s
    assert 0 < seconds < 1
    assert TickSampler(samplers[::2], N_VOCAB)(logits[::2]).masks_s == []
