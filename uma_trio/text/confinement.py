"""Shapes are compiled here first, in a process that can be killed and reports the costs.

Shapes that pass are compiled in the daemon if they are plain and small, and otherwise followed in a
process of their own, for which the engine never waits with the GIL. Refusals are remembered.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from functools import partial
from typing import Final, Protocol

import msgspec
import numpy as np
from attrs import define, frozen

from uma_trio.confined import workers
from uma_trio.confined.link import WorkerLimits
from uma_trio.confined.post import WorkerGone
from uma_trio.confined.workers import Unavailable, Worker, Workers
from uma_trio.text import shape_worker
from uma_trio.text.constraint import NONE, Ids, UnderWay, holds
from uma_trio.text.shape import NotChecked, Shape, Unconstrainable, waits_until
from uma_trio.text.shape_worker import STEP_S, Check, Follow, Known, Verdict
from uma_trio.text.slices import digest

# A caller that cannot go on without the answer waits so long: what a step in the daemon may take.
_AT_ONCE_S: Final = 0.020
_WORD_BITS: Final = 8
# Tokens of an answer that has begun before it is followed here: each frame has a time limit of its own.
_FRAME_TOKENS: Final = 256


Started = tuple[Worker, bool]
"""A process with its constraint, and whether it has followed an earlier answer."""


@define(eq=False)
class Fate:
    """The latest state of an answer's process, shared with its callbacks: the problem, and whether it is reusable."""

    problem: str | None = None
    can_go_on: bool = False


class ApartFollower:
    """Follows one answer as :class:`.constrain.Follower` does.

    `start` returns a worker that has its instructions; called for the first mask, it never waits. `finish`
    gets the worker when this object is collected. `explain` returns the reason why the worker ended.
    """

    #: What is allowed is found elsewhere: ask for all of it, rather than for one token.
    elsewhere: Final = True

    def __init__(
        self,
        start: Callable[[], Started | None],
        finish: Callable[[Worker, Fate], None],
        n_vocab: int,
        explain: Callable[[str], str],
    ) -> None:
        self._start, self._finish, self._n_vocab, self._explain = start, finish, n_vocab, explain
        self._fate = Fate()
        self._worker: Worker | None = None
        self._failed = False
        self._steps = bytearray()
        self._mask: UnderWay | None = None

    @property
    def problem(self) -> str | None:
        return self._fate.problem

    def begin(self, tokens: Sequence[int]) -> None:
        """Advance by the tokens of an answer that was followed here before. Never waits."""
        for first in range(0, len(tokens), _FRAME_TOKENS):
            for token in tokens[first : first + _FRAME_TOKENS]:
                self.accept(token)
            self._here()

    def allows(self, token: int) -> bool:
        """Whether `token` may come next. Waits briefly, then returns False."""
        mask = self._here()
        try:
            ids = mask.future.result(_AT_ONCE_S)
        except TimeoutError:
            return False
        return holds(ids, token)

    def allowed(self) -> Ids:
        return self._here()()

    def deferred(self) -> Callable[[], Ids]:
        return self._here()

    def accept(self, token: int) -> None:
        self._step(shape_worker.ACCEPT, token)

    def take_back(self) -> None:
        self._step(shape_worker.TAKE_BACK, 1)

    def _step(self, step: bytes, token: int) -> None:
        self._steps += shape_worker.STEP.pack(step, token)
        self._mask = None

    def _here(self) -> UnderWay:
        if self._mask is None:
            self._mask = self._asked()
        return self._mask

    def _asked(self) -> UnderWay:
        if self._worker is None and not self._failed:
            started = self._start()
            if started is None:
                self._failed = True
            else:
                self._worker, is_used = started
                if is_used:
                    self._steps[:0] = shape_worker.STEP.pack(shape_worker.RESET, 0)
                weakref.finalize(self, self._finish, self._worker, self._fate).atexit = False
        found: Future[Ids] = Future()
        found.set_running_or_notify_cancel()
        if self._worker is None:
            found.set_result(NONE)
            return UnderWay(found)
        answer = self._worker.ask(bytes(self._steps))
        self._steps.clear()
        answer.add_done_callback(partial(_settle, found, self._n_vocab, self._fate, self._explain))
        return UnderWay(found)


