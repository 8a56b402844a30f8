"""The playout buffer: tokens are shown when they are due, and every one of them is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import trio
from attrs import evolve
from engine_kit import Bench
from http_kit import http_house
from hypothesis import example, given
from hypothesis import strategies as st
from net_kit import TICK_S, House, give, house, items_of, take_from
from policy_kit import state
from trio.testing import MockClock

from uma_protocol import Code, Eos, Generate, Token
from uma_trio.engine.messages import Finished, StreamItem, TokenOut
from uma_trio.engine.playout import show_times
from uma_trio.policy.baseline import baseline
from uma_trio.policy.check import check_plan
from uma_trio.policy.pipeline import Policy, PolicyError
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import PLACES_IN_FLIGHT, Contract, SchedulerState
from uma_trio.service.answers import Answers
from uma_trio.service.ask import Ask, Door, Origin
from uma_trio.service.stream import GRAIN_S, Pipe, Playout, Reader
from uma_trio.sockets.principal import Principal
from uma_trio.uds.wire import ask_of
from uma_trio_sim.fake import FakeBackend, InjectedFault, linear_cost

PLAYOUT_S = Contract().playout_s
PLACES = 20  # of a stream, unless a test says otherwise
DOOR = Door(max_prompt_bytes=1000)


def pacing(seconds: float, until: float = math.inf) -> Policy:
    """Return the baseline, with every reader paced so far on the engine's clock."""

    def plan(now: SchedulerState) -> Plan:
        readers = now.protected if now.now < until else ()
        return evolve(baseline(now), paces={view.key: seconds for view in readers})

    return plan


def origin() -> Origin:
    """Return somebody."""
    return Origin(principal=Principal(connection=7), door=DOOR, name="r")


# --- when a token is shown ---

seconds = st.floats(0, 1)


def times_of(
    shown_at: float | None,
    now: float,
    n: int = 1,
    *,
    pace: float = 0.0,
    since_s: float = 0.1,
    held: int = 0,
    most: int = 100,
    most_s: float = 1.0,
) -> tuple[float, ...]:
    """Return when `n` tokens are shown."""
    return show_times(
        shown_at, now, n, pace=pace, since_s=since_s, held=held, most=most, most_s=most_s
    )


@given(seconds, seconds, st.integers(1, 5), seconds, seconds, st.integers(0, 9), st.floats(0, 0.5))
@example(0.3, 0.1, 3, 0.0, 0.1, 2, 0.4)
def test_tokens_are_shown_in_order_and_never_too_late(
    shown_at: float, now: float, n: int, pace: float, since_s: float, held: int, most_s: float
) -> None:
    """Not before they are there, and none is held for longer than was promised."""
    times = times_of(shown_at, now, n, pace=pace, since_s=since_s, held=held, most=6, most_s=most_s)
    assert len(times) == n
    assert list(times) == sorted(times)
    assert now <= times[0]
    assert times[-1] <= now + most_s
    if pace:
        assert all(later - at <= pace + 1e-9 for at, later in pairwise(times))


def test_a_paced_token_is_due_a_pace_after_the_one_before() -> None:
    """Or at once, where it comes too late for that."""
    assert times_of(10.0, 10.1, 2, pace=0.3) == pytest.approx((10.3, 10.6))
    assert times_of(10.0, 10.5, 2, pace=0.3) == pytest.approx((10.5, 10.8))
    assert times_of(None, 10.5, pace=0.3) == (10.5,)


def test_where_no_more_may_be_held_a_token_moves_those_before_it_forward() -> None:
    """It comes when as many more are computed, and the buffer spreads the others until then."""
    assert times_of(11.9, 10.1, pace=0.3, held=6, most=6) == pytest.approx((10.7,))
    assert times_of(10.7, 10.2, pace=0.3, held=6, most=6) == pytest.approx((10.8,))
    # A tick's unrest moves nobody; with more than there should be, the next comes a little sooner.
    assert times_of(10.85, 10.2, pace=0.3, held=6, most=6) == pytest.approx((10.95,))
    assert times_of(10.85, 10.2, pace=0.3, held=9, most=6) == pytest.approx((10.90,))


