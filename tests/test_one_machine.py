"""Models that share a machine: whatever one of them does, readers and newcomers of the others do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from attrs import evolve
from engine_kit import Bench, Doze
from machine_kit import TRUTH, Clock, Machine
from streams_kit import STEP_S, Streams, Timed

from uma_trio.backend.base import DecodeStatus
from uma_trio.engine.planner import EngineSettings
from uma_trio.machine.bell import Bell
from uma_trio.machine.machine import Machine as Compute
from uma_trio.machine.work import EARLY_S
from uma_trio.policy.baseline import baseline
from uma_trio.policy.deadline import deadline
from uma_trio.policy.pipeline import Policy
from uma_trio_sim.fake import FakeBackend

PREFIXES = 1 << 28


def at(machine: Machine, n: int, event: Callable[[], object]) -> None:
    """Call `event` within the `n`-th decode from now."""
    calls = [0]

    def noise() -> float:
        calls[0] += 1
        if calls[0] == n:
            event()
        return 1.0

    machine.noise = noise


@pytest.mark.parametrize("page_s", [0.002, 0.010])
def test_restoring_a_prefix_of_one_model_delays_no_reader_of_another(page_s: float) -> None:
    """3,000 tokens are 47 pages: they are restored one by one in the time that the reader leaves."""
    streams = Streams(2, page_s=page_s, prefix_bytes=PREFIXES)
    found = dict[str, Timed]()

    def begin() -> None:
        streams.engines[1].cells.drop_leaves()
        found["reader"] = streams.ask(0, 8, 250)
        at(
            streams.machines[0],
            60,
            lambda: found.update(other=streams.ask(1, 3000, 2, namespace="u")),
        )

    streams.later.append(begin)
    streams.ask(1, 3000, 2, namespace="u")
    streams.run(idle_s=5.0)
    assert found["other"].end.cached_tokens > 2900
    assert max(found["reader"].gaps) <= STEP_S + page_s + EARLY_S
    assert found["other"].times[-1] < found["reader"].times[-1]


def test_saving_before_a_request_that_can_be_repeated_delays_no_reader_of_another_model() -> None:
    """Alone in its cache it would have all leaves saved first, for as long as ten ticks take."""
    streams = Streams(2, page_s=0.010, prefix_bytes=PREFIXES)
    machine = streams.machines[1]
    machine.limits = evolve(machine.limits, whole_cache=True)
    streams.engines[1].cells.prefix._limits = machine.limits
    found = dict[str, Timed]()

    def comes() -> None:
        found["other"] = streams.ask(1, 200, 2, namespace="v", temperature=0.0)

    def begin() -> None:
        found["reader"] = streams.ask(0, 8, 150)
        at(streams.machines[0], 60, comes)

    streams.later.append(begin)
    streams.ask(1, 2000, 2, namespace="u")
    streams.run()
    assert len(found["other"].tokens) == 2
    assert max(found["reader"].gaps) <= STEP_S + 0.010 + EARLY_S


@pytest.mark.parametrize("model", [0, 1])
def test_a_request_for_any_model_ends_a_decode_that_only_measures(model: int) -> None:
    """While nothing is computed model 0 is measured, with decodes that may take a second."""
    streams = Streams(2)
    machine, asked = streams.machines[0], list[int]()

    def noise() -> float:
        if not asked and machine.sizes[-1] >= 128:
            asked.append(len(machine.sizes) - 1)
            streams.ask(model, 8, 2)
        return 1.0

    machine.noise = noise
    streams.run(idle_s=60.0)
    assert machine.statuses[asked[0]] == DecodeStatus.ABORTED


@pytest.mark.parametrize("model", [0, 1])
def test_a_background_tick_is_aborted_for_an_interactive_request_to_any_model(model: int) -> None:
    """The tick has no reader and more than 50 ms to go."""
    streams = Streams(2)
    machine, asked = streams.machines[0], list[tuple[int, Timed]]()

    def noise() -> float:
        if not asked and machine.sizes[-1] >= 100:
            asked.append((len(machine.sizes) - 1, streams.ask(model, 8, 2)))
        return 1.0

    machine.noise = noise
    streams.ask(0, 2000, 2, "background")
    streams.run()
    ((index, newcomer),) = asked
    assert machine.statuses[index] == DecodeStatus.ABORTED
    assert len(newcomer.tokens) == 2


def test_a_model_that_is_added_after_the_end_is_not_computed() -> None:
    """Its loading may end within the last tick of a shutdown: the thread ends all the same."""
    bell = Bell()
    task = Compute(bell, lambda: 0.0)
    first, late = Bench(), Bench()
    task.add(first.engine)
    task.close()
    task.add(late.engine)
    thread = threading.Thread(target=task.run, daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive()
    assert late.inbox.closed


def test_the_time_in_which_a_tick_is_paused_is_no_part_of_what_it_has_run() -> None:
    """A request to its model comes when the tick should have ended, but a third of it is still to be computed."""
    streams = Streams(2, slower=10.0, parts=200)
    one, two = streams.machines
    asked = list[tuple[int, Timed]]()
    began = list[float]()

    def reader_ticks() -> float:
        if began and not asked and streams.clock.now - began[0] > two.took[-1]:
            asked.append((len(two.sizes) - 1, streams.ask(1, 8, 2)))
        return 1.0

    def ticks() -> float:
        if not began and two.sizes[-1] > 100:
            began.append(streams.clock.now)
            streams.ask(0, 8, 400)
        return 1.0

    one.noise, two.noise = reader_ticks, ticks
    streams.ask(1, 1500, 2, "background")
    streams.run()
    ((index, newcomer),) = asked
    assert len(newcomer.tokens) == 2
    assert two.statuses[index] == DecodeStatus.ABORTED


def test_a_batch_of_one_model_leaves_the_machine_to_a_person_who_waits_for_another() -> None:
    """As within one model: it keeps the background's floor, and has more again when the first token is there."""
    first_s = list[float]()
    for with_batch in (False, True):
        streams = Streams(2)
        if with_batch:
            streams.ask(0, 4000, 2, "background")
        person = streams.ask(1, 1000, 2)
        streams.run()
        first_s.append(person.times[0])
    alone_s, beside_s = first_s
    assert beside_s < 1.3 * alone_s


@pytest.mark.parametrize("policy", [baseline, deadline])
def test_a_request_gets_the_place_of_a_reader_who_is_away_though_nothing_else_happens(
    policy: Policy,
) -> None:
    """Also where ticks have no predicted cost. Only time passes."""
    clock = Clock()

    def sleep(seconds: float | None) -> bool:
        clock.now += seconds or 0.0
        if seconds is None or clock.now > 20:
            compute.close()
        return False

    compute = Compute(Doze(sleep), clock)
    cost = TRUTH if policy is deadline else None
    settings = EngineSettings(cost=cost, scratch_slots=1)
    bench = Bench(FakeBackend(n_ctx=1024, n_slots=2), policy, clock=clock, settings=settings)
    for client in range(2):
        bench.submit("hello", 50, client=client, credit=2)
    _, other = bench.submit("world", 5, client=3)
    compute.add(bench.engine)
    compute.run()
    assert [end.reason for end in other.ends] == ["length"]
