"""A running tick is given up for a person who has just come: the engine on the fake backend."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from attrs import evolve
from engine_kit import Bench, Sink, slow
from hypothesis import given, settings
from hypothesis import strategies as st

from uma_trio.backend.base import DecodeStatus
from uma_trio.engine.recorder import ABORTED
from uma_trio.engine.tick_abort import GIVEN_UP
from uma_trio.policy.baseline import baseline
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState
from uma_trio_sim.fake import FakeBackend, InjectedFault

DOCUMENT = "A long document about many things, for a batch job in the night. " * 8


def bench(backend: FakeBackend | None = None, policy: Callable[..., Plan] = slow) -> Bench:
    """Return an engine whose ticks are long, by its policy's prediction."""
    return Bench(backend or FakeBackend(n_ctx=4096, n_batch=128), policy)


def aborted(bench: Bench) -> int:
    """Return how many ticks were given up."""
    n = bench.metrics.snapshot()["irregular_ticks_total"]["aborted"]
    assert isinstance(n, int)
    return n


def once(action: Callable[[], object]) -> Callable[[], object]:
    """Return what does it the first time it is called, and then nothing."""
    todo = [action]
    return lambda: todo.pop()() if todo else None


def test_a_newcomer_ends_the_running_tick_and_is_in_the_next() -> None:
    """A batch job's chunk gives way to a person, who has a token after one tick more."""
    run = bench()
    _, batch = run.submit(DOCUMENT, 5, lane="background")
    came: list[Sink] = []
    run.backend.meanwhile = once(lambda: came.append(run.submit("hello", 5)[1]))
    run.engine.tick()
    assert run.backend.used_cells == 0
    assert aborted(run) == 1
    run.ticks(1)
    assert len(came[0].tokens) == 1
    run.run()
    assert came[0].tokens == run.expected("hello", 5)
    assert batch.tokens == run.expected(DOCUMENT, 5)


def test_what_was_computed_before_is_kept() -> None:
    """Only the chunk that was given up is computed again."""
    run = bench()
    handle, _ = run.submit(DOCUMENT, 5, lane="background")
    run.ticks(2)
    (before,) = run.inspect()
    assert before.computed_tokens > 0
    run.backend.meanwhile = once(lambda: run.submit("hello", 5))
    run.engine.tick()
    report = next(r for r in run.inspect() if r.handle == handle)
    assert aborted(run) == 1
    assert report.computed_tokens >= before.computed_tokens


def test_who_came_while_the_tick_was_planned_ends_it_too() -> None:
    """Between taking in what arrived and computing there is no gap to fall into."""

    def with_a_guest(state: SchedulerState) -> Plan:
        arrive()
        return slow(state)

    run = bench(policy=with_a_guest)
    run.submit(DOCUMENT, 5, lane="background")
    arrive = once(lambda: run.submit("hello", 5))
    run.engine.tick()
    assert aborted(run) == 1
    assert run.backend.used_cells == 0


def test_no_tick_is_interrupted_for_a_batch_job() -> None:
    """It waits for the end of the tick."""
    run = bench()
    run.submit(DOCUMENT, 5, lane="background")
    run.backend.meanwhile = lambda: None if run.inbox.waiting > 3 else run.submit(lane="background")
    run.ticks(20)
    assert aborted(run) == 0


def test_a_long_prompt_of_a_person_gives_way_to_a_short_question() -> None:
    """And loses nothing but the time of that tick."""
    run = bench()
    _, long = run.submit(DOCUMENT, 5)
    run.backend.meanwhile = once(lambda: run.submit("hello", 5))
    run.run()
    assert aborted(run) == 1
    assert long.tokens == run.expected(DOCUMENT, 5)


def test_a_backend_that_cannot_be_interrupted_is_not() -> None:
    """There the newcomer waits for the end of the tick, as before."""
    run = bench(FakeBackend(n_ctx=4096, n_batch=128, interruptible=False))
    _, batch = run.submit(DOCUMENT, 5, lane="background")
    run.backend.meanwhile = once(lambda: run.submit("hello", 5))
    run.run()
    assert aborted(run) == 0
    assert batch.tokens == run.expected(DOCUMENT, 5)


def test_the_policy_learns_nothing_from_a_tick_that_was_given_up() -> None:
    """Its next state has the measurements and the memory that the one before had."""
    seen: list[SchedulerState] = []

    def noted(state: SchedulerState) -> Plan:
        seen.append(state)
        return slow(state)

    run = bench(policy=noted)
    run.submit(DOCUMENT, 5, lane="background")
    run.engine.tick()
    run.backend.meanwhile = once(lambda: run.submit("hello", 5))
    run.ticks(2)
    before, after = seen[-2:]
    assert aborted(run) == 1
    assert after.measured == before.measured
    assert after.memory == before.memory
    assert after.tick == before.tick + 1


