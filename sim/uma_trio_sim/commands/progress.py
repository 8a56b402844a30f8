"""How far a command is that does the same many times, and how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from uma_trio.words import duration, several

_CLEAR = "\r\x1b[K"
_WORTH_S = 2.0  # what is over before needs no line


class RunsDone:
    """A line on standard error, if that is a terminal: "12 of 160 runs, about 3 min left".

    Each run counts the same, so the estimate is rough where they differ. :meth:`hide` makes room for
    what is printed meanwhile.
    """

    def __init__(self, total: int, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._what = what
        self._clock = clock
        self._started = clock()
        self._done = 0
        self._watched = sys.stderr.isatty()
        self._shown = False

    def one_more(self) -> None:
        """Take note that one more is done."""
        self._done += 1
        took_s = self._clock() - self._started
        if not self._watched or took_s < _WORTH_S:
            return
        left_s = took_s / self._done * (self._total - self._done)
        line = f"{self._done} of {several(self._total, self._what)}, about {duration(left_s)} left"
        sys.stderr.write(_CLEAR + line)
        sys.stderr.flush()
        self._shown = True

    def hide(self) -> None:
        """Take the line away. Idempotent; the next one shows it again."""
        if self._shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._shown = False
