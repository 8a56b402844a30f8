"""Who gets in is decided as if everybody were looked at again for every place and every choice."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.policy.admission import AWAY_S, admit, preempt_for_interactive, preempt_parked
from uma_trio.policy.floor import BUCKET_S, is_spared
from uma_trio.policy.line import MAX_PASSED_OVER, MOST_PASSED_OVER
from uma_trio.policy.state import AdmissionState, Holder, Waiting
from uma_trio.words import Lane

LANES = st.sampled_from(["interactive", "background"])
#: A sender, and whose share it divides: programs of two principals, with two conversations each.
SENDERS = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)).map(
    lambda drawn: (drawn[0], 10 * drawn[0] + drawn[1], 100 * drawn[0] + 10 * drawn[1] + drawn[2])
)
PASSED_OVER = st.sampled_from([0, 0, 0, 1, MAX_PASSED_OVER, 20, MOST_PASSED_OVER])


def asked(
    key: int, lane: Lane, sender: tuple[int, ...], cells: int, drawn: tuple[int, float, bool]
) -> Waiting:
    """Return a request that waits."""
    *within, client = sender
    passed_over, arrived, preempted = drawn
    return Waiting(key, lane, client, cells, passed_over, arrived, preempted, tuple(within))


def holding(
    key: int, lane: Lane, sender: tuple[int, ...], cells: int, drawn: tuple[int, float, bool]
) -> Holder:
    """Return one that has a slot."""
    *within, client = sender
    computed, parked_s, tenured = drawn
    started = computed % 2 == 0
    return Holder(
        1000 + key,
        lane,
        client,
        cells,
        computed,
        0,
        parked_s,
        tenured=tenured,
        within=tuple(within),
        started=started,
    )


def with_deadline(one: Waiting) -> Waiting:
    """Return it with a deadline that is not in the order of arrivals, if it is interactive."""
    if one.lane == "background":
        return one
    return evolve(one, due=5.0 - 2.0 * one.arrived + one.cells / 60)


STATES = st.builds(
    lambda waiting, running, slots, cells, bucket_s, due: AdmissionState(
        tuple(
            with_deadline(asked(key, *one)) if due else asked(key, *one)
            for key, one in enumerate(waiting)
        ),
        tuple(holding(key, *one) for key, one in enumerate(running)),
        *(slots, cells, bucket_s),
        now=4.0,
    ),
    st.lists(
        st.tuples(
            LANES,
            SENDERS,
            st.integers(1, 60),
            st.tuples(PASSED_OVER, st.sampled_from([0.0, 1.0, 2.0]), st.booleans()),
        ),
        max_size=12,
    ),
    st.lists(
        st.tuples(
            LANES,
            SENDERS,
            st.integers(1, 40),
            st.tuples(st.integers(0, 9), st.sampled_from([0.0, AWAY_S]), st.booleans()),
        ),
        max_size=8,
    ),
    st.integers(0, 4),
    st.integers(-10, 120),
    st.sampled_from([BUCKET_S, 0.1, 0.0]),
    st.booleans(),
)


def one_after_another(state: AdmissionState) -> list[int]:
    """Return who gets in, from the rules alone: everybody is looked at for every place."""
    running = Counter(node for held in state.running for node in held.path)
    owed = state.bucket_s >= BUCKET_S and not any(held.tenured for held in state.running)
    persons_run = any(held.lane == "interactive" and not held.parked_s for held in state.running)
    left = [
        one
        for one in state.waiting
        if owed
        or one.lane == "interactive"
        or not one.preempted
        or state.free_slots > 1
        or not persons_run
    ]
    cells, found = state.free_cells, list[int]()
    everybody = {one.path for one in (*state.running, *left)}
    while left and len(found) < state.free_slots:
        chosen = next_of(state, everybody, left, running, cells, owed=owed)
        if chosen is None:
            break
        found.append(chosen.key)
        left.remove(chosen)
        running.update(chosen.path)
        cells -= chosen.cells
        owed = owed and chosen.lane == "interactive"
    return found


def beyond(
    state: AdmissionState, everybody: Collection[tuple[int, ...]], path: tuple[int, ...]
) -> list[float]:
    """Return by how many slots one more answer is beyond the even share, level by level."""
    found, share = list[float](), float(len(state.running) + state.free_slots)
    for level, node in enumerate(path):
        siblings = {other[level] for other in everybody if other[:level] == path[:level]}
        share = max(1.0, share / len(siblings))
        answers = sum(held.started and node in held.path for held in state.running)
        found.append(max(0.0, answers + 1 - share))
    return found


def next_of(
    state: AdmissionState,
    everybody: Collection[tuple[int, ...]],
    left: Sequence[Waiting],
    running: Counter[int],
    cells: int,
    *,
    owed: bool,
) -> Waiting | None:
    """Return who is next."""
    may = [one for one in left if one.cells <= cells]
    overdue = [
        one
        for one in left
        if one.passed_over >= MAX_PASSED_OVER and (one.due is None or one.due <= state.now)
    ]
    if overdue:
        turn = [one for one in overdue if owed or one.lane == "interactive"]
        first = min(turn or overdue, key=lambda one: (-one.passed_over, one.arrived))
        if turn and first.cells <= cells:
            return first
        if turn and first.passed_over >= MOST_PASSED_OVER:
            return None
        persons = [one for one in may if one.lane == "interactive"]
        may = persons or [one for one in may if one is first]

    def rank(one: Waiting) -> tuple[bool, list[float], float, int]:
        if one.due is not None:
            return False, beyond(state, everybody, one.path), one.due, one.key
        return one.lane == "background", [float(running[n]) for n in one.path], one.arrived, one.key

    return min(may, key=rank, default=None)


def who_goes(
    state: AdmissionState,
    could: Sequence[Holder],
    helped: Callable[[Collection[Holder]], Collection[int]],
) -> tuple[int, ...]:
    """Return the first choice of those that `could` go that lets in somebody of whom it has `helped`."""
    could = sorted(could, key=lambda held: (held.computed, -held.key))
    for going in [*[[held] for held in could], *[could[:n] for n in range(2, len(could) + 1)]]:
        after = evolve(
            state,
            free_slots=state.free_slots + len(going),
            free_cells=state.free_cells + sum(held.cells for held in going),
        )
        if set(one_after_another(after)) & set(helped(going)):
            return tuple(held.key for held in going)
    return ()


@given(STATES)
def test_everybody_gets_in_in_the_order_of_the_rules(state: AdmissionState) -> None:
    """Also among programs and conversations, with turns of those that were passed over."""
    assert list(admit(state)) == one_after_another(state)


@given(STATES)
def test_the_same_background_requests_give_their_places(state: AdmissionState) -> None:
    """The fewest computed tokens, the fewest requests, and only where a person gets in by it."""
    could = [
        held
        for held in state.running
        if held.lane == "background" and not is_spared(held, state.bucket_s)
    ]
    persons = [one.key for one in state.waiting if one.lane == "interactive"]
    assert preempt_for_interactive(state) == who_goes(state, could, lambda _going: persons)


@given(STATES)
def test_the_same_parked_requests_make_way(state: AdmissionState) -> None:
    """For other clients, and no person for a background request."""

    def others(going: Collection[Holder]) -> Collection[int]:
        clients = {held.client for held in going}
        person = any(held.lane == "interactive" for held in going)
        return [
            one.key
            for one in state.waiting
            if one.client not in clients and not (person and one.lane == "background")
        ]

    could = [held for held in state.running if held.parked_s >= AWAY_S]
    assert preempt_parked(state) == who_goes(state, could, others)


def test_a_choice_that_cannot_help_costs_nothing_by_those_who_wait() -> None:
    """256 wait behind one for which all room is kept: 64 background requests are asked in vain each tick."""

    def calls(n_waiting: int) -> int:
        large = asked(0, "interactive", (1, 11, 111), 10**6, (MOST_PASSED_OVER, 0.0, False))
        small = asked(1, "interactive", (1, 12, 121), 20, (0, 1.0, False))
        many = [evolve(small, key=key) for key in range(1, n_waiting)]
        job = holding(0, "background", (2, 21, 211), 50, (0, 0.0, False))
        running = tuple(evolve(job, key=1000 + n, computed=n) for n in range(64))
        state, n = AdmissionState((large, *many), running, 0, 0), 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal n
            n += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            assert preempt_for_interactive(state) == ()
        finally:
            sys.setprofile(None)
        return n

    assert calls(256) <= calls(16) + 2 * 256
