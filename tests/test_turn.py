"""Whose tick comes next, and several engines on one compute thread."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve
from encoder_kit import PART_S as PART_S_OF_TEXT
from streams_kit import COST, STEP_S, Streams, Timed

from uma_trio.backend.base import BackendDied, Overlap, nothing
from uma_trio.engine.encoder import LOOK_S, LOOKS
from uma_trio.engine.messages import (
    Explain,
    Finished,
    Inspect,
    TokenOut,
)
from uma_trio.engine.planner import Planner
from uma_trio.engine.snapshot import wait_of
from uma_trio.machine.machine import Machine as Compute
from uma_trio.machine.work import CAREFUL, EARLY_S, PART_S, Claim, Grant, choose, free_s, leads
from uma_trio.observe.records import Recorded, Wait
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.words import Lane

FLOOR = 0.05
READER = Claim(due_at=1.040, takes_s=0.010, least_s=0.010)
BATCH = Claim(has_work=True, least_s=0.010)


def test_nobody_is_next_where_nothing_is_to_be_computed() -> None:
    """As after the last answer."""
    assert choose([Claim(), Claim()], 0.0, FLOOR) is None


def test_work_that_nobody_reads_goes_first_while_a_reader_has_time() -> None:
    """The reader's token is computed when its tick has to begin."""
    assert choose([READER, BATCH], 1.0, FLOOR) == 1
    assert choose([READER, BATCH], READER.begins_at, FLOOR) == 0


def test_a_reader_does_not_wait_where_nobody_else_works() -> None:
    """Its token comes as soon as it can."""
    assert choose([Claim(), READER], 1.0, FLOOR) == 1


def test_of_two_readers_the_one_whose_tick_has_to_begin_first_is_next() -> None:
    """What is due later but takes longer may have to begin before."""
    long = Claim(due_at=1.060, takes_s=0.050)
    assert choose([READER, long], 1.0, FLOOR) == 1


def test_of_two_models_without_readers_the_one_that_had_less_is_next() -> None:
    """So both get half of the machine."""
    rich = Claim(has_work=True, least_s=0.010, used_s=2.0)
    assert choose([rich, BATCH], 1.0, FLOOR) == 1


def test_who_waits_for_long_gets_its_smallest_tick_whoever_reads() -> None:
    """A twentieth of the machine, however little time readers leave."""
    waits = Claim(has_work=True, least_s=0.010, waited_s=0.010 / FLOOR)
    assert choose([READER, waits], READER.begins_at, FLOOR) == 1
    assert free_s([READER, waits], 1, READER.begins_at, FLOOR) == 0.010


def test_a_tick_may_take_until_the_readers_tick_of_another_model_has_to_begin() -> None:
    """Its own readers are its policy's business."""
    assert free_s([READER, BATCH], 1, 1.0, FLOOR) == pytest.approx(
        0.040 - CAREFUL * 0.010 - EARLY_S
    )
    assert free_s([READER, BATCH], 0, 1.0, FLOOR) == math.inf


def test_a_tick_waits_until_readers_are_far_enough_ahead_for_a_large_one() -> None:
    """Small ones would compute a prompt at a fraction of the rate."""
    wants = evolve(BATCH, wants_s=0.200)
    for begins_at, next_one in ((1.199, 0), (1.201, 1)):
        due_at = begins_at + CAREFUL * 0.010 + EARLY_S
        reader = Claim(due_at=due_at, takes_s=0.010, reach_s=0.300)
        assert choose([reader, wants], 1.0, FLOOR) == next_one


def test_a_tick_does_not_wait_for_more_than_readers_can_be_ahead() -> None:
    """It takes what there is."""
    wants = evolve(BATCH, wants_s=0.200)
    assert choose([evolve(READER, reach_s=0.030), wants], 1.0, FLOOR) == 0
    assert choose([evolve(READER, reach_s=0.026), wants], 1.0, FLOOR) == 1


def test_a_reader_leads_where_another_model_works() -> None:
    """And where readers of two models need most of the machine, so that no tick may be late."""
    light, heavy = (Claim(due_at=1.0, takes_s=0.040 * part, load=part) for part in (0.2, 0.5))
    assert leads([READER, BATCH], 0)
    assert not leads([light, heavy], 0)
    assert leads([heavy, heavy], 0)
    assert not leads([evolve(heavy, load=0.9), Claim()], 0)