def test_a_tick_that_was_given_up_is_remembered_and_not_counted_as_work() -> None:
    """Status, reason and time stand in the record; its tokens are in no sum."""
    run = bench()
    handle, _ = run.submit(DOCUMENT, 1, lane="background")
    run.backend.meanwhile = once(lambda: run.submit("hello", 1))
    run.run()
    first = run.explain(ticks=100).ticks[0]
    assert (first.status, first.recovery) == (DecodeStatus.ABORTED, GIVEN_UP)
    assert first.decode_s > 0
    (story,) = run.explain(handle).requests
    assert story.prefill.skipped == {ABORTED: 1}
    assert story.prefill.tokens == len(DOCUMENT) + 1
    assert run.metrics.snapshot()["tokens_total"] == len(DOCUMENT) + 1 + len("hello") + 1


def test_to_give_up_a_tick_is_no_failure() -> None:
    """It neither starts the search for a culprit nor shortens the next batch."""
    run = bench(FakeBackend(n_ctx=4096, n_batch=128, faults={1: InjectedFault(status=-3)}))
    _, batch = run.submit(DOCUMENT, 5, lane="background")
    run.backend.meanwhile = once(lambda: run.submit("hello", 5))
    run.run()
    said = [tick.recovery for tick in run.explain(ticks=100).ticks if tick.status]
    assert said == [GIVEN_UP, "positions re-synchronised, to be tried again"]
    assert batch.tokens == run.expected(DOCUMENT, 5)


def test_an_abort_that_nobody_asked_for_is_a_failure() -> None:
    """A backend that ends a tick by itself may have left anything: positions are compared."""
    faults = {0: InjectedFault(status=DecodeStatus.ABORTED, keep=3)}
    run = bench(FakeBackend(n_ctx=4096, n_batch=128, faults=faults), baseline)
    _, sink = run.submit(DOCUMENT, 5, lane="background")
    run.run()
    assert aborted(run) == 0
    said = [tick.recovery for tick in run.explain(ticks=100).ticks if tick.status]
    assert said == ["positions re-synchronised, to be tried again"]
    assert sink.tokens == run.expected(DOCUMENT, 5)


def test_arrivals_in_every_tick_do_not_starve_a_batch_job() -> None:
    """After a tick that was given up, one of the same kind is computed to its end."""

    def people_first(state: SchedulerState) -> Plan:
        people = tuple(view for view in state.sequences if view.lane == "interactive")
        return slow(evolve(state, sequences=people) if people else state)

    run = bench(FakeBackend(n_ctx=8192, n_batch=128), people_first)
    _, batch = run.submit(DOCUMENT * 4, 1, lane="background")
    running = run.engine.registry.running
    run.backend.meanwhile = lambda: run.submit("hello", 1) if len(running) == 1 else None
    for _ in range(200):
        run.engine.tick()
        if batch.ends:
            break
    assert batch.tokens == run.expected(DOCUMENT * 4, 1)
    alone = [tick for tick in run.explain(ticks=1000).ticks if tick.items[0].key == 1]
    lost = [tick.status == DecodeStatus.ABORTED for tick in alone]
    assert lost[0]
    assert not any(first and second for first, second in pairwise(lost))
    lost_s = sum(tick.decode_s for tick, is_lost in zip(alone, lost, strict=True) if is_lost)
    assert 3 * lost_s <= sum(tick.decode_s for tick in alone) + max(t.decode_s for t in alone)


lengths = st.integers(1, 300)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(lengths, st.integers(1, 20)), min_size=1, max_size=4),
    arrivals=st.dictionaries(st.integers(0, 30), st.tuples(lengths, st.booleans()), max_size=8),
    n_batch=st.integers(4, 200),
    n_slots=st.integers(1, 8),
)
def test_aborts_change_when_tokens_come_and_not_which(
    jobs: list[tuple[int, int]],
    arrivals: dict[int, tuple[int, bool]],
    n_batch: int,
    n_slots: int,
) -> None:
    """Whoever comes at whatever moment, everybody gets the text that there is without aborts."""

    def told(*, interruptible: bool) -> tuple[list[list[int]], int]:
        backend = FakeBackend(
            n_ctx=1024, n_slots=n_slots, n_batch=n_batch, interruptible=interruptible
        )
        run = bench(backend)
        sinks = {
            i: run.submit([65 + i] * n, m, lane="background")[1] for i, (n, m) in enumerate(jobs)
        }

        def arrive(most: int | None = None) -> None:
            # In the middle of a tick, or those for whom there were too few of them.
            for at in [at for at in coming if at < (most or backend.decodes)]:
                n, person = coming.pop(at)
                lane = "interactive" if person else "background"
                sinks[100 + at] = run.submit([97 + at % 20] * n, 5, lane=lane)[1]

        coming = dict(arrivals)
        backend.meanwhile = arrive
        run.run()
        arrive(most=100)
        run.run()
        return [sinks[key].tokens for key in sorted(sinks)], aborted(run)

    plain, none = told(interruptible=False)
    assert none == 0
    assert told(interruptible=True)[0] == plain
