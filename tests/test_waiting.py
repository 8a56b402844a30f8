"""What somebody waits for: tokens as they come, or the end of an answer; and when first tokens are due."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import COST, decoder, prompt, situation, waited_for

from uma_protocol import Generate, Tool
from uma_protocol.errors import Code
from uma_trio.engine.sequences import after_tokens
from uma_trio.policy.deadline import deadline
from uma_trio.policy.state import (
    MOMENT_S,
    STRETCH,
    Contract,
    FirstToken,
    SchedulerState,
)
from uma_trio.policy.stretch import (
    LOOKED_AT,
    SHORT_BURST_S,
    SHORT_SHARE,
    OwnMachine,
    ShortLane,
    Wanted,
    common_stretch,
    level_of,
    prefill_s,
)
from uma_trio.policy.stretch import deadline as due_at
from uma_trio.service.ask import Ask, Door, Refusal, awaits_of
from uma_trio.service.checks import Bounds, check_untokenised
from uma_trio.uds.wire import ask_of
from uma_trio_sim.machine import built_in, steady
from uma_trio_sim.simulation import Simulation
from uma_trio_sim.world import SimulatedRequest

READS = Contract(reading_pace_s=0.040)
SOLO = COST.computing(1)


# --- what is waited for ---


@pytest.mark.parametrize(
    ("asked", "awaits"),
    [
        ({}, "tokens"),
        ({"stream": False}, "answer"),
        ({"n": 2}, "answer"),
        ({"regex": "a+"}, "answer"),
        ({"stream": False, "awaits": "tokens"}, "tokens"),
        ({"awaits": "answer"}, "answer"),
    ],
)
def test_what_is_waited_for_follows_from_what_is_asked(
    asked: dict[str, object], awaits: str
) -> None:
    """Whoever sees the answer only when it is whole waits for its end, unless the request says it."""
    assert awaits_of(ask_of(Generate("a", prompt="Hi", **asked))) == awaits  # type: ignore[arg-type]


def test_whoever_gives_tools_waits_for_the_end() -> None:
    """A coding agent does nothing before the call is complete."""
    tool = Tool(name="look", parameters={"type": "object"})
    message = {"messages": (), "tools": (tool,)}
    assert awaits_of(ask_of(Generate("a", **message))) == "answer"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lane", "awaits"),
    [("background", "tokens"), ("background", "answer"), ("interactive", "nothing")],
)
def test_a_wait_that_the_lane_does_not_have_is_refused(lane: str, awaits: str) -> None:
    """The refusal names the field and what there is."""
    ask = Ask(prompt="Hi", lane=lane, awaits=awaits)  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="background lane") as refused:
        check_untokenised(
            ask, Door(max_prompt_bytes=100), Bounds(model="m", n_ctx_seq=99, n_vocab=9)
        )
    assert (refused.value.code, refused.value.field) == (Code.E_PROTO_003, "awaits")


def test_whoever_waits_for_the_end_does_so_behind_the_first_token() -> None:
    """An answer that nobody reads does not become one that is read."""
    world = Simulation(deadline, READS, profile=built_in("h200", steady))
    world.submit(20, 2000, client=1, awaits="answer")
    world.run(1.0)
    (running,) = world.engine.registry.running.values()
    assert running.view.started
    assert not running.view.read


def test_tokens_change_of_a_sequence_only_where_it_stands() -> None:
    """What its request said, and who sent it, stays: no field is forgotten."""
    view = decoder(
        1,
        awaits="answer",
        within=(7, 8),
        client=9,
        pays_for_drafts=False,
        target_ttft_s=1.0,
        target_itl_s=0.1,
        cached=3,
        shown_at=4.0,
        first_token_at=2.0,
        last_token_at=3.0,
    )
    after = after_tokens(view, 12, 1, 5.0, 6.0)
    moved = evolve(view, pending=1, computed=11, credit=view.credit - 1)
    assert after == evolve(moved, last_token_at=5.0, shown_at=6.0)


# --- the step ---


def test_a_step_is_the_reading_pace_where_that_is_longer() -> None:
    """Other work may use the time that nobody can read in."""
    now = evolve(situation(decoder(1), prompt(9, 500, lane="background")), contract=READS)
    plan = deadline(now)
    assert plan.limit.step_s == pytest.approx(0.040)
    assert SOLO < plan.predicted_s <= 0.040


def test_a_slow_machine_keeps_its_cap() -> None:
    """Where a token takes longer than anybody needs, other work adds a fifth."""
    slow = COST.times(10)
    now = situation(decoder(1), prompt(9, 500, lane="background"), cost=slow)
    assert deadline(evolve(now, contract=READS)).limit.step_s == pytest.approx(1.2 * 10 * SOLO)


def test_a_reading_pace_brakes_nobody() -> None:
    """Beside one light stream a reader has what a tick of two gives, and not one token each step."""
    world = Simulation(deadline, READS, profile=built_in("h200", steady))
    reader = world.submit(20, 2000, client=1)
    world.run(1.0)
    world.submit(20, 2000, client=2, lane="background")
    world.run(1.0)
    before = len(reader.token_times)
    world.run(2.0)
    assert (len(reader.token_times) - before) / 2.0 >= 0.8 / 0.0042


def test_a_reader_in_a_storm_is_shown_each_token_within_its_step() -> None:
    """Three clients send prompts without end, on a GPU that can do much between two tokens."""
    world = Simulation(deadline, READS, profile=built_in("h200", steady))
    reader = world.submit(20, 4000, client=1)
    world.run(1.0)
    for client in range(3):
        world.storm(100 + client)
    world.run(5.0)
    assert max(reader.itl) <= 0.040 * 1.1
    assert sum(world.machine.tokens[100 + client] for client in range(3)) > 5.0 * 8000


# --- first tokens ---


def order(now: SchedulerState) -> list[int]:
    """Return the keys of the prompts by their deadlines."""
    prompts = [view for view in now.sequences if view.first is not None]
    return [view.key for view in sorted(prompts, key=lambda view: due_at(now.first_tokens, view))]


def test_a_first_token_is_due_after_twice_its_own_time_and_a_moment() -> None:
    """As long as all of them can be met."""
    now = waited_for(situation(prompt(1, 40, arrived=99.99)))
    own_s = prefill_s(COST, 512, 40, 0)
    due = due_at(now.first_tokens, now.views[1])
    assert due == pytest.approx(99.99 + STRETCH * (own_s + MOMENT_S))


def test_who_is_due_first_is_computed_first() -> None:
    """A short question that comes behind a long paste does not wait for all of it."""
    paste, question = prompt(1, 400, arrived=99.9, client=1), prompt(2, 20, arrived=100.0, client=2)
    assert deadline(waited_for(situation(paste, question))).items[0].key == 2


def test_prompts_of_one_client_stand_one_behind_another() -> None:
    """Thirty-two at once gain nothing over one: another client's prompt is third at the latest."""
    many = [prompt(key, 200, arrived=99.0, client=1) for key in range(1, 33)]
    other = prompt(40, 200, arrived=99.0, client=2)
    assert order(waited_for(situation(*many, other))).index(40) <= 2


