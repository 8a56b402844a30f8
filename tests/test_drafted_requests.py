"""What a request may ask for beside drafts: its answer is the same with them and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from constraint_kit import Turns
from drafts_kit import FLAT, Babbler, speaking
from engine_kit import Bench, Sink, told_to_people
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_protocol import Explain, Explanation
from uma_trio.cli.explain import tick_table
from uma_trio.engine.messages import SamplingParams, TokenOut
from uma_trio.engine.planner import EngineSettings
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.sampling import UNREACHED, Sampler, TickSampler
from uma_trio.engine.sampling.adjusting import Adjuster
from uma_trio.observe.records import TickRecord
from uma_trio.policy.deadline import deadline
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import TracedTick, decode, encode
from uma_trio.policy.state import SchedulerState
from uma_trio.text.constraint import Constraint
from uma_trio.words import Lane

PROMPT = "abba baba abba baba ab"


def told(
    asked: dict[str, object], drafts: bool, constraint: Callable[[], Constraint] | None = None
) -> tuple[list[Sink], float]:
    """Return the streams of three equal requests, and how many guesses were right."""
    bench = speaking(drafts=drafts, kind=Babbler)
    sinks = []
    for n in range(3):
        follows = None if constraint is None else constraint()
        sinks.append(bench.submit(PROMPT + "ab"[n % 2] * n, 50, constraint=follows, **asked)[1])
    bench.run()
    return sinks, bench.metrics.totals().drafts_right


def same(with_drafts: list[Sink], without: list[Sink]) -> bool:
    """Whether the streams say the same, logprobs included."""
    return all(
        [(i.token_id, i.text, i.logprobs) for i in one.items if isinstance(i, TokenOut)]
        == [(i.token_id, i.text, i.logprobs) for i in other.items if isinstance(i, TokenOut)]
        and one.end.reason == other.end.reason
        for one, other in zip(with_drafts, without, strict=True)
    )


ASKED: dict[str, st.SearchStrategy[object]] = {
    "presence_penalty": st.sampled_from([-0.5, 1.5]),
    "frequency_penalty": st.sampled_from([-0.2, 0.7]),
    "repeat_penalty": st.sampled_from([0.8, 1.3]),
    "repeat_last_n": st.sampled_from([-1, 1, 5]),
    "logit_bias": st.just(((97, 1.0), (98, -0.5))),
    "logprobs": st.integers(0, 3),
    "min_tokens": st.sampled_from([3, 30]),
    "stop_token_ids": st.just((101, 116)),
    "stop": st.just(("abbab", "bb")),
    "credit": st.sampled_from([10_000, 60]),
}


@settings(max_examples=40, deadline=None)
@given(
    asked=st.fixed_dictionaries({}, optional=ASKED),
    temperature=st.sampled_from([0.0, 0.5, 1.5]),
    top_k=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)
def test_what_changes_or_describes_rows_gives_the_same_with_drafts(
    asked: dict[str, object], temperature: float, top_k: int, seed: int
) -> None:
    """Penalties count the guesses before a row; logprobs are of rows that were reached."""
    asked |= {"temperature": temperature, "top_k": top_k, "seed": seed}
    without, _ = told(asked, drafts=False)
    drafted, _ = told(asked, drafts=True)
    assert same(drafted, without)


@settings(max_examples=40, deadline=None)
@given(
    most=st.integers(1, 45),
    temperature=st.sampled_from([0.0, 0.5, 1.5]),
    top_k=st.sampled_from([0, 3]),
    penalty=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 99),
)
def test_a_constrained_answer_is_the_same_with_drafts(
    most: int, temperature: float, top_k: int, penalty: float, seed: int
) -> None:
    """Each token is looked at behind those before it, refused ones are drawn again in order."""
    asked: dict[str, object] = {
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "frequency_penalty": penalty,
    }
    without, _ = told(asked, drafts=False, constraint=lambda: Turns(most))
    drafted, _ = told(asked, drafts=True, constraint=lambda: Turns(most))
    assert same(drafted, without)


@pytest.mark.parametrize(
    "asked", [{}, {"logprobs": 2}, {"frequency_penalty": 0.01}, {"repeat_penalty": 1.01}], ids=str
)
@pytest.mark.parametrize("constraint", [None, lambda: Turns(40)], ids=["free", "constrained"])
def test_guesses_are_kept_whatever_is_asked(
    asked: dict[str, object], constraint: Callable[[], Constraint] | None
) -> None:
    """Or the properties above would hold of nothing."""
    _, right = told(asked, drafts=True, constraint=constraint)
    assert right > 10


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.lists(st.integers(0, 9), max_size=15),
    st.sampled_from([-1, 1, 4, 20]),
)
def test_what_was_supposed_is_taken_back_whole(
    known: list[int], guesses: list[int], last: int
) -> None:
    """The row behind it is edited as if nothing had been supposed."""
    params = SamplingParams(
        repeat_penalty=1.3, repeat_last_n=last, frequency_penalty=0.5, min_tokens=20
    )
    prompt = np.array(known[:10], np.int32)
    one, other = (Adjuster(params, (3,), prompt) for _ in range(2))
    for adjuster in (one, other):
        for token in known[10:]:
            adjuster.accept(token)
    for token in guesses:
        one.suppose(token)
    one.take_back()
    rows = np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 12)
    rows[1] = rows[0]
    one.apply(rows[0])
    other.apply(rows[1])
    assert rows[0].tolist() == rows[1].tolist()


def test_a_row_behind_a_wrong_guess_is_neither_drawn_nor_described() -> None:
    """It would take the time of a row, and a number that is another token's."""
    logits = np.eye(4, 8, dtype=np.float32) * 9
    sampler = Sampler(SamplingParams(1.0, seed=3, logprobs=1), ())
    chosen = TickSampler([sampler] * 4, 8)(logits, [0, 5, 2, -1])
    assert chosen.tokens[:2] == [0, 1]
    assert chosen.tokens[2:] == [UNREACHED] * 2
    assert list(chosen.logprobs) == [0, 1]


