"""A reader that stops makes nobody slow but itself."""

from __future__ import annotations

import pytest
from engine_kit import KINDS, Bench, Doze, Sink, compute
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.policy.admission import AWAY_S
from uma_trio_sim.fake import FakeBackend


class Room:
    """An engine whose cells two interactive requests of client 1 have reserved; their readers stop."""

    def __init__(self, kind: type[FakeBackend] = FakeBackend, n_slots: int = 8) -> None:
        self.now = 0.0
        self.bench = Bench(kind(n_ctx=200, n_slots=n_slots), clock=lambda: self.now)
        self.away = [self.ask(10, 90, credit=4), self.ask(20, 80, credit=4)]
        self.bench.run()

    def ask(self, prompt: int, n: int, client: int = 1, credit: int = 1000) -> tuple[int, Sink]:
        """Send a request."""
        return self.bench.submit([65 + prompt] * prompt, n, client=client, credit=credit)

    def after(self, seconds: float) -> None:
        """Let time pass, and the engine do what there is to do."""
        self.now += seconds
        self.bench.run()

    def check(self, prompt: int, n: int, sink: Sink) -> None:
        """Check that a stream got what its prompt must give."""
        assert sink.tokens == self.bench.backend.continuation([65 + prompt] * prompt, n)
        assert sink.end.reason == "length"

    @property
    def running(self) -> list[int]:
        """Who has a slot."""
        return list(self.bench.engine.registry.running)


@pytest.mark.parametrize("kind", KINDS)
def test_an_innocent_request_is_served_beside_readers_that_stopped(kind: type[FakeBackend]) -> None:
    """What they have reserved and do not use is there for it, and nothing is computed again."""
    room = Room(kind)
    _, innocent = room.ask(30, 30, client=2)
    room.after(AWAY_S / 2)
    assert innocent.tokens == [], "a short stop is no reason"
    room.after(AWAY_S)
    room.check(30, 30, innocent)
    assert room.bench.metrics.snapshot()["preemptions_total"] == 0
    for handle, _ in room.away:
        room.bench.credit(handle, 1000)
    room.after(0.0)
    room.check(10, 90, room.away[0][1])
    room.check(20, 80, room.away[1][1])


def test_a_large_request_takes_their_cells_and_they_are_computed_again() -> None:
    """Once their readers are back they are in line, and their streams go on where they stopped."""
    room = Room()
    _, large = room.ask(60, 110, client=2)
    room.after(AWAY_S)
    room.check(60, 110, large)
    assert room.bench.metrics.snapshot()["preemptions_total"] == 1
    for (handle, sink), (prompt, n) in zip(room.away, [(10, 90), (20, 80)], strict=True):
        room.bench.credit(handle, 1000)
        room.after(0.0)
        room.check(prompt, n, sink)
    reasons = {tick.reason for tick in room.bench.explain(ticks=1).requests}
    assert reasons == {"length"}


def test_slots_are_taken_too() -> None:
    """Where every slot has a reader that stopped."""
    room = Room(n_slots=2)
    _, innocent = room.ask(5, 5, client=2)
    room.after(AWAY_S)
    room.check(5, 5, innocent)


def test_who_comes_back_while_its_room_is_used_waits_in_line() -> None:
    """What was promised to the other is not taken from it."""
    room = Room()
    used, _ = room.ask(30, 120, client=2, credit=10)
    room.after(AWAY_S)
    assert used in room.running
    (handle, sink), _ = room.away
    room.bench.credit(handle, 1000)
    room.after(0.0)
    assert handle not in room.running
    record = next(r for r in room.bench.explain(handle).requests)
    assert (record.state, record.preemptions) == ("preempted", 1)
    room.bench.credit(used, 1000)
    room.after(0.0)
    room.check(10, 90, sink)


def test_a_request_without_a_reader_is_not_in_line() -> None:
    """It would take room only to lose it."""
    room = Room(n_slots=2)
    room.ask(5, 90, client=2)
    room.after(AWAY_S)
    preempted = [handle for handle, _ in room.away if handle not in room.running]
    assert len(preempted) == 1
    room.after(0.0)
    assert room.running == [handle for handle, _ in room.away if handle not in preempted]


