"""Idle connections make room for newcomers, operators have places, and who is refused is told."""

from __future__ import annotations

import contextlib
import os

import pytest
import trio
from attrs import define
from http_kit import http_house
from hypothesis import given
from hypothesis import strategies as st
from net_kit import Client, House, house
from trio.testing import MockClock

from uma_protocol import (
    Eos,
    Error,
    Explain,
    GetMetrics,
    ListSessions,
    Ok,
    Prefix,
    Request,
    SetPriority,
    Token,
)
from uma_trio.service.front import GRACE_S, OVER_SHARE_GRACE_S, connection_to_evict
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.transport import MOST_AT_ONCE


@define(eq=False)
class Seat:
    """A connection as the policy sees it."""

    owner: str
    idle_since: float | None


SEATS = st.lists(
    st.builds(
        Seat,
        st.sampled_from("abc"),
        st.none() | st.sampled_from([0.0, 18.0, 19.0, 19.5, 19.95, 20.0]),
    ),
    max_size=12,
)


@given(SEATS, st.sampled_from("abcd"))
def test_who_makes_room_is_idle_and_holds_no_less(seats: list[Seat], owner: str) -> None:
    """Never one that works; of others only where they hold more; of these the oldest; sooner if the owner has too many."""
    chosen = connection_to_evict(seats, owner, now=20.0)

    def held(name: str) -> int:
        return sum(seat.owner == name for seat in seats)

    fair = len(seats) / len({owner} | {seat.owner for seat in seats})

    def grace_s(name: str) -> float:
        return OVER_SHARE_GRACE_S if held(name) > fair else GRACE_S

    may = [
        seat
        for seat in seats
        if seat.idle_since is not None
        and 20.0 - seat.idle_since >= grace_s(seat.owner)
        and (seat.owner == owner or held(seat.owner) > held(owner))
    ]
    if not may:
        assert chosen is None
        return
    assert chosen in may
    assert held(chosen.owner) == max(held(seat.owner) for seat in may)
    same = [seat.idle_since for seat in may if held(seat.owner) == held(chosen.owner)]
    assert chosen.idle_since == min(since for since in same if since is not None)


# --- over HTTP ---


async def test_an_idle_connection_makes_room_over_http(autojump_clock: MockClock) -> None:
    """The one that has been idle for the longest is closed, and one that streams is not."""
    async with http_house(max_connections=3) as daemon:
        stream = daemon.connect()
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500, "stream": True}
        await stream.send("POST", "/v1/chat/completions", asked)
        await stream.head()
        first, second = daemon.connect(), daemon.connect()
        await trio.sleep(GRACE_S + 0.5)
        assert (await first.ask("GET", "/health")).status == 200
        await trio.sleep(GRACE_S + 0.5)
        assert (await daemon.connect().ask("GET", "/health")).status == 200
        assert await second.is_closed()
        assert (await first.ask("GET", "/health")).status == 200
        assert await stream.piece()


