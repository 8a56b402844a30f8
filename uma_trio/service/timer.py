"""A timer for one moment, with the finest resolution of the machine.

epoll counts milliseconds and rounds up, so a trio deadline is 0.5 ms late on average, a twentieth
of the time of a token of 10 ms. On Linux timerfd_create(2) gives timers that are file descriptors:
they count nanoseconds, and epoll waits for them. kqueue has fine timeouts of its own.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable
from typing import Final, Protocol

import trio

_FLAGS: Final[int] = os.O_NONBLOCK | os.O_CLOEXEC  # <bits/timerfd.h>: those of open(2)


class Timer(Protocol):
    """Expires at the time that was set last; never, before a time is set."""

    def set(self, at: float) -> None:
        """Expire at `at`, on the clock of its construction; never, if that is infinite."""

    async def wait(self) -> None:
        """Wait until it has expired; afterwards it returns at once until a new time is set.

        For one task. A time that is set meanwhile counts. If that is later than the previous one,
        this may return early.
        """

    def close(self) -> None:
        """Release its system resources. No task may wait; a time that is set later has no effect.

        Idempotent.
        """


class TrioTimer:
    """A deadline on trio's clock, with its resolution: milliseconds with epoll."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = math.inf
        self._scope: trio.CancelScope | None = None

    def set(self, at: float) -> None:
        self._at = at
        if self._scope is not None:
            self._scope.deadline = self._deadline()

    async def wait(self) -> None:
        try:
            with trio.CancelScope(deadline=self._deadline()) as self._scope:
                await trio.sleep_forever()
        finally:
            self._scope = None

    def close(self) -> None:
        pass

    def _deadline(self) -> float:
        return trio.current_time() + self._at - self._clock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class FileTimer:
    """A file descriptor that becomes readable when it expires.

    Raises:
        AttributeError: the system has no such descriptors.
        OSError: no descriptor is left, or they are not permitted.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        # These calls never wait, so they keep the interpreter's lock (PyDLL): to give it up and to take it
        # back next to a thread that computes costs more than the call.
        library = ctypes.PyDLL(None, use_errno=True)
        create, self._settime = library.timerfd_create, library.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._clock = clock
        self._spec = _Itimerspec()
        self._address = ctypes.addressof(self._spec)
        self._file = _checked(create(time.CLOCK_MONOTONIC, _FLAGS))

    def set(self, at: float) -> None:
        if self._file < 0:
            return
        value = self._spec.value
        if at == math.inf:
            value.seconds = value.nanoseconds = 0  # which stops it
        else:
            after_ns = max(1, int((at - self._clock()) * 1e9))
            value.seconds, value.nanoseconds = divmod(after_ns, 1_000_000_000)
        # This resets the kernel's count, so the file need not be read.
        _checked(self._settime(self._file, 0, self._address, None))

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._file)

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def finest_timer(clock: Callable[[], float]) -> Timer:
    """Return the finest timer of this machine for `clock`, which must run in real time."""
    try:
        return FileTimer(clock)
    except (AttributeError, OSError):
        return TrioTimer(clock)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