def _settle(
    found: Future[Ids],
    n_vocab: int,
    fate: Fate,
    explain: Callable[[str], str],
    answer: Future[bytes],
) -> None:
    if answer.cancelled():
        found.set_result(NONE)
        return
    error = answer.exception(0)
    reply = b"" if error is not None else answer.result(0)
    fate.can_go_on = reply.startswith(shape_worker.ALLOWED)
    if error is not None:
        fate.problem = explain(str(error))
    elif reply.startswith(shape_worker.FAILED):
        fate.problem = reply[1:].decode() or None
    found.set_result(_ids(reply, n_vocab))


def _ids(reply: bytes, n_vocab: int) -> Ids:
    if (
        not reply.startswith((shape_worker.ALLOWED, shape_worker.WORN))
        or (len(reply) - 1) * _WORD_BITS < n_vocab
    ):
        return NONE
    bits = np.frombuffer(reply, np.uint8, offset=1)
    return np.flatnonzero(np.unpackbits(bits, count=n_vocab, bitorder="little"))


PROGRAM: Final = "uma_trio.text.shape_worker:prepare"
# In the daemon: whatever takes more than this is followed elsewhere.
_PLAIN_BYTES: Final = 8 << 20
_PLAIN_COMPILE_S: Final = 0.25
_PLAIN_STEP_S: Final = 0.005
_GRACE: Final = 0.25  # of the CPU time to compile, for an answer that is followed
# Processes that wait for another answer of their shape: with none, each answer forks and compiles.
_KEPT: Final = 4
_SLACK_S: Final = 0.5  # for the answer to arrive
_LIMITS: Final = frozenset({workers.OUT_OF_CPU, workers.OUT_OF_MEMORY, workers.OUT_OF_TIME})
# Wall time also passes for other programs, and a foreign signal is not evidence about a constraint.
_OF_THE_SHAPE: Final = frozenset({workers.OUT_OF_CPU, workers.OUT_OF_MEMORY})


@frozen
class ShapeLimits:
    """What compiling one shape may take."""

    cpu_s: float = 2.0
    wall_s: float = 10.0
    memory_bytes: int = 64 << 20

    @property
    def of_worker(self) -> WorkerLimits:
        return WorkerLimits(self.cpu_s, self.wall_s, self.memory_bytes)


