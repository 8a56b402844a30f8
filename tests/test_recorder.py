"""What the engine remembers: ticks as they were, and the story of each request."""

from __future__ import annotations

import pytest
from attrs import evolve
from engine_kit import Bench

from uma_trio.backend.base import DecodeStatus
from uma_trio.engine.messages import Explain
from uma_trio.engine.recorder import NO_ROOM, SHOWN, Recorder
from uma_trio.observe.records import (
    MOST_REASONS,
    OTHER_REASONS,
    Recorded,
    RequestRecord,
    TickRecord,
)
from uma_trio.policy.baseline import baseline
from uma_trio.policy.deadline import deadline
from uma_trio.policy.deadline.fill import SAVING
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan, Skip
from uma_trio.policy.state import SchedulerState
from uma_trio_sim.fake import FakeBackend, InjectedFault
from uma_trio_sim.machine import built_in
from uma_trio_sim.simulation import Simulation


def story(bench: Bench, handle: int) -> RequestRecord:
    """Return what is known of one request."""
    (record,) = bench.explain(handle).requests
    return record


def seconds(record: RequestRecord) -> float:
    """Return the sum of the parts of a request's time."""
    phases = (record.prefill, record.decode)
    admitted = record.ended if record.admitted is None else record.admitted
    assert admitted is not None
    return (
        (admitted - record.submitted)
        + record.preempted_s
        + record.parked_s
        + sum(spent.computing_s + spent.waiting_s for spent in phases)
    )


def asked(simulation: Simulation, handle: int | None = None, ticks: int = 0) -> Recorded:
    """Ask a simulated engine."""
    answers: list[Recorded] = []
    simulation.inbox.put(Explain(answers.append, handle, ticks))
    simulation.tick()
    return answers[0]


# --- ticks ---


def test_a_tick_is_kept_as_it_was_planned_and_measured() -> None:
    """Its record refers to the plan's own values, and copies nothing."""
    seen: list[tuple[SchedulerState, Plan, TickRecord]] = []
    bench = Bench(recorder=Recorder(lambda *tick: seen.append(tick)))
    handle, _ = bench.submit("hello", 3)
    bench.run()
    assert [record.tick for _, _, record in seen] == [0, 1, 2]
    for state, plan, record in seen:
        assert record.tick == state.tick
        assert record.items is plan.items
        assert record.skipped is plan.skipped
        assert record.limit is plan.limit
        assert record.status == DecodeStatus.OK
        assert record.decode_s == pytest.approx(0.001)
    assert [(i.key, i.phase, i.n_tokens) for _, _, r in seen for i in r.items] == [
        (handle, "prefill", 6),
        (handle, "decode", 1),
        (handle, "decode", 1),
    ]


def test_the_measured_time_is_what_was_predicted() -> None:
    """On a machine that does what its model says, both are the same."""
    simulation = Simulation(deadline, profile=built_in("q4_0"))
    simulation.submit(20, 100, client=1)
    simulation.run(2.0)
    for tick in asked(simulation, ticks=50).ticks:
        assert tick.measured_s == pytest.approx(tick.predicted_s, rel=0.01)


def test_only_so_many_ticks_and_requests_are_kept() -> None:
    """The rings forget the oldest."""
    bench = Bench(recorder=Recorder(ticks=10, requests=3))
    for _ in range(5):
        bench.submit("hello", 4)
        bench.run()
    kept = bench.explain(ticks=1000)
    assert [tick.tick for tick in kept.ticks] == list(range(10, 20))
    assert [record.handle for record in kept.requests] == [3, 4, 5]


def test_not_more_than_some_requests_are_shown_at_once() -> None:
    """Those that ended last, and of the others those that came first."""
    bench = Bench(max_waiting=1000)
    for _ in range(SHOWN + 10):
        bench.submit("a", 1)
    bench.run()
    for _ in range(SHOWN + 10):
        bench.submit("a", 1_000, lane="background")
    shown = [record.handle for record in bench.explain().requests]
    assert shown == [*range(11, 11 + SHOWN), *range(SHOWN + 11, 2 * SHOWN + 11)]


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({1: InjectedFault(status=DecodeStatus.NO_KV_ROOM)}, ["no room: the next batch holds"]),
        ({1: InjectedFault(status=-3)}, ["positions re-synchronised, to be tried again"]),
        (
            {1: InjectedFault(status=-3), 2: InjectedFault(status=-3)},
            ["positions re-synchronised, to be tried again", "each of its requests is computed"],
        ),
    ],
)
def test_a_failed_decode_is_kept_with_what_was_done(
    faults: dict[int, InjectedFault], said: list[str]
) -> None:
    """Status and remedy stand in the tick that failed; its time was waiting."""
    bench = Bench(FakeBackend(faults=faults))
    bench.submit("one", 5)
    bench.ticks(1)
    handle, _ = bench.submit("two and more", 5)
    bench.run()
    failed = [tick for tick in bench.explain(ticks=100).ticks if tick.status]
    assert len(failed) == len(said)
    for tick, words in zip(failed, said, strict=True):
        assert tick.recovery.startswith(words)
    assert story(bench, handle).prefill.skipped["the decode failed"] == len(said)


