"""Logs: short lines for people, JSON for machines, and never in anybody's way.

A line is one bounded, non-blocking write to standard error. Where the reader is behind, lines
are dropped and counted, and the next one that fits says how many; where it is gone, so are the
lines. Keys that could carry what a user wrote are withheld whatever the level.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Sequence
from typing import Any, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

PIPE_BUF = 4096  # what a pipe takes at once or not at all (Linux; POSIX promises 512)
_WITHHELD = frozenset({"prompt", "messages", "content", "text", "system", "stop"})
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure(level: str = "info", *, json: bool | None = None, fd: int = 2) -> None:
    """Send everything from `level` on to `fd`; as JSON unless a person is reading there."""
    as_json = not os.isatty(fd) if json is None else json
    structlog.configure(
        processors=_processors(as_json),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: LineWriter(fd),
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

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def msg(self, message: str) -> None:
        """Write one line, or drop it."""
        with LineWriter._lock:
            if not self._writable():
                LineWriter._dropped += 1
                return
            note = f"({LineWriter._dropped} lines dropped)\n" if LineWriter._dropped else ""
            data = (note + message).encode("utf-8", "replace")
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