def test_without_a_pace_a_stream_catches_up_twice_as_fast_as_it_is_computed() -> None:
    """The others are gone: no jump, and in the end nothing is held."""
    now, shown_at, held, ahead = 10.0, 10.9, 3, []
    for _ in range(5):
        now += 0.1
        (shown_at,) = times_of(shown_at, now, held=held)
        ahead.append(shown_at - now)
        held = max(0, held - 1)
    assert ahead == pytest.approx([0.20, 0.15, 0.10, 0.0, 0.0])


def test_a_pace_that_is_no_number_of_seconds_is_refused() -> None:
    """A policy may come from another package."""
    for wrong in (math.nan, math.inf, -0.1):
        with pytest.raises(PolicyError, match="paced"):
            check_plan(state(), Plan(paces={1: wrong}))


# --- in the engine ---


def test_the_policy_sees_when_a_token_will_be_shown() -> None:
    """The same for a stream that is passed on at once: there it bounds progress."""
    bench = Bench(policy=pacing(0.05))
    smooth, stream = bench.submit("hello", 50, smooth=True)
    asap, other = bench.submit("world", 50)
    bench.ticks(6)
    for handle, sink in ((smooth, stream), (asap, other)):
        view = bench.engine.registry.running[handle].view
        tokens = [item for item in sink.items if isinstance(item, TokenOut)]
        assert view.shown_at is not None
        assert view.last_token_at is not None
        assert view.shown_at > view.last_token_at + 0.05
        if handle == smooth:
            shows = [token.show_at for token in tokens]
            assert shows[-1] == view.shown_at
            assert [b - a for a, b in pairwise(shows[1:])] == pytest.approx([0.05] * 4)
        else:
            assert not any(token.show_at for token in tokens)


def test_without_paces_no_token_is_ever_held() -> None:
    """Who has the machine to itself is shown all there is."""
    bench = Bench()
    handle, stream = bench.submit("hello", 20, smooth=True)
    bench.ticks(10)
    view = bench.engine.registry.running[handle].view
    assert view.shown_at == view.last_token_at
    bench.run()
    assert not any(item.show_at for item in stream.items if isinstance(item, TokenOut))


def test_ps_and_explain_tell_how_far_ahead_a_stream_is_computed() -> None:
    """Of what its reader is shown: now, and at most; its worst gap is of what was shown."""
    bench = Bench(policy=pacing(0.05))
    handle, _ = bench.submit("hello", 50, smooth=True)
    asap, _ = bench.submit("hello", 50)
    bench.ticks(6)
    ahead = {report.handle: report.ahead_s for report in bench.inspect()}
    assert ahead[handle] > 0.05
    assert ahead[asap] == 0.0
    records = {record.handle: record for record in bench.explain().requests}
    assert records[handle].held_s > 0.05
    assert records[asap].held_s == 0.0
    gap = records[handle].worst_gap
    assert gap is not None
    assert gap.seconds == pytest.approx(0.05)


def test_a_preempted_stream_goes_on_behind_what_it_has_to_show() -> None:
    """What is held stays so, and what is computed again comes once."""
    bench = Bench(policy=pacing(0.05))
    handle, stream = bench.submit("hello", 12, smooth=True)
    bench.ticks(6)
    held = bench.engine.registry.running[handle].view.shown_at
    bench.engine.registry.preempt(handle, "for a test")
    assert bench.engine.registry.waiting[handle].view.shown_at == held
    bench.run()
    shows = [item.show_at for item in stream.items if isinstance(item, TokenOut)]
    assert stream.tokens == bench.expected("hello", 12)
    assert any(shows[8:-1])  # it is paced once more
    assert shows[-1] == 0.0  # the end comes at once, and takes all along


def test_a_stream_whose_places_are_all_held_is_not_emptied_when_it_goes_on() -> None:
    """What it shows next comes behind what is held, a token for each that is computed."""
    bench = Bench(FakeBackend(), pacing(0.05))
    handle, sink = bench.submit(max_tokens=40, credit=12, smooth=True)
    bench.run()
    assert len(sink.tokens) == 12
    bench.credit(handle, 1)
    bench.ticks(1)
    token = sink.items[-1]
    assert isinstance(token, TokenOut)
    assert token.show_at > bench.clock()


