"""Turns at questions to the daemon, so that asking them takes a bounded part of trio's thread.

Metrics, lists of requests and explanations are made on trio's thread, which also sends the tokens of
every stream. A client may ask as fast as it likes. While answers are generated, the time between two
questions is at least :data:`PAUSE` times what the earlier one took: all questions together get
about one part in 1 + PAUSE of the thread. Principals take turns, so that a flood of one delays
another principal's question by at most one pause for each principal.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Hashable
from typing import Any, Final, TypeVar

import trio

from uma_trio.service.fair import FairQueue

Answer = TypeVar("Answer")

PAUSE: Final = 19
"""Pauses are so many times as long as the work before them: questions get 5 % of the thread."""
LEAST_S: Final = 0.0003
"""What a question is taken to cost at least: reading it and writing its answer is not measured."""
LONGEST_PAUSE_S: Final = 1.0
"""After one answer. It bounds the wait of the next one where a clock jumps or the machine sleeps."""


class Questions:
    """The queue of questions. `busy` says whether requests run: nothing is paused if none does.

    A pause is `pause` times as long as the work before it.
    """

    def __init__(
        self, clock: Callable[[], float], busy: Callable[[], bool], *, pause: float = PAUSE
    ) -> None:
        self._clock = clock
        self._busy = busy
        self._pause = pause
        self._free_at = float("-inf")  # on trio's clock
        self._queue = FairQueue[Hashable]()
        self._at_the_gate = False

    async def answer(
        self, asker: Hashable, make: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> Answer:
        """Return what `make` returns, as soon as it is the turn of `asker`, a principal.

        Only the time on trio's thread counts, not what `make` waits for; and while it waits others
        have their turns. Cancelled, the question leaves the queue. Raises what `make` raises.
        """
        await self._turn(asker)
        self.charge(LEAST_S)
        return await _metered(make(), self._clock, self.charge)

    async def wait(self, asker: Hashable, seconds: float) -> None:
        """Wait for the turn of `asker`, and charge work of so many seconds. Always a checkpoint.

        Cancelled, it leaves the queue.
        """
        await trio.lowlevel.checkpoint()
        await self._turn(asker)
        self.charge(seconds)

    def charge(self, seconds: float) -> None:
        """Count so much work for questions: the next one waits in proportion."""
        pause = min(self._pause * max(seconds, 0.0), LONGEST_PAUSE_S)
        self._free_at = max(self._free_at, trio.current_time()) + pause

    async def _turn(self, asker: Hashable) -> None:
        if self._at_the_gate:
            await self._queue.wait(asker, self._next)
        self._at_the_gate = True
        try:
            if self._busy():
                await trio.sleep_until(min(self._free_at, trio.current_time() + LONGEST_PAUSE_S))
        finally:
            self._next()

    def _next(self) -> None:
        self._at_the_gate = self._queue.wake()


@types.coroutine
def _metered(
    work: Coroutine[Any, Any, Answer], clock: Callable[[], float], spent: Callable[[float], None]
) -> Generator[Any, Any, Answer]:
    """Await `work`, and give `spent` the time of each of its steps on this thread."""
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
