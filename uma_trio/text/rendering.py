"""Renders templates in worker processes, shared by all models, each with one prompt at a time.

A template that takes too much ends its process, which costs only its own request. Fairness between
clients is that of the helper threads that wait here.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import TimeoutError as NotInTime
from functools import cache
from typing import Final

import msgspec
from attrs import define, field

from uma_trio.confined.link import WorkerLimits
from uma_trio.confined.post import Gone
from uma_trio.confined.workers import (
    OUT_OF_CPU,
    OUT_OF_MEMORY,
    OUT_OF_TIME,
    Unavailable,
    Worker,
    Workers,
)
from uma_trio.text.prompt import Prompt, Refused, Render, Rendered, Source, Unknown, Unrenderable

PROGRAM: Final = "uma_trio.text.render_worker:prepare"
# To decode a request; what rendering may take is said by the worker, which knows its size.
_LIMITS: Final = WorkerLimits(cpu_s=10.0, wall_s=60.0, memory_bytes=256 << 20, niceness=0)
_PATIENCE_S: Final = 3600.0  # beyond every limit of a worker
_KEPT: Final = 2
_ANSWER: Final = msgspec.msgpack.Decoder(Rendered | Refused | Unknown)
_TAKES_TOO_MUCH: Final = {
    OUT_OF_CPU: "it takes more time than it is given for so many messages",
    OUT_OF_MEMORY: f"it takes more than {_LIMITS.memory_bytes >> 20} MiB of memory",
}
_LATE: Final = "it was not rendered in time; try again"


class NotRendered(Unrenderable):
    """It is not known what the template would write; a retry may help."""


class _Lost(NotRendered):
    """The process was ended by none of its limits."""


@define
class _Process:
    worker: Worker
    known: set[bytes] = field(factory=set)


class Renderer:
    """A pool of processes that are started on demand. Safe to use from any thread."""

    def __init__(self) -> None:
        self._workers = Workers(PROGRAM, lambda: b"")
        self._idle: list[_Process] = []
        self._lock = threading.Lock()

    def render(self, asked: Render, source: Source) -> Prompt:
        """Render a conversation. Blocks. Raises `Unrenderable`, or `NotRendered` where it failed for now."""
        try:
            answer = self._answered(self._idle_process() or self._new_process(), asked, source)
        except _Lost:  # maybe it waited for a request then
            answer = self._answered(self._new_process(), asked, source)
        if isinstance(answer, Rendered):
            return answer.prompt()
        raise Unrenderable(answer.why if isinstance(answer, Refused) else "it is unknown")

    def _answered(
        self, process: _Process, asked: Render, source: Source
    ) -> Rendered | Refused | Unknown:
        try:
            answer = self._answer(process, _with_source(asked, process, source))
            if isinstance(answer, Unknown):
                process.known.discard(asked.key)
                answer = self._answer(process, _with_source(asked, process, source))
        except BaseException:
            process.worker.close()
            raise
        process.known.add(asked.key)
        self._give_back(process)
        return answer

    def _idle_process(self) -> _Process | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.worker.is_idle:
                    return process
        return None

    def _new_process(self) -> _Process:
        try:
            return _Process(self._workers.start(_LIMITS))
        except Unavailable as error:
            raise NotRendered(f"it cannot be rendered: {error}") from None

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < _KEPT:
                self._idle.append(process)
                return
        process.worker.close()

    def _answer(self, process: _Process, asked: Render) -> Rendered | Refused | Unknown:
        try:
            answer = process.worker.ask(msgspec.msgpack.encode(asked)).result(_PATIENCE_S)
        except NotInTime:
            raise NotRendered(_LATE) from None
        except Gone as gone:
            why = str(gone)
            if why in _TAKES_TOO_MUCH:
                raise Unrenderable(_TAKES_TOO_MUCH[why]) from None
            if why == OUT_OF_TIME:
                raise NotRendered(_LATE) from None
            raise _Lost(f"the process that rendered it has ended ({why}); try again") from None
        found: Rendered | Refused | Unknown = _ANSWER.decode(answer)
        return found


def _with_source(asked: Render, process: _Process, source: Source) -> Render:
    if asked.key in process.known:
        return asked
    return msgspec.structs.replace(asked, source=source)


def key_of(source: Source) -> bytes:
    """Return the digest of a source."""
    return hashlib.sha256(msgspec.msgpack.encode(source)).digest()


@cache
def renderer() -> Renderer:
    """Return the pool that all models of this process share."""
    return Renderer()