def test_background_requests_are_not_held() -> None:
    """Nobody reads them; nor is one that was demoted."""
    bench = Bench(policy=pacing(0.05))
    handle, stream = bench.submit("hello", 50, smooth=True)
    bench.ticks(4)
    assert [item.show_at > 0 for item in stream.items if isinstance(item, TokenOut)][-1]
    bench.engine.registry.set_lane(handle, "background")
    bench.ticks(3)
    assert not [item.show_at > 0 for item in stream.items if isinstance(item, TokenOut)][-1]


def test_a_token_that_was_not_there_when_it_was_due_is_counted_by_its_cause() -> None:
    """The bench's clock moves on by itself, so a pace of a microsecond cannot be kept."""
    for predicted_s, cause in ((1.0, "planned"), (0.0, "mispredicted")):

        def plan(now: SchedulerState, predicted_s: float = predicted_s) -> Plan:
            return evolve(pacing(1e-6)(now), predicted_s=predicted_s)

        bench = Bench(policy=plan)
        bench.submit("hello", 10)
        bench.run()
        shown = bench.metrics.snapshot()
        counted = shown["late_tokens_total"]
        assert isinstance(counted, dict)
        assert {name for name, n in counted.items() if n} == {cause}


# --- the buffer ---


def played(
    arrivals: list[tuple[float, float]], patience: list[float], pause_s: float
) -> list[tuple[int, float, float, float]]:
    """Send tokens through a pipe in virtual time: each after a pause, with what it is held for.

    The reader gives up after each `patience` in turn, then reads on, and pauses between takes.
    Returns each token's number, when it came, was due, and was taken. The last one comes unpaced.
    """
    sent: list[tuple[float, float]] = []
    got: list[tuple[int, float, float, float]] = []

    async def main() -> None:
        playout = Playout(trio.current_time)
        pipe = Pipe(playout, Reader())

        async def read() -> None:
            waits = iter(patience)
            while len(got) <= len(arrivals):
                items: list[StreamItem] = []
                with trio.move_on_after(next(waits, math.inf)):
                    items = await take_from(pipe)
                for item in items:
                    assert isinstance(item, TokenOut)
                    got.append((item.token_id, *sent[item.token_id], trio.current_time()))
                await trio.sleep(pause_s)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(playout.run)
            nursery.start_soon(read)
            for n, (after_s, hold_s) in enumerate(arrivals):
                await trio.sleep(after_s)
                now = trio.current_time()
                sent.append((now, now + hold_s))
                give(pipe, TokenOut(n, "", None, now + hold_s))
            await trio.sleep(0.01)
            sent.append((trio.current_time(), 0.0))
            give(pipe, TokenOut(len(arrivals), ""))
        assert playout.held == 0

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return got


arrivals = st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, PLAYOUT_S)), max_size=12)


@given(arrivals, st.lists(st.floats(0, 0.3), max_size=5))
@example([(0.0, 0.3), (0.1, 0.2), (0.05, 0.0)], [0.01])
@example([(0.0, 0.1), (0.0, 0.1), (0.2, 0.1)], [])
def test_tokens_come_in_order_when_they_are_due_and_none_is_lost(
    arrivals: list[tuple[float, float]], patience: list[float]
) -> None:
    """Not before, unless something behind them was due sooner; nor after, whoever gives up waiting."""
    got = played(arrivals, patience, 0.0)
    assert [n for n, *_ in got] == list(range(len(arrivals) + 1))
    for place, (_, came, due, taken) in enumerate(got):
        moved, latest = False, due
        for _, later_came, later_due, _ in got[place + 1 :]:
            moved = moved or (later_came <= taken and later_due < latest)
            latest = max(latest, later_due)
        assert moved or taken >= due - GRAIN_S - 1e-9
        assert taken <= max(came, due) + GRAIN_S + 1e-9
        assert taken - came <= PLAYOUT_S + GRAIN_S


@given(arrivals, st.floats(0, 0.5))
def test_a_reader_that_is_slow_gets_every_token_too(
    arrivals: list[tuple[float, float]], pause_s: float
) -> None:
    """What became due while it was away comes with one take."""
    got = played(arrivals, [], pause_s)
    assert [n for n, *_ in got] == list(range(len(arrivals) + 1))