def test_conversations_of_one_program_do_not_stand_behind_each_other() -> None:
    """Where nobody else asks, its own prompts go by when they came and what they take."""
    many = [prompt(key, 200, arrived=99.0, client=key, within=(1, 11)) for key in range(100, 132)]
    short = prompt(200, 20, arrived=99.0, client=200, within=(1, 11))
    assert order(waited_for(situation(*many, short)))[0] == 200
    other = prompt(300, 200, arrived=99.0, client=300, within=(2, 21))
    assert 300 in order(waited_for(situation(*many, short, other)))[:3]


def test_a_target_makes_a_prompt_no_earlier_than_it_is_due() -> None:
    """Or a target of a millisecond would always win."""
    hasty = prompt(1, 200, arrived=99.0, client=1, target_ttft_s=0.001)
    other = prompt(2, 200, arrived=98.9, client=2)
    assert deadline(waited_for(situation(hasty, other))).items[0].key == 2


def test_a_target_orders_the_prompts_of_one_client() -> None:
    """Its own order is its own business."""
    later = prompt(1, 200, arrived=99.0, client=1)
    hasty = prompt(2, 200, arrived=99.0, client=1, target_ttft_s=0.001)
    assert deadline(waited_for(situation(later, hasty))).items[0].key == 2


def test_of_equals_one_that_has_begun_is_finished_first() -> None:
    """Two agents of one program whose prompts came together: shared in turns both would be done last."""
    one = prompt(1, 400, arrived=99.0, client=101, within=(1, 11))
    other = evolve(one, key=2, client=102, computed=200, pending=200)
    assert deadline(waited_for(situation(one, other))).items[0].key == 2


