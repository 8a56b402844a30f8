"""Who counts as one client for fairness: a process, whoever holds a key, or a program by its name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from uma_trio.http.message import Caller, Head
from uma_trio.sockets.peers import Peer

_REMEMBERED = 1024
_LABEL = 64


class Clients:
    """Numbers clients. `new_client` gives numbers that nobody else has.

    The kernel names the process at the other end of a Unix socket. Over TCP a key tells clients
    apart, and where no key is needed the address and what the program calls itself do: that is
    no proof of anything, and grants nothing but a share of one's own.
    """

    def __init__(self, new_client: Callable[[], int]) -> None:
        self._new_client = new_client
        self._numbers: OrderedDict[tuple[str, object], int] = OrderedDict()

    def identifier(self, host: str, peer: Peer | None) -> Callable[[Head, int | None], Caller]:
        """Return what says who sends the requests of one connection."""

        def identify(head: Head, key: int | None) -> Caller:
            app = label(head)
            if key is not None:
                client = self._number(("key", key))
            elif peer is not None and peer.pid is not None:
                client = peer.pid
            else:
                client = self._number((host, app))
            if peer is None:
                return Caller(client, app)
            return Caller(client, app, peer.uid, peer.pid)

        return identify

    def _number(self, name: tuple[str, object]) -> int:
        if name not in self._numbers:
            self._numbers[name] = self._new_client()
            if len(self._numbers) > _REMEMBERED:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(name)
        return self._numbers[name]


def label(head: Head) -> str | None:
    """Return what a program calls itself: ``X-UMA-App``, or the first word of its User-Agent."""
    named = head.headers.get("x-uma-app")
    if named is None:
        named = head.headers.get("user-agent", "").partition(" ")[0]
    shown = "".join(letter for letter in named if letter.isprintable())[:_LABEL]
    return shown or None