async def test_there_is_a_timer_only_while_something_is_held(autojump_clock: MockClock) -> None:
    """A stream that is not paced costs nothing but its reader's wake."""

    def next_deadline() -> float:
        return trio.lowlevel.current_statistics().seconds_to_next_deadline

    playout = Playout(trio.current_time)
    pipe = Pipe(playout, Reader())
    taken: list[StreamItem] = []

    async def read() -> None:
        while True:
            taken.extend(await take_from(pipe))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(playout.run)
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        give(pipe, TokenOut(1, ""))
        await trio.testing.wait_all_tasks_blocked()
        assert next_deadline() == math.inf
        give(pipe, TokenOut(2, "", None, trio.current_time() + 0.2))
        await trio.testing.wait_all_tasks_blocked()
        assert next_deadline() == pytest.approx(0.2)
        assert len(taken) == 1
        await trio.sleep(0.3)
        assert next_deadline() == math.inf
        assert len(taken) == 2
        nursery.cancel_scope.cancel()


async def test_a_closed_pipe_holds_nothing(autojump_clock: MockClock) -> None:
    """Its client is gone: the count of held tokens goes down by what it had."""
    playout = Playout(trio.current_time)
    pipe = Pipe(playout, Reader())
    for n in range(3):
        give(pipe, TokenOut(n, "", None, trio.current_time() + 0.1))
    assert playout.held == 3
    pipe.close()
    pipe.close()
    assert playout.held == 0


# --- in the daemon ---


async def test_a_client_gets_tokens_at_the_pace_and_the_end_at_once(
    autojump_clock: MockClock,
) -> None:
    """They were computed in 20 ms each; the last of them takes all that is held along."""
    async with house(policy=pacing(0.05)) as daemon:
        client, times = daemon.connect(), []
        await client.ask("a", max_tokens=9)
        while not isinstance(await client.next(), Eos):
            times.append(trio.current_time())
        gaps = [later - at for at, later in pairwise(times)]
        assert gaps[:3] == pytest.approx([0.05] * 3, abs=GRAIN_S)
        assert max(gaps[3:]) <= 0.05 + GRAIN_S
        assert times[-1] - times[0] == pytest.approx(8 * TICK_S)
        assert client.n_tokens == 9
        assert client.text == daemon.expected("hello", 9)
        assert daemon.service.playout.held == 0


async def test_who_asks_for_each_token_asap_gets_it_so(autojump_clock: MockClock) -> None:
    """A program that reads ahead wants no rhythm; on the socket and over HTTP."""
    async with house(policy=pacing(0.05)) as daemon:
        client, times = daemon.connect(), []
        await client.ask("a", max_tokens=9, pace="asap")
        while not isinstance(await client.next(), Eos):
            times.append(trio.current_time())
        assert [b - a for a, b in pairwise(times)] == pytest.approx([TICK_S] * 8)
        assert daemon.recorder.gaps == pytest.approx([TICK_S] * 8)


def test_what_a_request_says_of_its_pace_reaches_the_engine() -> None:
    """By the words of the socket, which are also those of HTTP; without a word it is smooth."""
    assert ask_of(Generate("a", pace="asap", prompt="Hi")).pace == "asap"
    assert ask_of(Generate("a", prompt="Hi")).pace == "smooth"


@pytest.mark.parametrize("pace", ["smooth", "asap"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/completion", {"prompt": "hello"}),
        ("/generate", {"prompt": "hello"}),
    ],
)
async def test_over_http_the_body_says_the_pace(
    autojump_clock: MockClock, path: str, body: dict[str, object], pace: str
) -> None:
    """In every API that streams."""
    async with http_house(policy=pacing(0.05)) as daemon:
        asked = {**body, "stream": True, "pace": pace, "max_tokens": 9}
        answer = await daemon.ask("POST", path, asked)
        assert answer.status == 200
        assert (max(daemon.inner.recorder.gaps) > 2 * TICK_S) == (pace == "smooth")


