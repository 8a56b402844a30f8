"""Long calls into llama.cpp that yield the cores to ticks with readers.

On Linux each thread has a niceness of its own, and threads that it starts, as those of OpenMP, inherit it. An unprivileged
process cannot lower it again, so that such a call has a thread of its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Final, TypeVar

POLITE: Final = 5
"""Added to the niceness: where both want a core, the call gets a quarter of it (sched(7), a factor of 1.25 for each
unit). With more it might be suspended while it holds the interpreter lock, which every thread needs."""

_T = TypeVar("_T")


def politely(call: Callable[[], _T]) -> _T:
    """Return what `call` returns, or raise what it raises; it runs in a thread that yields to others."""
    returned: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + POLITE)
        try:
            returned.append(call())
        except BaseException as error:  # it is the caller's
            raised.append(error)

    thread = threading.Thread(target=run, name="polite", daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return returned[0]


def at_once(call: Callable[[], _T]) -> _T:
    """Return what `call` returns, computed on this thread as it is."""
    return call()
