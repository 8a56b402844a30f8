"""Slots, forks and the order of prompts follow one stretch of first tokens, in the whole engine."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from uma_trio.policy.baseline import baseline
from uma_trio.policy.deadline import deadline
from uma_trio.policy.state import MOMENT_S, STRETCH, Contract
from uma_trio.policy.stretch import prefill_s
from uma_trio_sim.machine import built_in, modelled, steady
from uma_trio_sim.simulation import LIMITS, Simulation, settings_for
from uma_trio_sim.world import SimulatedRequest

READS = Contract(reading_pace_s=0.040)
H200 = built_in("h200", steady)
CPU = built_in("q4_0", steady)


def machine(n_slots: int, *, cached: bool = False) -> Simulation:
    """Return an engine with so many slots, on an H200."""
    settings = evolve(settings_for(H200, READS), prefix_bytes=(1 << 30) * cached)
    limits = evolve(LIMITS, n_slots=n_slots + 1, n_rows=n_slots + 1)
    return Simulation(deadline, READS, profile=H200, settings=settings, limits=limits)


def own_s(tokens: int) -> float:
    """Return what a prompt takes alone."""
    return prefill_s(H200.believed, 512, tokens, 0)


def some(n: int, seed: int) -> NDArray[np.int32]:
    """Return the tokens of a text."""
    return np.random.default_rng(seed).integers(1, 250, n).astype(np.int32)


def until_all_have_ended(world: Simulation, asked: list[SimulatedRequest]) -> None:
    """Run on until every request has ended, a virtual minute at most."""
    world.run(0.1)
    for _ in range(120):
        if all(request.end is not None for request in asked):
            return
        world.run(0.5)
    raise AssertionError([request.handle for request in asked if request.end is None])


def test_a_short_question_does_not_wait_for_a_slot_behind_long_prompts() -> None:
    """Eight long prompts for two slots came first, each of another client."""
    world = machine(2)
    asked = [world.submit(4000, 2, client=n, awaits="answer") for n in range(8)]
    world.run(0.2)
    question = world.submit(20, 2, client=100, awaits="answer")
    until_all_have_ended(world, [*asked, question])
    assert question.ttft_s < sorted(request.ttft_s for request in asked)[3]


@pytest.mark.parametrize("client", [1, 100])
@pytest.mark.parametrize("n_slots", [2, 16])
def test_a_short_question_is_answered_beside_eight_long_prompts(client: int, n_slots: int) -> None:
    """Of the same program and of another one, also if prompts have all slots: the promise of the README."""
    limits = evolve(LIMITS, n_ctx=300_000, n_ctx_seq=40_000, n_slots=n_slots + 1, n_batch=1024)
    world = Simulation(deadline, READS, profile=H200, limits=limits)
    asked = [world.submit(30_000, 2, client=1, awaits="answer") for _ in range(8)]
    questions: list[SimulatedRequest] = []
    for n in range(10):
        ask = lambda: questions.append(world.submit(58, 2, client=client))  # noqa: E731
        world.at(0.2 + 1.7 * n, ask)
    until_all_have_ended(world, asked)
    assert [len(questions), len(asked)] == [10, 8]
    assert max(question.ttft_s for question in questions) <= STRETCH * (own_s(58) + MOMENT_S)


def test_short_questions_in_a_row_abort_long_chunks_and_keep_the_promise() -> None:
    """On a CPU, behind thousands of tokens. After an abort ticks are brief until the lost time is made up."""
    deep = evolve(CPU.believed, context_cell_s=3e-6, wide_context_cell_s=1.5e-6)
    world = Simulation(deadline, READS, profile=modelled("deep", deep))
    asked = [world.submit(3000, 2, client=1, awaits="answer") for _ in range(6)]
    questions: list[SimulatedRequest] = []
    for n in range(12):
        ask = lambda: questions.append(world.submit(20, 1, client=1))  # noqa: E731
        world.at(0.3 + 0.6 * n + 0.2 * (n % 2), ask)
    until_all_have_ended(world, [*asked])
    assert world.metrics.snapshot()["irregular_ticks_total"]["aborted"] > 0  # type: ignore[operator]
    alone_s = prefill_s(CPU.believed, 512, 20, 0)
    assert len(questions) == 12
    assert max(question.ttft_s for question in questions) <= STRETCH * (alone_s + MOMENT_S)


def test_conversations_that_overload_the_machine_do_not_delay_a_short_question() -> None:
    """Each long prompt is of another conversation, so that the common stretch is 8."""
    limits = evolve(LIMITS, n_ctx=300_000, n_ctx_seq=40_000, n_batch=1024)
    world = Simulation(deadline, READS, profile=H200, limits=limits)
    asked = [world.submit(30_000, 2, client=n, awaits="answer") for n in range(8)]
    world.run(1.0)
    assert world.engine.registry.first_tokens.known.stretch > 2 * STRETCH
    question = world.submit(58, 2, client=0)
    until_all_have_ended(world, [*asked, question])
    assert question.ttft_s <= STRETCH * (own_s(58) + MOMENT_S)


@pytest.mark.parametrize("pieces", [2, 8, 32])
def test_a_client_that_divides_its_work_has_it_done_no_sooner(pieces: int) -> None:
    """Beside three clients that send the same work in one prompt."""

    def done_at(pieces: int) -> tuple[float, float]:
        limits = evolve(LIMITS, n_ctx=300_000, n_ctx_seq=20_000, n_slots=41)
        world = Simulation(deadline, READS, profile=H200, limits=limits)
        others = [world.submit(16_000, 1, client=100 + n, awaits="answer") for n in range(3)]
        world.run(0.01)
        own = [world.submit(16_000 // pieces, 1, client=1, awaits="answer") for _ in range(pieces)]
        until_all_have_ended(world, [*others, *own])
        own_s, others_s = ([request.token_times[0] for request in of] for of in (own, others))
        return max(own_s), max(others_s)

    whole, divided = done_at(1), done_at(pieces)
    assert divided[0] >= whole[0]
    assert divided[1] <= 1.03 * max(whole)


def test_answers_that_hold_every_slot_make_way_once_for_a_first_token() -> None:
    """And lose no token by it; nobody waits for the end of somebody's long answers."""
    world = machine(2, cached=True)
    long = [
        world.submit(200, 1500, client=1, awaits="answer", prompt=some(200, seed))
        for seed in (1, 2)
    ]
    world.run(2.0)
    question = world.submit(300, 5, client=2, awaits="answer")
    world.run(3.0)
    assert question.ttft_s <= STRETCH * (own_s(300) + MOMENT_S)
    until_all_have_ended(world, long)
    assert [len(request.token_times) for request in long] == [1500, 1500]


