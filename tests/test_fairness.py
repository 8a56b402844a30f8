"""Machine time is shared: between clients evenly, between lanes by weight, after every pause."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import decoder, prompt, state

from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.deadline import deadline
from uma_trio.policy.fairness import lift, lift_all, standings, turns
from uma_trio.policy.state import Contract, Memory, SequenceView
from uma_trio.words import Lane

AHEAD = 1e6  # when a reader is shown its latest token that never has to wait for the next one
STAIRS = Staircase(
    (1, 2, 3, 4, 8, 16, 64, 512), (0.008, 0.012, 0.016, 0.011, 0.019, 0.026, 0.1, 0.8)
)
TURN_S = 512 * 0.006  # a full batch at the price of a tick of two
APART_S = TURN_S + 0.8  # and a tick: none takes longer


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
        plan = deadline(now)
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
    """Whatever each asks for, and in how many requests, they differ by a turn and a tick."""
    views = []
    for client, (pending, requests) in enumerate(clients):
        for _ in range(requests):
            views.append(prompt(len(views), pending, lane="background", client=client))
    used, _ = shared_out(views, ticks)
    shares = [used[client] for client in range(len(clients))]
    assert max(shares) - min(shares) <= APART_S


@given(
    st.lists(st.tuples(st.integers(64, 5000), st.integers(1, 3)), min_size=2, max_size=4),
    st.integers(1, 8),
    st.booleans(),
    st.integers(50, 150),
)
def test_so_they_do_beside_background_decoders(
    clients: list[tuple[int, int]], decoders: int, read: bool, ticks: int
) -> None:
    """Of other clients, whether or not somebody reads: none of the prompts pays for them alone."""
    views = [
        decoder(100 + n, lane="background", client=100 + n, computed=0) for n in range(decoders)
    ]
    if read:
        views.append(decoder(99, client=99, computed=0, first_token_at=0.0, shown_at=AHEAD))
    for client, (pending, requests) in enumerate(clients):
        for _ in range(requests):
            views.append(prompt(len(views), pending, lane="background", client=client))
    used, _ = shared_out(views, ticks, Contract(latency_cap=3.0))
    shares = [used[client] for client in range(len(clients))]
    assert sum(shares) > 0
    assert max(shares) - min(shares) <= APART_S


def test_prompts_are_computed_one_after_the_other() -> None:
    """Half-done prompts lie in the KV cache: of three clients' there is one at a time."""
    left = dict.fromkeys(range(3), 500)
    memory = Memory(cost=CostModel(STAIRS))
    ended = []
    for tick in range(120):
        views = [
            prompt(key, n, computed=500 - n, lane="background", client=key)
            for key, n in left.items()
            if n
        ]
        plan = deadline(evolve(state(*views), tick=tick, memory=memory))
        memory = plan.memory
        for item in plan.items:
            left[item.key] -= item.n_tokens
            ended += [item.key] if not left[item.key] else []
        assert sum(0 < n < 500 for n in left.values()) <= 1
    assert sorted(ended) == [0, 1, 2]


def test_long_prompts_are_computed_a_batch_at_a_time() -> None:
    """Of two that fill many batches one goes on until its batch is done, and then the other."""
    left = {1: 2048, 2: 2048}
    memory, order = Memory(cost=CostModel(STAIRS)), []
    reader = decoder(9, client=9, computed=0, first_token_at=0.0, shown_at=AHEAD)
    while sum(left.values()) > 1024:
        views = [
            prompt(k, n, computed=2048 - n, lane="background", client=k) for k, n in left.items()
        ]
        now = evolve(state(reader, *views), tick=len(order), now=100 + 0.02 * len(order))
        plan = deadline(evolve(now, memory=memory, contract=Contract(latency_cap=3.0)))
        memory = plan.memory
        for item in plan.items:
            if item.key in left:
                left[item.key] -= item.n_tokens
                order.append(item.key)
    switches = sum(before != after for before, after in pairwise(order))
    assert switches <= 2 * 3072 / 512


