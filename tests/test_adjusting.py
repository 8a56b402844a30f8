"""Bias, penalties and masks, beside a plain implementation and beside llama.cpp's own chain."""

from __future__ import annotations

import ctypes
import math
from collections import Counter

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.sampling import NOT_FINITE, Sampler, TickSampler, choose
from uma_trio.engine.sampling.adjusting import Adjuster, Bag

N_VOCAB = 97
ENDS = {3, 96}


def logits(seed: int, n: int = 1, n_vocab: int = N_VOCAB) -> FloatArray:
    """Return `n` rows of logits, some of them negative."""
    return (np.random.default_rng(seed).standard_normal((n, n_vocab)) * 3).astype(np.float32)


def adjusted(
    params: SamplingParams, prompt: list[int], answer: list[int], row: FloatArray
) -> FloatArray:
    """Return what an adjuster makes of a copy of `row` after `answer`."""
    adjuster = Adjuster(params, ENDS, np.array(prompt, np.int32))
    for token in answer:
        adjuster.accept(token)
    row = row.copy()
    adjuster.apply(row)
    return row


def plainly(
    params: SamplingParams, prompt: list[int], answer: list[int], row: FloatArray
) -> FloatArray:
    """Return the same from the definition, token by token, in doubles."""
    out = row.astype(np.float64)
    for token, bias in params.logit_bias:
        out[token] += bias
    history, n = [*prompt, *answer], params.repeat_last_n
    recent = set(history if n < 0 else history[len(history) - min(n, len(history)) :])
    for token in recent:
        factor = params.repeat_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token, count in Counter(answer).items():
        out[token] -= count * params.frequency_penalty + params.presence_penalty
    if len(answer) < params.min_tokens:
        out[list(ENDS)] = -math.inf
    return out.astype(np.float32)


a_token = st.integers(0, N_VOCAB - 1)
some_tokens = st.lists(st.integers(0, 9) | a_token, max_size=30)
penalties = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -2.0, 2.0]),
    repeat_penalty=st.sampled_from([1.0, 1.1, 0.5, 3.0]),
    repeat_last_n=st.sampled_from([-1, 0, 1, 5, 64]),
    logit_bias=st.dictionaries(a_token, st.floats(-100, 100, width=32), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.sampled_from([0, 0, 3, 100]),
)


@settings(max_examples=200, deadline=None)
@given(penalties, some_tokens, some_tokens, st.integers(0, 99))
def test_a_row_is_changed_as_the_definition_says(
    params: SamplingParams, prompt: list[int], answer: list[int], seed: int
) -> None:
    """Whatever the history, incremental counting gives what counting anew gives."""
    (row,) = logits(seed)
    expected = plainly(params, prompt, answer, row)
    assert adjusted(params, prompt, answer, row) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(penalties, some_tokens, st.integers(0, 99))
def test_undo_puts_every_bit_back(params: SamplingParams, answer: list[int], seed: int) -> None:
    """Edits that meet at the same token are undone in the opposite order."""
    (row,) = logits(seed)
    before = row.copy()
    adjuster = Adjuster(params, ENDS, np.array(answer, np.int32))
    for token in answer:
        adjuster.accept(token)
    Adjuster.undo(row, adjuster.apply(row))
    assert row.tobytes() == before.tobytes()


