"""Three daemons on the fake model, Debian's HAProxy in front of them, and a client that knows what it should get."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import trio
from attrs import Factory, define

from uma_trio_cluster.commands.cluster import cluster
from uma_trio_cluster.runtime import NodeState, NotRunning, Runtime

PATIENCE_S = 30.0
_HERE = Path(__file__).resolve().parent
PROGRAM = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def free_ports(n: int, *, together: int = 1) -> list[int]:
    """Return ports that nobody has now, each the first of so many. The kernel gives none of these to a client."""
    found: list[int] = []
    while len(found) < n:
        port = random.randrange(20_000, 32_000, 4)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for i in range(together):
                held.enter_context(socket.create_server(("127.0.0.1", port + i)))
            if port not in found:
                found.append(port)
    return found


def eventually(check: Callable[[], object]) -> None:
    """Wait until `check` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError("it never happened")
        time.sleep(0.02)


@define
class Answer:
    """What a client got: the status, the node, every byte of the body, and whether the body was whole."""

    status: int = 0
    node: str = ""
    body: bytes = b""
    whole: bool = False
    first_at: float = 0.0

    @property
    def text(self) -> str:
        """What the model said, of a stream or of a document."""
        if not self.body.startswith(b"data:") and b"\ndata:" not in self.body:
            return str(json.loads(self.body)["choices"][0]["message"]["content"])
        events = [
            json.loads(line.removeprefix(b"data: "))
            for line in self.body.split(b"\n\n")
            if line.startswith(b"data: {")
        ]
        return "".join(
            choice["delta"].get("content") or "" for event in events for choice in event["choices"]
        )

    @property
    def cached(self) -> int:
        """How many tokens of the prompt were cached."""
        return int(json.loads(self.body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def chat(*said: str, tokens: int = 8, stream: bool = False) -> dict[str, Any]:
    """Return a chat of which each second message is the model's."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    }


async def ask(
    port: int,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    *,
    started: trio.Event | None = None,
) -> Answer:
    """Ask on a connection of its own, as a client without retries does; `started` is set by the first byte."""
    answer = Answer()
    document = json.dumps(body).encode()
    named = {"Host": "localhost", "Content-Type": "application/json", "Connection": "close"}
    lines = [f"{name}: {value}" for name, value in {**named, **(headers or {})}.items()]
    head = "\r\n".join(
        ["POST /v1/chat/completions HTTP/1.1", *lines, f"Content-Length: {len(document)}", "", ""]
    )
    data = b""
    with contextlib.suppress(trio.BrokenResourceError, OSError):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(head.encode() + document)
            async for more in stream:
                if not data:
                    answer.first_at = time.monotonic()
                    if started is not None:
                        started.set()
                data += more
    _parse(data, answer)
    return answer


def _parse(data: bytes, answer: Answer) -> None:
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    if not lines[0].startswith("HTTP/1.1 "):
        return
    answer.status = int(lines[0].split()[1])
    named = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    answer.node = named.get("x-uma-node", "")
    if "content-length" in named:
        answer.body = rest
        answer.whole = len(rest) == int(named["content-length"])
        return
    while rest:
        length, _, rest = rest.partition(b"\r\n")
        size = int(length or b"0", 16)
        if not size:
            answer.whole = length == b"0"
            return
        answer.body += rest[:size]
        rest = rest[size + 2 :]


@define(eq=False)
class Node:
    """One daemon."""

    number: int
    port: int
    folder: Path
    options: Sequence[str]
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it; :meth:`until_ready` waits."""
        self.process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    str(_HERE / "fake_daemon.py"),
                    str(self.folder / f"s{self.number}"),
                ),
                *(f"http={self.port}", f"agent={self.port + 1}", *self.options),
            ],
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{_HERE}:{_HERE.parent}"},
        )

    def until_ready(self) -> None:
        """Wait until its agent answers."""

        def answers() -> bool:
            address = ("127.0.0.1", self.port + 1)
            with contextlib.suppress(OSError), socket.create_connection(address, 1) as sock:
                return sock.recv(100).startswith(b"up")
            return False

        eventually(answers)

    def signal(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        if self.process is not None:
            self.process.send_signal(number)
            if number == signal.SIGKILL:
                self.process.wait()

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self.process is None or self.process.poll() is not None


@define(eq=False)
class Fleet:
    """The daemons, and HAProxy as `uma-trio cluster up` starts it."""

    folder: Path
    port: int
    nodes: list[Node]
    spare: Node
    runtime: Runtime = Factory(
        lambda self: Runtime(self.folder / "cluster.d" / "haproxy.sock"), takes_self=True
    )

    @property
    def file(self) -> Path:
        """The file of nodes."""
        return self.folder / "cluster.yaml"

    def command(self, action: Any, *names: str, **flags: Any) -> None:
        """Run `uma-trio cluster`, which must succeed."""
        if cluster(action, names, file=self.file, **flags) != 0:
            raise AssertionError(f"cluster {action} failed")

    def states(self) -> dict[int, NodeState]:
        """Return what HAProxy says of each node; nothing while a new process takes over."""
        with contextlib.suppress(NotRunning):
            return {state.id: state for state in self.runtime.nodes()}
        return {}

    def heal(self) -> None:
        """Have the first three daemons run and taken for healthy, with nothing to do."""
        for node in self.nodes:
            if node.ended:
                node.start()
        for node in self.nodes:
            node.until_ready()
        eventually(self._is_well)

    def _is_well(self) -> bool:
        states = self.states()
        return set(states) == {1, 2, 3} and all(
            state.status == "UP" and not state.active and state.weight > 90
            for state in states.values()
        )


@contextlib.contextmanager
def fleet(folder: Path, *options: str, **document: Any) -> Iterator[Fleet]:
    """Run three daemons behind HAProxy. `options` are those of each daemon, `document` of the file of nodes."""
    edge, sync = free_ports(2)
    ports = free_ports(4, together=2)
    nodes = [Node(i + 1, port, folder, options) for i, port in enumerate(ports)]
    found = Fleet(folder, edge, nodes[:3], nodes[3])
    listed = [{"id": node.number, "address": f"127.0.0.1:{node.port}"} for node in found.nodes]
    listen, own = f"127.0.0.1:{edge}", f"127.0.0.1:{sync}"
    found.file.write_text(json.dumps({"listen": listen, "sync": own, "nodes": listed, **document}))
    try:
        for node in found.nodes:
            node.start()
        found.command("up")
        found.heal()
        yield found
    finally:
        with contextlib.suppress(AssertionError):
            found.command("down")
        for node in nodes:
            if not node.ended:
                node.signal()
