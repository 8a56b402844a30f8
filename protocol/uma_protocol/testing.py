"""Test helpers for code that uses the protocol: no sockets, no threads, no waiting.

`ConnectionPair` connects a client and a server. `whole`, `bytewise`, `cuts` and `all_cuts` split a
byte stream in different ways, and `feed` collects the events of a connection.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from .connection import Connection, Pause
from .errors import RemoteProtocolError
from .events import ConnectionClosed
from .states import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .events import Event
    from .requests import Request

    Seen = Request | Event | ConnectionClosed | Pause


def whole(data: bytes) -> list[bytes]:
    """The stream in one piece."""
    return [data]


def bytewise(data: bytes) -> list[bytes]:
    """The stream byte by byte."""
    return [data[i : i + 1] for i in range(len(data))]


def cuts(data: bytes, *positions: int) -> list[bytes]:
    """The stream cut at positions, in any order; pieces that would be empty are left out."""
    edges = [0, *sorted(positions), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if a < b]


def all_cuts(data: bytes, number: int) -> Iterator[list[bytes]]:
    """Every way to cut the stream at so many different places."""
    for positions in combinations(range(1, len(data)), number):
        yield cuts(data, *positions)


def drain(connection: Connection) -> list[Seen]:
    """Ask for events until the connection has no more, and return them without the last NEED_DATA.

    `PAUSED` and `ConnectionClosed` end the list and are part of it.

    Raises:
        RemoteProtocolError: as `Connection.next_event` does. What was seen before is lost.
    """
    seen: list[Seen] = []
    while True:
        event = connection.next_event()
        if event is Pause.NEED_DATA:
            return seen
        seen.append(event)
        if isinstance(event, Pause | ConnectionClosed):
            return seen


def feed(connection: Connection, pieces: Iterable[bytes]) -> list[Seen | RemoteProtocolError]:
    """Give pieces to a connection one after another and collect everything that comes out.

    Errors that are not fatal are collected like events; a fatal one is the last in the list. When
    a server pauses at the end of a request the list ends there too.
    """
    seen: list[Seen | RemoteProtocolError] = []
    for piece in pieces:
        connection.receive_data(piece)
        while True:
            try:
                event = connection.next_event()
            except RemoteProtocolError as exc:
                seen.append(exc)
                if exc.fatal:
                    return seen
                continue
            if event is Pause.NEED_DATA:
                break
            seen.append(event)
            if event is Pause.PAUSED or not piece:
                return seen
    return seen


class ConnectionPair:
    """A client and a server whose bytes arrive at once, whole and in order.

    Args:
        token: what the server asks for and the client has; nothing by default.

    Attributes:
        client: the client's end.
        server: the server's end.
    """

    def __init__(self, token: str | None = None) -> None:
        self.client = Connection(Role.CLIENT, token=token)
        self.server = Connection(Role.SERVER, token=token)

    def end(self, role: Role) -> Connection:
        """The end that plays a role."""
        return self.client if role is Role.CLIENT else self.server

    def send(self, role: Role, *events: Request | Event) -> list[Seen]:
        """Send events from one end and return what the other saw, which must be the same.

        Raises:
            LocalProtocolError: the sender may not say that.
            RemoteProtocolError: the receiver does not accept it.
            AssertionError: the receiver saw something else.
        """
        sender = self.end(role)
        receiver = self.end(Role.SERVER if role is Role.CLIENT else Role.CLIENT)
        for event in events:
            receiver.receive_data(sender.send(event))
        seen = drain(receiver)
        if [event for event in seen if not isinstance(event, Pause)] != list(events):
            raise AssertionError(f"{role.value} sent {list(events)}, its peer saw {seen}")
        return seen

    def next_cycle(self) -> None:
        """Begin again at both ends."""
        self.client.start_next_cycle()
        self.server.start_next_cycle()

    def close(self, role: Role) -> list[Seen]:
        """End the stream from one end and return what the other saw."""
        receiver = self.end(Role.SERVER if role is Role.CLIENT else Role.CLIENT)
        receiver.receive_data(b"")
        return drain(receiver)