class TokenTexts(Protocol):
    """What compiling a shape needs of a vocabulary."""

    @property
    def n_vocab(self) -> int:
        """How many tokens there are."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """End-of-generation tokens."""

    def pieces(self) -> Sequence[bytes]:
        """Return the bytes of each token."""


class Confinement:
    """Checks shapes for one vocabulary. Safe to use from any thread; `check` blocks."""

    def __init__(
        self,
        vocabulary: TokenTexts,
        limits: ShapeLimits | None = None,
        on_first: Callable[[], None] = lambda: None,
        events: dict[str, int] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self.limits = limits or ShapeLimits()
        self._workers = Workers(PROGRAM, self._known)
        self._on_first = on_first
        self._lock = threading.Lock()
        self._keeping = threading.Lock()  # never waited for: the collector may run anywhere
        self._finished = deque[tuple[bytes, Worker]]()
        self._kept = deque[tuple[bytes, Worker]]()
        #: Counts of what became of shapes.
        self.events = Counter[str]() if events is None else events

    @property
    def is_warm(self) -> bool:
        """Whether the process that all are forked from runs, so that `follow` does not block."""
        return self._workers.is_warm

    def warm(self) -> None:
        """Start that process. Raises :class:`.workers.Unavailable`."""
        self._workers.warm()

    def check(self, shape: Shape) -> Verdict:
        """Compile a shape in a process of its own. Raises :class:`Unconstrainable`, or `NotChecked` for now."""
        try:
            payload = msgspec.msgpack.encode(Check(shape.kind, shape.text))
        except UnicodeEncodeError:
            raise Unconstrainable("is not usable: it holds half a character") from None
        patience = min(self.limits.wall_s, waits_until() - time.monotonic())
        if patience <= 0:
            raise NotChecked("was not looked at in time; try again")
        worker = self._started()
        try:
            answer = worker.ask(payload).result(patience + _SLACK_S)
        except NotInTime:
            raise NotChecked("takes too long to be compiled; simplify it, or try again") from None
        except WorkerGone as error:
            self.note("ended")
            why = str(error)
            if why in _OF_THE_SHAPE:
                raise Unconstrainable(self._over(why, "compile")) from None
            raise NotChecked(self._over(why, "compile")) from None
        finally:
            worker.close()
        found = msgspec.msgpack.decode(answer, type=Verdict)
        if found.problem is not None:
            self.note("refused")
            raise Unconstrainable(found.problem)
        self.note("plain" if fits_in_daemon(found) else "apart")
        return found

    def follow(
        self, shape: Shape, key: bytes | None = None, *, revive: bool = True
    ) -> ApartFollower:
        """Return a follower of one answer in a process of its own, which starts with the answer.

        Blocks if the host process has to be started first. A thread that must not wait sets `revive` to
        False and passes the `key` of the shape, its digest: without a host the answer cannot continue then.

        Raises:
            NotChecked: that process cannot be started now.
        """
        if revive:
            try:
                self._workers.warm()
            except Unavailable as error:
                raise NotChecked(f"cannot be followed: {error}") from None
        payload = msgspec.msgpack.encode(Follow(shape.kind, shape.text, self._grace_s))
        key = key or digest(shape.kind, shape.text)

        def start() -> Started | None:
            worker = self._taken(key)
            if worker is not None:
                return worker, True
            try:
                worker = self._workers.start(self.limits.of_worker, revive=False)
            except Unavailable:
                return None
            worker.send(payload)
            return worker, False

        def explain(why: str) -> str:
            if why in _LIMITS:
                self.note("stopped")
            return f"The {shape.field} {self._over(why, 'follow')}."

        finish = partial(self._finish, key)
        return ApartFollower(start, finish, self._vocabulary.n_vocab, explain)

    def _finish(self, key: bytes, worker: Worker, fate: Fate) -> None:
        """Keep the process of an answer for the next one of the same shape; of too many, the oldest is ended.

        The collector calls this on any thread, also inside of the code below: it waits for no lock, and the thread that
        holds it keeps what was finished meanwhile.
        """
        if not fate.can_go_on or not worker.is_idle:
            worker.close()
            return
        self._finished.append((key, worker))
        while self._finished and self._keeping.acquire(blocking=False):
            try:
                self._keep_finished()
            finally:
                self._keeping.release()

    def _keep_finished(self) -> None:
        """Move finished processes to the kept ones. Under the lock."""
        while self._finished:
            self._kept.append(self._finished.popleft())
        while len(self._kept) > _KEPT:
            self._kept.popleft()[1].close()

    def _taken(self, key: bytes) -> Worker | None:
        with self._keeping:
            self._keep_finished()
            for at, (known, worker) in enumerate(self._kept):
                if known == key and worker.is_idle:
                    del self._kept[at]
                    return worker
        return None

    def note(self, event: str) -> None:
        with self._lock:
            self.events[event] = self.events.get(event, 0) + 1

    def close(self) -> None:
        self._workers.close()

    def _started(self) -> Worker:
        try:
            return self._workers.start(self.limits.of_worker)
        except Unavailable as error:
            raise NotChecked(f"cannot be checked: {error}") from None

    def _known(self) -> bytes:
        self._on_first()
        vocabulary = self._vocabulary
        return msgspec.msgpack.encode(
            Known(tuple(vocabulary.pieces()), sorted(vocabulary.end_tokens))
        )

    @property
    def _grace_s(self) -> float:
        return self.limits.cpu_s * _GRACE

    def _over(self, why: str, verb: str) -> str:
        limits = self.limits
        if why == workers.OUT_OF_CPU:
            took = f"takes more than {limits.cpu_s:g} s of CPU time to compile"
            if verb == "follow":
                took = (
                    f"takes more CPU time to follow than {STEP_S * 1e3:g} ms a token and "
                    f"{self._grace_s:g} s"
                )
            return f"{took}; simplify it, or raise --shape-cpu"
        if why == workers.OUT_OF_MEMORY:
            most = limits.memory_bytes >> 20
            return f"takes more than {most} MiB to {verb}; simplify it, or raise --shape-memory"
        if why == workers.OUT_OF_TIME:
            return f"takes more than {limits.wall_s:g} s to {verb}; simplify it, or try again"
        return f"was not done: the process that was to {verb} it ended by none of its limits ({why}); try again"


def fits_in_daemon(verdict: Verdict) -> bool:
    return (
        verdict.plain
        and verdict.kept_bytes <= _PLAIN_BYTES
        and verdict.compile_s <= _PLAIN_COMPILE_S
        and verdict.step_s <= _PLAIN_STEP_S
    )