def test_no_reader_loses_its_slot_to_a_first_token() -> None:
    """What is read goes on, and the question waits for the first end."""
    world = machine(2, cached=True)
    read = [world.submit(200, 400, client=1, prompt=some(200, seed)) for seed in (1, 2)]
    world.run(0.5)
    question = world.submit(300, 5, client=2, awaits="answer")
    until_all_have_ended(world, [*read, question])
    assert question.token_times[0] > min(request.token_times[-1] for request in read)
    assert max(gap for request in read for gap in request.gaps) < 0.2


def test_who_computes_a_shared_prefix_is_due_when_its_followers_are() -> None:
    """A prompt that is due between leader and follower goes behind both."""
    world = machine(8, cached=True)
    shared = some(6000, 1)
    world.submit(6000, 2, client=1, awaits="answer", prompt=shared)
    world.run(0.02)
    follower = world.submit(
        6020, 2, client=2, awaits="answer", prompt=np.concatenate([shared, some(20, 2)])
    )
    world.run(0.02)
    between = world.submit(1500, 2, client=3, awaits="answer", prompt=some(1500, 3))
    leader = world.engine.registry.running[1].view
    assert leader.first is not None
    world.run(0.1)
    follows = world.engine.registry.running[follower.handle].view.first
    assert follows is not None
    assert follows.own_s < leader.first.own_s / 4
    assert world.engine.registry.running[1].view.waited_by == (follows,)
    until_all_have_ended(world, [follower, between])
    assert follower.token_times[0] < between.token_times[0]
    assert not any(sequence.view.waited_by for sequence in world.engine.registry.running.values())


def test_a_client_with_thirty_two_long_prompts_starves_nobody() -> None:
    """Four others ask short and long questions meanwhile, on sixteen slots that are all taken.

    In the order of arrival they would wait for nine seconds, fifty times what a question takes.
    """
    world = machine(16)
    many = [world.submit(3000, 100, client=1, awaits="answer") for _ in range(32)]
    others: list[SimulatedRequest] = []
    for n in range(24):
        tokens, client = (40, 400, 1500)[n % 3], 2 + n % 4
        world.at(
            0.3 + 0.2 * n,
            lambda tokens=tokens, client=client: others.append(  # type: ignore[misc]
                world.submit(tokens, 20, client=client, awaits="answer")
            ),
        )
    world.run(6.0)
    until_all_have_ended(world, [*many, *others])
    slow = [request.ttft_s / (own_s(request.prompt_tokens) + MOMENT_S) for request in others]
    assert max(slow) <= 10


def test_nothing_is_due_where_no_cost_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then requests get slots in turn by who sent them, as without deadlines."""
    settings = evolve(settings_for(H200), cost=None)
    world = Simulation(baseline, READS, profile=H200, settings=settings)
    asked = [world.submit(100, 3, client=n) for n in range(40)]
    registry = world.engine.registry
    world.run(0.001)
    assert registry.waiting
    monkeypatch.setattr(registry.cells, "cached", _never_searched)
    registry.note_waiting(world.clock())
    monkeypatch.undo()
    until_all_have_ended(world, asked)
    assert registry.first_tokens.known.stretch == STRETCH


def _never_searched(*_args: object) -> None:
    raise AssertionError("looked up what nobody asks for")


def test_who_has_been_served_is_forgotten_while_others_wait() -> None:
    """Of sixty clients, one after another beside long prompts, few are kept."""
    world, most = machine(4), 0
    for n in range(60):
        world.submit(4000, 1, client=1000 + n % 2, awaits="answer")
        until_all_have_ended(world, [world.submit(20, 1, client=n, awaits="answer")])
        most = max(most, len(world.engine.registry.first_tokens._machines))
    assert most < 30