def test_explain_tells_what_was_guessed_and_what_of_it_was_right() -> None:
    """By tick with its source, and for the request, whose end says it, too; wrong guesses are no tokens of its answer."""
    bench = speaking(drafts=True, kind=Babbler)
    handle, sink = bench.submit(PROMPT, 50)
    bench.run()
    recorded = bench.explain(handle, ticks=100)
    (request,), ticks = recorded.requests, recorded.ticks
    drafted = [one for tick in ticks for one in tick.drafted]
    assert {(one.source, one.key) for one in drafted} == {("own text", handle)}
    assert all(0 <= one.right <= one.n and one.match >= 2 for one in drafted)
    spent = request.decode
    assert spent.drafted == sum(one.n for one in drafted)
    assert spent.accepted == sum(one.right for one in drafted) > 0
    assert spent.tokens == len(sink.tokens) - 1
    assert sink.end is not None
    assert (sink.end.drafted_tokens, sink.end.accepted_tokens) == (spent.drafted, spent.accepted)
    shown = told_to_people(Explain(handle), recorded)
    assert isinstance(shown, Explanation)
    said = [tick_table([tick], handle)[0]["WHY"] for tick in shown.ticks]
    assert any("drafted (own text, match" in why and "accepted" in why for why in said)


def test_tokens_that_are_drawn_along_chains_follow_the_models_distribution() -> None:
    """A chi-square test: guesses that are right half of the time shift no token's share."""
    n_vocab, left = 40, 20_000
    chance = np.random.default_rng(5)
    row = (chance.standard_normal(n_vocab) * 1.5).astype(np.float32)
    sampler = Sampler(SamplingParams(1.0, seed=11), ())
    choice, logits = TickSampler([sampler] * 4, n_vocab), np.stack([row] * 4)
    ids, probs = Sampler(SamplingParams(1.0), ()).candidates(row)
    shares = np.zeros(n_vocab)
    shares[ids] = probs
    shares /= shares.sum()
    counts, drawn = np.zeros(n_vocab), 0
    while drawn < left:
        guesses = [int(token) for token in chance.choice(n_vocab, 3, p=shares)]
        tokens = choice(logits, [*guesses, -1]).tokens
        right = next((n for n in range(3) if tokens[n] != guesses[n]), 3)
        sampler.given(right + 1)
        np.add.at(counts, tokens[: right + 1], 1)
        drawn += right + 1
    expected = shares * drawn
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 39 degrees of freedom: more than this happens once in a thousand, and the seeds are fixed.
    assert chi_square < 72.1