# --- several engines ---


def test_a_reader_keeps_its_step_while_another_model_computes_a_long_prompt() -> None:
    """A prompt of 2,000 tokens is computed in the time that the reader leaves."""
    streams = Streams(2)
    reader = streams.ask(0, 8, 150)
    other = streams.ask(1, 2000, 8, "background")
    streams.run()
    assert len(reader.tokens) == 150
    assert len(other.tokens) == 8
    assert max(reader.gaps) <= STEP_S + EARLY_S


# About what a model of 0.5B costs on two cores: a tick of one token leaves less of a step than another such tick takes.
SLOW = CostModel(
    Staircase(
        (1, 2, 4, 8, 16, 20, 24, 32, 64),
        (0.0187, 0.029, 0.046, 0.090, 0.171, 0.185, 0.202, 0.226, 0.463),
    ),
    context_cell_s=1.2e-6,
)


def test_a_reader_is_computed_ahead_for_ticks_of_another_model_that_are_longer_than_a_step() -> (
    None
):
    """A small tick would not fit before the reader's, and a large one computes a prompt three times as fast."""
    streams = Streams(2, SLOW)
    reader = streams.ask(0, 8, 1000)
    prompt = streams.ask(1, 2000, 2, "background")
    streams.run()
    alone_s = sum(SLOW.seconds(Work(32, 1, 32 * at, at)) for at in range(0, 2000, 32))
    left = 1.0 - SLOW.seconds(Work(1)) / STEP_S
    assert prompt.times[0] < 1.15 * alone_s / left
    beside = [b - a for a, b in pairwise(t for t in reader.times[1:-1] if t < prompt.times[0])]
    assert max(beside[20:]) <= STEP_S + EARLY_S


def test_a_reader_on_each_of_two_models_keeps_its_step() -> None:
    """Their ticks alternate."""
    streams = Streams(2)
    one, two = streams.ask(0, 8, 60), streams.ask(1, 8, 60)
    streams.run()
    assert max(one.gaps + two.gaps) <= STEP_S
    assert len(one.tokens) == len(two.tokens) == 60


def test_readers_of_two_models_who_need_nearly_all_of_the_machine_keep_their_steps() -> None:
    """A tick that takes longer than the one before it is taken from their leads."""
    streams, rng = Streams(2, SLOW), random.Random(1)
    for machine in streams.machines:
        machine.noise = lambda: rng.uniform(0.8, 1.3)
    one, two = streams.ask(0, 8, 200), streams.ask(1, 8, 200)
    streams.run()
    assert max(one.gaps + two.gaps) <= STEP_S + EARLY_S


def test_a_reader_of_the_model_that_computes_a_prompt_keeps_its_step_too() -> None:
    """Its tick has few tokens of the prompt until the other model's reader is ahead."""
    streams = Streams(2, COST.times(0.8))
    one, two = streams.ask(0, 8, 300), streams.ask(1, 8, 300)
    prompt = streams.ask(1, 1000, 2, "background")
    streams.run()
    assert prompt.times[0] < two.times[-1]
    assert max(one.gaps + two.gaps) <= STEP_S + EARLY_S


def test_drafts_of_one_model_do_not_take_the_time_of_another_models_readers() -> None:
    """Both texts repeat themselves, and a tick with all guesses would take 40 ms."""
    truth = CostModel(Staircase((1, 16), (0.010, 0.014)), Staircase((1, 16), (0.0, 0.026)))
    streams = Streams(2, truth, drafts=True)
    for machine in streams.machines:
        machine.favourite = machine._choice = lambda _history: 97  # type: ignore[method-assign]
    one, two = streams.ask(0, 8, 200), streams.ask(1, 8, 200)
    streams.run()
    assert min(max(machine.sizes[5:20]) for machine in streams.machines) > 1
    assert max(one.gaps[:150] + two.gaps[:150]) <= STEP_S + EARLY_S


def test_two_models_without_readers_share_the_machine() -> None:
    """Neither waits for the end of the other's work."""
    streams = Streams(2)
    one = streams.ask(0, 300, 40, "background")
    two = streams.ask(1, 300, 40, "background")
    streams.run()
    assert one.times[-1] == pytest.approx(two.times[-1], rel=0.2)


