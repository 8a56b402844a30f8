"""Chunks, outcomes, and what a sequence makes of them: one token a tick, none, or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from attrs import evolve
from engine_kit import KINDS, Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.engine.chunk import FAULTS, Chunk, Draft, Outcome, outcomes
from uma_trio.engine.loop import Engine
from uma_trio.engine.sampling import LATE, NOT_FINITE, SampledTokens
from uma_trio.engine.sequences import Sequence
from uma_trio.policy.baseline import baseline
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState
from uma_trio_sim.fake import FakeBackend


def outcome(chunk: Chunk, tokens: list[int]) -> Outcome:
    """Return what came of the only chunk of a tick."""
    (found,) = outcomes([chunk], SampledTokens(tokens))
    return found


def tokens_of(found: Outcome) -> list[int]:
    """Return the ids of what was sampled."""
    return [drawn.token for drawn in found.tokens]


def test_an_unfinished_prompt_keeps_its_tokens_and_samples_none() -> None:
    """It has no row of logits."""
    found = outcome(Chunk(1, start=0, n_tokens=64), [])
    assert (found.kept, tokens_of(found), found.fault) == (64, [], None)


def test_each_step_is_given_the_tokens_of_its_own_rows() -> None:
    """A chunk without rows in between moves nobody's."""
    chunks = [Chunk(1, 9, 1, 0, 1), Chunk(2, 0, 64), Chunk(3, 5, 3, 1, 1)]
    found = outcomes(chunks, SampledTokens([70, 71]))
    assert [tokens_of(one) for one in found] == [[70], [], [71]]


@pytest.mark.parametrize(
    ("sampled", "kept", "tokens"),
    [
        ([5, 6, 7], 3, [5, 6, 7]),  # both drafts are right, and one more token is there
        ([5, 9, 7], 2, [5, 9]),  # the second is wrong: what was sampled instead is right
        ([8, 6, 7], 1, [8]),
    ],
)
def test_drafts_are_kept_up_to_the_first_that_was_not_sampled(
    sampled: list[int], kept: int, tokens: list[int]
) -> None:
    """The last known token is always kept; a wrong draft and all behind it are not."""
    chunk = Chunk(1, start=20, n_tokens=3, first_row=0, n_rows=3, drafts=(5, 6))
    found = outcome(chunk, sampled)
    assert (found.kept, tokens_of(found)) == (kept, tokens)


@pytest.mark.parametrize(
    ("sampled", "right"),
    [
        ([5, 6, 7], 2),
        ([5, 9, 7], 1),
        ([8, 6, 7], 0),
        ([5, LATE, 7], 1),
        ([LATE, 6, 7], 0),
        ([5, NOT_FINITE, 7], 1),
    ],
)
def test_a_draft_is_right_if_it_was_sampled_whatever_comes_behind_it(
    sampled: list[int], right: int
) -> None:
    """Where the token behind it is not there yet, it is computed again, and was right all the same."""
    chunk = Chunk(1, start=20, n_tokens=3, first_row=0, n_rows=3, drafts=(5, 6))
    assert outcome(chunk, sampled).right == right


def test_a_row_that_is_no_number_is_a_fault_only_if_it_is_reached() -> None:
    """What would have been sampled behind a wrong draft concerns nobody; what came before is given."""
    chunk = Chunk(1, start=20, n_tokens=3, first_row=0, n_rows=3, drafts=(5, 6))
    assert outcome(chunk, [8, NOT_FINITE, NOT_FINITE]).fault is None
    reached = outcome(chunk, [5, 6, NOT_FINITE])
    assert (reached.kept, tokens_of(reached), reached.fault) == (2, [5, 6], None)
    assert outcome(chunk, [NOT_FINITE, 6, 7]).fault is FAULTS[NOT_FINITE]


class Drafting(Engine):
    """An engine that guesses at its decoding sequences before each plan."""

    guess: Callable[[Sequence], tuple[int, ...]]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._drafter.propose = self._propose  # type: ignore[method-assign]

    def _propose(self, running: Mapping[int, Sequence]) -> None:
        """Behind admission and before the plan, guess."""
        for sequence in running.values():
            if sequence.view.decoding:
                room = len(sequence.tokens) - sequence.known - 1
                guess = self.guess(sequence)[: max(0, min(room, sequence.credit - 1))]
                sequence.guess(Draft(tuple(guess), (0.5,) * len(guess)))


def with_drafts(state: SchedulerState) -> Plan:
    """Plan as the baseline does, with all drafts there are; rows suffice for them."""
    plan = baseline(state)
    views = state.views
    items = [
        evolve(item, n_tokens=view.pending, n_drafts=view.drafted)
        if (view := views[item.key]).decoding
        else item
        for item in plan.items
    ]
    return evolve(plan, items=tuple(items))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    right=st.lists(st.booleans(), min_size=1, max_size=4),
    stop=st.sampled_from([(), ("e",)]),
    credit=st.integers(1, 9),
)
def test_drafts_right_or_wrong_change_no_token(
    kind: type[FakeBackend], right: list[bool], stop: tuple[str, ...], credit: int
) -> None:
    """Whatever is guessed, a stream gets the tokens that it gets without; wrong guesses leave no cell."""
    backend = kind(n_slots=16, n_ctx=600)
    bench = Bench(backend, with_drafts, engine=Drafting)

    def guess(sequence: Sequence) -> tuple[int, ...]:
        known = sequence.tokens[: sequence.known].tolist()
        coming = backend.continuation(known, len(right))
        return tuple(t if good else (t + 1) % 256 for t, good in zip(coming, right, strict=True))

    bench.engine.guess = guess  # type: ignore[attr-defined]
    plain = Bench(kind(n_slots=16, n_ctx=600))
    for one in (bench, plain):
        sinks = [one.submit(prompt, 20, credit=credit, stop=stop) for prompt in ("hello", "you")]
        for _ in range(30):
            one.ticks(3)
            for handle, _sink in sinks:
                one.credit(handle, 2)
        one.run()
        one.texts = [sink.text for _, sink in sinks]  # type: ignore[attr-defined]
    assert bench.texts == plain.texts  # type: ignore[attr-defined]


def test_right_drafts_take_fewer_decodes() -> None:
    """Three tokens a decode, where two guesses are always right."""
    backend = FakeBackend(n_slots=16)
    bench = Bench(backend, with_drafts, engine=Drafting)
    bench.engine.guess = (
        lambda s: tuple(  # type: ignore[attr-defined]
            backend.continuation(s.tokens[: s.known].tolist(), 2)
        )
    )
    _, sink = bench.submit("hello", 31)
    bench.run()
    assert sink.tokens == bench.expected("hello", 31)
    assert backend.decodes == 11
