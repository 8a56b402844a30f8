"""Texts are encoded in turns by user, in small steps, and in the time that readers leave."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from encoder_kit import PART_S, FakeEncoder, info_of, vector_of
from engine_kit import Bench
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.backend.base import IntArray
from uma_trio.backend.fake import FakeBackend, linear_cost
from uma_trio.engine.encoding import ENCODE_S, IDLE_TURNS, STEP_TOKENS, Encodings
from uma_trio.engine.messages import Encode, Encoded, StopEncoding
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.state import Contract


def tokens(n: int, first: int = 0) -> IntArray:
    """Return an input of so many tokens."""
    return np.arange(first, first + n, dtype=np.int32)


def asked(
    answers: list[Encoded], handle: int, inputs: Sequence[IntArray], user: str = "u"
) -> Encode:
    """Return a request whose answer is kept; its shortest input is first."""
    order = sorted(range(len(inputs)), key=lambda at: len(inputs[at]), reverse=True)
    return Encode(handle, "embed", user, inputs, order, answers.append)


class Clock:
    """Stands still."""

    def __call__(self) -> float:
        """Return the same time."""
        return 0.0


def queue(model: FakeEncoder) -> Encodings:
    """Return the queue of an encoder."""
    return Encodings(model, lambda call: call(), Clock())


def run(encodings: Encodings) -> None:
    """Compute all there is."""
    while encodings.has_work:
        encodings.advance(1.0)


@given(st.lists(st.lists(st.integers(1, 48), min_size=1, max_size=20), min_size=1, max_size=6))
def test_each_request_has_the_vectors_of_its_own_inputs_in_order(requests: list[list[int]]) -> None:
    """However they are packed into steps, and no step is larger than the model takes."""
    model = FakeEncoder()
    encodings, answers = queue(model), [list[Encoded]() for _ in requests]
    inputs = [[tokens(n, at + n) for at, n in enumerate(lengths)] for lengths in requests]
    for number, each in enumerate(inputs):
        encodings.submit(asked(answers[number], number, each, user=f"u{number % 2}"))
    run(encodings)
    for (answer,), each in zip(answers, inputs, strict=True):
        assert answer.vectors is not None
        expected = np.stack([vector_of(one) for one in each])
        assert np.array_equal(answer.vectors, expected)
    for step in model.steps:
        assert len(step) <= model.info.max_inputs
        assert len(step) == 1 or sum(step) <= STEP_TOKENS


def test_a_user_with_many_inputs_takes_half_of_each_step_beside_another() -> None:
    """Users take turns input by input, whoever was first."""
    model = FakeEncoder()
    encodings = queue(model)
    many, few = list[Encoded](), list[Encoded]()
    encodings.submit(asked(many, 1, [tokens(20)] * 200, user="a"))
    encodings.advance(1.0)
    encodings.submit(asked(few, 2, [tokens(20)] * 2, user="b"))
    for _ in range(2):  # steps of two inputs
        encodings.advance(1.0)
    assert few
    assert not many


def test_a_step_that_fails_ends_only_those_who_have_an_input_in_it() -> None:
    """And the encoder goes on."""
    model = FakeEncoder(fails=(1,))
    encodings = queue(model)
    first, second = list[Encoded](), list[Encoded]()
    encodings.submit(asked(first, 1, [tokens(8)]))
    encodings.advance(1.0)
    encodings.submit(asked(second, 2, [tokens(8)]))
    run(encodings)
    assert (first[0].vectors, first[0].code) == (None, "E_RUNTIME_001")
    assert second[0].vectors is not None


def test_who_stops_has_no_answer_and_its_step_is_given_up() -> None:
    """Unless somebody else has an input in it; and who is unknown stops nothing."""
    model = FakeEncoder()
    encodings = queue(model)
    answers = list[Encoded]()
    encodings.submit(asked(answers, 1, [tokens(40)] * 3))
    encodings.advance(PART_S)
    encodings.cancel(1)
    encodings.cancel(7)
    assert (encodings.has_work, model.dropped, answers) == (False, 1, [])
    encodings.submit(asked(answers, 2, [tokens(8)], user="a"))
    encodings.submit(asked(answers, 3, [tokens(8)], user="b"))
    encodings.advance(PART_S)
    encodings.cancel(2)
    run(encodings)
    assert (len(answers), model.dropped) == (1, 1)


def test_a_part_that_is_longer_than_what_is_allowed_waits_until_enough_was_left() -> None:
    """So a long input is computed beside readers, too, and the time is not exceeded over many ticks."""
    model = FakeEncoder(part_s=0.010)
    encodings = queue(model)
    answers = list[Encoded]()
    encodings.submit(asked(answers, 1, [tokens(30)]))
    encodings.advance(0.010)  # begins the step
    for _ in range(3):
        encodings.advance(0.003)
    left = model._left
    encodings.advance(0.003)
    assert (left, model._left) == (29, 28)


COST = CostModel(Staircase((1, 512), (0.02, 0.2)))


def test_an_engine_encodes_between_the_ticks_of_a_reader_and_while_it_is_idle() -> None:
    """Beside a stream the encoder has a part of each tick; the stream is the same as without it."""
    alone = Bench(FakeBackend(cost=linear_cost(0.02, 0.0)))
    _, expected = alone.submit("hello", 20)
    alone.run()
    model = FakeEncoder()
    made = Bench(FakeBackend(cost=linear_cost(0.02, 0.0)), encoders={"embed": model})
    answers = list[Encoded]()
    _, sink = made.submit("hello", 20)
    made.engine.tick()
    made.inbox.put(asked(answers, 1, [tokens(20)] * 16))
    made.engine.tick()
    made.engine.tick()
    assert model.steps
    made.run()
    while made.engine.aside():
        pass
    assert sink.tokens == expected.tokens
    assert answers[0].vectors is not None
    assert made.metrics.values()["encoded_inputs_total"] == 16


class Time:
    """Passes by computing only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def passes(self, seconds: float) -> None:
        """Let it pass."""
        self.now += seconds


