"""What the bytes of clients cost trio's thread is bounded by user, and no flood of them keeps other tasks waiting."""

from __future__ import annotations

import h11
import pytest
import trio
from http_kit import Client, HttpHouse, http_house
from trio.abc import Instrument
from trio.testing import MockClock

from uma_trio.http.heads import MOST_LINES
from uma_trio.service.fair import UserProgram
from uma_trio.service.loop import (
    BURST_S,
    CHUNK_S,
    HEAD_S,
    MOST_USERS,
    PAUSE,
    SHARE,
    SLICE_S,
    ThreadShare,
)

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NOWHERE = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
BODY = b'{"prompt": "hi", "max_tokens": 1}'


class Longest(Instrument):
    """Counts what h11 tells in each step of a task."""

    def __init__(self) -> None:
        self.events = self.most = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Begin to count."""
        self.events = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Keep the largest number."""
        self.most = max(self.most, self.events)


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> Longest:
    """Count the requests and chunks that one step of a task of the daemon reads."""
    counted = Longest()
    next_event = h11.Connection.next_event

    def noted(self: h11.Connection) -> object:
        event = next_event(self)
        served = self.our_role is h11.SERVER and isinstance(event, h11.Request | h11.Data)
        counted.events += served
        return event

    monkeypatch.setattr(h11.Connection, "next_event", noted)
    return counted


def chunked(pieces: list[bytes], trailers: bytes = b"") -> bytes:
    """Return a body in chunks, with its head."""
    parts = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return POST + b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n" + trailers + b"\r\n"


async def speaks(daemon: HttpHouse, data: bytes) -> Client:
    """Return a client that has sent `data` and can read an answer."""
    client = daemon.connect()
    client.http.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    await client.send_bytes(data)
    return client


# --- the account ---


async def test_who_stays_within_the_share_never_waits(autojump_clock: MockClock) -> None:
    """Requests at the rate of the share pass at once, however long that lasts."""
    share = ThreadShare(trio.current_time, lambda: True)
    for _ in range(2000):
        before = trio.current_time()
        await share.spend(UserProgram("a", "x"), HEAD_S)
        assert trio.current_time() == before
        await trio.sleep(HEAD_S / SHARE * 1.01)


@pytest.mark.parametrize("busy", [True, False])
async def test_a_flood_gets_one_part_in_four(autojump_clock: MockClock, busy: bool) -> None:
    """Behind its burst and its share each request waits for three times its cost; if nothing runs, for nothing."""
    share = ThreadShare(trio.current_time, lambda: busy)
    n = 2000
    began = trio.current_time()
    for _ in range(n):
        await share.spend(UserProgram("a", "x"), HEAD_S)
    spent = n * HEAD_S - BURST_S
    expected = spent / (1 / PAUSE + SHARE) if busy else 0.0
    assert trio.current_time() - began == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(("asks", "waits_s"), [("b", 0.0), ("a", 3 * (1 + PAUSE) * HEAD_S)])
async def test_a_flood_delays_no_other_user_and_another_program_a_turn(
    autojump_clock: MockClock, asks: str, waits_s: float
) -> None:
    """While hundreds of the first one wait, another user passes at once, another program of its user soon."""
    share = ThreadShare(trio.current_time, lambda: True)
    async with trio.open_nursery() as nursery:
        for _ in range(500):
            nursery.start_soon(share.spend, UserProgram("a", "x"), HEAD_S)
        await trio.testing.wait_all_tasks_blocked()
        before = trio.current_time()
        await share.spend(UserProgram(asks, "y"), HEAD_S)
        assert trio.current_time() - before <= waits_s
        nursery.cancel_scope.cancel()


async def test_accounts_are_bounded(autojump_clock: MockClock) -> None:
    """Of more users than are remembered the one heard longest ago begins anew."""
    share = ThreadShare(trio.current_time, lambda: True)
    for n in range(MOST_USERS + 50):
        await share.spend(UserProgram(f"connection {n}", "x"), HEAD_S)
    assert len(share._accounts) == MOST_USERS


# --- heads and chunks ---


async def test_requests_in_one_write_are_read_one_a_step(
    autojump_clock: MockClock, longest: Longest
) -> None:
    """Other tasks have their turn after each request, and every request is answered."""
    async with http_house() as daemon:
        trio.lowlevel.add_instrument(longest)
        client = await speaks(daemon, NOWHERE * 100)
        for _ in range(100):
            client.http.send(h11.EndOfMessage())
            assert (await client.answer()).status == 404
            client.http.start_next_cycle()
            client.http.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
        trio.lowlevel.remove_instrument(longest)
    assert longest.most == 1


async def test_chunks_of_a_byte_are_read_in_slices(
    autojump_clock: MockClock, longest: Longest
) -> None:
    """No step reads more than a slice of them, and the request is answered."""
    padding = [b" "] * 3000
    async with http_house() as daemon:
        trio.lowlevel.add_instrument(longest)
        client = daemon.connect()
        client.http.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
        await client.send_bytes(chunked([*padding, BODY, *padding]))
        assert (await client.answer()).status == 200
        trio.lowlevel.remove_instrument(longest)
    assert 50 < longest.most <= SLICE_S / CHUNK_S + 2


@pytest.mark.parametrize("cut", [False, True])
async def test_a_head_of_too_many_lines_is_refused(autojump_clock: MockClock, cut: bool) -> None:
    """Before h11 parses one of them, also if its end is not there yet; as many as are allowed are read."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    async with http_house() as daemon:
        fits = await speaks(daemon, head + b"a: b\r\n" * (MOST_LINES - 2) + b"\r\n")
        assert (await fits.answer()).status == 200
        client = await speaks(daemon, head + b"a:\r\n" * MOST_LINES + (b"" if cut else b"\r\n"))
        answer = await client.answer()
        assert answer.status == 431
        assert f"{MOST_LINES} lines" in answer.error["message"]
        assert await client.is_closed()


async def test_too_many_lines_behind_a_body_are_refused(autojump_clock: MockClock) -> None:
    """A few trailers are read and dropped; what only looks like the last chunk counts as a chunk."""
    lines = BODY[:-1] + b"\n" * 1000 + b"}"
    async with http_house() as daemon:
        fine = await speaks(daemon, chunked([BODY], b"a: b\r\n" * 9))
        assert (await fine.answer()).status == 200
        zeros = POST + b"Transfer-Encoding: chunked\r\n\r\n%08x\r\n%b\r\n0\r\n\r\n"
        also = await speaks(daemon, zeros % (len(lines), lines))
        assert (await also.answer()).status == 200
        client = await speaks(daemon, chunked([BODY], b"a:\r\n" * 1000))
        assert (await client.answer()).status == 431