def test_a_clients_own_request_waits_for_its_readers() -> None:
    """Its other answers are the ones in the way."""
    room = Room(n_slots=2)
    _, own = room.ask(5, 5, client=1)
    room.after(10 * AWAY_S)
    assert own.tokens == []


def test_nobody_is_away_while_credit_could_not_be_given_back() -> None:
    """Trio's loop stood still for a minute: that says nothing about the readers."""
    now, loop = 0.0, 0.0
    bench = Bench(FakeBackend(n_ctx=200, n_slots=2), clock=lambda: now, readers_s=lambda: loop)
    readers = [bench.submit([65 + n] * n, 70, client=1, credit=4) for n in (10, 20)]
    bench.run()
    _, other = bench.submit([70] * 5, 5, client=2)
    now = 60.0
    bench.run()
    assert other.tokens == []
    for handle, sink in readers:
        bench.credit(handle, 1000)
        bench.run()
        assert sink.end.reason == "length"
    assert bench.metrics.snapshot()["preemptions_total"] == 0
    assert other.end.reason == "length"


def test_the_time_in_which_a_loop_ran_is_counted() -> None:
    """A reader that has been behind for that long is away."""
    now, loop = 0.0, 0.0
    bench = Bench(FakeBackend(n_ctx=200, n_slots=1), clock=lambda: now, readers_s=lambda: loop)
    bench.submit([65] * 10, 90, client=1, credit=4)
    bench.run()
    _, other = bench.submit([70] * 5, 5, client=2)
    loop = AWAY_S
    bench.run()
    assert other.end.reason == "length"


def test_a_person_who_is_back_goes_on_at_once_beside_a_batch_job() -> None:
    """It lent its cells to the background; they are its again, and nothing of it is computed anew."""
    now = 0.0
    bench = Bench(FakeBackend(n_ctx=200, n_slots=8), clock=lambda: now)
    handle, sink = bench.submit([65] * 10, 150, client=1, credit=4)
    bench.run()
    job, job_sink = bench.submit([70] * 50, 100, client=2, lane="background", credit=4)
    now = 2 * AWAY_S
    bench.run()
    assert job_sink.tokens, "what a person does not use is there for batch jobs"
    bench.credit(handle, 1000)
    bench.run()
    assert sink.end.reason == "length"
    assert next(r for r in bench.explain(handle).requests).preemptions == 0
    bench.credit(job, 1000)
    bench.run()
    assert job_sink.end.reason == "length"


def test_an_engine_that_rests_looks_again_while_readers_are_away() -> None:
    """Nothing but time makes them be away, so it is not slept through."""

    def sleeps(timeout_s: float | None) -> bool:
        waits.append(timeout_s)
        room.now += 0.0 if timeout_s is None else timeout_s
        if innocent.ends or len(waits) > 9:
            room.bench.inbox.close()
        return False

    waits: list[float | None] = []
    room = Room()
    _, innocent = room.ask(30, 30, client=2)
    room.bench.inbox.bell = Doze(sleeps)
    compute(room.bench.engine, room.bench.clock)
    room.check(30, 30, innocent)
    assert None not in waits[:3]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "credit", "time"]), st.integers(0, 5), st.integers(1, 40)
        ),
        max_size=40,
    ),
    st.sampled_from(KINDS),
)
def test_everybody_gets_all_of_its_answer_in_the_end(
    steps: list[tuple[str, int, int]], kind: type[FakeBackend]
) -> None:
    """Whoever stops and comes back, in whatever order, while others take its room."""
    now = [0.0]
    bench = Bench(kind(n_ctx=160, n_slots=3, n_batch=20), clock=lambda: now[0])
    sinks: list[tuple[list[int], int, Sink]] = []
    for what, which, n in steps:
        if what == "submit":
            prompt, lane = (
                [66 + n] * (1 + which * 10),
                "background" if n % 3 == 0 else "interactive",
            )
            _, sink = bench.submit(prompt, n, client=which, credit=1 + n % 5, lane=lane)
            sinks.append((prompt, n, sink))
        elif what == "credit":
            bench.credit(1 + which, n)
        else:
            now[0] += n / 10
        bench.ticks(2)
    for handle in range(1, len(sinks) + 1):
        bench.credit(handle, 1000)
    bench.run()
    bench.engine.cells.check()
    for prompt, n, sink in sinks:
        assert sink.tokens == bench.backend.continuation(prompt, n)
        assert sink.end.reason == "length"
