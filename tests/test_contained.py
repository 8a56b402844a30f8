"""A request at which the engine itself fails ends alone, and everybody gets one terminal item."""

from __future__ import annotations

from typing import NoReturn

import pytest
from drafts_kit import FLAT
from engine_kit import KINDS, Balking, Bench, BrokenText, OnDevice

from uma_trio.backend.base import Overlap, nothing
from uma_trio.engine.drafts import Drafter
from uma_trio.engine.drafts.drafting import (
    FIRST_REST_S,
    LONGEST_REST_S,
    PATIENCE,
    Contained,
    Failures,
)
from uma_trio.engine.intake import Handler
from uma_trio.engine.messages import InboxMessage, SetLane
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.deadline import deadline
from uma_trio_sim.fake import FakeBackend

BROKEN = "E_RUNTIME_006"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [(), ("never said",)])
def test_a_text_that_cannot_be_decoded_ends_its_request_alone(
    kind: type[FakeBackend], stop: tuple[str, ...]
) -> None:
    """Its reader has what was right before; the others notice nothing."""
    bench = Bench(kind())
    _, first = bench.submit("request 0", 30)
    handle, second = bench.submit("request 1", 30, stop=stop)
    bench.ticks(5)
    n = len(second.tokens)
    bench.engine.registry.running[handle].text = BrokenText()
    bench.run()
    assert second.end.code == BROKEN
    assert second.tokens == bench.expected("request 1", n)
    assert first.end.code is None
    assert first.tokens == bench.expected("request 0", 30)
    bench.engine.cells.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_constraint_that_fails_at_a_token_ends_its_request_alone(
    kind: type[FakeBackend],
) -> None:
    """Also where the next tick is computed already when its token is committed."""
    bench = Bench(kind())
    _, first = bench.submit("request 0", 30)
    _, second = bench.submit("request 1", 30, constraint=Balking(8))
    bench.run()
    assert (second.end.reason, second.end.code) == ("error", BROKEN)
    assert second.tokens == bench.expected("request 1", 7)
    assert first.end.code is None
    assert first.tokens == bench.expected("request 0", 30)
    assert not bench.inbox.waiting
    bench.engine.cells.check()


def test_an_answer_whose_last_text_is_missing_is_no_success() -> None:
    """It ends by itself before it can be ended, and once."""
    bench = Bench()
    handle, sink = bench.submit(max_tokens=4)
    bench.ticks(2)
    bench.engine.registry.running[handle].text = BrokenText()
    bench.run()
    assert (sink.end.reason, sink.end.code) == ("error", BROKEN)


def test_a_request_that_cannot_be_taken_in_ends_at_once() -> None:
    """Nothing is held for it, and the next one has its place in the queue."""
    bench = Bench(max_waiting=2)
    for _ in range(5):
        _, sink = bench.submit(stop=(7,))  # type: ignore[arg-type]
        _, other = bench.submit(max_tokens=5)
        bench.run()
        assert sink.end.code == BROKEN
        assert other.tokens == bench.expected("hello", 5)
    assert bench.inbox.waiting == 0


def test_requests_that_came_with_what_kills_the_engine_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those before it in the inbox, and those behind it, each once."""

    class Fragile(Handler):
        def handle(self, message: InboxMessage, now: float) -> None:
            if isinstance(message, SetLane):
                raise ZeroDivisionError
            super().handle(message, now)

    monkeypatch.setattr("uma_trio.engine.loop.Handler", Fragile)
    bench = Bench()
    _, running = bench.submit(max_tokens=30)
    bench.ticks(3)
    sinks = [running, bench.submit()[1]]
    bench.inbox.put(SetLane(1, "background"))
    sinks += [bench.submit()[1], bench.submit()[1]]
    with pytest.raises(ZeroDivisionError):
        bench.run()
    bench.engine.fail_all("E_RUNTIME_004", "gone")
    assert [sink.end.code for sink in sinks] == ["E_RUNTIME_004"] * 4
    assert running.tokens == bench.expected("hello", len(running.tokens))


def test_a_commit_that_fails_keeps_nobodys_end_back() -> None:
    """The engine dies of it; its tokens are lost, and nothing else."""
    bench = Bench()
    sinks = [bench.submit(max_tokens=30)[1] for _ in range(2)]
    bench.ticks(3)
    bench.engine.tick()
    bench.engine.registry.commit = None  # type: ignore[assignment, method-assign]
    bench.engine.fail_all("E_RUNTIME_004", "gone")
    assert [sink.end.code for sink in sinks] == ["E_RUNTIME_004"] * 2


class Watching(OnDevice):
    """Notes before each decode whether the commit of the one before is still to come."""

    bench: Bench
    early: list[bool]

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Look, then compute."""
        running = self.bench.engine.registry.running.values()
        self.early.append(int(self.batch.pos[0]) != next(iter(running)).computed)
        return super().decode(n_tokens, while_computing)