def test_clients_that_come_new_with_each_request_do_not_go_before_one_that_waits() -> None:
    """Every run of a script is a client of its own: a long prompt and a decoder go on beside them."""
    long, batch = (
        prompt(1, 3000, lane="background", client=1),
        decoder(2, lane="background", client=2),
    )
    reader = decoder(3, client=3, computed=0, first_token_at=0.0, shown_at=AHEAD)
    scripts, came = dict.fromkeys(range(10, 13), 300), 13
    memory, decoded = Memory(cost=CostModel(STAIRS)), 0
    for tick in range(4000):
        short = [
            prompt(
                key, n, computed=300 - n, lane="background", client=key, arrived=100 + 0.02 * tick
            )
            for key, n in scripts.items()
        ]
        now = evolve(state(long, batch, reader, *short), tick=tick, now=100 + 0.02 * tick)
        plan = deadline(evolve(now, memory=memory, contract=Contract(latency_cap=3.0)))
        memory = plan.memory
        for item in plan.items:
            if item.key in scripts:
                scripts[item.key] -= item.n_tokens
                if not scripts[item.key]:
                    del scripts[item.key]
                    scripts[came], came = 300, came + 1
            decoded += item.key == 2
            if item.key == 1:
                long = evolve(long, pending=long.pending - item.n_tokens)
        if not long.pending:
            break
    assert came > 20, "the scripts went on all the while"
    assert long.pending <= 1500
    assert decoded > 100
    assert len(memory.used_s) < 40


def test_background_decoders_do_not_wait_for_whole_turns() -> None:
    """They are served when they had less than the mean of clients with prompts, not the least."""
    batch = [decoder(10 + n, lane="background", client=10 + n, computed=0) for n in range(4)]
    reader = decoder(9, client=9, computed=0, first_token_at=0.0, shown_at=AHEAD)
    left = dict.fromkeys(range(3), 500)
    memory = Memory(cost=CostModel(STAIRS))
    waited, longest = 0, 0
    for tick in range(300):
        views = [
            prompt(key, n, computed=500 - n, lane="background", client=key)
            for key, n in left.items()
        ]
        now = evolve(state(reader, *batch, *views), tick=tick, now=100 + 0.02 * tick)
        plan = deadline(evolve(now, memory=memory, contract=Contract(latency_cap=3.0)))
        memory = plan.memory
        for item in plan.items:
            if item.key in left:
                left[item.key] = left[item.key] - item.n_tokens or 500
        waited = 0 if any(item.key >= 10 for item in plan.items) else waited + 1
        longest = max(longest, waited)
    assert longest <= 30


def test_a_debt_is_no_turn() -> None:
    """Where one client owes a minute, the prompts of another do not wait for others to catch up."""
    together, finish = turns({1: 60.0, 2: 1.0, 3: 3.0}, {1: 0.1, 2: 1.0, 3: 0.5}, 2.0)
    assert together == 2.0
    assert sorted(finish, key=finish.__getitem__) == [2, 3, 1]


def test_short_prompts_do_not_get_a_client_ahead_of_its_turn() -> None:
    """Of one client's prompts the oldest counts, and goes first, whatever else it sends."""
    old = prompt(1, 5000, lane="background", client=1)
    short = prompt(2, 30, lane="background", client=1)
    other = prompt(3, 5000, lane="background", client=2)
    for used_s, first in (({1: 0.0, 2: 0.0}, 1), ({1: 0.5, 2: 0.0}, 3)):
        memory = Memory(cost=CostModel(STAIRS), used_s=used_s)
        assert deadline(evolve(state(old, short, other), memory=memory)).items[0].key == first


def test_a_greedy_client_gets_no_more_for_asking_ten_times() -> None:
    """Ten prompts of one client and one of another share the machine evenly."""
    views = [prompt(i, 5000, lane="background", client=1) for i in range(10)]
    used, _ = shared_out([*views, prompt(10, 5000, lane="background", client=2)], 200)
    assert abs(used[1] - used[2]) <= APART_S


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


def test_who_was_never_seen_starts_where_the_furthest_is() -> None:
    """Or a turn ahead of the least, where that is a debtor's place; or nobody would come before it."""
    assert lift({1: 3.0, 2: 4.0}, {1, 2, 3}, beyond_s=2.0)[3] == 4.0
    assert lift({1: 3.0, 2: 50.0}, {1, 2, 3}, beyond_s=2.0)[3] == 5.0


def test_only_debts_are_remembered_of_those_who_left() -> None:
    """The counters do not grow with everyone who ever came."""
    assert lift({1: 5.0, 2: 7.0, 3: 9.0}, {2}) == {2: 7.0, 3: 9.0}


# --- levels ---


def on(path: tuple[int, ...]) -> dict[str, object]:
    """Return what places a sequence on a path."""
    return {"within": path[:-1], "client": path[-1]}


def time_of(views: list[SequenceView], ticks: int) -> dict[int, float]:
    """Return the seconds of everybody on the paths of endless sequences, after so many ticks."""
    used: dict[int, float] = defaultdict(float)
    memory = Memory(cost=CostModel(STAIRS))
    by_key = {view.key: view for view in views}
    for tick in range(ticks):
        plan = deadline(evolve(state(*views), tick=tick, now=0.02 * tick, memory=memory))
        memory = plan.memory
        for item in plan.items:
            for node in by_key[item.key].path:
                used[node] += plan.predicted_s * item.n_tokens / plan.n_tokens
    return used


