"""Texts are encoded in turns by user, in small batches; requests are told of; questions are answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from encoder_kit import PART_S, FakeEncoder, vector_of
from engine_kit import Doze
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.backend.base import IntArray
from uma_trio.engine.encoder import BATCH_TOKENS, EncoderEngine, Encodings
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.messages import Encode, Encoded, Explain, Inspect, Prefix, StopEncoding
from uma_trio.machine.machine import Machine
from uma_trio.observe.records import Wait


def tokens(n: int, first: int = 0) -> IntArray:
    """Return an input of so many tokens."""
    return np.arange(first, first + n, dtype=np.int32)


def asked(
    answers: list[Encoded], handle: int, inputs: Sequence[IntArray], user: str = "u"
) -> Encode:
    """Return a request whose answer is kept; its shortest input is first."""
    order = sorted(range(len(inputs)), key=lambda at: len(inputs[at]), reverse=True)
    return Encode(handle, user, inputs, order, answers.append)


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
    """However they are packed into batches, and no batch is larger than the model takes."""
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
    for batch in model.batches:
        assert len(batch) <= model.info.max_inputs
        assert len(batch) == 1 or sum(batch) <= BATCH_TOKENS


def test_a_user_with_many_inputs_takes_half_of_each_batch_beside_another() -> None:
    """Users take turns input by input, whoever was first."""
    model = FakeEncoder()
    encodings = queue(model)
    many, few = list[Encoded](), list[Encoded]()
    encodings.submit(asked(many, 1, [tokens(20)] * 200, user="a"))
    encodings.advance(1.0)
    encodings.submit(asked(few, 2, [tokens(20)] * 2, user="b"))
    for _ in range(2):  # batches of two inputs
        encodings.advance(1.0)
    assert few
    assert not many


def test_a_batch_that_fails_ends_only_those_who_have_an_input_in_it() -> None:
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


def test_who_stops_has_no_answer_and_its_batch_is_given_up() -> None:
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


def test_users_share_time_and_not_requests() -> None:
    """Who was charged for a loading, or sent long texts, waits until others had as much."""
    model = FakeEncoder()
    encodings = queue(model)
    order: list[int] = []
    for handle, user, owes_s in ((1, "a", 0.0), (2, "b", 5.0), (3, "a", 0.0), (4, "c", 0.0)):
        inputs = [tokens(20)] * 4
        message = Encode(
            *(handle, user, inputs, [3, 2, 1, 0]),
            lambda _found, handle=handle: order.append(handle),  # type: ignore[misc]
            owes_s=owes_s,
        )
        encodings.submit(message)
    run(encodings)
    assert order[-1] == 2
    assert set(order[:2]) == {1, 4}


def test_who_comes_back_has_no_claim_to_what_others_used() -> None:
    """A user who was idle gets half from now on, and not all until it had as much."""
    model = FakeEncoder()
    encodings = queue(model)
    late, busy = list[Encoded](), list[Encoded]()
    encodings.submit(asked(busy, 1, [tokens(20)] * 200, user="busy"))
    for _ in range(20):
        encodings.advance(1.0)
    encodings.submit(asked(late, 2, [tokens(20)] * 100, user="late"))
    batches = len(model.batches)
    while not late:
        encodings.advance(1.0)
    assert len(model.batches) - batches > 90


def test_a_request_is_told_of_as_any_other_is() -> None:
    """How much of it is computed, what it waits for, and how it ended."""
    model = FakeEncoder()
    encodings = queue(model)
    answers = list[Encoded]()
    encodings.submit(asked(answers, 1, [tokens(40)] * 2, user="a"))
    encodings.submit(asked(answers, 2, [tokens(40)], user="a"))
    encodings.advance(PART_S)
    (running,), (queued,) = encodings.reports(9)
    assert (running.handle, running.state, running.prompt_tokens) == (1, "prefill", 80)
    assert (queued.handle, queued.state, queued.wait) == (
        2,
        "queued",
        Wait("texts of others are computed", (1,)),
    )
    encodings.advance(1.0)
    assert encodings.reports(9)[0][0].computed_tokens == 40
    encodings.cancel(2)
    run(encodings)
    states = {each.handle: (each.state, each.prefill.tokens) for each in encodings.records(None)}
    assert states == {1: ("stop", 80), 2: ("cancelled", 0)}
    assert [each.handle for each in encodings.records(2)] == [2]


def test_an_engine_that_ends_tells_who_waits_for_a_vector() -> None:
    """Also who was not taken in yet."""
    inbox = Inbox(9)
    engine = EncoderEngine(queue(FakeEncoder()), inbox, lambda call: call(), Clock())
    first, second = list[Encoded](), list[Encoded]()
    inbox.put(asked(first, 1, [tokens(20)]))
    engine.claim(0.0)
    inbox.put(asked(second, 2, [tokens(20)]))
    engine.fail_all("E_RUNTIME_004", "the engine has stopped")
    assert [each[0].code for each in (first, second)] == ["E_RUNTIME_004"] * 2


def test_a_request_that_stops_leaves_the_engine() -> None:
    """Its messages arrive in order."""
    inbox = Inbox(9)
    engine = EncoderEngine(queue(FakeEncoder()), inbox, lambda call: call(), Clock())
    answers = list[Encoded]()
    inbox.put(asked(answers, 1, [tokens(20)]))
    inbox.put(StopEncoding(1))
    assert not engine.claim(0.0).has_work
    assert not answers


def test_questions_to_an_encoder_are_answered() -> None:
    """The same ones as to an engine that writes: nothing is cached by it."""
    inbox, found = Inbox(9), list[Any]()
    engine = EncoderEngine(queue(FakeEncoder()), inbox, lambda call: call(), Clock())
    inbox.put(asked([], 7, [tokens(20)]))
    inbox.put(Inspect(found.append, -1))
    inbox.put(Explain(found.append, None, 5))
    inbox.put(Prefix(found.append, lambda _namespace: True))
    engine.claim(0.0)
    snapshot, recorded, prefixes = found
    assert [each.handle for each in snapshot.requests] == [7]
    assert [each.handle for each in recorded.requests] == [7]
    assert (prefixes.budget, prefixes.namespaces) == (0, ())


class _Interrupted(EncoderEngine):
    """A request comes once, when the engine has just said that it has nothing to compute."""

    late: Encode | None = None

    def interrupt(self) -> None:
        late, self.late = self.late, None
        if late is not None:
            self.inbox.put(late)


def test_a_request_that_comes_while_another_model_is_asked_is_not_left_until_the_next_one() -> None:
    """The machine does not ask a work again that had nothing to compute, unless a message came since."""
    sleeps = list[float | None]()

    def sleep(seconds: float | None) -> bool:
        sleeps.append(seconds)
        if seconds is None or len(sleeps) > 20:
            machine.close()
        return False

    machine, answers = Machine(Doze(sleep), Clock()), list[Encoded]()
    for engine in [
        _Interrupted(
            queue(FakeEncoder()), Inbox(8, bell=machine.bell), lambda call: call(), Clock()
        )
        for _ in range(2)
    ]:
        engine.late = asked(answers, 1, [tokens(8)])
        machine.add(engine)
    machine.run()
    assert len(answers) == 2
