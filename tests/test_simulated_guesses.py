"""Drafts in virtual time: what a trace shows of them, and that a run with them is predicted."""

from __future__ import annotations

import random

import pytest

from uma_trio.engine.recorder import Recorder
from uma_trio.observe.records import TickRecord
from uma_trio.observe.trace import traced
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.cost import CostModel
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.portable import TracedTick
from uma_trio.policy.state import Contract, SchedulerState, SequenceView
from uma_trio_sim.guesses import NO_GUESSES, Guesses
from uma_trio_sim.latency import gaps, itl
from uma_trio_sim.machine import HOST_S, TABLES, Profile, built_in, gaussian, modelled, staircase
from uma_trio_sim.simulation import Simulation

CPU = built_in("q4_0", gaussian(0.02))
# Computes beside the host, and captures no graphs.
DEVICE = modelled(
    "device", CostModel(staircase(TABLES["h200"]), host_s=HOST_S), gaussian(0.02), overlaps=True
)
MACHINES = pytest.mark.parametrize("machine", [CPU, DEVICE], ids=lambda profile: profile.name)
SEVEN = Guesses.always(0.7)


def recorded() -> tuple[list[TracedTick], Recorder]:
    """Return a list and a recorder that fills it with ticks, as a trace has them."""
    ticks: list[TracedTick] = []

    def keep(state: SchedulerState, plan: Plan, record: TickRecord) -> None:
        ticks.append(traced(state, plan, record))

    return ticks, Recorder(keep)


def guessed(
    machine: Profile,
    guesses: Guesses,
    *,
    policy: str = "deadline",
    recorder: Recorder | None = None,
) -> Simulation:
    """Return a simulation all of whose answers can be guessed like that."""
    return Simulation(
        find_policy(policy), profile=machine, seed=3, recorder=recorder, guesses=lambda _: guesses
    )


# --- guesses ---


def test_what_nobody_knows_of_a_guess_is_drawn_by_its_chance() -> None:
    """And what is known stays."""
    known = Guesses((0.7,) * 2000, (True, False) * 1000)
    assert known.settled(random.Random(1)) is known
    drawn = SEVEN.settled(random.Random(1)).right
    assert sum(map(bool, drawn)) / len(drawn) == pytest.approx(0.7, abs=0.03)
    assert drawn == SEVEN.settled(random.Random(1)).right


def test_guesses_go_on_up_to_a_place_without_one_and_begin_again_behind_the_last() -> None:
    """An answer may be longer than what was recorded of it."""
    guesses = Guesses((0.9, 0.8, 0.0), (True, False, False))
    assert guesses.behind(0, 15) == ([True, False], [0.9, 0.8])
    assert guesses.behind(1, 15) == ([False], [0.8])
    assert guesses.behind(2, 15) == ([], [])
    assert guesses.behind(3, 1) == ([True], [0.9])
    assert NO_GUESSES.behind(0, 15) == ([], [])


# --- latencies of tokens that come together ---


def test_tokens_that_come_together_took_equal_parts_of_the_time() -> None:
    """There is one gap between two deliveries."""
    times = [1.0, 4.0, 4.0, 4.0, 6.0]
    assert itl(times) == [1.0, 1.0, 1.0, 2.0]
    assert gaps(times) == [3.0, 2.0]
    assert itl([1.0, 1.0, 3.0]) == [2.0]
    assert itl([]) == gaps([]) == []


# --- the engine with them ---


@MACHINES
def test_guesses_that_are_right_make_an_answer_quicker_and_no_longer(machine: Profile) -> None:
    """As many tokens, in less time; rows of wrong guesses are no tokens."""
    took = {}
    for guesses in (NO_GUESSES, SEVEN):
        world = guessed(machine, guesses)
        request = world.submit(20, 300, client=1)
        world.run(60.0)
        assert len(request.token_times) == 300
        assert world.machine.tokens == {1: 20 + 300 - 1}
        took[guesses is SEVEN] = request.computed_times[-1] - request.computed_times[0]
    assert took[True] < 0.75 * took[False]
    assert 0.25 < world.machine.accepted / world.machine.drafted < 0.85


def read_beside(guesses: Guesses, cap: float, clients: int) -> tuple[float, int]:
    """Return the seconds of a reader's token beside so many endless prompts, and their tokens."""
    world = Simulation(
        find_policy("deadline"),
        Contract(latency_cap=cap),
        profile=CPU,
        seed=3,
        guesses=lambda _: guesses,
    )
    for client in range(clients):
        world.storm(100 + client)
    world.run(1.0)
    reader = world.submit(20, 3000, client=1)
    world.run(10.0)
    shown = reader.token_times[len(reader.token_times) // 5 :]
    others = sum(n for client, n in world.machine.tokens.items() if client >= 100)
    return (shown[-1] - shown[0]) / (len(shown) - 1), others


@pytest.mark.parametrize("cap", [1.2, 2.0])
def test_a_reader_whose_guesses_are_right_keeps_its_pace_beside_others(cap: float) -> None:
    """The cap is by what it takes alone with them, and the others get what such a reader leaves."""
    alone_s, _ = read_beside(SEVEN, cap, 0)
    beside_s, others = read_beside(SEVEN, cap, 3)
    assert beside_s <= 1.1 * cap * alone_s
    assert others > 1500


def test_guesses_that_are_believed_and_wrong_bring_no_deadline_nearer() -> None:
    """Or the others would starve for tokens that nobody gets sooner."""
    wrong = Guesses((0.9,) * 400, (False,) * 400)
    _, others = read_beside(wrong, 1.2, 3)
    _, plainly = read_beside(NO_GUESSES, 1.2, 3)
    assert others > 0.85 * plainly


def test_guesses_that_are_believed_and_wrong_are_computed_and_change_nothing() -> None:
    """The chances are what a policy goes by; a simulation may have them wrong."""
    world = guessed(CPU, Guesses((0.9,), (False,)))
    request = world.submit(20, 100, client=1)
    world.run(60.0)
    assert len(request.token_times) == 100
    assert world.machine.drafted > 10
    assert world.machine.accepted == 0


# --- what a trace shows ---


def view(known: int, *survival: float) -> SequenceView:
    """Return a stream of which so many tokens are known, and guesses at what follows."""
    n = len(survival)
    return SequenceView(
        1, "interactive", 1 + n, known - 1, started=True, credit=9, arrived=0.0,
        drafted=n, survival=survival,
    )  # fmt: skip


def tick(known: int, *survival: float, tried: int = 0, right: int = 0) -> TracedTick:
    """Return a tick of that stream in which the first guesses were tried, and some were right."""
    state = SchedulerState(0.0, 0, (view(known, *survival),), 512, 1000)
    item = PlanItem(1, 1 + tried, "decode", "", tried)
    return TracedTick(state, Plan((item,)), 0.01, 0.0, 0, {1: right} if tried else {})
