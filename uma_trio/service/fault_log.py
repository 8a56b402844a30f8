"""The log of a front end: a fault that a client can repeat must not fill the disk."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import trio

from uma_trio.service.telemetry import Log

EVERY_S = 60.0
MOST_PLACES = 64


class FaultLog:
    """Writes into `log`, of the faults raised at one place one traceback a minute.

    The next traceback of that place says in `more` how many were left out before it. Beyond
    `MOST_PLACES` places within a minute no traceback is written.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._places: dict[tuple[object, ...], float] = {}  # and when it is told again
        self._left_out: dict[tuple[object, ...], int] = {}

    def warning(self, event: str, *args: Any, **values: Any) -> None:
        """Write a warning; its caller limits how often."""
        self._log.warning(event, *args, **values)

    def exception(self, event: str, *args: Any, **values: Any) -> None:
        """Write the traceback of the exception that is being handled, or count it."""
        now, place = trio.current_time(), _place_of(sys.exc_info()[1])
        if now < self._places.get(place, now):
            self._left_out[place] = self._left_out.get(place, 0) + 1
            return
        if len(self._places) >= MOST_PLACES:
            self._places = {key: until for key, until in self._places.items() if now < until}
            self._left_out = {k: n for k, n in self._left_out.items() if k in self._places}
            if len(self._places) >= MOST_PLACES:
                return
        self._places[place] = now + EVERY_S
        if more := self._left_out.pop(place, 0):
            values["more"] = more
        self._log.exception(event, *args, **values)


def _place_of(error: BaseException | None) -> tuple[object, ...]:
    """Return what tells one fault from another: its type, and where it was raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    trace: TracebackType | None = None if error is None else error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = (None, 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return (type(error), *at)