def test_a_request_that_cannot_be_computed_is_told_apart() -> None:
    """The tick says which one was ended."""
    bench = Bench(FakeBackend(faults={i: InjectedFault(status=-3) for i in range(50)}))
    handle, _ = bench.submit("one", 5)
    bench.run()
    last = bench.explain(ticks=1).ticks[0]
    assert last.recovery == f"request {handle} was ended"
    assert story(bench, handle).code == "E_RUNTIME_001"


# --- requests ---


def test_a_story_has_all_that_happened() -> None:
    """Tokens and ticks by phase, and the moments in between."""
    bench = Bench()
    handle, sink = bench.submit("hello", 8)
    bench.run()
    record = story(bench, handle)
    assert (record.prefill.tokens, record.prefill.ticks) == (6, 1)
    assert (record.decode.tokens, record.decode.ticks) == (7, 7)
    assert (record.prompt_tokens, record.completion_tokens) == (6, 8)
    assert (record.reason, record.state, record.code) == ("length", "length", None)
    assert record.first_token is not None
    assert record.first_token - record.submitted == pytest.approx(sink.end.ttft_s)
    assert record.ended is not None
    assert record.ended - record.submitted == pytest.approx(sink.end.total_s)


def test_a_running_request_has_a_story_so_far() -> None:
    """It is told before it is over."""
    bench = Bench()
    handle, _ = bench.submit("hello", 100)
    bench.ticks(4)
    record = story(bench, handle)
    assert (record.state, record.reason, record.ended) == ("decode", "", None)
    assert record.completion_tokens == 4
    assert record.decode.ticks == 3


@pytest.mark.parametrize("policy", [baseline, deadline], ids=["baseline", "deadline"])
def test_the_parts_of_a_requests_time_add_up(policy: Policy) -> None:
    """Nothing of it is lost and nothing counted twice, whatever the policy did with it."""
    simulation = Simulation(policy)
    for client in range(12):
        simulation.storm(100 + client, prompt_tokens=200)
    for client in range(8):
        simulation.submit(50, 60, client=client)
    simulation.run(20.0)
    ended = [record for record in asked(simulation).requests if record.ended is not None]
    assert len(ended) > 10
    for record in ended:
        assert record.ended is not None
        assert seconds(record) == pytest.approx(record.ended - record.submitted, rel=1e-6)


def test_who_waits_for_a_slot_is_told_so() -> None:
    """The reason is the one of the moment it came."""
    bench = Bench(FakeBackend(n_slots=2))
    handles = [bench.submit("hello", 5)[0] for _ in range(3)]
    bench.run()
    stories = [story(bench, handle) for handle in handles]
    assert [record.queue_reason for record in stories] == ["", "", "all 2 slots were busy"]
    assert stories[2].queue_by == tuple(handles[:2])
    assert stories[2].admitted is not None
    assert stories[2].admitted - stories[2].submitted > 0.01


def test_who_waits_for_cells_is_told_how_many() -> None:
    """Slots are not all that a request needs."""
    bench = Bench(FakeBackend(n_ctx=100, n_slots=4))
    bench.submit("hello", 60)
    bench.ticks(2)
    handle, _ = bench.submit("hello", 60)
    bench.run()
    assert story(bench, handle).queue_reason == "it reserves 66 KV cells, 34 were free"


def test_who_was_passed_over_knows_how_often() -> None:
    """A large request behind which smaller ones went first."""
    bench = Bench(FakeBackend(n_ctx=100, n_slots=4))
    bench.submit("hello", 60)
    bench.ticks(2)
    large, _ = bench.submit("hello", 60)
    for _ in range(2):
        bench.submit("a", 4)
    bench.run()
    assert story(bench, large).passed_over == 2


def test_one_that_is_cancelled_in_the_queue_has_a_story_too() -> None:
    """All of its time was waiting."""
    bench = Bench(FakeBackend(n_slots=1))
    bench.submit("hello", 5)
    handle, _ = bench.submit("hello", 5)
    bench.ticks(2)
    bench.cancel(handle)
    bench.run()
    record = story(bench, handle)
    assert (record.reason, record.admitted, record.prefill.ticks) == ("cancelled", None, 0)
    assert record.queue_reason == "the slot was busy"
    assert record.ended is not None
    assert seconds(record) == pytest.approx(record.ended - record.submitted)