READING_S = 0.040


def tick(time: Time, bench: Bench) -> None:
    """Let the engine compute a tick, which takes its time."""
    made = bench.engine.next_tick()
    assert made is not None
    status = bench.engine.compute(made)
    time.passes(bench.backend.last_cost_s)
    bench.engine.finish(made, status)


def timed(tick_s: float) -> tuple[Time, Bench]:
    """Return an engine whose ticks of a reader take so long, by its cost model, too; parts of texts take 1 ms."""
    time = Time()
    cost = CostModel(Staircase((1, 512), (tick_s, 10 * tick_s)))
    bench = Bench(
        FakeBackend(cost=linear_cost(tick_s, 0.0)),
        clock=time,
        settings=EngineSettings(
            cost=cost, drafts=False, contract=Contract(reading_pace_s=READING_S)
        ),
        encoders={"embed": FakeEncoder(passes=time.passes)},
    )
    return time, bench


@pytest.mark.parametrize(("length", "tick_s"), [(5, 0.010), (5, 0.018), (40, 0.010), (40, 0.018)])
def test_beside_one_reader_texts_have_half_of_the_machine(length: int, tick_s: float) -> None:
    """Of short and of long ones as many are encoded in a second as half of those alone; no token is late."""
    time, bench = timed(tick_s)
    bench.submit("hello", 500)
    bench.inbox.put(asked([], 1, [tokens(length)] * 4000))
    shown = []
    for _ in range(100):
        tick(time, bench)
        shown.append(time.now)
    gaps = [later - sooner for sooner, later in pairwise(shown[20:])]
    assert max(gaps) <= READING_S + 1e-9
    assert bench.metrics.encoding.seconds >= 0.5 * time.now


def test_beside_a_reader_and_a_prompt_texts_leave_half_of_the_spare_time() -> None:
    """What no reader misses is for the ticks of other requests, too."""
    spent = []
    for other in (False, True):
        time, bench = timed(0.010)
        bench.submit("hello", 500)
        if other:
            bench.submit("hello", 500, lane="background")
        for _ in range(3):
            tick(time, bench)
        bench.inbox.put(asked([], 1, [tokens(40)] * 400))
        tick(time, bench)
        spent.append(bench.metrics.encoding.seconds)
    assert 0 < spent[1] < 0.7 * spent[0]


def test_while_nothing_else_is_computed_a_turn_is_long_until_a_message_comes() -> None:
    """A turn of the engine costs what a vector could have; who comes waits for one look at most."""
    time, bench = timed(0.010)
    bench.inbox.put(asked([], 1, [tokens(40)] * 400))
    bench.engine.tick()
    bell, began = bench.inbox.bell, time.now
    bell.rang = False
    bench.engine.aside()
    assert time.now - began == pytest.approx(IDLE_TURNS * ENCODE_S)
    bell.ring()
    began = time.now
    bench.engine.aside()
    assert time.now - began == pytest.approx(ENCODE_S)


def test_a_turn_is_short_where_readers_of_another_model_wait() -> None:
    """It ends when their tick is due."""
    time, bench = timed(0.010)
    bench.inbox.put(asked([], 1, [tokens(40)] * 400))
    bench.engine.tick()
    bench.inbox.bell.rang = False
    bench.engine.limit(2 * ENCODE_S)
    began = time.now
    bench.engine.aside()
    assert time.now - began == pytest.approx(2 * ENCODE_S)


def test_a_request_that_stops_leaves_the_engine() -> None:
    """Its messages arrive in order."""
    model = FakeEncoder()
    made = Bench(encoders={"embed": model})
    answers = list[Encoded]()
    made.inbox.put(asked(answers, 1, [tokens(20)]))
    made.inbox.put(StopEncoding(1, "embed"))
    made.engine.tick()
    assert not made.engine.aside()
    assert not answers


def test_an_engine_that_ends_tells_who_waits_for_a_vector() -> None:
    """Also who was not taken in yet."""
    model = FakeEncoder(info_of())
    made = Bench(encoders={"embed": model})
    first, second = list[Encoded](), list[Encoded]()
    made.inbox.put(asked(first, 1, [tokens(20)]))
    made.engine.tick()
    made.inbox.put(asked(second, 2, [tokens(20)]))
    made.engine.fail_all("E_RUNTIME_004", "the engine has stopped")
    assert [each[0].code for each in (first, second)] == ["E_RUNTIME_004"] * 2