@settings(max_examples=50, deadline=None)
@given(penalties, some_tokens.filter(bool), st.integers(0, 99))
def test_penalties_are_those_of_the_llama_chain(
    params: SamplingParams, answer: list[int], seed: int
) -> None:
    """With a history of nothing but the answer, llama.cpp's penalties give the same logits."""
    llama = pytest.importorskip("llama_cpp.llama_cpp")
    params = evolve(params, logit_bias=(), min_tokens=0, repeat_last_n=64)
    (row,) = logits(seed)
    penalise = llama.llama_sampler_init_penalties(
        N_VOCAB, 64, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
    )
    data = (llama.llama_token_data * N_VOCAB)()
    table = np.frombuffer(data, dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
    table["id"], table["logit"] = np.arange(N_VOCAB), row
    try:
        for token in answer:
            llama.llama_sampler_accept(penalise, token)
        array = llama.llama_token_data_array(data, N_VOCAB, -1, False)
        llama.llama_sampler_apply(penalise, ctypes.byref(array))
    finally:
        llama.llama_sampler_free(penalise)
    assert adjusted(params, [], answer, row) == pytest.approx(table["logit"], rel=1e-5, abs=1e-5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.lists(st.integers(0, 40), max_size=60))
def test_a_bag_counts_what_was_added_and_not_removed(added: list[int], more: list[int]) -> None:
    """Ids and counts are those of a counter, in some order, after any additions and removals."""
    bag, counter = Bag(np.array(added, np.int32)), Counter(added)
    for token in more:
        bag.add(token)
        counter[token] += 1
        if added:
            gone = added.pop()
            bag.remove(gone)
            counter[gone] -= 1
    found = dict(zip(bag.ids.tolist(), bag.counts.tolist(), strict=True))
    assert found == {token: n for token, n in counter.items() if n}
    assert bool(bag) == bool(found)


def test_a_request_that_changes_nothing_has_no_adjuster() -> None:
    """Its rows take the path that they always took."""
    for params in (
        SamplingParams(0.8, 0.9, 40, 0.05, 1, ignore_eos=True),
        SamplingParams(repeat_penalty=2.0, repeat_last_n=0),
        SamplingParams(repeat_last_n=-1, logprobs=20, stop_token_ids=(1,)),
    ):
        assert Sampler(params, ENDS).adjuster is None


def test_end_tokens_are_masked_until_there_are_min_tokens() -> None:
    """The first `min_tokens` of an answer are no ends; the next one may be."""
    (row,) = logits(1)
    row[[3, 96]] = 50.0, 49.0
    sampler = Sampler(SamplingParams(min_tokens=2), ENDS)
    drawn = []
    for _ in range(3):
        drawn.append(sampler(row))
        sampler.accept(drawn[-1])
    assert not {3, 96} & set(drawn[:2])
    assert drawn[2] == 3


def test_stop_tokens_wait_for_min_tokens_and_stand_beside_ignore_eos() -> None:
    """A request's own stop tokens end it whatever becomes of the model's."""
    params = SamplingParams(stop_token_ids=(7,), min_tokens=1, ignore_eos=True)
    sampler = Sampler(params, ENDS)
    assert sampler.ends == {7}
    assert Sampler(evolve(params, ignore_eos=False), ENDS).ends == {3, 7, 96}
    (row,) = logits(1)
    row[[3, 7]] = 50.0, 49.0
    first = sampler(row)
    sampler.accept(first)
    assert first not in {3, 7, 96}
    assert sampler(row) == 7


def test_a_bias_of_100_decides_and_of_minus_100_forbids() -> None:
    """As OpenAI's documentation says of logits of the usual size."""
    (row,) = logits(2)
    likeliest = int(row.argmax())
    assert Sampler(SamplingParams(logit_bias=((5, 100.0),)), ENDS)(row) == 5
    forbidding = SamplingParams(temperature=1.0, logit_bias=((likeliest, -100.0),), seed=1)
    sampler = Sampler(forbidding, ENDS)
    assert likeliest not in {sampler(row) for _ in range(300)}


def test_no_bias_brings_back_an_end_token_that_is_ignored() -> None:
    """`ignore_eos` holds whatever else is asked."""
    (row,) = logits(2)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature, ignore_eos=True, logit_bias=((3, 100.0),), seed=1)
        assert Sampler(params, ENDS)(row) != 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(min_tokens=9),
        SamplingParams(logit_bias=((3, -100.0),)),
        SamplingParams(presence_penalty=2.0, repeat_penalty=1.5),
    ],
    ids=["mask", "bias", "penalties"],
)
def test_a_bad_logit_is_found_where_it_is_changed(
    params: SamplingParams, temperature: float, bad: float
) -> None:
    """Neither a mask nor an addition hides NaN or +inf; other rows keep their tokens."""
    rows = logits(4, 3)
    rows[1, 3] = bad
    samplers = [Sampler(evolve(params, temperature=temperature), ENDS) for _ in rows]
    for sampler in samplers:
        sampler.accept(3)
    before = rows.copy()
    tokens = choose(rows, samplers)
    assert [token == NOT_FINITE for token in tokens] == [False, True, False]
    assert np.array_equal(rows, before, equal_nan=True)


def test_logits_at_the_end_of_floats_are_divided_without_a_warning() -> None:
    """A row that a penalty drives out of range is not sane, and that is all."""
    row = np.array([3e38, -3e38, 0.0, 1.0], np.float32)
    params = SamplingParams(repeat_penalty=2.0)
    sampler = Sampler(params, (), np.array([1, 3], np.int32))
    assert sampler(row) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            lambda params, temperature, top_k, seed: evolve(
                params, temperature=temperature, top_k=top_k, seed=seed
            ),
            penalties | st.just(SamplingParams()),
            st.sampled_from([0.0, 0.8, 1.5]),
            st.sampled_from([0, 1, 5]),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=6,
    ),
    some_tokens,
    st.integers(0, 99),
)
def test_a_seed_gives_the_same_answer_with_company_and_without(
    params: list[SamplingParams], prompt: list[int], seed: int
) -> None:
    """One compiled choice, used tick after tick, gives each row what its sampler gives alone."""
    known = np.array(prompt, np.int32)
    together = [Sampler(p, ENDS, known) for p in params]
    alone = [Sampler(p, ENDS, known) for p in params]
    choice = TickSampler(together, N_VOCAB)
    for tick in range(6):
        rows = logits(seed + tick, len(params))
        tokens = choice(rows).tokens
        assert tokens == [sampler(row) for row, sampler in zip(rows, alone, strict=True)]
        for token, one, other in zip(tokens, together, alone, strict=True):
            one.accept(token)
            other.accept(token)


def test_plain_rows_draw_the_same_beside_rows_that_are_changed() -> None:
    """The company of an adjusted row leaves every token and every draw of a plain one alone."""
    plain = [SamplingParams(0.8, 0.95, 40, seed=s) for s in range(3)] + [SamplingParams()]
    changed = SamplingParams(0.8, presence_penalty=1.0, logprobs=5, min_tokens=4)
    n_vocab = 4096
    alone, company = ([Sampler(p, ENDS) for p in plain] for _ in range(2))
    company.append(Sampler(changed, ENDS))
    one, other = TickSampler(alone, n_vocab), TickSampler(company, n_vocab)
    for tick in range(20):
        rows = logits(tick, 5, n_vocab)
        assert other(rows).tokens[:4] == one(rows[:4]).tokens
        company[-1].accept(tick)


def test_candidates_are_those_of_the_changed_row() -> None:
    """What tests and tools ask a sampler is what its draws come from."""
    (row,) = logits(5)
    before = row.copy()
    sampler = Sampler(SamplingParams(1.0, top_k=1, logit_bias=((5, 100.0),)), ENDS)
    ids, _ = sampler.candidates(row)
    assert ids.tolist() == [5]
    assert np.array_equal(row, before)
