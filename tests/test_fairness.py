"""Machine time is shared: between clients evenly, between lanes by weight, after every pause."""

from __future__ import annotations

from collections import defaultdict

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import prompt, state

from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.fairness import lift
from uma_trio.policy.pipeline import contract
from uma_trio.policy.state import Contract, Lane, Memory, SequenceView

STAIRS = Staircase(
    (1, 2, 3, 4, 8, 16, 64, 512), (0.008, 0.012, 0.016, 0.011, 0.019, 0.026, 0.1, 0.8)
)
LONGEST_S = 0.8


def shared_out(
    views: list[SequenceView], ticks: int, rules: Contract | None = None
) -> tuple[dict[int, float], dict[Lane, float]]:
    """Let endless sequences compute for so many ticks; return the seconds by client and by lane."""
    clients: dict[int, float] = defaultdict(float)
    lanes: dict[Lane, float] = defaultdict(float)
    memory = Memory(cost=CostModel(STAIRS))
    for tick in range(ticks):
        now = evolve(
            state(*views), tick=tick, now=0.02 * tick, memory=memory, contract=rules or Contract()
        )
        plan = contract(now)
        memory = plan.memory
        by_key = {view.key: view for view in views}
        for item in plan.items:
            seconds = plan.predicted_s * item.n_tokens / plan.n_tokens
            clients[by_key[item.key].client] += seconds
            lanes[by_key[item.key].lane] += seconds
    return clients, lanes


@given(
    st.lists(st.tuples(st.integers(512, 5000), st.integers(1, 4)), min_size=2, max_size=4),
    st.integers(50, 150),
)
def test_clients_that_always_have_work_get_the_same_time(
    clients: list[tuple[int, int]], ticks: int
) -> None:
    """Whatever each asks for, and in how many requests, they differ by two ticks at the most."""
    views = []
    for client, (pending, requests) in enumerate(clients):
        for _ in range(requests):
            views.append(prompt(len(views), pending, lane="background", client=client))
    used, _ = shared_out(views, ticks)
    shares = [used[client] for client in range(len(clients))]
    assert max(shares) - min(shares) <= 2 * LONGEST_S


def test_a_greedy_client_gets_no_more_for_asking_ten_times() -> None:
    """Ten prompts of one client and one of another share the machine evenly."""
    views = [prompt(i, 5000, lane="background", client=1) for i in range(10)]
    used, _ = shared_out([*views, prompt(10, 5000, lane="background", client=2)], 200)
    assert abs(used[1] - used[2]) <= 2 * LONGEST_S


def test_lanes_share_by_their_weights() -> None:
    """A person's long paste gets ten parts, a batch job one: neither waits for ever."""
    paste = prompt(1, 100_000, computed=600, client=1)
    batch = prompt(2, 100_000, lane="background", client=2)
    _, lanes = shared_out([paste, batch], 400)
    assert 8 < lanes["interactive"] / lanes["background"] < 12
    _, lanes = shared_out([paste, batch], 400, Contract(interactive_weight=1.0))
    assert 0.8 < lanes["interactive"] / lanes["background"] < 1.2


def test_a_pause_is_no_claim() -> None:
    """Who could use nothing starts level with the least of those that stayed."""
    assert lift({1: 50.0, 2: 3.0}, {1, 2}) == {1: 50.0, 2: 3.0}
    after = lift({1: 50.0, 2: 3.0}, {1})
    after[1] += 10.0
    assert lift(after, {1, 2}) == {1: 60.0, 2: 60.0}


def test_what_was_used_is_not_shed_by_leaving() -> None:
    """Who comes back between two requests still owes what it had more than the others."""
    away = lift({1: 50.0, 2: 3.0}, {2})
    assert away == {1: 50.0, 2: 3.0}
    assert lift(away, {1, 2}) == {1: 50.0, 2: 3.0}


def test_only_debts_are_remembered_of_those_who_left() -> None:
    """The counters do not grow with everyone who ever came."""
    assert lift({1: 5.0, 2: 7.0, 3: 9.0}, {2}) == {2: 7.0, 3: 9.0}
