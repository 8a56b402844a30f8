"""How much of the machine other programs use, from the kernel's counters of processor time.

Other programs only add time to a decode. A table of such times is too slow as soon as they end, so the
table is marked with their share and measured again when the machine is quiet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from attrs import define, field, frozen

# A share from which a table is marked, and below which the machine counts as quiet. The two agree, so that a
# table is never measured again under conditions that would mark it.
BUSY = 0.1
# The kernel counts by the 10 ms (USER_HZ): over a second that is a hundredth of a processor.
WINDOW_S, LONGEST_WINDOW_S = 1.0, 60.0


@frozen
class CpuTimes:
    """Counters at one moment, all in seconds.

    `busy_s` and `all_s` are summed over the processors that this process may use; None where the kernel does
    not tell them. `own_s` is the processor time of this process, all threads together.
    """

    wall_s: float
    own_s: float
    busy_s: float | None = None
    all_s: float = 0.0


Reader = Callable[[], CpuTimes]


def cpu_times(root: Path = Path("/")) -> CpuTimes:
    """Read the counters. What a hypervisor gave to others (`steal`) counts as busy."""
    wall_s, own_s = time.monotonic(), time.process_time()
    try:
        allowed = os.sched_getaffinity(0)
        lines = (root / "proc/stat").read_text(encoding="ascii").splitlines()
        hertz = os.sysconf("SC_CLK_TCK")
        found = [
            [int(figure) for figure in figures[:8]]  # what follows is contained in these
            for name, *figures in map(str.split, lines)
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed
        ]
    except (OSError, ValueError, AttributeError):
        return CpuTimes(wall_s, own_s)
    if not found:
        return CpuTimes(wall_s, own_s)
    total = sum(map(sum, found))
    resting = sum(sum(figures[3:5]) for figures in found)  # idle and iowait
    return CpuTimes(wall_s, own_s, (total - resting) / hertz, total / hertz)


def others_share(before: CpuTimes, after: CpuTimes) -> float:
    """Return the part of the machine that other programs used between two readings, 0 to 1.

    Where the kernel does not tell, it is what a process that computes all the time did not get of one
    processor.
    """
    own_s = after.own_s - before.own_s
    if before.busy_s is None or after.busy_s is None:
        passed_s, others_s = after.wall_s - before.wall_s, after.wall_s - before.wall_s - own_s
    else:
        passed_s, others_s = after.all_s - before.all_s, after.busy_s - before.busy_s - own_s
    return min(1.0, max(0.0, others_s / passed_s)) if passed_s > 0 else 0.0


@define
class QuietWatch:
    """Says of each window of about a second whether the machine was quiet in it.

    Where the kernel does not tell, every window is quiet.
    """

    read: Reader = cpu_times
    _began: CpuTimes | None = field(default=None, init=False)

    def verdict(self) -> bool | None:
        """Return whether the window that ends now was quiet, None if it has not ended.

        The next one begins where one ended. One that was not ended in time was not quiet.
        """
        now, began = self.read(), self._began
        if began is not None and now.wall_s - began.wall_s < WINDOW_S:
            return None
        self._began = now
        if began is None:
            return None
        if now.wall_s - began.wall_s > LONGEST_WINDOW_S:
            return False
        return now.busy_s is None or others_share(began, now) < BUSY


def in_words(others: float) -> str:
    """Return the sentence for people about a table that was measured beside other programs."""
    return (
        f"other programs used {100 * others:.0f} % of the machine when it was measured: it is measured again "
        "when it is idle and quiet"
    )