async def test_tokens_that_are_held_when_the_pace_ends_come_without_a_jump(
    autojump_clock: MockClock,
) -> None:
    """Each gap is one that the reader has seen before, or shorter; then all is as alone."""
    async with house(policy=pacing(0.05, until=trio.current_time() + 0.3)) as daemon:
        client, times = daemon.connect(), []
        await client.ask("a", max_tokens=60)
        while not isinstance(await client.next(), Eos):
            times.append(trio.current_time())
        gaps = [later - at for at, later in pairwise(times)]
        assert max(gaps[1:]) <= 0.05 + GRAIN_S
        assert min(gaps) >= TICK_S / 4
        assert gaps[-5:] == pytest.approx([TICK_S] * 5)


Act = Callable[[House, "object"], None]


async def ended_early(act: Callable[[House], None], reason: str, code: Code | None) -> None:
    """End a request while tokens of it are held: those that were sampled are told, all of them."""
    async with house(policy=pacing(0.05)) as daemon:
        client = daemon.connect()
        await client.ask("a", max_tokens=60)
        for _ in range(4):
            await client.until(Token)
        assert daemon.service.playout.held > 1
        act(daemon)
        end = await client.until(Eos)
        assert (end.reason, end.code) == (reason, None if code is None else code.value)
        assert client.n_tokens == end.usage.completion_tokens > 5
        assert client.text == daemon.expected("hello", client.n_tokens)
        assert daemon.service.playout.held == 0


def cancel(daemon: House) -> None:
    """End what runs."""
    (running,) = daemon.service.directory
    running.end()


def drain(daemon: House) -> None:
    """End the daemon, as a signal does once its patience is over."""
    daemon.service.stop_taking()
    daemon.service.end_all(Code.E_LIFECYCLE_001, "stopping")


async def test_a_cancelled_request_gives_what_is_held(autojump_clock: MockClock) -> None:
    """And its usage says as much."""
    await ended_early(cancel, "cancelled", None)


async def test_a_daemon_that_stops_gives_what_is_held(autojump_clock: MockClock) -> None:
    """SIGTERM ends in the same way."""
    await ended_early(drain, "error", Code.E_LIFECYCLE_001)


async def test_a_dead_engine_leaves_nothing_held(autojump_clock: MockClock) -> None:
    """The streams are told that it is gone, behind every token that it had sampled."""
    backend = FakeBackend(cost=linear_cost(TICK_S, 0.0), faults={12: InjectedFault(died="gone")})
    items: list[StreamItem] = []

    async def read() -> None:
        async with house(backend, policy=pacing(0.05)) as daemon:
            ask = Ask(prompt="hello", max_tokens=60)
            with trio.CancelScope(shield=True):
                async with Answers(daemon.service, [ask], origin()) as stream:
                    items.extend([item async for item in items_of(stream)])

    with pytest.raises(ExceptionGroup):
        await read()
    end = items[-1]
    assert isinstance(end, Finished)
    assert end.code == "E_RUNTIME_004"
    assert sum(isinstance(item, TokenOut) for item in items) == end.completion_tokens > 5


async def test_a_client_that_has_said_all_gets_what_is_held(autojump_clock: MockClock) -> None:
    """To close one's sending half ends nothing."""
    async with house(policy=pacing(0.05)) as daemon:
        client = daemon.connect()
        await client.ask("a", max_tokens=20)
        await client.until(Token)
        client.end_sending()
        end = await client.until(Eos)
        assert client.n_tokens == end.usage.completion_tokens == 20


async def test_a_client_that_vanishes_leaves_nothing_held(autojump_clock: MockClock) -> None:
    """Its tokens are nobody's."""
    async with house(policy=pacing(0.05)) as daemon:
        client = daemon.connect()
        await client.ask("a", max_tokens=60)
        for _ in range(4):
            await client.until(Token)
        assert daemon.service.playout.held > 1
        client.close()
        await daemon.until_idle()
        assert daemon.service.playout.held == 0


async def test_a_token_that_is_held_keeps_its_place_and_who_does_not_read_is_parked(
    autojump_clock: MockClock,
) -> None:
    """However long it takes; when the reader is back it goes on."""
    async with house(policy=pacing(0.05), credit=8) as daemon:
        ask = Ask(prompt="hello", max_tokens=30)
        async with Answers(daemon.service, [ask], origin()) as stream:
            await trio.sleep(2)
            (report,) = daemon.bench.snapshot().requests
            assert (report.state, report.completion_tokens) == ("parked", 8)
            n = 0
            while not stream.finished:
                ((_, items),) = await stream.burst()
                n += sum(isinstance(item, TokenOut) for item in items)
        assert n == 30


