"""The load generator: many streams, read by one thread, the same code for every server.

Requests start at chosen moments, follow each other, and are given up by closing their connection.
Each read of a socket is kept with its time, and nothing is parsed before the scene is over.
"""

from __future__ import annotations

import gc
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from benches.clients import Answer, Job, Read, Wire, read_out

_READ_BYTES = 1 << 16
WATCH_MS = 250

Clock = Callable[[], float]
Series = Sequence[tuple[float, float]]
"""A counter over time: (moment, value so far), in order."""


@dataclass(eq=False)
class Stream:
    """One request while it runs. `over` is set when its last byte came, or it was given up."""

    job: Job
    sock: socket.socket
    ended: Callable[[bytes], bool]
    then: Callable[[Stream], None] | None = None
    sent: float = 0.0
    reads: list[Read] = field(default_factory=list)
    over: bool = False
    whole: bool = False


class Live:
    """All connections of one scene, read by one thread. A context manager: it closes them all."""

    def __init__(self, wire: Wire, clock: Clock = time.perf_counter) -> None:
        self._wire = wire
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._collecting = False
        self._watch: Stream | None = None
        self.streams: list[Stream] = []

    def __enter__(self) -> Self:
        self._collecting = gc.isenabled()
        gc.disable()  # a collection of ours must not look like a pause of the server
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in [*self.streams, *([self._watch] if self._watch else [])]:
            self.stop(stream)
        self._selector.close()
        if self._collecting:
            gc.enable()

    @property
    def now(self) -> float:
        """The time by the clock of all reads."""
        return self._clock()

    def start(
        self,
        job: Job,
        then: Callable[[Stream], None] | None = None,
        connect: Callable[[], socket.socket] | None = None,
    ) -> Stream:
        """Send `job` now; `then` is called with its stream once the last byte has come.

        Whoever is to be its client can `connect` for it.
        """
        sock = (connect or self._wire.connect)()
        stream = self._open(job, sock, self._wire.request(job), self._wire.end_detector(), then)
        self.streams.append(stream)
        return stream

    def watch(self) -> None:
        """Have the server send its counters at intervals, where it can."""
        request = self._wire.watch(WATCH_MS)
        if request is not None:
            sock = self._wire.connect()
            self._watch = self._open(Job("watch", "", 0), sock, request, lambda _data: False, None)

    def _open(
        self,
        job: Job,
        sock: socket.socket,
        request: bytes,
        ended: Callable[[bytes], bool],
        then: Callable[[Stream], None] | None,
    ) -> Stream:
        stream = Stream(job, sock, ended, then)
        stream.sent = self._clock()
        stream.sock.sendall(request)
        self._selector.register(stream.sock, selectors.EVENT_READ, stream)
        return stream

    def neglect(self, stream: Stream) -> None:
        """Read no more of a stream, as a slow client does; its connection stays open."""
        if not stream.over:
            stream.over = True
            self._selector.unregister(stream.sock)

    def stop(self, stream: Stream) -> None:
        """Close the connection, whether or not its answer is complete."""
        self.neglect(stream)
        stream.sock.close()

    def run(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Read for so long, or until there is `enough`."""
        deadline = self._clock() + seconds
        while (left := deadline - self._clock()) > 0 and not enough():
            # Also waits where nothing is open: an idle scene takes its time too.
            for key, _ in self._selector.select(min(left, 0.05)):
                self._read(key.data)

    def _read(self, stream: Stream) -> None:
        if stream.over:
            return
        try:
            data = stream.sock.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        stream.reads.append((self._clock(), data))
        if not data or stream.ended(data):
            self.stop(stream)
            stream.whole = True
            if stream.then is not None:
                stream.then(stream)

    def answers(self, streams: Sequence[Stream]) -> list[Answer]:
        """Return what came of `streams`; to be called when the scene is over."""
        return [read_out(self._wire, s.job, s.sent, s.reads, whole=s.whole) for s in streams]

    def counters(self) -> list[tuple[float, dict[str, Any]]]:
        """Return the server's counters by moment; none where it does not send them."""
        if self._watch is None:
            return []
        return [
            (at, event["metrics"])
            for at, event in self._wire.events(self._watch.reads)
            if event.get("event") == "metrics"
        ]

    def prompt_tokens(self, answers: Sequence[Answer]) -> Series:
        """Return how many prompt tokens had been computed by when.

        By the server's own counter where it has one, else from the progress of each of `answers`.
        """
        if found := self.counters():
            return [(at, float(values["prompt_tokens_total"])) for at, values in found]
        steps: list[tuple[float, int]] = []
        for answer in answers:
            before = 0
            for at, computed in answer.progress:
                steps.append((at, computed - before))
                before = computed
        total, series = 0, []
        for at, step in sorted(steps):
            total += step
            series.append((at, float(total)))
        return series


class Endless:
    """Clients that send one request after another, each as soon as the last was answered."""

    def __init__(self, live: Live, make: Callable[[], Job]) -> None:
        self._live = live
        self._make = make
        self.streams: list[Stream] = []

    def send(self, connect: Callable[[], socket.socket] | None = None) -> None:
        """Send the next request of the client who connects so, and then one after another."""
        then = lambda _before: self.send(connect)  # noqa: E731
        self.streams.append(self._live.start(self._make(), then, connect))


def drive(
    wire: Wire, work: Sequence[Job], *, timeout_s: float = 300.0, clock: Clock = time.perf_counter
) -> list[Answer]:
    """Send all of `work` at once, each on its own connection, and read until all have ended.

    Never raises for what a server does: a stream that breaks or takes too long has an `error`.
    """
    with Live(wire, clock) as live:
        socks = [wire.connect() for _ in work]
        streams = [
            live.start(job, connect=lambda sock=sock: sock)  # type: ignore[misc]
            for job, sock in zip(work, socks, strict=True)
        ]
        live.run(timeout_s, lambda: all(stream.over for stream in streams))
    for stream in streams:
        stream.whole = True  # what is missing is an error
    return live.answers(streams)
