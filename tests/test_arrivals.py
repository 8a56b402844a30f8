"""Clients that connect at once are let in by turns: a flood of one user delays no other."""

from __future__ import annotations

import socket
from collections import deque

import trio
from hypothesis import given
from hypothesis import strategies as st
from net_kit import house
from trio.testing import MockClock

from uma_protocol import Eos
from uma_trio.sockets.accepting import MOST_ARRIVALS, Arrivals
from uma_trio.sockets.listener import Listener
from uma_trio.sockets.principal import Principal


def of(uid: int) -> Principal:
    """Return a client of a user."""
    return Principal(connection=0, uid=uid)


@given(st.lists(st.integers(0, 3) | st.none(), max_size=60))
def test_users_take_turns_and_each_users_clients_keep_their_order(steps: list[int | None]) -> None:
    """Whatever the order in which they come and go: a number arrives, None takes the next."""
    with socket.socket() as sock:
        arrivals, lanes, order = Arrivals(), {n: deque[int]() for n in range(4)}, list[int]()
        for n, uid in enumerate([*steps, *[None] * len(steps)]):
            if uid is not None:
                arrivals.add(sock, Principal(connection=n, uid=uid))
                lanes[uid].append(n)
                if uid not in order:
                    order.append(uid)
            elif len(arrivals):
                _, who = arrivals.take()
                first = order.pop(0)
                assert (who.uid, who.connection) == (first, lanes[first].popleft())
                if lanes[first]:
                    order.append(first)
        assert len(arrivals) == 0


def test_a_newcomer_is_behind_one_of_a_flood_at_most() -> None:
    """However many have come before."""
    with socket.socket() as sock:
        arrivals = Arrivals()
        for _ in range(MOST_ARRIVALS):
            arrivals.add(sock, of(1))
        arrivals.add(sock, of(2))
        assert [arrivals.take()[1].uid for _ in range(2)] == [1, 2]


def test_a_full_queue_closes_the_latest_of_who_has_most() -> None:
    """A newcomer of somebody else is never the one, and the oldest of a flood keep their places."""
    pairs = [socket.socketpair() for _ in range(MOST_ARRIVALS + 2)]
    arrivals = Arrivals()
    for n, (_, theirs) in enumerate(pairs):
        arrivals.add(theirs, of(2 if n == MOST_ARRIVALS else 1))
    assert len(arrivals) == MOST_ARRIVALS
    assert [n for n, (_, theirs) in enumerate(pairs) if theirs.fileno() == -1] == [
        MOST_ARRIVALS - 1,
        MOST_ARRIVALS + 1,
    ]
    assert [arrivals.take()[1].uid for _ in range(2)] == [1, 2]
    for pair in pairs:
        for sock in pair:
            sock.close()


class Backlog:
    """A listener whose clients are all there at once."""

    def __init__(self, socks: list[socket.socket]) -> None:
        self._socks = socks

    async def accept_forever(self, handle: object, _failed: object) -> None:
        """Hand them over, as many at once as a real listener does."""
        while self._socks:
            for _ in range(min(24, len(self._socks))):
                handle(self._socks.pop(0))  # type: ignore[operator]
            await trio.lowlevel.checkpoint()
        await trio.sleep_forever()

    def stop(self) -> None:
        """Accept no more."""


async def test_everybody_in_a_long_backlog_has_a_turn() -> None:
    """Those who have left already take no place."""
    pairs = [socket.socketpair() for _ in range(100)]
    for ours, _ in pairs[:-1]:
        ours.close()
    listener: Listener = Backlog([theirs for _, theirs in pairs])  # type: ignore[assignment]
    async with house(listener=listener, max_sessions=8) as daemon:
        client = daemon.adopt(pairs[-1][0])
        await client.ask(max_tokens=2)
        await client.until(Eos)
        assert daemon.recorder.opened == 1


async def test_who_was_accepted_is_answered_before_the_daemon_goes(
    autojump_clock: MockClock,
) -> None:
    """Also who has no connection task yet: it must not learn that the daemon is stopping."""
    pairs = [socket.socketpair() for _ in range(8)]
    listener: Listener = Backlog([])  # type: ignore[assignment]
    async with house(listener=listener, max_sessions=8) as daemon:
        clients = [daemon.adopt(ours) for ours, _ in pairs]
        for client in clients:
            await client.ask(max_tokens=2)
        for _, theirs in pairs:
            daemon.server._arrived(theirs)
        await daemon.server.empty()
        daemon.service.stop_taking()
        for client in clients:
            await client.until(Eos)
            assert client.text == daemon.expected("hello", 2)