def test_a_stop_string_keeps_no_prepared_tick_waiting() -> None:
    """Whether it is complete is known from the token, before its text is written down."""
    backend = Watching()
    backend.bench, backend.early = bench, _ = Bench(backend), []
    expected = backend.text_of(bench.expected("hello", 40))
    _, sink = bench.submit("hello", 40, stop=(expected[20:23],))
    bench.submit("another", 40)
    bench.ticks(2)  # which also publish at their end: the first decode after that is no early one
    backend.early.clear()
    bench.ticks(11)
    assert backend.early[1:] == [True] * 10
    bench.run()
    assert sink.end.reason == "stop"
    assert expected.startswith(sink.text)
    assert expected[20:23] not in sink.text


class _Raising(Drafter):
    """Finds drafts, and fails at what `fails` names."""

    def __init__(self, fails: str, kind: type[Exception] = MemoryError) -> None:
        super().__init__()

        def raises(*_: object) -> NoReturn:
            raise kind(fails)

        setattr(self, fails, raises)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", ["propose", "unread", "take_in", "expects", "learn", "keep"])
def test_drafts_that_fail_end_nothing(kind: type[FakeBackend], fails: str) -> None:
    """Every answer is whole, and the failures are counted and not repeated for ever."""
    backend = kind(n_slots=5, n_ctx=4000, n_rows=24)
    given = EngineSettings(cost=FLAT, scratch_slots=1)
    bench = Bench(backend, deadline, settings=given, drafter=_Raising(fails))
    texts = [f"aaaa bbbb {n} " * 6 for n in range(4)]
    for _ in range(PATIENCE):
        sinks = [bench.submit(text, 40, namespace="x")[1] for text in texts]
        bench.run()
        for text, sink in zip(texts, sinks, strict=True):
            assert sink.end.code is None
            assert sink.tokens == bench.expected(text, 40)
    if not (fails == "expects" and kind is FakeBackend):  # where nothing is prepared
        assert bench.engine._drafter.failures == PATIENCE
    bench.engine.cells.check()


def test_drafts_may_be_forgotten_during_a_rest() -> None:
    """What a user clears is gone, whatever failed before."""
    forgotten: list[bool] = []
    inner = _Raising("keep")
    inner.forget = lambda mine: forgotten.append(mine("x"))  # type: ignore[method-assign]
    drafter = Contained(inner, clock=lambda: 0.0)
    for _ in range(5):
        drafter.keep(None)  # type: ignore[arg-type]
    drafter.forget(lambda _: True)
    assert forgotten == [True]
    assert drafter.failures == PATIENCE


def test_rests_double_up_to_an_hour_until_drafts_work_for_as_long() -> None:
    """One failure is enough for the next rest; a time without any makes up for all."""
    failures, now = Failures(), 0.0
    assert [failures.note(now) for _ in range(PATIENCE)] == [0.0] * (PATIENCE - 1) + [FIRST_REST_S]
    rests = []
    for _ in range(8):
        now = failures.rests_until
        rests.append(failures.note(now))
    assert rests == [min(FIRST_REST_S * 2.0**n, LONGEST_REST_S) for n in range(1, 9)]
    now = failures.rests_until + LONGEST_REST_S
    assert [failures.note(now) for _ in range(PATIENCE)] == [0.0] * (PATIENCE - 1) + [FIRST_REST_S]
    assert failures.total == 2 * PATIENCE + 8


def test_what_fails_during_a_rest_makes_it_no_longer() -> None:
    """Several failures of one moment are one reason to rest."""
    failures = Failures()
    rests = [failures.note(0.0) for _ in range(PATIENCE + 8)]
    assert rests == [0.0] * (PATIENCE - 1) + [FIRST_REST_S] * 9
    assert failures.note(FIRST_REST_S) == 2 * FIRST_REST_S
    assert failures.total == PATIENCE + 9


def test_what_fails_behind_an_end_takes_nobodys_items() -> None:
    """The items of that publish are out, ends and last tokens, before the engine ends."""
    bench = Bench()
    sinks = [bench.submit(f"request {n}", 3)[1] for n in range(3)]

    def fails(*_: object) -> NoReturn:
        raise MemoryError

    bench.engine._publisher._ended = fails
    with pytest.raises(MemoryError):
        bench.run()
    bench.engine.fail_all("E_RUNTIME_004", "gone")
    for n, sink in enumerate(sinks):
        assert sink.end.code is None
        assert sink.tokens == bench.expected(f"request {n}", 3)