@given(
    st.lists(st.integers(64, 5000), min_size=2, max_size=8),
    st.integers(64, 5000),
    st.booleans(),
    st.integers(100, 200),
)
@settings(max_examples=20)
def test_a_principal_with_many_names_gets_no_more_time(
    many: list[int], one: int, decodes: bool, ticks: int
) -> None:
    """Beside another with one: prompts or decoders, they differ by little more than a turn and a tick."""
    views = [
        prompt(n, pending, lane="background", **on((1, 10 + n, 100 + n)))
        for n, pending in enumerate(many)
    ]
    alone = on((2, 50, 150))
    if decodes:
        views.append(decoder(99, lane="background", computed=0, **alone))
        views.append(prompt(98, one, lane="background", **alone))
    else:
        views.append(prompt(99, one, lane="background", **alone))
    used = time_of(views, ticks)
    assert abs(used[1] - used[2]) <= APART_S + TURN_S


@given(st.integers(2, 4), st.integers(1, 3), st.integers(100, 200))
@settings(max_examples=20)
def test_programs_of_one_principal_get_the_same_time(n: int, more: int, ticks: int) -> None:
    """However many conversations each has; and so do the conversations of a program."""
    views = [prompt(0, 3000, lane="background", **on((1, 10, 100)))]
    for program in range(11, 10 + n):
        for _ in range(more):
            key = len(views)
            views.append(prompt(key, 3000, lane="background", **on((1, program, 100 + key))))
    used = time_of(views, ticks)
    programs = [used[program] for program in range(10, 10 + n)]
    assert max(programs) - min(programs) <= APART_S + TURN_S
    talks = [used[101 + i] for i in range(more)]
    assert max(talks) - min(talks) <= APART_S


def test_a_new_name_for_each_request_gives_no_more_time() -> None:
    """A principal whose every request is another program's gets half beside one that waits."""
    script, came = {100: 300, 101: 300, 102: 300, 103: 300}, 104
    used = {1: 0.0, 2: 0.0}
    memory = Memory(cost=CostModel(STAIRS))
    other = prompt(1, 10_000_000, lane="background", **on((2, 20, 30)))
    for tick in range(600):
        short = [
            prompt(key, n, computed=300 - n, lane="background", **on((1, 1000 + key, 5000 + key)))
            for key, n in script.items()
        ]
        plan = deadline(evolve(state(other, *short), tick=tick, now=0.02 * tick, memory=memory))
        memory = plan.memory
        for item in plan.items:
            seconds = plan.predicted_s * item.n_tokens / plan.n_tokens
            used[2 if item.key == 1 else 1] += seconds
            if item.key in script:
                script[item.key] -= item.n_tokens
                if not script[item.key]:
                    del script[item.key]
                    script[came], came = 300, came + 1
    assert came > 130, "the script went on all the while"
    assert abs(used[1] - used[2]) <= APART_S + TURN_S
    assert len(memory.used_s) < 100
    assert memory.part_of.keys() <= memory.used_s.keys()


@given(st.dictionaries(st.integers(1, 9), st.floats(0, 50), min_size=1), st.floats(0, 5))
def test_on_one_level_one_stands_where_its_counter_is(used: dict[int, float], most: float) -> None:
    """And below one principal by the same differences as without it, however large they are."""
    flat = standings(used, [(client,) for client in used], most)
    assert flat == used
    under = standings({**used, 0: 7.0}, [(0, client) for client in used], most)
    for one in used:
        for two in used:
            assert abs((under[one] - under[two]) - (used[one] - used[two])) < 1e-9


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_lifted_counters_are_of_those_that_are_there(chosen: list[tuple[int, int, int]]) -> None:
    """Each has one, and each but the outermost says whose share it divides."""
    paths = {(p, 10 * p + c, 1000 + 100 * p + 10 * c + v) for p, c, v in chosen}
    used, parts = lift_all({}, {}, paths, 1.0)
    assert used.keys() == {node for path in paths for node in path}
    assert parts == {path[i]: path[i - 1] for path in paths for i in (1, 2)}
    busy = {node: float(node) for node in used}
    again, same = lift_all(busy, parts, paths, 1.0)
    assert (again, same) == (busy, parts)
    fewer = set(list(paths)[:1])
    left, still = lift_all(busy, parts, fewer, 1.0)
    assert {node for path in fewer for node in path} <= left.keys() <= used.keys()
    assert still.keys() <= left.keys()
    assert lift_all(busy, parts, set(), 1.0) == ({}, {})