def test_who_waits_for_another_model_knows_whose_requests_those_are() -> None:
    """As long as the readers of that one leave it less than its smallest tick."""
    streams = Streams(2, COST.times(3.0))
    reader = streams.ask(0, 8, 60)
    streams.ask(1, 300, 4, "background")
    engine, seen = streams.engines[1], list[Wait | None]()

    def look() -> None:
        for sequence in engine.registry.running.values():
            now = streams.clock.now
            seen.append(wait_of(sequence, engine.registry, engine._recorder, now))

    reader.heard = look
    streams.run()
    assert Wait("another model is computed", (1,)) in seen
    assert None in seen


def test_a_model_that_rests_answers_questions_while_another_is_computed() -> None:
    """Whoever lists what runs asks all of them."""
    streams, answers = Streams(2), list[float]()
    reader = streams.ask(0, 8, 60)
    inbox = streams.engines[1].inbox

    def look() -> None:
        if len(reader.times) == 10:
            inbox.put(Inspect(lambda _snapshot: answers.append(streams.clock.now)))

    reader.heard = look
    streams.run()
    (answered,) = answers
    assert reader.times[9] <= answered <= reader.times[12]


def test_what_passes_between_ticks_is_a_part_of_a_requests_time() -> None:
    """Another model's ticks, from when the request has its slot: the parts add up."""
    streams = Streams(2)
    streams.ask(0, 300, 20, "background")
    streams.ask(1, 300, 20, "background")
    streams.run()
    answers = list[Recorded]()
    streams.engines[1]._handler.handle(Explain(answers.append, 2, 0), streams.clock.now)
    streams.engines[1].publish()
    ((record,),) = [answer.requests for answer in answers]
    assert record.aside_s > 0.2
    assert record.admitted is not None
    assert record.ended is not None
    spent = sum(one.computing_s + one.waiting_s for one in (record.prefill, record.decode))
    assert spent + record.aside_s == pytest.approx(record.ended - record.admitted, abs=0.002)


def test_what_another_model_computed_is_not_learnt_as_this_ones_time() -> None:
    """Its ticks are predicted as before."""
    streams = Streams(2)
    streams.ask(0, 8, 100)
    streams.ask(1, 2000, 8, "background")
    streams.run()
    cost = streams.engines[0].memory.cost
    assert cost is not None
    assert cost.scale == pytest.approx(1.0, rel=0.05)
    assert cost.host_s < 0.001


def test_texts_are_encoded_while_another_model_is_read() -> None:
    """In the time that the reader leaves: its tokens come a step apart, and no later."""
    streams = Streams(1)
    encoder = streams.encoder()
    reader = streams.ask(0, 8, 60)
    answered = streams.encode(encoder, [40] * 40)
    streams.run()
    assert answered[0] < reader.times[-1]
    assert max(reader.gaps) <= STEP_S + 1e-9