def test_the_time_of_a_slow_reader_is_its_own() -> None:
    """It is parked from its last place to the next, also while the engine idles."""
    now = [0.0]
    bench = Bench(clock=lambda: now[0])
    handle, _ = bench.submit("hello", 6, credit=3)
    bench.run()
    now[0] = 5.0
    bench.credit(handle, 100)
    bench.run()
    record = story(bench, handle)
    assert record.parked_s == 5.0
    assert record.decode.waiting_s == 0.0
    assert record.worst_gap is not None
    assert record.worst_gap.seconds == 0.0


def test_a_parked_request_is_not_counted_as_left_out() -> None:
    """The ticks of others pass it by for its reader's sake."""
    bench = Bench()
    handle, _ = bench.submit("hello", 60, credit=3)
    bench.submit("hello", 50)
    bench.ticks(30)
    record = story(bench, handle)
    assert record.state == "parked"
    assert record.decode.skipped == {}
    assert record.parked_s > 0.01


def test_a_request_whose_reader_never_came_gets_no_slot() -> None:
    """Without credit it could not use one; it was queued, and not parked."""
    now = [0.0]
    bench = Bench(clock=lambda: now[0])
    handle, _ = bench.submit("hello", 6, credit=0)
    bench.run()
    now[0] = 3.0
    bench.credit(handle, 100)
    bench.run()
    record = story(bench, handle)
    assert (record.admitted, record.parked_s, record.prefill.waiting_s) == (3.0, 0.0, 0.0)


def test_one_that_is_preempted_while_parked_is_one_of_both_at_a_time() -> None:
    """Without a slot its reader is not to blame."""
    now = [0.0]
    bench = Bench(clock=lambda: now[0])
    handle, _ = bench.submit("hello", 6, credit=3)
    bench.run()
    now[0] = 5.0
    bench.engine.registry.preempt(handle, NO_ROOM)
    now[0] = 7.0
    bench.ticks(2)  # it is not admitted while its reader is behind
    now[0] = 10.0
    bench.credit(handle, 100)
    bench.run()
    record = story(bench, handle)
    assert (record.parked_s, record.preempted_s) == (5.0, 5.0)
    assert seconds(record) == record.ended == 10.0


def test_what_passes_between_decodes_is_a_part_of_the_tick() -> None:
    """From the first token to the last, nothing is missing."""
    bench = Bench()
    handle, _ = bench.submit("hello", 20)
    bench.run()
    record = story(bench, handle)
    assert record.ended is not None
    assert record.first_token is not None
    assert record.decode.computing_s == pytest.approx(record.ended - record.first_token)


def test_the_reason_to_wait_is_that_of_the_moment_it_came() -> None:
    """What was missing later does not rewrite it."""
    bench = Bench(FakeBackend(n_ctx=100, n_slots=2))
    bench.submit("hello", 60)
    bench.submit("hello", 4)
    handle, _ = bench.submit("hello", 60)
    bench.ticks(8)  # a slot is free by now, and the cells are not
    assert story(bench, handle).queue_reason == "all 2 slots were busy"


def test_the_worst_gap_forgets_what_happened_before_the_last_token() -> None:
    """Left out three times, for one reason most, then served, then in a tick that was longer still."""
    now = [0.0]

    def policy(state: SchedulerState) -> Plan:
        now[0] += 10.0 if state.tick == 9 else 1.0
        plan = baseline(state)
        if state.tick not in (4, 5, 6) or len(plan.items) < 2:
            return plan
        reason = "first" if state.tick == 4 else "second"
        return evolve(plan, items=plan.items[:1], skipped=(Skip(plan.items[1].key, reason),))

    bench = Bench(policy=policy, clock=lambda: now[0])
    bench.submit("hello", 50)
    handle, _ = bench.submit("hello", 50)
    bench.ticks(8)
    gap = story(bench, handle).worst_gap
    assert gap is not None
    assert (gap.seconds, gap.tick.tick, gap.skipped, gap.reason) == (4.0, 7, 3, "second")
    bench.ticks(3)
    gap = story(bench, handle).worst_gap
    assert gap is not None
    assert (gap.seconds, gap.tick.tick, gap.skipped) == (10.0, 9, 0)
    assert gap.reason == gap.tick.limit.reason