async def test_any_number_of_idle_connections_shuts_nobody_out(autojump_clock: MockClock) -> None:
    """Also those that have sent half a head, or a head and no body; these are told."""
    async with http_house(max_connections=8) as daemon:
        halves = [daemon.connect() for _ in range(4)]
        for half in halves[:2]:
            await half.send_bytes(b"GET /health HT")
        for half in halves[2:]:
            await half.send_bytes(
                b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
        for _ in range(4):
            daemon.connect()
        await trio.sleep(GRACE_S + 0.1)
        for _ in range(8):
            assert (await daemon.connect().ask("GET", "/health")).status == 200
        for half in halves:
            assert (await half.transport.receive_some()).startswith(b"HTTP/1.1 503 ")
        assert len(daemon.server._placed) == 8


async def test_hundreds_that_were_just_opened_shut_no_other_user_out(
    autojump_clock: MockClock,
) -> None:
    """A newcomer of another user has the place of the oldest of them after a tenth of a second."""
    async with http_house(max_connections=40) as daemon:
        daemon.peer = Principal(connection=1, uid=65_534)
        for _ in range(40):
            daemon.connect()
        await trio.sleep(OVER_SHARE_GRACE_S)
        daemon.peer = Principal(connection=2, uid=1000)
        assert (await daemon.connect().ask("GET", "/health")).status == 200


async def test_a_connection_that_was_just_used_keeps_its_place(autojump_clock: MockClock) -> None:
    """Its client may be about to send; the newcomer is told to come again."""
    async with http_house(max_connections=2) as daemon:
        clients = [daemon.connect() for _ in range(2)]
        for client in clients:
            assert (await client.ask("GET", "/health")).status == 200
        late = daemon.connect()
        answer = await late.ask("GET", "/health")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        for client in clients:
            assert (await client.ask("GET", "/health")).status == 200


async def test_every_refused_client_of_a_burst_reads_why(autojump_clock: MockClock) -> None:
    """Although each has sent its request already, which a closing socket would answer with a reset."""
    async with http_house(max_connections=1) as daemon:
        holder = daemon.connect()
        await trio.lowlevel.checkpoint()
        late = [daemon.connect() for _ in range(MOST_AT_ONCE + 10)]
        for client in late:
            assert b" 503 " in await client.transport.receive_some()
        assert (await holder.ask("GET", "/health")).status == 200


# --- on the socket ---


async def busy(daemon: House, n: int) -> list[Client]:
    """Return so many clients whose answers are under way."""
    clients = [daemon.connect() for _ in range(n)]
    for client in clients:
        await client.ask(max_tokens=1000)
        await client.until(Token)
    return clients


async def test_an_idle_session_makes_room_on_the_socket(autojump_clock: MockClock) -> None:
    """It is told, and may connect again; the others go on."""
    async with house(max_sessions=3) as daemon:
        (stream,) = await busy(daemon, 1)
        idle = [daemon.connect() for _ in range(2)]
        await trio.sleep(GRACE_S + 0.1)
        late = daemon.connect()
        await late.ask(max_tokens=2)
        await late.until(Eos)
        (error,) = await idle[0].rest()
        assert isinstance(error, Error)
        assert (error.code, error.retryable) == ("E_LIMIT_006", True)
        await idle[1].ask(max_tokens=2)
        await idle[1].until(Eos)
        await stream.until(Token)


QUESTIONS: dict[str, Request] = {
    "metrics": GetMetrics(),
    "sessions": ListSessions(),
    "explain": Explain(),
    "prefix": Prefix(),
    "priority": SetPriority(priority="background", request=1),
}


@pytest.mark.parametrize("name", QUESTIONS)
async def test_an_operator_is_served_although_all_places_are_held(
    autojump_clock: MockClock, name: str
) -> None:
    """Each question of the command line, while every session has a request."""
    async with house(max_sessions=4) as daemon:
        await busy(daemon, 4)
        for _ in range(3):
            client = daemon.connect()
            question = QUESTIONS[name]
            if isinstance(question, SetPriority):
                running = next(iter(daemon.service.directory))
                question = SetPriority(priority="background", request=running.handle)
            await client.send(question)
            event = await client.next()
            assert event is not None
            assert not isinstance(event, Error), event
            assert isinstance(event, Ok) is (name == "priority")
            client.close()


async def test_who_generates_in_a_place_of_operators_is_told(autojump_clock: MockClock) -> None:
    """With when to come again; it gets the place of a session that has ended meanwhile."""
    async with house(max_sessions=2) as daemon:
        first, _ = await busy(daemon, 2)
        late = daemon.connect()
        await late.ask(max_tokens=2)
        (error,) = await late.rest()
        assert isinstance(error, Error)
        assert (error.code, error.id, error.retry_after_ms) == ("E_LIMIT_002", "r", 1000)
        again = daemon.connect()
        first.close()
        await trio.sleep(0.1)
        await again.ask(max_tokens=2)
        assert isinstance(await again.until(Eos), Eos)


async def test_nobody_stays_in_a_place_of_operators_for_nothing(autojump_clock: MockClock) -> None:
    """Who says nothing is told after half a second; who watches gives way to the next one."""
    async with house(max_sessions=1) as daemon:
        await busy(daemon, 1)
        began = trio.current_time()
        (error,) = await daemon.connect().rest()
        assert isinstance(error, Error)
        assert error.code == "E_LIMIT_002"
        assert trio.current_time() - began == pytest.approx(0.5, abs=0.1)
        watchers = [daemon.connect() for _ in range(2)]
        for watcher in watchers:
            await watcher.send(GetMetrics(interval_ms=1000))
            await watcher.next()
        await trio.sleep(3)
        client = daemon.connect()
        await client.send(ListSessions())
        assert not isinstance(await client.next(), Error)


async def test_every_client_of_a_burst_gets_a_word(autojump_clock: MockClock) -> None:
    """300 at once: some are served, and the others read a code with a time, never an end without."""
    async with house(max_sessions=8) as daemon:
        clients = [daemon.connect() for _ in range(300)]
        for client in clients:
            with contextlib.suppress(
                trio.BrokenResourceError
            ):  # its word lies in the socket already
                await client.ask(max_tokens=1)
        words = []
        for client in clients:
            events = await client.rest() if client not in clients[:8] else [await client.until(Eos)]
            last = events[-1]
            assert isinstance(last, Eos | Error)
            words.append("eos" if isinstance(last, Eos) else last.code)
            if isinstance(last, Error):
                assert last.retry_after_ms == 1000
        assert words.count("eos") == 8
        assert set(words) == {"eos", "E_LIMIT_002"}


async def test_another_user_makes_nobody_leave(autojump_clock: MockClock) -> None:
    """Who may not come in is told before anybody's place is looked at."""
    async with house(max_sessions=1) as daemon:
        idle = daemon.connect()
        await trio.sleep(GRACE_S + 0.1)
        daemon.server._allowed = frozenset()
        (error,) = await daemon.connect().rest()
        assert isinstance(error, Error)
        assert error.code == "E_AUTH_001"
        daemon.server._allowed = frozenset({os.geteuid()})
        await idle.ask(max_tokens=1)
        await idle.until(Eos)
