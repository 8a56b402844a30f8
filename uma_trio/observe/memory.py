"""How much memory this process takes: resident, and its fair part of what it shares."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# The kernel walks every page to add up the shares, a third of a second for a model of 30 GB. Read
# again only after a thousand times as long, it never takes more than a thousandth of a core.
_REST = 1000.0


def resident_bytes() -> int:
    """Return the resident memory of this process; where it cannot be read now, the peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        import resource  # POSIX without /proc, macOS: bytes there, kilobytes elsewhere

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes() -> int | None:
    """Return the PSS: each page divided by how many processes map it. None where unknown.

    Takes long for a large process; not for the event loop's thread.
    """
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
        (line,) = (line for line in text.splitlines() if line.startswith("Pss:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None


class SharedMemory:
    """The PSS as it was read last; `bytes` is None until then, and where it is unknown."""

    def __init__(
        self,
        read: Callable[[], int | None] = proportional_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._due = clock()
        self.bytes: int | None = None

    @property
    def due(self) -> bool:
        """Whether it may be read again."""
        return self._clock() >= self._due

    def refresh(self) -> None:
        """Read it again (a helper thread, one at a time)."""
        began = self._clock()
        self.bytes = self._read()
        ended = self._clock()
        self._due = ended + _REST * (ended - began)
