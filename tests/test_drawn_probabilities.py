"""What `post_sampling` tells of a token: by which probabilities it was drawn, and its rivals'."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attrs import evolve
from constraint_kit import Only
from http_kit import http_house
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import SamplingParams, TokenLogprobs
from uma_trio.engine.sampling import NO_GUESS, Sampler, TickSampler

N_VOCAB = 4096
ENDS = (7, 8)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 1000),
    ignore_eos=st.booleans(),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.sampled_from([(), ((3, 8.0), (5, -4.0))]),
    logprobs=st.integers(0, 20),
    post_sampling=st.booleans(),
)


def rows_of(n: int, seed: int) -> FloatArray:
    """Return rows of logits."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, N_VOCAB)) * 3).astype(np.float32)


def as_drawn(sampler: Sampler, row: FloatArray, token: int, n_top: int) -> TokenLogprobs:
    """Return what is to be told of a token, from all that could be drawn."""
    ids, probs = sampler.candidates(row)
    every = sorted(zip(-probs.astype(float), ids.tolist(), strict=True))
    (own,) = [-p for p, id_ in every if id_ == token]
    return TokenLogprobs(math.log(own), tuple((id_, math.log(-p)) for p, id_ in every[:n_top] if p))


def alike(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    """Whether both say the same, but for rounding."""
    return (
        one.logprob == pytest.approx(other.logprob, abs=1e-5)
        and [id_ for id_, _ in one.top] == [id_ for id_, _ in other.top]
        and [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-5)
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_token_is_told_with_what_it_was_drawn_by(params: list[SamplingParams], seed: int) -> None:
    """After bias, penalties, bans and filters, in any company; who does not ask hears of the row as given."""
    rows = rows_of(len(params), seed)
    given = rows.copy()
    choices = TickSampler([Sampler(one, ENDS) for one in params], N_VOCAB)(rows)
    raw = [evolve(one, post_sampling=False) for one in params]
    plain = TickSampler([Sampler(one, ENDS) for one in raw], N_VOCAB)(rows.copy())
    assert choices.tokens == plain.tokens
    assert (rows == given).all()
    for row, one in enumerate(params):
        found = choices.logprobs[row]
        if one.post_sampling:
            token, n_top = choices.tokens[row], one.logprobs or 0
            assert alike(found, as_drawn(Sampler(one, ENDS), rows[row], token, n_top))
        else:
            assert alike(found, plain.logprobs[row])


def test_a_description_survives_the_rows_of_the_next_tick() -> None:
    """It is found when somebody looks, and by then the logits may be others."""
    params = SamplingParams(1.0, top_k=10, presence_penalty=1.0, logprobs=3, post_sampling=True)
    choice, rows = TickSampler([Sampler(params, ENDS)], N_VOCAB), rows_of(1, 1)
    first, row = choice(rows), rows[0].copy()
    rows[:] = rows_of(1, 2)
    choice(rows)
    expected = as_drawn(Sampler(params, ENDS), row, first.tokens[0], 3)
    assert alike(first.logprobs[0], expected)


def test_a_row_behind_a_right_guess_is_told_with_the_history_that_it_had() -> None:
    """The guess before it counts as said: it is penalised in that row."""
    greedy = SamplingParams(0.0, presence_penalty=100.0, logprobs=2, post_sampling=True)
    rows = np.repeat(rows_of(1, 3), 2, axis=0)
    guess = int(rows[0].argmax())
    greedy = evolve(greedy, logit_bias=((guess, 50.0),))
    for params in (greedy, evolve(greedy, temperature=2.0, top_k=5)):
        sampler = Sampler(params, ENDS)
        choices = TickSampler([sampler, sampler], N_VOCAB)(rows, [guess, NO_GUESS])
        assert choices.tokens[0] == guess
        twin = Sampler(params, ENDS)
        twin.accept(guess)
        expected = as_drawn(twin, rows[1], choices.tokens[1], 2)
        assert alike(choices.logprobs[1], expected)
        assert guess not in [id_ for id_, _ in choices.logprobs[1].top]


def test_a_token_in_place_of_a_refused_one_is_told_among_the_allowed() -> None:
    """These weigh one together, and all others nothing."""
    rows = rows_of(1, 4)
    allowed = np.argsort(rows[0])[:3]  # none of them would be drawn
    params = SamplingParams(1.0, top_k=40, logprobs=10, post_sampling=True)
    sampler = Sampler(params, ENDS, constraint=Only(*allowed.tolist()))
    choices = TickSampler([sampler], N_VOCAB)(rows)
    found = choices.logprobs[0]
    weights = np.exp(rows[0][allowed].astype(float))
    expected = dict(zip(allowed.tolist(), weights / weights.sum(), strict=True))
    assert {id_: math.exp(p) for id_, p in found.top} == pytest.approx(expected, rel=1e-5)
    assert math.exp(found.logprob) == pytest.approx(expected[choices.tokens[0]], rel=1e-5)


# --- HTTP ---


@pytest.mark.parametrize("streams", [False, True])
async def test_llama_servers_clients_get_probabilities_after_sampling(
    autojump_clock: MockClock, *, streams: bool
) -> None:
    """`prob` and `top_probs` in place of logarithms, of the few tokens that top_k left."""
    async with http_house() as daemon:
        asked = {"prompt": "hello", "n_predict": 5, "n_probs": 10, "top_k": 4, "min_p": 0}
        asked |= {"top_p": 1, "temperature": 2, "seed": 1, "stream": streams, "ignore_eos": True}
        answer = await daemon.ask("POST", "/completion", {**asked, "post_sampling_probs": True})
        assert "x-uma-ignored" not in answer.headers
        chunks = answer.events if streams else [answer.json]
        tokens = [t for c in chunks for t in c.get("completion_probabilities", ())]
        assert len(tokens) == 5
        for token in tokens:
            assert token.keys() == {"id", "token", "bytes", "prob", "top_probs"}
            probs = [one["prob"] for one in token["top_probs"]]
            assert len(probs) == 4
            assert probs == sorted(probs, reverse=True)
            assert sum(probs) == pytest.approx(1)
            assert (
                token["prob"] == {one["id"]: one["prob"] for one in token["top_probs"]}[token["id"]]
            )
        assert chunks[-1]["generation_settings"]["post_sampling_probs"] is True
        plain = await daemon.ask("POST", "/completion", asked)
        (first, *_) = plain.events if streams else [plain.json]
        assert first["completion_probabilities"][0].keys() == {
            *("id", "token", "bytes", "logprob", "top_logprobs")
        }


async def test_the_likeliest_token_is_certain_without_a_temperature(
    autojump_clock: MockClock,
) -> None:
    """It alone could be drawn."""
    async with http_house() as daemon:
        asked = {"prompt": "hello", "n_predict": 3, "n_probs": 5, "temperature": 0}
        answer = await daemon.ask("POST", "/completion", {**asked, "post_sampling_probs": True})
        for token in answer.json["completion_probabilities"]:
            assert token["prob"] == 1
            assert [(one["id"], one["prob"]) for one in token["top_probs"]] == [(token["id"], 1)]
