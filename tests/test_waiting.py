"""What somebody waits for: tokens as they come, or the end of an answer; and when first tokens are due."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import COST, decoder, prompt, situation

from uma_protocol.errors import Code
from uma_protocol.events import Generate, Tool
from uma_trio.engine.sequences import after_tokens
from uma_trio.policy.deadline import deadline
from uma_trio.policy.deadline.first_tokens import MOMENT_S, STRETCH, prefill_s
from uma_trio.policy.deadline.first_tokens import deadline as due_at
from uma_trio.policy.state import Contract, SchedulerState
from uma_trio.service.ask import Ask, Door, Refusal, awaits_of
from uma_trio.service.checks import Bounds, check_untokenised
from uma_trio.sim.machine import built_in, steady
from uma_trio.sim.simulation import Simulation
from uma_trio.sim.world import Request
from uma_trio.wire import ask_of

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


def test_a_first_token_is_due_after_twice_its_own_time_and_a_moment() -> None:
    """As long as all of them can be met."""
    now = situation(prompt(1, 40, arrived=99.99))
    plan = deadline(now)
    own_s = prefill_s(COST, 512, 40, 0)
    due = due_at(plan.memory.first_tokens, now.views[1])
    assert due == pytest.approx(99.99 + STRETCH * (own_s + MOMENT_S))


def test_who_is_due_first_is_computed_first() -> None:
    """A short question that comes behind a long paste does not wait for all of it."""
    paste, question = prompt(1, 400, arrived=99.9, client=1), prompt(2, 20, arrived=100.0, client=2)
    plan = deadline(situation(paste, question))
    assert plan.items[0].key == 2


def test_prompts_of_one_client_stand_one_behind_another() -> None:
    """Thirty-two at once gain nothing over one: another client's prompt is third at the latest."""
    many = [prompt(key, 200, arrived=99.0, client=1) for key in range(1, 33)]
    other = prompt(40, 200, arrived=99.0, client=2)
    plan = deadline(situation(*many, other))
    known = plan.memory.first_tokens
    order = sorted([*many, other], key=lambda view: due_at(known, view))
    assert [view.key for view in order].index(40) <= 2


def test_a_target_makes_a_prompt_no_earlier_than_it_is_due() -> None:
    """Or a target of a millisecond would always win."""
    hasty = prompt(1, 200, arrived=99.0, client=1, target_ttft_s=0.001)
    other = prompt(2, 200, arrived=98.9, client=2)
    assert deadline(situation(hasty, other)).items[0].key == 2


def test_a_target_orders_the_prompts_of_one_client() -> None:
    """Its own order is its own business."""
    later = prompt(1, 200, arrived=99.0, client=1)
    hasty = prompt(2, 200, arrived=99.0, client=1, target_ttft_s=0.001)
    assert deadline(situation(later, hasty)).items[0].key == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.floats(0, 5), st.integers(0, 3)), min_size=2, max_size=12
    )
)
def test_all_prompts_end_within_their_common_stretch(
    asked: list[tuple[int, float, int]],
) -> None:
    """If they are computed one after another by their deadlines, at the rate that was assumed."""
    views = [
        prompt(key, n, arrived=100.0 - ago, client=client)
        for key, (n, ago, client) in enumerate(asked, start=1)
    ]
    known = deadline(situation(*views)).memory.first_tokens
    at = 100.0
    for view in sorted(views, key=lambda view: due_at(known, view)):
        at += known.prompts[view.key].own_s / known.share
        assert at <= due_at(known, view) + 1e-9


def slowdowns(world: Simulation, asked: list[Request]) -> list[float]:
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
    asked: list[Request] = []
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
