"""Drafts in virtual time: what a trace shows of them, and that a run with them is predicted."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve

from uma_trio.engine.recorder import Recorder
from uma_trio.engine.records import TickRecord
from uma_trio.engine.trace import traced
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.cost import CostModel
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.portable import Header, TracedTick
from uma_trio.policy.state import Contract, SchedulerState, SequenceView
from uma_trio_sim import validate
from uma_trio_sim.guesses import NO_GUESSES, Guesses, any_of
from uma_trio_sim.latency import gaps, itl
from uma_trio_sim.machine import HOST_S, TABLES, Profile, built_in, gaussian, modelled, staircase
from uma_trio_sim.simulation import DRAFT_ROWS, LIMITS, Simulation, Told
from uma_trio_sim.trace import Recording, figures, requests_of
from uma_trio_sim.traced_guesses import guesses_of
from uma_trio_sim.workload import WORKLOADS, Session, Turn, play
from uma_trio_sim.workload import sessions as sessions_of

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
    assert known.settled(random.Random(1)).right == list(known.right)
    drawn = SEVEN.settled(random.Random(1)).right
    assert sum(map(bool, drawn)) / len(drawn) == pytest.approx(0.7, abs=0.03)
    assert drawn == SEVEN.settled(random.Random(1)).right


def test_guesses_go_on_up_to_a_place_without_one_and_begin_again_behind_the_last() -> None:
    """An answer may be longer than what was recorded of it."""
    guesses = Guesses((0.9, 0.8, 0.0), (True, False, None))
    assert guesses.behind(0, 15) == ([True, False], [0.9, 0.8])
    assert guesses.behind(1, 15) == ([False], [0.8])
    assert guesses.behind(2, 15) == ([], [])
    assert guesses.behind(3, 1) == ([True], [0.9])
    assert NO_GUESSES.behind(0, 15) == ([], [])


def test_an_answer_like_recorded_ones_is_one_of_them_begun_anywhere() -> None:
    """So runs of right guesses stay runs."""
    one = Guesses((0.1, 0.2, 0.3), (True, None, False), paid=False)
    found = any_of([one])(random.Random(5))
    at = found.chances.index(0.1)
    assert [*found.right[at:], *found.right[:at]] == [True, None, False]
    assert not found.paid


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


def test_a_trace_says_place_by_place_what_was_guessed_and_whether_it_was_right() -> None:
    """The first that is wrong is known; those behind it, and those not tried, are not."""
    ticks = [
        tick(10, 0.8, 0.4, 0.1, tried=3, right=1),  # of places 0 to 2
        tick(12, 0.5),  # place 2, not tried
        tick(13),  # place 3: nothing to guess
        tick(14, 0.5, tried=1, right=1),  # place 4, and one more token
    ]
    found = guesses_of(ticks)[1]
    assert found.chances == pytest.approx((0.8, 0.5, 0.5, 0.0, 0.5, 0.0))
    assert found.right == (True, False, None, None, True, None)
    assert guesses_of([tick(10), tick(11)]) == {}


def test_a_guess_whose_mask_was_late_is_not_taken_for_a_wrong_one() -> None:
    """Those before it were right; of itself nothing is known, and no token came in its place."""
    late = evolve(tick(10, 0.8, 0.4, 0.1, tried=3, right=1), late=(1,))
    assert late.gave(1) == 1
    assert guesses_of([late, tick(11, 0.5)])[1].right == (True, None)


@MACHINES
def test_a_trace_with_drafts_shows_every_request_as_it_was(machine: Profile) -> None:
    """Prompt, answer, the time for each token, and the time between deliveries."""
    ticks, recorder = recorded()
    world = guessed(machine, SEVEN, policy="deadline", recorder=recorder)
    work = (
        Session(1, "interactive", 0.5, [Turn(0.0, 30, 120), Turn(1.5, 40, 60)]),
        Session(2, "background", 0.0, [Turn(0.0, 300, 90)]),
    )
    play(world, work)
    world.run(20.0)
    streams = sorted(world.requests, key=lambda stream: stream.arrived)
    for stream, request in zip(streams, requests_of(ticks), strict=True):
        assert (request.prompt, request.answer) == (stream.prompt_tokens, stream.answer_tokens)
        assert request.guesses is not None
        # Measured to the end of a decode; where it overlaps, delivered a moment later.
        near = pytest.approx(itl(stream.computed_times)[: len(request.itl)], abs=5e-4)
        assert request.itl == near
        assert len(request.itl) > len(request.gaps) + 5
    assert figures(ticks).accepted == world.machine.accepted / world.machine.drafted


def test_a_recorded_run_with_drafts_is_predicted() -> None:
    """With the guesses that the trace has, within the bounds of a run without."""
    policy = "deadline"
    ticks, recorder = recorded()
    world = guessed(CPU, SEVEN, policy=policy, recorder=recorder)
    play(world, sessions_of(WORKLOADS["desk"], 6, 30.0))
    world.run(30.0)
    header = Header("0.1.0", "fake", policy, slots=LIMITS.n_slots)
    compared = validate.compare(Recording(header, tuple(ticks), 0), range(1))
    found = {one.name: one for one in compared}
    assert found["accepted"].measured > 0.3
    assert all(found[name].within for name in ("ttft_p50", "tokens_s", "itl_p95"))
    for name in ("accepted", "delivered", "itl_p50", "gap_p95"):
        # Some hundred guesses are accepted or not: their share varies by 0.1 between seeds.
        most = 0.15 if name == "accepted" else 0.1
        assert abs(found[name].off) < most, f"{name} is off by {found[name].off:.3f}"


def test_a_run_whose_drafts_were_looked_up_is_predicted() -> None:
    """The trace alone says what was guessed: the texts are not in it."""
    draw = np.random.default_rng(1)
    prompt = draw.integers(300, 900, 300).astype(np.int32)
    answer = prompt.copy()
    answer[::23] = draw.integers(900, 950, len(answer[::23]))
    ticks, recorder = recorded()
    world = Simulation(
        find_policy("deadline"),
        profile=CPU,
        limits=evolve(LIMITS, n_rows=LIMITS.n_slots + DRAFT_ROWS),
        n_vocab=1000,
        recorder=recorder,
    )
    for n in range(4):
        world.at(
            3.0 * n, lambda n=n: world.tell(Told(np.roll(prompt, 7 * n), np.roll(answer, 7 * n)), client=1)
        )  # fmt: skip
    world.run(15.0)
    header = Header("0.1.0", "fake", "deadline", slots=LIMITS.n_slots)
    recording = Recording(header, tuple(ticks), 0)
    found = {one.name: one for one in validate.compare(recording, range(1), closed=False)}
    assert found["delivered"].measured > 2.0
    for name in ("itl_p50", "itl_p95", "accepted", "ttft_p50", "tokens_s"):
        assert abs(found[name].off) < 0.1, f"{name} is off by {found[name].off:.3f}"


def test_each_guess_that_was_judged_is_simulated_as_it_was_judged() -> None:
    """Whatever the seed: only what nobody knows is drawn."""
    ticks, recorder = recorded()
    world = guessed(CPU, SEVEN, recorder=recorder)
    world.submit(20, 200, client=1)
    world.run(10.0)
    (request,) = requests_of(ticks)
    assert request.guesses is not None
    one, other = (request.guesses.settled(random.Random(seed)).right for seed in (1, 2))
    judged = [place for place, right in enumerate(request.guesses.right) if right is not None]
    assert len(judged) > 100
    assert [one[place] for place in judged] == [other[place] for place in judged]
    assert one != other
    assert all(before < after for before, after in pairwise(judged))