def test_a_trace_with_drafts_is_planned_the_same_again() -> None:
    """Its lines hold what was guessed and how likely it was."""
    lines: list[bytes] = []

    def keep(state: SchedulerState, plan: Plan, tick: TickRecord) -> None:
        lines.append(encode(TracedTick(state, plan, tick.decode_s, tick.host_s, tick.status)))

    bench = speaking(drafts=True, kind=Babbler, recorder=Recorder(keep))
    bench.submit(PROMPT, 50)
    bench.run()
    ticks = [line for line in map(decode, lines) if isinstance(line, TracedTick)]
    assert sum(item.n_drafts for tick in ticks for item in tick.plan.items) > 0
    assert all(deadline(tick.state) == tick.plan for tick in ticks)


class Asked(NamedTuple):
    """One request of a crowd: when it comes, how it is read, and when it is given up."""

    at: int
    lane: Lane
    seed: int
    temperature: float
    credit: int
    reads: int  # places that its reader gives back each tick
    left_at: int | None


ASKED_ONE = st.builds(
    Asked,
    at=st.integers(0, 30),
    lane=st.sampled_from(["interactive", "background"]),
    seed=st.integers(0, 9),
    temperature=st.sampled_from([0.0, 1.0, 3.0]),
    credit=st.sampled_from([1, 2, 5, 16]),
    reads=st.sampled_from([1, 3, 16]),
    left_at=st.one_of(st.none(), st.none(), st.integers(1, 60)),
)


def crowd(asked: list[Asked], *, drafts: bool) -> tuple[list[Sink], dict[str, float]]:
    """Let a crowd ask an engine that has places for three; return the streams and the counters."""
    settings = EngineSettings(cost=FLAT, scratch_slots=1, drafts=drafts)
    backend = Babbler(n_slots=4, n_ctx=400, n_rows=24)
    bench = Bench(backend, deadline, settings=settings)
    running: dict[int, tuple[int, Sink]] = {}
    given: Counter[int] = Counter()  # places that were given back, by request
    for tick in range(2000):
        for n, one in enumerate(asked):
            if tick == one.at:
                running[n] = bench.submit(
                    PROMPT + "ab"[n % 2], 40, lane=one.lane, client=n, credit=one.credit,
                    temperature=one.temperature, seed=one.seed, namespace="uid 1",
                )  # fmt: skip
            if n not in running:
                continue
            handle, sink = running[n]
            if one.left_at is not None and tick == one.at + one.left_at:
                bench.cancel(handle)
            elif taken := min(one.reads, len(sink.tokens) - given[n]):
                bench.credit(handle, taken)
                given[n] += taken
        bench.ticks(1)
        if len(running) == len(asked) and all(sink.ends for _, sink in running.values()):
            break
    bench.run()
    return [running[n][1] for n in range(len(asked))], bench.metrics.snapshot()


@settings(max_examples=25, deadline=None)
@given(st.lists(ASKED_ONE, min_size=4, max_size=8))
def test_whoever_leaves_reads_slowly_or_is_preempted_is_told_the_same_with_drafts(
    asked: list[Asked],
) -> None:
    """Guesses change when a token comes, and no token; of who leaves, what came until then is the same."""
    (with_drafts, _), (without, _) = crowd(asked, drafts=True), crowd(asked, drafts=False)
    for one, drafted, plain in zip(asked, with_drafts, without, strict=True):
        if one.left_at is None:
            assert (drafted.tokens, drafted.text) == (plain.tokens, plain.text)
            assert drafted.end.reason == plain.end.reason
        else:
            both = min(len(drafted.tokens), len(plain.tokens))
            assert drafted.tokens[:both] == plain.tokens[:both]


def test_a_crowd_is_preempted_and_drafted_for() -> None:
    """Or the property above would hold of nothing."""
    jobs = [Asked(0, "background", n, 0.0, 16, 16, None) for n in range(3)]
    people = [Asked(5, "interactive", n, 1.0, 5, 3, None) for n in range(4)]
    _, counted = crowd(jobs + people, drafts=True)
    assert counted["preemptions_total"] > 0
    assert sum(counted["draft_accepted_tokens_total"].values()) > 20