@pytest.mark.parametrize(("length", "slower"), [(5, 1.0), (5, 1.8), (40, 1.0), (40, 1.8)])
def test_beside_one_reader_texts_have_half_of_the_machine(length: int, slower: float) -> None:
    """Of short and of long ones as many are encoded in a second as half of those alone; no token is late."""
    streams = Streams(1, slower=slower)
    encoder = streams.encoder()
    reader = streams.ask(0, 8, 100)
    streams.encode(encoder, [length] * (20_000 // length))
    streams.run()
    shown_s = reader.times[-1] - reader.times[20]
    assert shown_s <= 80 * STEP_S
    assert PART_S_OF_TEXT * encoder.queue.figures.tokens >= 0.5 * reader.times[-1]


def test_texts_leave_the_machine_to_who_waits_for_a_first_token() -> None:
    """But for the floor; those who wait for nothing share it with texts."""
    times = []
    for with_texts in (False, True):
        streams = Streams(1)
        if with_texts:
            streams.encode(streams.encoder(), [40] * 5000)
        times.append(_first(streams))
    alone, beside = times
    assert beside <= 1.15 * alone + LOOKS * LOOK_S


def _first(streams: Streams) -> float:
    """Ask for an answer to a long prompt; return when its first token comes."""
    reader = streams.ask(0, 2000, 2)
    streams.run()
    return next(
        at
        for at, item in zip(reader.times, reader.items, strict=True)
        if isinstance(item, TokenOut)
    )


def test_texts_that_come_while_everything_rests_are_computed_to_the_end() -> None:
    """However many turns that takes: what wakes an engine is cleared by its first tick."""
    streams = Streams(1)
    encoder = streams.encoder()
    answered = list[list[float]]()
    streams.later.append(lambda: answered.append(streams.encode(encoder, [40] * 100)))
    streams.run()
    assert len(answered[0]) == 1


def test_texts_leave_half_of_the_machine_to_an_answer_that_nobody_reads() -> None:
    """Whoever of the two had less is next."""
    streams = Streams(1)
    encoder = streams.encoder()
    answer = streams.ask(0, 8, 100, "background")
    streams.encode(encoder, [40] * 500)
    streams.run()
    assert PART_S_OF_TEXT * encoder.queue.figures.tokens == pytest.approx(20.0, abs=1e-6)
    assert answer.times[-1] == pytest.approx(2.0, rel=0.15)


def test_while_nothing_else_is_computed_a_turn_is_long_until_a_message_comes() -> None:
    """A turn costs what a vector could have; who comes waits for one look at most."""
    streams = Streams(1)
    encoder, clock = streams.encoder(), streams.clock
    streams.encode(encoder, [40] * 400)
    bell, began = encoder.inbox.bell, clock.now
    bell.rang = False
    encoder.advance(Grant())
    assert clock.now - began == pytest.approx(LOOKS * LOOK_S)
    bell.ring()
    began = clock.now
    encoder.advance(Grant())
    assert clock.now - began == pytest.approx(LOOK_S)


def test_a_turn_is_short_where_readers_of_another_model_wait() -> None:
    """It ends when their tick is due."""
    streams = Streams(1)
    encoder, clock = streams.encoder(), streams.clock
    streams.encode(encoder, [40] * 400)
    encoder.inbox.bell.rang = False
    began = clock.now
    encoder.advance(Grant(most_s=1.5 * LOOK_S))
    assert clock.now - began == pytest.approx(1.5 * LOOK_S, abs=1.1e-3)


def test_a_long_part_is_computed_however_little_time_readers_leave() -> None:
    """It has the part of the machine that work has which nobody reads."""
    streams = Streams(1, slower=3.0)  # of a step of 40 ms they leave none
    encoder = streams.encoder(part_s=0.030)
    reader = streams.ask(0, 8, 300)
    answered = streams.encode(encoder, [8])
    streams.run()
    assert answered[0] < reader.times[-1]


def test_an_encoder_outlives_the_engine_of_another_model() -> None:
    """What was asked of it is answered."""
    streams = Streams(1)
    streams.raises = False
    encoder = streams.encoder()
    reader = streams.ask(0, 8, 50)
    answered = streams.encode(encoder, [40] * 100)

    def breaks() -> None:
        if len(reader.times) == 5:
            raise BackendDied("told to")

    streams.machines[0].noise = lambda: breaks() or 1.0  # type: ignore[func-returns-value]
    streams.run()
    assert len(streams.deaths) == 1
    assert answered


def test_nothing_is_kept_of_an_engine_that_has_left() -> None:
    """Also where another one waited for it: its saved prefixes are memory for others."""
    staying, leaving = Streams(2).engines
    compute = Compute(staying.inbox.bell, lambda: 0.0)
    compute.add(staying)
    compute.add(leaving)
    compute._attend()
    staying.delayed_by = leaving
    compute._members[1].is_leaving = True
    compute._attend()
    assert staying.delayed_by is None


def test_an_answer_is_the_same_beside_another_model() -> None:
    """Chunks of a prompt are cut elsewhere, and nothing else changes."""
    alone, beside = Streams(1), Streams(2)
    expected = alone.ask(0, 700, 20)
    alone.run()
    found = beside.ask(0, 700, 20)
    beside.ask(1, 8, 100)
    beside.run()
    assert found.tokens == expected.tokens


def test_a_request_that_waits_for_its_cells_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are restored between ticks, so that a tick has to be asked for."""
    engine = Streams(2).engines[0]
    assert not engine.claim(0.0).has_work
    monkeypatch.setattr(type(engine.cells), "blocked", property(lambda _cells: {1}))
    assert engine.claim(0.0).has_work


# --- while a model is loaded ---


@pytest.mark.parametrize("n", [1, 2])
def test_a_reader_does_not_see_that_a_tick_is_long_while_a_model_is_loaded(n: int) -> None:
    """The thread that loads it takes a core or the interpreter for a while; the reader is ahead."""
    streams = Streams(n, SLOW)
    reader, machine = streams.ask(0, 8, 100), streams.machines[0]
    machine.noise = lambda: 8.0 if len(machine.took) == 50 else 1.0
    with streams.compute.loading():
        streams.run()
    assert max(machine.took) > 0.140
    assert max(reader.gaps) <= STEP_S + EARLY_S


def test_ticks_that_a_loading_makes_longer_make_no_step_longer() -> None:
    """What they take is not what they take when the model is there."""
    streams = Streams(1, SLOW)
    reader, machine = streams.ask(0, 8, 100), streams.machines[0]
    machine.noise = lambda: 2.1 if len(machine.took) > 20 else 1.0
    with streams.compute.loading():
        streams.run()
    assert max(reader.gaps) <= STEP_S + EARLY_S
    cost = streams.engines[0].memory.cost
    assert cost is not None
    assert cost.scale == pytest.approx(1.0)


def test_a_reader_who_is_ahead_leaves_the_machine_to_who_loads_a_model() -> None:
    """It is computed no faster than it is shown, and faster again when the model is there."""
    streams = Streams(1, SLOW)
    reader, loading = streams.ask(0, 8, 100), streams.compute.loading()
    loading.__enter__()
    reader.heard = lambda: len(reader.times) == 51 and loading.__exit__(None, None, None)
    streams.run()
    took = streams.machines[0].took
    assert reader.times[50] - reader.times[20] == pytest.approx(30 * STEP_S, rel=0.05)
    assert reader.times[-1] - reader.times[60] < 1.1 * sum(took[60:])


# --- ticks that pause ---

PARTS = 25


def test_a_reader_keeps_its_step_beside_ticks_that_are_longer_than_it() -> None:
    """One token of the other model takes 100 ms: the reader's ticks are computed in pauses of that."""
    streams = Streams(2, slower=10.0, parts=PARTS)
    reader = streams.ask(0, 8, 300)
    other = streams.ask(1, 60, 8, "background")
    streams.run()
    assert len(reader.tokens) == 300
    assert len(other.tokens) == 8
    assert other.times[-1] < reader.times[-1]
    assert max(reader.gaps) <= STEP_S + PART_S


def test_a_tick_that_pauses_is_not_cut_for_readers_beyond_its_parts() -> None:
    """Small batches would not make it shorter, and compute a prompt more slowly."""
    streams = Streams(2, slower=10.0, parts=PARTS)
    streams.ask(0, 8, 300)
    streams.ask(1, 60, 8, "background")
    streams.run()
    assert max(streams.machines[1].sizes) >= 16


def test_what_passes_in_pauses_is_no_part_of_a_ticks_time() -> None:
    """Neither the model that pauses nor the one that is computed meanwhile is predicted slower."""
    streams = Streams(2, slower=10.0, parts=PARTS)
    streams.ask(0, 8, 300)
    streams.ask(1, 60, 20, "background")
    streams.run()
    for engine in streams.engines:
        cost = engine.memory.cost
        assert cost is not None
        assert cost.scale == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("worked_before", [False, True])
@pytest.mark.parametrize("lane", ["interactive", "background"])
def test_who_comes_to_a_resting_model_is_computed_within_the_tick_of_another(
    worked_before: bool, lane: Lane
) -> None:
    """A long tick pauses although nobody else had work when it began, whatever both computed before."""
    streams = Streams(2, slower=10.0, parts=PARTS)
    come: list[tuple[float, Timed]] = []

    def comes() -> float:
        if not come and streams.machines[1].sizes[-1:] > [100]:
            come.append((streams.clock.now, streams.ask(0, 8, 4, lane)))
        return 1.0

    def begins() -> None:
        streams.machines[1].noise = comes
        streams.ask(1, 1500, 4, "background")

    streams.later.append(begins)
    if worked_before:
        for model in (0, 1):
            streams.ask(model, 100, 20, "background")
    streams.run()
    ((asked_at, newcomer),) = come
    part_s = max(streams.machines[1].took) / PARTS
    assert part_s > 0.100
    assert newcomer.times[0] - asked_at < 2.5 * part_s


def test_a_device_prepares_its_ticks_beside_an_idle_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them: the idle one is asked now and then whether what it waits for has come."""
    prepared, real = list[object](), Planner.take_prepared

    def noted(planner: Planner, *arguments: Any) -> Any:
        found = real(planner, *arguments)
        prepared.extend([found] if found else [])
        return found

    monkeypatch.setattr(Planner, "take_prepared", noted)
    streams = Streams(2)
    for machine in streams.machines:
        machine.overlaps = True
    streams.ask(0, 8, 100)
    streams.run()
    assert len(prepared) > 70


def test_an_engine_that_raises_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may be freed by then."""
    streams = Streams(2, slower=10.0, parts=PARTS)
    streams.raises, engine = False, streams.engines[1]
    calls: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(engine, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            if name == "claim" and len(calls) > 20:
                calls.append("raised")
                raise BackendDied("fell off the bus")
            return real(*arguments)

        return call

    for name in ("claim", "advance", "publish"):
        monkeypatch.setattr(engine, name, noted(name))
    streams.ask(1, 8, 100)
    streams.run()
    assert len(streams.deaths) == 1
    assert not {"claim", "advance"} & {*calls[calls.index("raised") :]}


def test_texts_do_not_wait_for_readers_who_have_no_slot() -> None:
    """Nothing can be computed for these."""
    streams = Streams(1)
    encoder, left = streams.encoder(), [20]

    def more() -> None:
        stream = streams.ask(0, 8, 100)

        def heard() -> None:
            if isinstance(stream.items[-1], Finished) and left[0] > 0:
                left[0] -= 1
                more()

        stream.heard = heard

    for _ in range(2 * streams.machines[0].limits.n_slots):
        more()
    answered = streams.encode(encoder, [40] * 25)
    streams.run()
    assert answered[0] < 0.5 * streams.clock.now


def test_nothing_is_learnt_of_ticks_that_a_loading_disturbs() -> None:
    """Neither that the machine is slower nor that it is faster."""
    streams, rng = Streams(1), random.Random(1)
    streams.machines[0].noise = lambda: rng.uniform(0.7, 1.3)
    for _ in range(2):
        streams.ask(0, 8, 300)
    with streams.compute.loading():
        streams.run()
    cost = streams.engines[0].memory.cost
    assert cost is not None
    assert cost.scale == pytest.approx(1.0, abs=0.02)


def test_an_answer_in_pauses_is_the_same() -> None:
    """Whoever is computed meanwhile."""
    alone = Streams(1, slower=10.0, parts=PARTS)
    expected = alone.ask(0, 60, 20)
    alone.run()
    beside = Streams(2, slower=10.0, parts=PARTS)
    beside.ask(0, 8, 100)
    found = beside.ask(1, 60, 20)
    beside.run()
    assert found.tokens == expected.tokens


def test_a_tick_ends_however_little_time_readers_leave() -> None:
    """A reader whose own ticks fill its step gets no more than all but the floor of the machine."""
    streams = Streams(2, slower=10.0, parts=PARTS)
    streams.machines[0].truth = COST.times(4.5)
    reader = streams.ask(0, 8, 200)
    other = streams.ask(1, 8, 2, "background")
    streams.run()
    assert len(other.tokens) == 2
    assert other.times[-1] < reader.times[-1]


def test_an_engine_that_raises_in_a_pause_ends_alone() -> None:
    """The tick that is paused goes on."""
    streams = Streams(2, slower=10.0, parts=PARTS)
    streams.raises = False
    streams.ask(0, 8, 100)
    other = streams.ask(1, 60, 8, "background")
    machine, decode = streams.machines[0], streams.machines[0].decode

    def broken(n_tokens: int, while_computing: Overlap = nothing) -> int:
        if streams.machines[1].decodes and len(machine.took) > 20:
            raise BackendDied("it broke")
        return decode(n_tokens, while_computing)

    machine.decode = broken  # type: ignore[method-assign]
    streams.run()
    assert [str(each) for each in streams.deaths] == ["it broke"]
    assert len(other.tokens) == 8


def test_two_readers_of_models_that_pause_both_go_on() -> None:
    """A tick within a pause may pause, too; whose tick is paused is not computed again."""
    streams = Streams(2, slower=3.0, parts=PARTS)
    streams.machines[0].parts = PARTS
    streams.engines[0]._planner._longest_part = 1 / PARTS
    one, two = streams.ask(0, 8, 60), streams.ask(1, 8, 60)
    streams.run()
    assert len(one.tokens) == len(two.tokens) == 60
    assert max(one.gaps) <= 2 * STEP_S
