"""Who gets a slot: fair among clients, interactive first, nobody waits for ever."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import waiting

from uma_trio.policy.admission import (
    AWAY_S,
    admit,
    preempt_for_first_token,
    preempt_for_interactive,
    preempt_for_reader,
    preempt_parked,
)
from uma_trio.policy.floor import BUCKET_S
from uma_trio.policy.line import MAX_PASSED_OVER, MOST_PASSED_OVER
from uma_trio.policy.state import AdmissionState, Holder, Waiting


def admitted(*requests: Waiting, slots: int = 1, cells: int = 100, **running: int) -> list[int]:
    """Return who is admitted; ``c3=2`` says that client 3 has two requests running."""
    held = tuple(
        Holder(0, "background", int(name[1:]), 0, 0, 0)
        for name, n in running.items()
        for _ in range(n)
    )
    return list(admit(AdmissionState(requests, held, slots, cells)))


def test_first_come_first_served_within_a_lane() -> None:
    """Equal requests go in the order of their arrival."""
    assert admitted(waiting(2), waiting(1), slots=2) == [1, 2]


def test_interactive_goes_before_background() -> None:
    """A person does not queue behind a batch job."""
    assert admitted(waiting(1, lane="background"), waiting(2)) == [2]


def test_many_names_get_a_principal_no_more_slots() -> None:
    """Principal 1 has three requests of three programs, 2 has two of one: another of 2 is next."""
    running = [
        Holder(n, "interactive", 100 + n, 1, 0, 0, within=(1, 10 + n) if n < 3 else (2, 20))
        for n in range(5)
    ]
    new = waiting(8, client=200, within=(1, 99))
    same = waiting(9, client=103, within=(2, 20))
    found = admit(AdmissionState((new, same), tuple(running), 1, 100))
    assert found == (9,)
    both = (waiting(8, client=100, within=(1, 10)), waiting(9, client=300, within=(1, 98)))
    assert admit(AdmissionState(both, tuple(running), 1, 100)) == (9,)


def test_the_client_with_least_running_is_next() -> None:
    """A client with many requests does not hold up one with few."""
    assert admitted(waiting(1, client=1), waiting(2, client=2), c1=3) == [2]


def test_slots_follow_the_deadlines_of_first_tokens() -> None:
    """A short question gets a slot before a long prompt that came earlier."""
    long, short = waiting(1, client=1, due=30.0), waiting(2, client=2, due=12.0)
    assert admitted(long, short) == [2]


def test_whose_answers_have_more_than_their_share_stand_behind_others() -> None:
    """Deadlines bound what prompts take, and not for how long answers keep their slots."""
    early, late = waiting(1, client=1, due=12.0), waiting(2, client=2, due=30.0)
    assert admitted(early, late, c1=3) == [2]
    assert admitted(early, late, slots=5, c1=1)[0] == 1


def test_nobody_is_passed_over_often_before_its_deadline() -> None:
    """A long prompt is due later: that shorter ones go before it is their order, and no offence."""
    long = waiting(1, client=1, due=30.0, passed_over=MAX_PASSED_OVER)
    short = waiting(2, client=2, due=12.0)
    assert admit(AdmissionState((long, short), (), 1, 100, now=20.0)) == (2,)
    assert admit(AdmissionState((long, short), (), 1, 100, now=31.0)) == (1,)


ANSWER = Holder(50, "interactive", 5, 30, 40, 0, yields=True)


def turn_given(*requests: Waiting, now: float = 10.0, yields: bool = True) -> tuple[int, ...]:
    """Return which answers make way where no slot is free; 51 used more machine time than 50."""
    one = evolve(ANSWER, yields=yields)
    running = (one, evolve(one, key=51, client=6))
    used_s = {5: 1.0, 6: 2.0}
    return preempt_for_first_token(AdmissionState(requests, running, 0, 0, now=now, used_s=used_s))


def test_an_answer_makes_way_for_a_first_token_that_would_be_late() -> None:
    """The one whose client had most machine time; and not before it has to."""
    late = waiting(9, client=1, due=10.5, own_s=0.4)
    assert turn_given(late) == (51,)
    assert turn_given(late, now=9.9) == ()
    assert turn_given(evolve(late, client=6)) == (50,)


def test_no_reader_makes_way_and_no_answer_twice() -> None:
    """Nor does anybody for a request that had a slot before."""
    late = waiting(9, client=1, due=10.5, own_s=0.4)
    assert turn_given(late, yields=False) == ()
    assert turn_given(evolve(late, preempted=True)) == ()
    assert turn_given(evolve(late, due=None)) == ()


def test_what_does_not_fit_lets_smaller_ones_pass() -> None:
    """A large request does not block the room that smaller ones can use."""
    assert admitted(waiting(1, cells=200), waiting(2), slots=2) == [2]


def test_who_was_passed_over_often_is_next_and_room_is_kept() -> None:
    """Nobody is passed over for ever: then the others wait."""
    overdue = waiting(1, lane="background", passed_over=MAX_PASSED_OVER)
    assert admitted(overdue, waiting(2), slots=1) == [1]
    large = waiting(1, cells=200, passed_over=MAX_PASSED_OVER)
    assert admitted(large, waiting(2, lane="background"), slots=2) == []


def test_room_is_not_kept_from_persons_unless_it_was_for_very_long() -> None:
    """A question does not wait until batch jobs have ended so that a large one finds room."""
    large = waiting(1, cells=200, lane="background", passed_over=MOST_PASSED_OVER - 1)
    assert admitted(large, waiting(2), waiting(3, lane="background"), slots=2) == [2]
    large = waiting(1, cells=200, lane="background", passed_over=MOST_PASSED_OVER)
    assert admitted(large, waiting(2), slots=2) == []


def test_nothing_is_admitted_without_a_slot() -> None:
    """Slots are what they are."""
    assert admitted(waiting(1), slots=0) == []


@given(
    st.lists(
        st.builds(
            Waiting,
            key=st.integers(0, 1000),
            lane=st.sampled_from(["interactive", "background"]),
            client=st.integers(0, 3),
            cells=st.integers(1, 60),
            passed_over=st.integers(0, 10),
            arrived=st.floats(0, 10),
        ),
        max_size=10,
        unique_by=lambda w: w.key,
    ),
    st.integers(0, 5),
    st.integers(0, 100),
)
def test_admission_never_promises_what_is_not_there(
    requests: list[Waiting], slots: int, cells: int
) -> None:
    """The admitted fit into the slots and cells that are free, each once."""
    keys = admit(AdmissionState(tuple(requests), (), slots, cells))
    chosen = [w for w in requests if w.key in keys]
    assert len(keys) == len(set(keys)) == len(chosen) <= slots
    assert sum(w.cells for w in chosen) <= cells


def place(
    *requests: Waiting,
    slots: int = 0,
    cells: int = 0,
    held: dict[int, int],
    tenant: int | None = None,
    bucket_s: float = BUCKET_S,
    unearned_s: float = 0.0,
) -> tuple[int, ...]:
    """Return who makes room; `held` says of background requests how much is computed.

    One of them may be the `tenant`.
    """
    running = tuple(
        Holder(
            *(key, "background", 0, 50, computed, 0),
            tenured=key == tenant,
            unearned_s=unearned_s,
        )
        for key, computed in held.items()
    )
    return preempt_for_interactive(AdmissionState(requests, running, slots, cells, bucket_s))


def test_a_person_takes_the_place_of_the_batch_request_that_loses_least() -> None:
    """Without a slot, or without room; what it held must be enough."""
    assert place(waiting(9), held={1: 40, 2: 5, 3: 30}) == (2,)
    assert place(waiting(9), slots=3, held={1: 40, 2: 5}) == (2,)
    assert place(waiting(9, cells=60), cells=5, held={1: 40}) == ()


def test_several_make_room_where_none_alone_has_enough() -> None:
    """In the same order, and no more than it takes."""
    assert place(waiting(9, cells=90), held={1: 40, 2: 5, 3: 30}) == (2, 3)


def test_who_has_tenure_keeps_its_place_until_the_lane_had_its_floor() -> None:
    """Or it would be computed again and again; the next best goes."""
    assert place(waiting(9), held={1: 40, 8: 5}) == (8,)
    assert place(waiting(9), held={1: 40, 8: 5}, tenant=8) == (1,)
    assert place(waiting(9), held={8: 5}, tenant=8) == ()
    assert place(waiting(9), held={8: 5}, tenant=8, bucket_s=0.0) == (8,)


def test_who_has_tenure_keeps_its_place_until_its_prompt_was_worth_it() -> None:
    """What is lost with the place was not longer in the making than the answer that came of it."""
    assert place(waiting(9), held={8: 5}, tenant=8, bucket_s=-1.0, unearned_s=0.1) == ()
    assert place(waiting(9), held={8: 5}, tenant=8, bucket_s=-1.0, unearned_s=-0.1) == (8,)
    assert place(waiting(9), held={8: 5}, bucket_s=-1.0, unearned_s=0.1) == (8,)


def test_it_is_a_background_requests_turn_only_while_its_lane_is_owed_time() -> None:
    """And one at a time."""
    often = [waiting(n, lane="background", passed_over=MAX_PASSED_OVER) for n in (1, 2)]
    person, tenant = waiting(3), Holder(7, "background", 5, 1, 1, 0, tenured=True)

    def chosen(bucket_s: float, *running: Holder, slots: int = 1) -> tuple[int, ...]:
        return admit(AdmissionState((*often, person), running, slots, 100, bucket_s))

    assert chosen(BUCKET_S) == (1,)
    assert chosen(BUCKET_S, slots=2) == (1, 3)
    assert chosen(0.9 * BUCKET_S) == (3,)
    assert chosen(BUCKET_S, tenant) == (3,)


def test_who_was_preempted_does_not_slip_into_a_place_that_persons_use_in_turn() -> None:
    """It would be computed for nothing; a second free place, or nobody who comes again, is enough."""
    job = waiting(1, lane="background", preempted=True)

    def comes_back(slots: int, *running: Holder) -> bool:
        return admit(AdmissionState((job,), running, slots, 100, 0.0)) == (1,)

    person = Holder(2, "interactive", 2, 10, 10, 0)
    assert not comes_back(1, person)
    assert comes_back(2, person)
    assert comes_back(1)
    assert comes_back(1, evolve(person, parked_s=0.5))


def test_nobody_gives_place_to_a_batch_request() -> None:
    """And not for the sake of a person whose turn it would not be."""
    assert place(waiting(9, lane="background"), held={1: 40}) == ()
    overdue = waiting(8, lane="background", passed_over=MAX_PASSED_OVER)
    assert place(waiting(9), overdue, held={1: 40}) == ()


def test_whose_turn_it_is_gets_a_place_together_with_the_person_behind() -> None:
    """A person does not wait for a slot because a batch request stands before it."""
    overdue = waiting(8, lane="background", passed_over=MAX_PASSED_OVER)
    assert place(waiting(9), overdue, held={1: 40, 2: 5}) == (2, 1)


def way(*requests: Waiting, slots: int = 0, cells: int = 0, held: dict[int, float]) -> list[int]:
    """Return who makes way; `held` says of requests of client 1 how long they have been parked.

    Their keys are also how much of each is computed.
    """
    running = tuple(
        Holder(key, "interactive", 1, 50, key, 0, parked_s) for key, parked_s in held.items()
    )
    return list(preempt_parked(AdmissionState(requests, running, slots, cells)))


def test_who_is_parked_for_long_makes_way_for_another_client() -> None:
    """The one first of which least has to be computed again."""
    assert way(waiting(9, client=2), held={3: AWAY_S, 2: AWAY_S, 1: 0.0}) == [2]
    assert way(waiting(9, client=2, cells=90), held={3: AWAY_S, 2: AWAY_S}) == [2, 3]


@given(
    st.lists(
        st.builds(
            Holder,
            key=st.integers(0, 99),
            lane=st.sampled_from(["interactive", "background"]),
            client=st.integers(0, 2),
            cells=st.integers(1, 60),
            computed=st.integers(0, 50),
            passed_over=st.integers(0, 10),
            parked_s=st.sampled_from([0.0, 5 * AWAY_S]),
        ),
        max_size=6,
        unique_by=lambda held: held.key,
    ),
    st.integers(0, 40),
)
def test_a_person_who_reads_slowly_loses_nothing_to_a_batch_job(
    running: list[Holder], cells: int
) -> None:
    """Whatever is parked, for however long: a background request takes background requests' places."""
    state = AdmissionState((waiting(100, client=9, lane="background"),), tuple(running), 0, cells)
    lanes = {held.key: held.lane for held in running}
    assert all(lanes[key] == "background" for key in preempt_parked(state))


def test_who_is_back_gets_the_cells_that_it_lent_from_batch_jobs() -> None:
    """As few of them as it takes, those first that lose least, and none in vain."""
    running = tuple(
        Holder(key, "background" if key else "interactive", 1, 20, key, 0) for key in range(4)
    )
    state = AdmissionState((), running, 0, 5)
    assert preempt_for_reader(state, 5) == ()
    assert preempt_for_reader(state, 30) == (1, 2)
    assert preempt_for_reader(state, 66) == ()


def test_nobody_makes_way_in_vain_or_at_once() -> None:
    """Not where it helps nobody, not for a request of the same client, not after a short stop."""
    assert way(waiting(9, client=2, cells=60), held={3: AWAY_S}) == []
    assert way(waiting(9, client=1), held={3: AWAY_S}) == []
    assert way(waiting(9, client=2), held={3: AWAY_S / 2}) == []
