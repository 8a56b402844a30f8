"""Many requests over many kept connections: all answered, descriptors and memory flat. A few minutes.

    python -m benches many                     100,000 requests over 256 connections
    python -m benches many --requests 5000     fewer

The daemon computes nothing (`benches.metered`, ticks of 1 ms), so that the figure is of HTTP and the service.
Every connection asks again as soon as it is answered: whole answers and streams in turn, one in fifty gives up
half way and connects anew. The exit status is 1 if an answer is missing or anything but 200, or if the daemon
holds more descriptors at the end, or 8 MiB more memory than after the first fifth.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import time
from dataclasses import dataclass, field

from benches import host, servers
from benches.clients import Dechunker
from benches.driver import tool

_TOKENS = 4
_GIVES_UP = 50
_FIRST_PART = 5
_MOST_MIB = 8.0
_CLOSED_S = 10.0  # for the daemon to notice that the last clients have left
_DEADLINE_S = 1800.0


@dataclass(eq=False)
class _Visitor:
    """A connection that asks again and again. One that `leaves` gives up at the first byte."""

    sock: socket.socket
    leaves: bool = False
    read: bytes = b""


@dataclass
class _Crowd:
    """All connections, and what came of their requests."""

    port: int
    requests: int
    sent: int = 0
    answered: int = 0
    left: int = 0
    wrong: list[bytes] = field(default_factory=list)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    @property
    def done(self) -> int:
        """How many requests are over, given up or answered in any way."""
        return self.answered + self.left + len(self.wrong)

    def connect(self) -> None:
        """Let one more in, who asks at once."""
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor = _Visitor(sock)
        self.selector.register(sock, selectors.EVENT_READ, visitor)
        self._ask(visitor)

    def run(self, until: int) -> None:
        """Go on until so many requests are over."""
        deadline = time.monotonic() + _DEADLINE_S
        while self.done < until and time.monotonic() < deadline:
            for key, _ in self.selector.select(1.0):
                self._read(key.data)

    def close(self) -> None:
        """Let all leave."""
        for key in tuple(self.selector.get_map().values()):
            self._drop(key.data)
        self.selector.close()

    def _ask(self, visitor: _Visitor) -> None:
        if self.sent >= self.requests:
            return
        self.sent += 1
        visitor.read = b""
        visitor.leaves = self.sent % _GIVES_UP == 0
        body = json.dumps(
            {"prompt": f"number {self.sent}", "n_predict": _TOKENS, "ignore_eos": True,
             "temperature": 0, "stream": self.sent % 2 == 0}
        ).encode()  # fmt: skip
        head = (
            "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            visitor.sock.sendall(head.encode() + body)
        except OSError:
            return  # it was closed: the next read says so, and the request counts as wrong

    def _read(self, visitor: _Visitor) -> None:
        try:
            data = visitor.sock.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        visitor.read += data
        if visitor.leaves and data:
            self.left += 1
            self._again(visitor)
        elif not data:
            self.wrong.append(visitor.read[:200] or b"closed without an answer")
            self._again(visitor)
        elif is_whole(visitor.read):
            if is_right(visitor.read):
                self.answered += 1
            else:
                self.wrong.append(visitor.read[:200])
            self._ask(visitor)

    def _again(self, visitor: _Visitor) -> None:
        self._drop(visitor)
        if self.sent < self.requests:
            self.connect()

    def _drop(self, visitor: _Visitor) -> None:
        self.selector.unregister(visitor.sock)
        visitor.sock.close()


def is_whole(read: bytes) -> bool:
    """Whether an answer has come to its last byte."""
    head, found, body = read.partition(b"\r\n\r\n")
    if not found:
        return False
    if b"chunked" in head:
        return body.endswith(b"\r\n0\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(body) >= int(length)


def is_right(read: bytes) -> bool:
    """Whether an answer has all the tokens that were asked for."""
    body = Dechunker()
    said = body.feed(read)
    return body.status == 200 and f'"tokens_predicted":{_TOKENS}'.encode() in said


def _state(pid: int) -> tuple[int, float]:
    """Return how many descriptors a process holds, and its private memory in MiB."""
    return len(os.listdir(f"/proc/{pid}/fd")), host.memory(pid).anonymous


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=100_000, metavar="N")
    parser.add_argument("--connections", type=int, default=256, metavar="N")


@tool(_arguments)
def many(given: argparse.Namespace) -> int:
    """Ask, and say what came of it."""
    setup = servers.Setup(servers.FAKE, 1, n_ctx=8192, slots=16)
    port = servers.free_port()
    # One that gave up is still counted when its next connection comes.
    flags = ("--http", str(port), "--http-max-connections", str(2 * given.connections),
             "--max-queue", str(given.connections))  # fmt: skip
    with servers.fake_daemon(setup, flags) as running:
        idle = _state(running.pid)
        crowd = _Crowd(port, given.requests)
        began = time.monotonic()
        for _ in range(given.connections):
            crowd.connect()
        crowd.run(given.requests // _FIRST_PART)
        early = _state(running.pid)
        crowd.run(given.requests)
        seconds = time.monotonic() - began
        late = _state(running.pid)
        crowd.close()
        ended = time.monotonic()
        after = _state(running.pid)
        while after[0] > idle[0] and time.monotonic() - ended < _CLOSED_S:
            time.sleep(0.1)
            after = _state(running.pid)
    print(f"{crowd.answered} answered, {crowd.left} given up by us, {len(crowd.wrong)} wrong, "
          f"{given.requests - crowd.done} missing; {given.requests / seconds:.0f} requests/s")  # fmt: skip
    for reply in crowd.wrong[:3]:
        print(f"  wrong: {reply!r}")
    for name, (files, mib) in {
        "idle": idle,
        "after a fifth": early,
        "at the end": late,
        "left": after,
    }.items():
        print(f"{name:<14} {files:4} descriptors  {mib:6.1f} MiB private")
    flat = after[0] <= idle[0] and late[1] - early[1] <= _MOST_MIB
    return 0 if flat and not crowd.wrong and crowd.done == given.requests else 1
