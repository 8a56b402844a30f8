"""All tokens that a constrained answer may go on with: found at once, or by helper threads.

To find them takes llguidance 0.1 ms at the median and some milliseconds at worst, without the
interpreter's lock. A :class:`MaskThreads` finds the masks of several rows side by side, and one that
takes long goes on while the engine computes its next tick.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Final, Protocol

import numpy as np

from uma_trio.engine.sampling.shortlist import IdArray
from uma_trio.observe import log
from uma_trio.text.constraint import Constraint, UnderWay

# More rows than these are seldom refused in one tick; the others wait for one of the first.
_MOST_THREADS: Final = 4


class Mask(Protocol):
    """What is allowed at one place of one answer."""

    def wait(self, seconds: float) -> bool:
        """Wait for it so long at most; return whether it is there."""

    def notify(self, there: Callable[[], object]) -> None:
        """Have `there` called once it is there, or was dropped; on any thread, and maybe at once."""

    def ids(self) -> IdArray:
        """Return the tokens, ascending; none if there is no way on. It must be there."""

    def drop(self) -> None:
        """It is not needed any more: do not make it, if that has not begun."""


class Masks(Protocol):
    """What finds masks."""

    def begin(self, constraint: Constraint) -> Mask:
        """Begin to find what `constraint` allows where it stands. It may go on meanwhile."""


def await_any(masks: Iterable[Mask], seconds: float) -> None:
    """Wait until one of these is there, so long at most."""
    there = Event()
    for mask in masks:
        mask.notify(there.set)
    there.wait(seconds)


class _Found:
    def __init__(self, ids: IdArray) -> None:
        self._ids = ids

    def wait(self, seconds: float) -> bool:
        """It is there."""
        return True

    def notify(self, there: Callable[[], object]) -> None:
        """It is there."""
        there()

    def ids(self) -> IdArray:
        """Return the tokens."""
        return self._ids

    def drop(self) -> None:
        """It is made."""


class MasksAtOnce:
    """Finds each mask in the thread that asks for it."""

    def begin(self, constraint: Constraint) -> Mask:
        """Find it."""
        return _Found(constraint.allowed())


AT_ONCE: Final = MasksAtOnce()


class _Awaited:
    def __init__(self, future: Future[IdArray]) -> None:
        self._future = future

    def wait(self, seconds: float) -> bool:
        """Wait for it so long at most; return whether it is there."""
        try:
            self._future.exception(max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    def notify(self, there: Callable[[], object]) -> None:
        """Have `there` called once it is there, or was dropped; on any thread, and maybe at once."""
        self._future.add_done_callback(lambda _future: there())

    def ids(self) -> IdArray:
        """Return the tokens; none where looking for them failed, which ends the request."""
        error = self._future.exception(0)
        if error is None:
            return self._future.result(0)
        log.get("engine").error("a mask could not be found", exc_info=error)
        return np.empty(0, np.intp)

    def drop(self) -> None:
        """Let the masks behind it go before it."""
        self._future.cancel()


class MaskThreads:
    """Finds masks in a few threads, which are started by the first one and end with this object."""

    def __init__(self) -> None:
        n_threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="mask")

    def begin(self, constraint: Constraint) -> Mask:
        """Begin to find what `constraint` allows where it stands. It may go on meanwhile."""
        found = constraint.deferred()
        if isinstance(found, UnderWay):
            return _Awaited(found.future)
        return _Awaited(self._pool.submit(found))