def test_of_equals_the_conversation_begins_that_had_least() -> None:
    """Its next step does not overtake another agent's first prompt."""
    now = waited_for(
        situation(
            prompt(1, 400, arrived=99.0, client=101, within=(1, 11)),
            prompt(2, 400, arrived=99.01, client=102, within=(1, 11)),
        )
    )
    used = evolve(now.memory, used_s={1: 2.0, 11: 2.0, 101: 2.0, 102: 0.0})
    assert deadline(evolve(now, memory=used)).items[0].key == 2


def test_who_computes_for_others_is_due_when_the_first_of_them_is() -> None:
    """Else whoever is due between the two holds up both."""
    leader, between = prompt(1, 400, arrived=99.0, client=1), prompt(2, 200, arrived=99.0, client=2)
    assert order(waited_for(situation(leader, between))) == [2, 1]
    heir = evolve(leader, waited_by=(FirstToken(99.0, 0.01, (99.01,)),))
    assert order(waited_for(situation(heir, between))) == [1, 2]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.001, 3.0)), min_size=1, max_size=LOOKED_AT),
    st.floats(0.05, 1.0),
    st.floats(1.0, 500.0),
)
def test_all_prompts_end_within_their_common_stretch(
    asked: list[tuple[float, float]], share: float, before: float
) -> None:
    """One after another by their deadlines; it is no larger than needed, whatever it was before."""
    waited = [Wanted(100.0 - ago, own_s, own_s) for ago, own_s in asked]

    def late_s(stretch: float) -> float:
        at, late = 100.0, -float("inf")
        for due, left_s in sorted(
            (since + stretch * (own_s + MOMENT_S), left_s) for since, own_s, left_s in waited
        ):
            at += left_s / share
            late = max(late, at - due)
        return late

    found = common_stretch(100.0, waited, share, before)
    assert late_s(found) <= 1e-9
    assert found == STRETCH or late_s(found / 1.06) > 0
    assert found == pytest.approx(common_stretch(100.0, waited, share), rel=0.06)


def test_the_search_looks_at_a_bounded_number_of_prompts() -> None:
    """Of thousands each stands for those around it, and the stretch is about the same."""
    waited = [Wanted(100.0 + n / 1000, 0.1, 0.1) for n in range(4096)]
    exact = 4096 * 0.1 / (0.1 + MOMENT_S)
    assert common_stretch(100.0, waited, 1.0) == pytest.approx(exact, rel=0.1)


def test_readers_leave_a_share_to_prompts() -> None:
    """It is noted for the search, and not for small changes."""
    now = evolve(situation(decoder(1), prompt(2, 300, arrived=99.0)), contract=READS)
    share = deadline(now).memory.prompts_share
    assert share == pytest.approx(1.0 - SOLO / 0.040, rel=0.1)
    again = evolve(now, memory=evolve(deadline(now).memory, prompts_share=share * 1.05))
    assert deadline(again).memory.prompts_share == share * 1.05


def test_the_outermost_level_that_differs_says_who_stands_behind_whom() -> None:
    """Principals, then programs, then conversations."""
    assert level_of([(1, 11, 111), (2, 21, 211)]) == 0
    assert level_of([(1, 11, 111), (1, 12, 121)]) == 1
    assert level_of([(1, 11, 111), (1, 11, 112)]) == 2
    assert level_of([(1, 11, 111)]) == 2
    assert level_of([]) == 0


def slowdowns(world: Simulation, asked: list[SimulatedRequest]) -> list[float]:
    """Return how many times the time that each would take alone its first token took."""
    cost = world.machine.profile.believed
    return [
        request.ttft_s / (prefill_s(cost, 512, request.prompt_tokens, 0) + MOMENT_S)
        for request in asked
    ]


