"""What looking on costs the streams: tokens a second beside no watcher, and beside five. Two minutes.

    python -m benches watchers

A stream is read as fast as it is computed, without drafts, so that its rate is that of the ticks. In rounds, one
behind the other, nobody looks, and then five clients read ``/events?ticks=1``, as five open pages do. The daemon
has one compute thread, so that on two cores its own thread and the watchers have the other one. The figure is
the median over the rounds of how much longer a tick takes; target: 3 %.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

from benches import beside, contest, servers
from benches.driver import tool
from uma_trio.models import bundled_model
from uma_trio_sim.latency import median

_TARGET_PCT = 3.0
_WATCH = """
import selectors, socket, sys
port, n = int(sys.argv[1]), int(sys.argv[2])
selector = selectors.DefaultSelector()
for _ in range(n):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"GET /events?ticks=1 HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    selector.register(sock, selectors.EVENT_READ)
print("watching", flush=True)
while True:
    for key, _ in selector.select():
        key.fileobj.recv(1 << 16)
"""


@contextlib.contextmanager
def _watched(port: int, n: int) -> Iterator[None]:
    """Have `n` clients look on."""
    command = [sys.executable, "-c", _WATCH, str(port), str(n)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is not None:
                process.stdout.readline()
            yield
        finally:
            process.kill()


def _rate(stream: beside.Stream, seconds: float) -> float:
    """Return the tokens a second that come in so many seconds."""
    before, began = stream.parts, time.monotonic()
    time.sleep(seconds)
    return (stream.parts - before) / (time.monotonic() - began)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S")
    parser.add_argument("--watchers", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")


@tool(_arguments)
def watchers(given: argparse.Namespace) -> int:
    """Measure a stream in turns with and without watchers."""
    setup = servers.Setup(bundled_model(), given.threads, n_ctx=2048, slots=4)
    port = servers.free_port()
    longer = []
    extra = ("--http", str(port), "--speculation", "off")
    with servers.daemon(setup, extra=extra), beside.stream(port) as stream:
        for _ in range(given.rounds):
            alone = _rate(stream, given.seconds)
            with _watched(port, given.watchers):
                seen = _rate(stream, given.seconds)
            longer.append(100 * (alone / seen - 1))
            print(
                f"{alone:6.1f} tokens/s, beside {given.watchers} watchers {seen:6.1f}", flush=True
            )
    found = median(longer)
    print(contest.verdict("a tick takes longer by %", found, _TARGET_PCT, at_most=True))
    return 0 if found <= _TARGET_PCT else 1
