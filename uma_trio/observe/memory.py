"""The memory of this process: resident, and its proportional share."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# The kernel walks every page to compute the PSS: a third of a second for 30 GB. Pausing a thousand times as long,
# it takes at most a thousandth of a core.
_PAUSE = 1000.0


def resident_bytes() -> int:
    """Return the resident memory; where it cannot be read, the peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        import resource  # POSIX without /proc, macOS: bytes there, kilobytes elsewhere

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes() -> int | None:
    """Return the PSS, in which a page mapped by n processes counts as 1/n; None where unknown.

    Slow for a large process: not for the event loop's thread.
    """
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
        (line,) = (line for line in text.splitlines() if line.startswith("Pss:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None


def storage_bytes() -> int | None:
    """Return the bytes that this process read from storage, page faults included; None where unknown."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
        (line,) = (line for line in text.splitlines() if line.startswith("read_bytes:"))
        return int(line.split()[1])
    except (OSError, ValueError):
        return None


class SharedMemory:
    """The PSS at its latest reading; `bytes` is None before the first, and where it is unknown."""

    def __init__(
        self,
        read: Callable[[], int | None] = proportional_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._due_at = clock()
        self.bytes: int | None = None

    @property
    def due(self) -> bool:
        """Whether it may be read again."""
        return self._clock() >= self._due_at

    def refresh(self) -> None:
        """Read it again, in a helper thread."""
        began = self._clock()
        self.bytes = self._read()
        ended = self._clock()
        self._due_at = ended + _PAUSE * (ended - began)