@pytest.mark.parametrize("machine", ["h200", "q4_0"])
def test_equals_with_long_prompts_do_not_starve_each_other(machine: str) -> None:
    """Four agents of six steps each: no first token takes more than all prompts before it take."""
    world = Simulation(deadline, READS, profile=built_in(machine, steady))
    asked: list[SimulatedRequest] = []
    size = 1500 if machine == "h200" else 150

    def start(client: int) -> None:
        left = [6]

        def ask() -> None:
            left[0] -= 1
            again = (lambda: world.at(world.clock.now, ask)) if left[0] else None
            size_now = size if left[0] == 5 else size // 5
            asked.append(world.submit(size_now, 40, client=client, awaits="answer", on_end=again))

        ask()

    for client in range(1, 5):
        start(client)
    world.run(60.0)
    assert len(asked) == 24
    assert all(request.end is not None for request in asked)
    assert max(slowdowns(world, asked)) <= 6


def test_answers_ride_along_and_are_owed_ticks_of_their_own() -> None:
    """Prompts without end: an answer gets a token in each of their ticks, and a quarter of the time."""
    world = Simulation(deadline, READS, profile=built_in("q4_0", steady))
    answer = world.submit(20, 2000, client=1, awaits="answer")
    world.run(1.0)
    for client in range(3):
        world.storm(100 + client, lane="interactive")
    before = len(answer.computed_times)
    world.run(10.0)
    got = len(answer.computed_times) - before
    assert got >= 0.2 * 10.0 / COST.computing(1)


def test_a_state_with_answers_is_planned_the_same_again() -> None:
    """What first tokens and answers are owed is in the memory, and nowhere else."""
    views = (decoder(1, awaits="answer"), prompt(2, 300, awaits="answer"))
    now: SchedulerState = situation(*views)
    assert deadline(now) == deadline(now)
    assert {item.key for item in deadline(now).items} == {1, 2}
    assert np.isinf(deadline(now).limit.seconds)


# --- the virtual machine of a sender ---


def test_the_shortest_prompt_of_a_sender_is_first() -> None:
    """And those behind it move on by its time."""
    machine = OwnMachine()
    machine.add(1, 0.0, 4.0)
    machine.add(2, 0.0, 4.0)
    machine.add(3, 1.0, 0.5)
    assert machine.ends() == {3: 1.5, 1: 4.5, 2: 8.5}


def test_what_is_left_of_a_prompt_counts_and_not_all_of_it() -> None:
    """One that is nearly done is finished."""
    machine = OwnMachine()
    machine.add(1, 0.0, 4.0)
    machine.add(2, 3.5, 1.0)
    assert machine.ends() == {1: 4.0, 2: 5.0}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(0.01, 2.0)), max_size=60))
def test_a_long_prompt_takes_at_most_about_twice_as_long_as_in_the_order_of_arrival(
    later: list[tuple[float, float]],
) -> None:
    """However many shorter ones come, and no machine time is lost."""
    machine, at, total_s = OwnMachine(), 0.0, 5.0
    machine.add(0, 0.0, 5.0)
    end = 5.0
    for key, (after_s, own_s) in enumerate(later, start=1):
        at += after_s
        if at >= end:
            break
        machine.add(key, at, own_s)
        total_s += own_s
        end = machine.ends()[0]
    assert end <= max(5.0 + 5.0 + MOMENT_S, 2 * 5.0) + 1e-9
    assert max(machine.ends().values()) == pytest.approx(total_s)


def test_short_prompts_use_a_part_of_the_machine_before_all_others() -> None:
    """What they may use in advance is made up for by time."""
    lane = ShortLane()
    admitted = [lane.admit(0.0, 0.05, 0.0) for _ in range(20)]
    assert sum(admitted) * 0.05 == pytest.approx(SHORT_SHARE * SHORT_BURST_S, abs=0.05)
    assert not lane.admit(0.1, 0.05, 0.0)
    assert lane.admit(3.0, 0.05, 0.0)
    assert not ShortLane().admit(0.0, 0.05, SHORT_BURST_S + 0.1), "its sender has used its share"
