"""Time on trio's thread: its lag, how long readers could return credit, and what clients may use of it.

Trio's thread writes every token, so anything that blocks it (a call, another thread with the GIL, a stalled machine)
delays all streams. Two kinds of work on it grow with what clients send. Both are limited only while answers are
generated:

- Questions (metrics, lists, explanations): the pause between two is at least :data:`QUESTION_PAUSE` times the time of
  the earlier one. Principals alternate, so a flood of one delays another by at most one pause per principal.
- Bytes: reading a head or a chunk takes microseconds, but one write can hold thousands. Each user may spend
  :data:`SHARE` of the thread. Work beyond that is queued, program by program, and gets 1 / (1 + :data:`PAUSE`) of the
  thread in total. Work within the share is spread over scheduler passes, :data:`AT_ONCE` pieces each.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Hashable
from typing import Any, Final, TypeVar

import trio
from attrs import define, field

from uma_trio.service.directory import Directory
from uma_trio.service.fair import FairQueue, UserProgram
from uma_trio.service.timer import Timer

BUSY_S: Final = 0.02
"""Seconds between two lag samples while requests run: a quarter of a percent of a core."""
IDLE_S: Final = 0.25
BEAT_S: Final = 0.1
"""Seconds between two counts of :class:`Presence`; more than a busy machine delays a wake-up."""


class LagWatch:
    """Measures the lag of trio's thread while :meth:`run` is active.

    `timer` uses `clock`, in seconds. `record` receives each lag in seconds; `is_busy` returns whether requests run.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        timer: Timer,
        record: Callable[[float], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._clock = clock
        self._timer = timer
        self._record = record
        self._is_busy = is_busy

    async def run(self) -> None:
        """Sample until cancelled."""
        try:
            while True:
                due = self._clock() + (BUSY_S if self._is_busy() else IDLE_S)
                self._timer.set(due)
                await self._timer.wait()
                self._record(max(0.0, self._clock() - due))
        finally:
            self._timer.close()


class Presence:
    """A clock of the seconds in which readers could return credit; callable on any thread.

    It stops while the loop is blocked, and while no request runs. It advances in steps of :data:`BEAT_S`, and by at
    most two of them after the loop was blocked. `clock` is in seconds.
    """

    def __init__(self, clock: Callable[[], float], directory: Directory) -> None:
        self._clock = clock
        self._directory = directory
        self._seconds = 0.0

    def __call__(self) -> float:
        return self._seconds

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            await self._directory.wait_until_any()
            before = self._clock()
            while len(self._directory):
                await trio.sleep(BEAT_S)
                now = self._clock()
                # Of a longer interval, only its first and last beat are certain to be time in which the loop ran.
                self._seconds += min(max(0.0, now - before), 2 * BEAT_S)
                before = now


Answer = TypeVar("Answer")

QUESTION_PAUSE: Final = 19
"""Length of a pause in multiples of the work before it: questions get 5 % of the thread."""
MIN_QUESTION_S: Final = 0.0003
"""Minimum cost of a question: reading it and writing its answer are not measured."""
MAX_PAUSE_S: Final = 1.0
"""Maximum pause after one answer, also where a clock jumps or the machine sleeps."""


class Questions:
    """The queue of questions. Without running requests (`busy`) there are no pauses.

    A pause is `pause` times as long as the work before it.
    """

    def __init__(
        self, clock: Callable[[], float], busy: Callable[[], bool], *, pause: float = QUESTION_PAUSE
    ) -> None:
        self._clock = clock
        self._busy = busy
        self._pause = pause
        self._free_at = float("-inf")  # on trio's clock
        self._queue = FairQueue[Hashable]()
        self._is_taken = False

    async def answer(
        self, asker: Hashable, make: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> Answer:
        """Await `make()` when it is the turn of the principal `asker`, and return its result.

        Only time on trio's thread is charged, not what `make` waits for; other questions run meanwhile. Cancelled,
        the question leaves the queue. Raises what `make` raises.
        """
        await self._turn(asker)
        self.charge(MIN_QUESTION_S)
        return await _metered(make(), self._clock, self.charge)

    async def wait(self, asker: Hashable, seconds: float) -> None:
        """Wait for the turn of `asker`, then charge `seconds` of work. Always a checkpoint.

        Cancelled, it leaves the queue.
        """
        await trio.lowlevel.checkpoint()
        await self._turn(asker)
        self.charge(seconds)

    def charge(self, seconds: float) -> None:
        """Charge work in seconds: the next question waits in proportion."""
        pause = min(self._pause * max(seconds, 0.0), MAX_PAUSE_S)
        self._free_at = max(self._free_at, trio.current_time()) + pause

    async def _turn(self, asker: Hashable) -> None:
        if self._is_taken:
            await self._queue.wait(asker, self._next)
        self._is_taken = True
        try:
            if self._busy():
                await trio.sleep_until(min(self._free_at, trio.current_time() + MAX_PAUSE_S))
        finally:
            self._next()

    def _next(self) -> None:
        self._is_taken = self._queue.wake()


@types.coroutine
def _metered(
    work: Coroutine[Any, Any, Answer], clock: Callable[[], float], spent: Callable[[float], None]
) -> Generator[Any, Any, Answer]:
    """Await `work`, and pass the time of each of its steps on this thread to `spent`."""
    step: Callable[[Any], Any] = work.send
    given: Any = None
    while True:
        began = clock()
        try:
            asked = step(given)
        except StopIteration as end:
            answer: Answer = end.value
            return answer
        finally:
            spent(clock() - began)
        try:
            step, given = work.send, (yield asked)
        except BaseException as fault:
            step, given = work.throw, fault


class Passes:
    """Resumes at most `most` tasks in one pass of the scheduler, the others in later passes, in order.

    trio runs every ready task before it polls sockets and timers again. When hundreds of connections close or send a
    request at once, one pass would run the work of all of them before a token that arrives meanwhile is written. The
    first pass of a new count may run twice as many. For trio's thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most
        self._lot = trio.lowlevel.ParkingLot()
        self._renews = False

    async def turn(self) -> None:
        """Wait until a pass has room. Always a checkpoint. Cancelled, its place goes to the next task."""
        if not self._renews:
            self._renews = True
            self._renew_soon()
        if self._left:
            self._left -= 1
            await trio.lowlevel.checkpoint()
        else:
            await self._lot.park()

    def _renew_soon(self) -> None:
        trio.lowlevel.current_trio_token().run_sync_soon(self._renew)

    def _renew(self) -> None:
        woken = self._lot.unpark(count=self._most)
        self._left = self._most - len(woken)
        if woken:
            self._renew_soon()
        else:
            self._renews = False


HEAD_S: Final = 0.0005
"""Assumed cost of a request with its head, its tasks and a short answer. Measured: 0.3 to 0.6 ms."""
CHUNK_S: Final = 0.00001
"""Assumed cost of a chunk of a body. h11 takes 5 µs."""
SLICE_S: Final = 0.001
"""Work in chunks after which other tasks run."""
SHARE: Final = 0.2
"""Part of the thread for each user: 400 requests a second."""
BURST_S: Final = 0.1
"""Seconds of the thread that an idle user may spend at once: 200 requests."""
PAUSE: Final = 3
"""Length of a pause after work beyond the share, in multiples of that work."""
AT_ONCE: Final = 4
"""Heads, or ends of connections, in one pass of trio's scheduler: about 2 ms."""
MOST_USERS: Final = 256
"""Accounts that are kept; the least recently used one is reset."""


@define
class _Account:
    """The seconds that a user had left at time `at`."""

    left_s: float
    at: float


class ThreadShare:
    """The accounts of all users. For trio's thread. `busy` returns whether requests run."""

    def __init__(self, clock: Callable[[], float], busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._queue = Questions(clock, busy, pause=PAUSE)
        self._passes = Passes(AT_ONCE)

    async def spend(self, client: UserProgram, seconds: float) -> None:
        """Charge work that was done for a client, and let other tasks run; wait if its user exceeds the share.

        Cancelled, it is charged all the same.
        """
        within = self._count(client.user, seconds)
        if within or not self._busy():
            await self._passes.turn()
        else:
            await self._queue.wait(client, seconds)

    async def turn(self) -> None:
        """Wait until a pass has room for work that is not charged, such as the end of a connection."""
        await self._passes.turn()

    def _count(self, user: str, seconds: float) -> bool:
        """Charge a user's account; return whether it had enough."""
        now = trio.current_time()
        account = self._accounts.get(user)
        if account is None:
            account = self._accounts[user] = _Account(BURST_S, now)
            if len(self._accounts) > MOST_USERS:
                self._accounts.popitem(last=False)
        self._accounts.move_to_end(user)
        account.left_s = min(BURST_S, account.left_s + SHARE * (now - account.at))
        account.at = now
        within = account.left_s >= seconds
        if within:
            account.left_s -= seconds
        return within


@define
class Meter:
    """The chunks of one connection, charged together: charging each would cost as much as reading it."""

    share: ThreadShare
    _spent_s: float = field(default=0.0, init=False)

    async def chunk(self, client: UserProgram) -> None:
        """Count a chunk that was read; let other tasks run once a slice is full."""
        self._spent_s += CHUNK_S
        if self._spent_s >= SLICE_S:
            spent, self._spent_s = self._spent_s, 0.0
            await self.share.spend(client, spent)