def test_a_preempted_request_knows_how_long_it_had_no_slot() -> None:
    """And that its worst gap was this."""
    bench = Bench(FakeBackend(n_ctx=200, n_slots=4))
    bench.submit("older background", 100, lane="background")
    bench.ticks(3)
    handle, _ = bench.submit("newer background", 100, lane="background")
    bench.run()
    record = story(bench, handle)
    assert record.preemptions == 1
    assert record.preempted_s > 0.05
    assert record.prefill.tokens > record.prompt_tokens  # it was computed again
    assert record.worst_gap is not None
    assert record.worst_gap.reason == "preempted: the KV cache had no room"
    assert record.worst_gap.seconds > record.preempted_s
    (tick,) = (t for t in bench.explain(ticks=1000).ticks if t.recovery.endswith("was preempted"))
    assert str(handle) in tick.recovery


def test_a_long_tick_is_the_worst_gap_with_the_reason_of_its_limit() -> None:
    """The guard allowed it, and says why; between tokens as they are to be shown."""
    simulation = Simulation(deadline)
    for client in range(3):
        simulation.storm(100 + client)
    stream = simulation.submit(20, 8000, client=1)
    simulation.run(20.0)
    found = asked(simulation, stream.handle, 11)
    (record,) = found.requests
    gap = record.worst_gap
    assert gap is not None
    assert gap.seconds == pytest.approx(max(stream.itl), rel=0.15)
    assert gap.skipped == 0
    assert gap.reason.startswith("the next token is due")
    assert [tick.tick - gap.tick.tick for tick in found.ticks] == list(range(-5, 6))


def test_a_decoder_that_is_left_out_knows_why_and_how_often() -> None:
    """Background streams wait for room; their worst gap counts the ticks in between."""
    simulation = Simulation(deadline)
    stream = simulation.submit(20, 8000, client=1, lane="background")
    simulation.run(1.0)
    simulation.submit(20, 8000, client=2)
    simulation.run(10.0)
    (record,) = asked(simulation, stream.handle).requests
    assert record.worst_gap is not None
    assert record.worst_gap.skipped >= 3
    assert record.worst_gap.reason == SAVING
    assert sum(record.decode.skipped.values()) >= record.worst_gap.skipped
    assert record.decode.waiting_s > 1.0


def test_a_gap_whose_tick_is_forgotten_is_still_explained() -> None:
    """The worst tick itself is kept with the request."""
    bench = Bench(recorder=Recorder(ticks=5))
    handle, _ = bench.submit("hello", 40)
    bench.run()
    found = bench.explain(handle, 3)
    gap = found.requests[0].worst_gap
    assert gap is not None
    assert gap.tick.tick < 20
    assert found.ticks == (gap.tick,)


def test_without_a_gap_the_ticks_are_those_before_its_end() -> None:
    """A request that got one token, or none, is seen in its last ticks."""
    bench = Bench()
    handle, _ = bench.submit("hello", 1)
    bench.run()
    bench.submit("hello", 20)
    bench.run()
    assert [tick.tick for tick in bench.explain(handle, 5).ticks] == [0]


def test_a_handle_that_is_not_known_gets_nothing() -> None:
    """Neither a request nor ticks."""
    bench = Bench()
    bench.submit("hello", 3)
    bench.run()
    found = bench.explain(77, 5)
    assert (found.requests, found.ticks) == ((), ())


def test_reasons_without_end_are_counted_together() -> None:
    """A policy that writes numbers into its reasons cannot fill the memory."""

    def chatty(state: SchedulerState) -> Plan:
        plan = baseline(state)
        served = plan.items[:1]
        return evolve(
            plan,
            items=served,
            skipped=tuple(Skip(i.key, f"in tick {state.tick}") for i in plan.items[1:]),
        )

    bench = Bench(policy=chatty)
    bench.submit("hello", 50)
    handle, _ = bench.submit("hello", 50)
    bench.ticks(40)
    skipped = story(bench, handle).prefill.skipped
    assert len(skipped) == MOST_REASONS + 1
    assert skipped[OTHER_REASONS] == 40 - MOST_REASONS


def test_a_policy_may_skip_what_does_not_exist() -> None:
    """A skip is only said; nothing is looked up by it."""
    bench = Bench(policy=lambda state: evolve(baseline(state), skipped=(Skip(999, "who?"),)))
    bench.submit("hello", 3)
    bench.run()
    assert bench.explain(ticks=1).ticks[0].skipped == (Skip(999, "who?"),)


def test_no_text_and_no_token_is_remembered() -> None:
    """What users write leaves no trace here."""
    bench = Bench()
    bench.submit("SECRET", 10, stop=("CONFIDENTIAL",))
    bench.submit("SECRET", 3)
    bench.ticks(6)
    kept = repr(bench.explain(ticks=100))
    assert "RequestRecord" in kept
    for text in ("SECRET", "CONFIDENTIAL", "array", "83, 69, 67"):
        assert text not in kept
