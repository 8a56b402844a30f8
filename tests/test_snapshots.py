"""Snapshots: what they show, how often they are made, and that nobody waits for one in vain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.lowlevel
from engine_kit import Bench
from http_kit import http_house
from net_kit import TICK_S, house
from trio.testing import MockClock

from uma_protocol import Error, ListSessions, Sessions, Token
from uma_trio.engine.messages import Inspect, Snapshot
from uma_trio.engine.snapshot import MOST_TICKS, MOST_WAITING
from uma_trio.models.loaded import SNAPSHOT_INTERVAL_S as INTERVAL_S
from uma_trio.observe.records import Wait
from uma_trio.service.ask import Refusal
from uma_trio.sockets.principal import Principal
from uma_trio_sim.fake import FakeBackend


def test_a_snapshot_shows_who_runs_who_waits_and_why() -> None:
    """Requests with a slot are apart from the queue, whose reason is told."""
    bench = Bench(FakeBackend(n_slots=1))
    first, _ = bench.submit("hello", 20)
    second, _ = bench.submit("another", 20)
    bench.ticks(3)
    seen = bench.snapshot()
    assert [one.handle for one in seen.running] == [first]
    assert [(one.handle, one.wait) for one in seen.queue] == [
        (second, Wait("the slot is taken", (first,)))
    ]
    assert seen.waiting == 1
    assert 0 < seen.cells.used <= seen.cells.reserved <= seen.cells.total


def test_a_snapshot_has_the_ticks_after_the_one_that_is_known() -> None:
    """They are numbered without a gap; nothing is told twice."""
    bench = Bench()
    bench.submit("hello", 30)
    bench.ticks(5)
    first = bench.snapshot()
    bench.ticks(4)
    second = bench.snapshot(first.tick)
    assert first.ticks[-1].tick == first.tick
    assert [tick.tick for tick in second.ticks] == [*range(first.tick + 1, second.tick + 1)]
    assert bench.snapshot(10**9).ticks == ()


def test_a_snapshot_is_bounded() -> None:
    """A long queue is counted, not described; of many ticks it has the latest."""
    bench = Bench(FakeBackend(n_slots=1), max_waiting=2 * MOST_WAITING)
    bench.submit("hello", MOST_TICKS + 40)
    bench.ticks(MOST_TICKS + 20)
    for _ in range(MOST_WAITING + 9):
        bench.submit("more", 1)
    bench.ticks(1)
    seen = bench.snapshot()
    assert (len(seen.queue), seen.waiting) == (MOST_WAITING, MOST_WAITING + 9)
    assert len(seen.ticks) == MOST_TICKS
    assert seen.ticks[-1].tick == seen.tick


async def test_many_who_look_are_one_question_ten_times_a_second(
    autojump_clock: MockClock,
) -> None:
    """Twenty viewers that ask again and again for a second cost the engine ten snapshots."""
    async with house() as daemon:
        asked: list[Inspect] = []
        put = daemon.bench.inbox.put

        def spy(message: object) -> None:
            if isinstance(message, Inspect):
                asked.append(message)
            put(message)  # type: ignore[arg-type]

        daemon.bench.inbox.put = spy  # type: ignore[method-assign]

        async def look() -> None:
            while True:
                await daemon.served.snapshot()

        with trio.move_on_after(1.0 - TICK_S):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(look)
        assert len(asked) == round(1.0 / INTERVAL_S)
        await trio.sleep(5)
        assert len(asked) == round(1.0 / INTERVAL_S), "nobody looks any more"


async def test_a_snapshot_is_not_older_than_the_question(autojump_clock: MockClock) -> None:
    """Who asks while another question is under way waits for the next one."""
    async with house() as daemon:
        before = trio.current_time()
        seen: list[Snapshot] = []

        async def look() -> None:
            seen.append(await daemon.served.snapshot())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            client = daemon.connect()
            await client.ask(max_tokens=900)
            await client.until(Token)
            nursery.start_soon(look)
        assert [len(one.requests) for one in seen] == [0, 1]
        assert trio.current_time() - before < INTERVAL_S + 5 * TICK_S


async def test_who_leaves_does_not_take_the_question_along(autojump_clock: MockClock) -> None:
    """The one who put the question is cancelled; another who waits for the answer gets it."""
    async with house() as daemon:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(daemon.served.snapshot)
                await trio.lowlevel.checkpoint()
                scope.cancel()
        with trio.fail_after(1):
            await daemon.served.snapshot()


@pytest.mark.parametrize("what", ["snapshot", "explain", "prefixes"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_no_question_waits_for_an_engine_that_is_gone(
    autojump_clock: MockClock, what: str, when: str
) -> None:
    """It is refused with what to do next, whether the engine ended before it or during it."""
    async with house() as daemon:
        service, inbox = daemon.service, daemon.bench.inbox
        questions: dict[str, Callable[[], Awaitable[object]]] = {
            "snapshot": daemon.served.snapshot,
            "explain": lambda: service.observer.explain(None, 0),
            "prefixes": lambda: service.prefixes(Principal(connection=1, uid=1)),
        }
        inbox.put = lambda message: None  # type: ignore[method-assign]
        if when == "before":
            inbox.close()
        async with trio.open_nursery() as nursery:
            if when == "meanwhile":
                nursery.start_soon(_close_later, inbox.close)
            with trio.fail_after(1), pytest.raises(Refusal, match="engine has stopped"):
                await questions[what]()


async def _close_later(close: Callable[[], None]) -> None:
    await trio.sleep(0.5)
    close()


async def test_lists_end_with_an_error_when_the_engine_is_gone(
    autojump_clock: MockClock,
) -> None:
    """`/slots` answers 503 and `sessions` an error, and neither reader waits for ever."""
    async with http_house() as daemon:
        daemon.inner.bench.inbox.close()
        with trio.fail_after(5):
            answer = await daemon.ask("GET", "/slots")
            assert answer.status == 503
            client = daemon.inner.connect()
            await client.send(ListSessions())
            event = await client.next()
        assert isinstance(event, Error)
        assert event.code == "E_LIFECYCLE_001"
        assert event.fatal


async def test_sessions_are_those_of_a_snapshot(autojump_clock: MockClock) -> None:
    """A request that has a token is listed with its state."""
    async with house() as daemon:
        client, other = daemon.connect(), daemon.connect()
        await client.ask(max_tokens=400)
        await client.until(Token)
        await other.send(ListSessions())
        listed = await other.until(Sessions)
        assert [one.state for one in listed.sessions] == ["decode"]
