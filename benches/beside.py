"""What somebody else feels of what is done to a daemon: a stream, newcomers, and the lag of its event loop."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benches import servers
from benches.clients import NotServed
from benches.host import ROOT
from uma_trio_sim.latency import median

_SPIN = "while True: pass"
_BETWEEN_NEWCOMERS_S = 0.2
_JSON = {"Content-Type": "application/json", "Accept": "application/json"}


@dataclass
class Stream:
    """The stream that is read beside everything: when its last part came, and the longest gap.

    `pace` is that of the request: ``asap`` shows what the engine does, ``smooth`` what a reader sees.
    """

    port: int
    pace: str = "asap"
    longest: float = 0.0
    last: float | None = None
    parts: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def restart(self) -> None:
        """Forget what was seen."""
        self.longest = 0.0

    def gap_ms(self) -> float:
        """Return the longest gap, the one that lasts included."""
        waiting = 0.0 if self.last is None else time.monotonic() - self.last
        return 1e3 * max(self.longest, waiting)

    def run(self) -> None:
        """Read one stream after the other. Only the time between two whole ones is no gap."""
        asked = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
        while not self.ended.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._read({**asked, "stream": True, "pace": self.pace})

    def _read(self, asked: Mapping[str, Any]) -> None:
        with contextlib.closing(parts(self.port, asked)) as read:
            for now, part in read:
                if self.last is not None:
                    self.longest = max(self.longest, now - self.last)
                self.last = None if b'"stop":true' in part else now
                self.parts += 1
                if self.ended.is_set():
                    return


@dataclass(frozen=True)
class Felt:
    """What was felt in a round, in ms; `ttft_ms` are the times to first token of newcomers."""

    lag_ms: float
    gap_ms: float
    ttft_ms: tuple[float, ...] = ()

    @property
    def usual_ttft_ms(self) -> float | None:
        """The median of the newcomers."""
        return median(self.ttft_ms) if self.ttft_ms else None


@contextlib.contextmanager
def stream(port: int, pace: str = "asap") -> Iterator[Stream]:
    """Read a stream of the daemon on `port` for as long as the block lasts; it has begun when this returns."""
    read = Stream(port, pace)
    reader = threading.Thread(target=read.run, daemon=True)
    reader.start()
    try:
        limit = time.monotonic() + servers.START_S
        while read.parts < 2:
            if time.monotonic() > limit:
                raise NotServed("the stream that is read beside everything does not begin")
            time.sleep(0.05)
        yield read
    finally:
        read.ended.set()
        reader.join(10)


@contextlib.contextmanager
def newcomers(port: int) -> Iterator[Callable[[], tuple[float, ...]]]:
    """Send short requests one after another; yield what returns their times to first token so far, in ms.

    The one that waits is among them, with the time that it has waited. One that is refused is sent again.
    """
    found: list[float] = []
    sent: list[float] = []
    ended = threading.Event()

    def run() -> None:
        for n in itertools.count():
            sent.append(time.monotonic())
            asked = {"prompt": f"Hello {n}!", "max_tokens": 3, "ignore_eos": True, "stream": True}
            while len(found) < len(sent):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    for now, _ in parts(port, asked):
                        if len(found) < len(sent):
                            found.append(now - sent[-1])
                if ended.wait(_BETWEEN_NEWCOMERS_S):
                    return

    def so_far() -> tuple[float, ...]:
        done = list(found)
        waiting = [time.monotonic() - at for at in sent[len(done) :]]
        return tuple(1e3 * value for value in (*done, *waiting))

    threading.Thread(target=run, daemon=True).start()
    try:
        yield so_far
    finally:
        ended.set()


def felt(
    read: Stream, seconds: float, act: Callable[[], None] = lambda: None, *, arriving: bool = False
) -> Felt:
    """Return what was felt for `seconds`, or as long as `act` takes if that is longer.

    With `arriving` there are newcomers.
    """
    before, began = metrics(read.port), time.monotonic()
    read.restart()
    with newcomers(read.port) if arriving else contextlib.nullcontext(tuple) as ttft_ms:
        act()
        time.sleep(max(0.2, began + seconds - time.monotonic()))
        gap_ms, times = read.gap_ms(), ttft_ms()
    return Felt(longest_lag(before, metrics(read.port)), gap_ms, times)


def over(value: float | None, other: float | None) -> float | None:
    """Return a ratio, None if there is none."""
    return value / other if value is not None and other else None


def longest_lag(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Return the longest lag between two snapshots of the metrics, in ms."""
    longest = float(after["loop_lag_ms"]["max"] or 0.0)
    if longest > (before["loop_lag_ms"]["max"] or 0.0):
        return longest
    old, new = before["loop_lag_ms"]["buckets"], after["loop_lag_ms"]["buckets"]
    # A step counts all below it, too: the first one that grew by as much as the last has them all.
    grown = sorted((float(edge), new[edge] - old.get(edge, 0)) for edge in new)
    if not grown or not grown[-1][1]:
        return 0.0
    return min(longest, next(edge for edge, count in grown if count == grown[-1][1]))


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """Run a process that spins."""
    with subprocess.Popen([sys.executable, "-c", _SPIN]) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def child(module: str, *words: str) -> Iterator[Callable[[str], str]]:
    """Run a module that answers each line with one; yield what asks it, once its first line has come.

    In a process of its own what it makes and sends takes nothing from who reads beside.
    """
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                          env=servers.environment()) as process:  # fmt: skip
        given, told = process.stdin, process.stdout
        if given is None or told is None:
            raise NotServed(f"{module} has no pipes")

        def answer() -> str:
            if not (line := told.readline()):
                raise NotServed(f"{module} has ended")
            return line.strip()

        def ask(line: str) -> str:
            given.write(f"{line}\n")
            given.flush()
            return answer()

        try:
            answer()
            yield ask
        finally:
            process.kill()


def metrics(port: int) -> Mapping[str, Any]:
    """Return the metrics of the daemon."""
    status, body = ask(port, "GET", "/metrics?format=json")
    if status != 200:
        raise NotServed(f"/metrics was answered with {status}")
    found: Mapping[str, Any] = json.loads(body)
    return found


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Ask on a connection of its own; return status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body, _JSON)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def parts(port: int, asked: Mapping[str, Any]) -> Iterator[tuple[float, bytes]]:
    """Yield each part of the stream of a completion with its time; a refusal has none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/completion", json.dumps(asked).encode(), _JSON)
        answer = connection.getresponse()
        while line := answer.readline():
            if line.startswith(b"data:") and b'"error"' not in line[:20]:
                yield time.monotonic(), line
    finally:
        connection.close()
