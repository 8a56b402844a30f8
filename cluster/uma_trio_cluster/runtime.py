"""A running HAProxy: what its socket tells, and what it is told, without a reload."""

from __future__ import annotations

import csv
import io
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import frozen

from uma_trio_cluster.haproxy import server_words
from uma_trio_cluster.nodes import Node

_MOST_BYTES: Final = 64 << 20
_TIMEOUT_S: Final = 5.0
_DONE = re.compile(r"^\s*$|^(New server registered|Server deleted)\.\s*$", re.IGNORECASE)


class NotRunning(Exception):
    """No HAProxy answers on the socket; the message is one sentence."""


class NotDone(Exception):
    """HAProxy does not do what it was told; the message is its own."""


@frozen(kw_only=True)
class NodeState:
    """One server of HAProxy: its state, what its agent said last, and the work that it has.

    `weight` is its headroom in percent, and `waiting` the requests that wait for it at the edge.
    """

    id: int
    status: str
    agent: str
    weight: int
    active: int
    waiting: int
    served: int
    pins: int = 0


class Runtime:
    """The socket of a running HAProxy. Each command is a connection of its own, and waits 5 s at most."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, command: str) -> str:
        """Return the answer to a command.

        Raises:
            NotRunning: nobody answers there.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(_TIMEOUT_S)
                sock.connect(str(self._path))
                sock.sendall(f"{command}\n".encode())
                found = bytearray()
                while (data := sock.recv(65_536)) and len(found) < _MOST_BYTES:
                    found += data
        except OSError as error:
            why = error.strerror or "it does not answer"
            raise NotRunning(
                f"no HAProxy answers on {self._path} ({why}); start it with `uma-trio cluster up`"
            ) from None
        return found.decode("utf-8", "replace").strip("\n")

    def tell(self, *commands: str) -> None:
        """Carry commands out, in order. Raises NotDone, with what was done before left as it is."""
        for command in commands:
            answer = self.ask(command)
            if not _DONE.match(answer):
                raise NotDone(f"{command.split(' check ')[0]}: {' '.join(answer.split())}")

    def nodes(self) -> tuple[NodeState, ...]:
        """Return every server, by id."""
        pins = pins_of(self.ask("show table nodes"))
        return states_of(self.ask("show stat"), pins)

    def worker(self) -> str:
        """Return the number of the process that answers: another one after a reload."""
        found = re.search(r"^Pid: (\d+)$", self.ask("show info"), re.MULTILINE)
        return "" if found is None else found[1]

    def drain(self, node_id: int) -> None:
        """Send no new conversation there; what runs goes on."""
        self.tell(f"set server nodes/{node_id} state drain")

    def ready(self, node_id: int) -> None:
        """Send requests there again."""
        self.tell(f"set server nodes/{node_id} state ready")

    def add(self, node: Node) -> None:
        """Add a server and check it; it takes requests when its checks pass. Of a failure nothing is left."""
        name = f"nodes/{node.id}"
        self.tell(f"add server {name} {node.host_port} id {node.id} {server_words(node)}")
        try:
            self.tell(*(f"enable {what} {name}" for what in ("health", "agent", "server")))
        except (NotDone, NotRunning):
            with suppress(NotDone, NotRunning):
                self.take_away(node)
            raise

    def close(self, node_id: int) -> None:
        """Take no further request there, so that it can be removed when those that run have ended."""
        self.tell(f"set server nodes/{node_id} state maint")

    def delete(self, node_id: int) -> None:
        """Remove a closed server. Raises NotDone while a request runs on it."""
        self.tell(f"del server nodes/{node_id}")

    def take_away(self, node: Node) -> None:
        """Undo :meth:`add`."""
        self.close(node.id)
        self.delete(node.id)

    def take_up(self, node: Node) -> None:
        """Have a server as it is described: there, and drained or not."""
        if all(state.id != node.id for state in self.nodes()):
            self.add(node)
        (self.drain if node.drained else self.ready)(node.id)


def states_of(text: str, pins: Mapping[int, int]) -> tuple[NodeState, ...]:
    """Return the servers in the answer to ``show stat``."""
    rows = csv.DictReader(io.StringIO(text.removeprefix("# ")))
    return tuple(
        NodeState(
            id=int(row["sid"]),
            status=row["status"],
            agent=row.get("last_agt") or row.get("agent_status") or "",
            weight=_whole(row.get("uweight") or row["weight"]),
            active=_whole(row["scur"]),
            waiting=_whole(row["qcur"]),
            served=_whole(row["stot"]),
            pins=pins.get(int(row["sid"]), 0),
        )
        for row in rows
        if row["pxname"] == "nodes" and row["svname"] not in ("FRONTEND", "BACKEND")
    )


def pins_of(text: str) -> Mapping[int, int]:
    """Return how many conversations each server has, from the answer to ``show table``."""
    found: Sequence[str] = re.findall(r"\bserver_id=(\d+)", text)
    return Counter(map(int, found))


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
