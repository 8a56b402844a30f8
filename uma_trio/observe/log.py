"""Logs: short lines on a terminal, JSON otherwise.

A line is one bounded, non-blocking write to standard error. Lines that its reader is too slow for are dropped, and
the next one says how many. The values of keys that could contain a user's text are withheld at every level.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any, Protocol, cast

import trio


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Let an import of `module` fail, unless it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = cast("ModuleType", None)
    try:
        yield
    finally:
        del sys.modules[module]


with _without("rich"):  # for tracebacks that no line of ours has: 4 MB, and 0.1 s of each start
    import structlog
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

EVERY_S = 60.0
MOST_PLACES = 64
PIPE_BUF = 4096  # what a pipe takes at once or not at all (Linux; POSIX promises 512)
_WITHHELD = frozenset({"prompt", "messages", "content", "text", "system", "stop"})
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class Log(Protocol):
    """Messages for the operator."""

    def warning(self, event: str, *args: Any, **values: Any) -> Any:
        """Log a fault outside the daemon."""

    def exception(self, event: str, *args: Any, **values: Any) -> Any:
        """Log the exception that is being handled."""


_CLEAR_LINE = "\r\x1b[K"  # a progress bar may be on the line


def configure(level: str = "info", *, json: bool | None = None, fd: int = 2) -> None:
    """Send everything from `level` on to `fd`; as JSON unless a person is reading there."""
    as_json = not os.isatty(fd) if json is None else json
    structlog.configure(
        processors=_processors(as_json),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: LineWriter(fd, clears=os.isatty(fd)),
        cache_logger_on_first_use=False,
    )


def get(name: str) -> FilteringBoundLogger:
    """Return the logger of one part of the daemon; it follows `configure` whenever that runs."""
    return cast(FilteringBoundLogger, structlog.get_logger(part=name))


def _processors(as_json: bool) -> Sequence[Processor]:
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        withhold,
        structlog.processors.format_exc_info,
    ]
    if as_json:
        stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
        return [*shared, stamp, structlog.processors.JSONRenderer(default=str)]
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    return [*shared, stamp, concise]


def withhold(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace what a user wrote by its length, should a caller ever log it."""
    for key in _WITHHELD & event.keys():
        event[key] = f"<withheld, {len(str(event[key]))} characters>"
    return event


def concise(_: WrappedLogger, __: str, event: EventDict) -> str:
    """Render ``12:00:00 info  engine: what happened  key=value``."""
    stamp, level = event.pop("timestamp", ""), event.pop("level", "")
    part, what = event.pop("part", ""), event.pop("event", "")
    trace = event.pop("exception", "")
    head = f"{part}: " if part else ""
    rest = "".join(f"  {key}={_short(value)}" for key, value in event.items())
    return f"{stamp} {level:<7} {head}{what}{rest}" + (f"\n{trace}" if trace else "")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if not text or " " in text or not text.isprintable() else text


class LineWriter:
    """Writes lines to a descriptor without ever waiting for, or failing with, its reader."""

    _lock = threading.Lock()  # held for one poll and one write that cannot block
    _dropped = 0

    def __init__(self, fd: int, *, clears: bool = False) -> None:
        self._fd = fd
        self._before = _CLEAR_LINE if clears else ""

    def msg(self, message: str) -> None:
        """Write one line, or drop it."""
        with LineWriter._lock:
            if not self._writable():
                LineWriter._dropped += 1
                return
            note = f"({LineWriter._dropped} lines dropped)\n" if LineWriter._dropped else ""
            data = (self._before + note + message).encode("utf-8", "replace")
            try:
                os.write(self._fd, data[: PIPE_BUF - 1] + b"\n")
            except OSError:
                LineWriter._dropped += 1  # nobody is left to read, or the disk is full
            else:
                LineWriter._dropped = 0

    debug = info = warning = warn = error = critical = exception = log = fatal = failure = msg

    def _writable(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self._fd, select.POLLOUT)
            (_, events), *_ = poll.poll(0) or [(0, 0)]
        except (OSError, ValueError):
            return False
        return bool(events & select.POLLOUT) and not events & (select.POLLERR | select.POLLNVAL)


class FaultLog:
    """Limits tracebacks to one per minute and place, so that a client cannot fill the disk by repeating a fault.

    The next traceback of a place has the number of omitted ones in `more`. Beyond `MOST_PLACES` places within a
    minute, none is written.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._places: dict[tuple[object, ...], float] = {}  # and when it may be logged again
        self._left_out: dict[tuple[object, ...], int] = {}

    def warning(self, event: str, *args: Any, **values: Any) -> None:
        """Log a warning; the caller limits how often."""
        self._log.warning(event, *args, **values)

    def exception(self, event: str, *args: Any, **values: Any) -> None:
        """Log the exception that is being handled, or count it."""
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
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    trace: TracebackType | None = None if error is None else error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = (None, 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return (type(error), *at)