async def test_holding_alone_never_parks_a_stream(autojump_clock: MockClock) -> None:
    """Where its places are taken, one token goes for each that comes: its reader is not behind."""
    async with house(policy=pacing(0.2), credit=8) as daemon:
        client, times, most = daemon.connect(), [], 0
        await client.ask("a", max_tokens=60)
        while not isinstance(await client.next(), Eos):
            times.append(trio.current_time())
            most = max(most, daemon.service.playout.held)
        assert 8 - PLACES_IN_FLIGHT <= most < 8
        assert times[-1] - times[0] == pytest.approx(59 * TICK_S)
        (record,) = daemon.bench.explain().requests
        assert record.parked_s == 0


async def test_where_places_run_out_tokens_come_evenly_whatever_single_ticks_take(
    autojump_clock: MockClock,
) -> None:
    """Each gap is near the mean of many ticks, and no stream is parked by what it holds."""
    unrest = itertools.cycle((0.9, 1.1, 1.05, 0.95, 0.92, 1.08, 1.0))
    backend = FakeBackend(cost=lambda *_: TICK_S * next(unrest))
    async with house(backend, policy=pacing(1.2 * TICK_S)) as daemon:
        client, times = daemon.connect(), []
        await client.ask("a", max_tokens=400)
        while not isinstance(await client.next(), Eos):
            times.append(trio.current_time())
        gaps = [later - at for at, later in pairwise(times)][100:-PLACES]
        assert min(gaps) > 0.7 * TICK_S
        assert max(gaps) <= 1.2 * TICK_S + GRAIN_S
        (record,) = daemon.bench.explain().requests
        assert record.parked_s == 0


async def test_the_time_between_tokens_is_told_as_they_were_shown(
    autojump_clock: MockClock,
) -> None:
    """Beside it stands the time between their computations."""
    async with house(policy=pacing(0.05)) as daemon:
        client = daemon.connect()
        await client.ask("a", max_tokens=4)
        await client.until(Eos)
        shown = daemon.recorder.gaps
        assert shown == pytest.approx([0.05, 3 * TICK_S - 0.05], abs=GRAIN_S)


def test_whatever_happens_the_tokens_told_are_the_tokens_sampled() -> None:
    """Random requests, with and without a pace, some of which are ended early."""
    requests = st.lists(
        st.tuples(
            st.integers(1, 30),  # tokens
            st.floats(0, 0.5),  # asked after
            st.one_of(st.none(), st.floats(0, 0.6)),  # ended after
            st.sampled_from(["smooth", "asap"]),
            st.sampled_from(["interactive", "background"]),
        ),
        min_size=1,
        max_size=6,
    )

    @given(requests, st.floats(0.0, 0.1), st.floats(0, 1))
    def check(
        asked: list[tuple[int, float, float | None, str, str]], pace: float, s: float
    ) -> None:
        async def one(daemon: House, n: int, at: float, end_s: float | None, **kinds: str) -> None:
            await trio.sleep(at)
            told = 0
            ask = Ask(prompt="hello", max_tokens=n, **kinds)  # type: ignore[arg-type]
            async with trio.open_nursery() as nursery:
                async with Answers(daemon.service, [ask], origin()) as stream:
                    if end_s is not None:
                        nursery.start_soon(end_later, stream.end, end_s)
                    async for item in items_of(stream):
                        told += isinstance(item, TokenOut)
                nursery.cancel_scope.cancel()
            assert isinstance(item, Finished)
            assert told == item.completion_tokens

        async def end_later(end: Callable[[], None], after_s: float) -> None:
            await trio.sleep(after_s)
            end()

        async def main() -> None:
            async with (
                house(policy=pacing(pace, until=trio.current_time() + s)) as daemon,
                trio.open_nursery() as nursery,
            ):
                for n, at, end_s, how, lane in asked:
                    kinds = {"pace": how, "lane": lane}
                    nursery.start_soon(
                        lambda *a, kinds=kinds: one(*a, **kinds), daemon, n, at, end_s
                    )

        trio.run(main, clock=MockClock(autojump_threshold=0))

    check()
