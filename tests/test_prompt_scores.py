"""A request that wants its prompt's logprobs: every token of it but the first is scored."""

from __future__ import annotations

import math

import numpy as np
import pytest
from drafts_kit import FLAT, STAIRS, Babbler, speaking
from engine_kit import KINDS, Bench, Sink
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import Finished, PromptDone, TokenLogprobs
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.sampling.logprobs import Describer
from uma_trio.policy.baseline import baseline
from uma_trio.policy.deadline import deadline
from uma_trio.policy.pipeline import Policy
from uma_trio_sim.fake import FakeBackend, InjectedFault

POLICIES = {"baseline": baseline, "deadline": deadline}
PROMPT = list(b"Once upon a time there was a fox. ") * 3


def done(sink: Sink) -> PromptDone:
    """Return what the stream was told of its prompt, once."""
    (item,) = [item for item in sink.items if isinstance(item, PromptDone)]
    return item


def scores(sink: Sink) -> tuple[TokenLogprobs, ...]:
    """Return what it was told of each token but the first."""
    found = done(sink).logprobs
    assert found is not None
    return found


def step_by_step(prompt: list[int], n_top: int) -> list[TokenLogprobs]:
    """Score each token of `prompt` by the row of the tokens before it, computed alone."""
    backend = FakeBackend()
    found = []
    for n in range(1, len(prompt)):
        row: FloatArray = np.empty(backend.model.n_vocab, np.float32)
        backend._fill_row(row, backend.history(prompt[:n]))
        found.append(Describer({0: n_top}, len(row))(row[np.newaxis], [prompt[n]])[0])
    return found


def same(sink: Sink, prompt: list[int], n_top: int) -> bool:
    """Whether the stream was told what its prompt scores."""
    pairs = zip(scores(sink), step_by_step(prompt, n_top), strict=True)
    return all(
        one.logprob == pytest.approx(other.logprob)
        and [token for token, _ in one.top] == [token for token, _ in other.top]
        and [value for _, value in one.top] == pytest.approx([value for _, value in other.top])
        for one, other in pairs
    )


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_scores_are_those_of_each_token_computed_alone(
    kind: type[FakeBackend], policy: Policy
) -> None:
    """In company, too, whose answers stay what they are; and the prompt's own answer."""
    given = EngineSettings(cost=STAIRS, scratch_slots=1)
    bench = Bench(kind(n_rows=40), policy, settings=given)
    _, reader = bench.submit("a reader", 60)
    bench.ticks(3)
    _, sink = bench.submit(PROMPT, 5, prompt_logprobs=2)
    _, beside = bench.submit("somebody else's prompt", 20, lane="background")
    bench.run()
    assert same(sink, PROMPT, 2)
    assert sink.tokens == bench.backend.continuation(PROMPT, 5)
    assert reader.tokens == bench.expected("a reader", 60)
    assert beside.tokens == bench.expected("somebody else's prompt", 20)
    assert done(reader).logprobs is None


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=6),
    st.integers(0, 40),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([FLAT, STAIRS]),
)
def test_rows_never_exceed_what_a_batch_may_ask_for(
    lengths: list[int], spare: int, policy: str, cost: object
) -> None:
    """However many are scored at once: the backend refuses more, and no plan is."""
    given = EngineSettings(cost=cost, scratch_slots=1)  # type: ignore[arg-type]
    bench = Bench(FakeBackend(n_slots=7, n_rows=7 + spare), POLICIES[policy], settings=given)
    prompts = [(PROMPT * 2)[:n] for n in lengths]
    sinks = [bench.submit(prompt, 3, prompt_logprobs=n)[1] for n, prompt in enumerate(prompts)]
    bench.run()
    assert bench.metrics.snapshot()["irregular_ticks_total"]["policy"] == 0
    assert not [tick for tick in bench.explain(ticks=999).ticks if tick.status != 0]
    for n, (sink, prompt) in enumerate(zip(sinks, prompts, strict=True)):
        assert sink.tokens == bench.backend.continuation(prompt, 3)
        assert same(sink, prompt, n)


def test_many_rows_are_computed_at_a_time() -> None:
    """As many as there are to spare, and not one token a tick."""
    bench = Bench(FakeBackend(n_slots=8, n_rows=40))
    _, sink = bench.submit(PROMPT, 1, prompt_logprobs=0)
    ticks = bench.run()
    assert len(scores(sink)) == len(PROMPT) - 1
    assert ticks <= 1 + math.ceil(len(PROMPT) / 28)


def test_drafts_of_others_find_room_beside_scores() -> None:
    """Guesses are checked with rows that scoring leaves, and nobody's answer changes."""
    bench = speaking(drafts=True, kind=Babbler)
    _, reader = bench.submit("abba baba abba baba ab", 80)
    bench.ticks(20)
    _, sink = bench.submit(PROMPT, 3, prompt_logprobs=1)
    bench.run()
    assert reader.tokens == bench.expected("abba baba abba baba ab", 80)
    assert len(scores(sink)) == len(PROMPT) - 1
    assert bench.metrics.totals().drafts_right > 0


def test_a_preempted_prompt_is_scored_as_if_it_had_not_been() -> None:
    """What was computed is computed again, and each score is there once."""
    bench = Bench(FakeBackend(n_ctx=160, n_batch=16, n_rows=24))
    _, first = bench.submit("first " * 8, 60, lane="background")
    _, sink = bench.submit(PROMPT[:60], 4, lane="background", prompt_logprobs=1)
    bench.ticks(3)
    bench.engine.registry.preempt(2, "a test")
    bench.run()
    assert bench.metrics.snapshot()["preemptions_total"] >= 1
    assert same(sink, PROMPT[:60], 1)
    assert first.tokens == bench.expected("first " * 8, 60)


def test_a_prompt_without_a_sane_distribution_ends_alone() -> None:
    """Logits that are not numbers score nothing: its request fails, and the other goes on."""
    bench = Bench(FakeBackend(n_rows=40, faults={1: InjectedFault(bad_rows=(1,))}))
    _, reader = bench.submit("reader", 30)
    bench.ticks(1)
    _, sink = bench.submit(PROMPT, 3, prompt_logprobs=1)
    bench.run()
    assert (sink.end.reason, sink.end.code) == ("error", "E_RUNTIME_006")
    assert reader.tokens == bench.expected("reader", 30)


def test_a_prompt_of_one_token_has_no_scores() -> None:
    """Nothing comes before its only token."""
    bench = Bench()
    _, sink = bench.submit([72], 2, prompt_logprobs=3)
    bench.run()
    assert scores(sink) == ()
    assert isinstance(sink.items[-1], Finished)
