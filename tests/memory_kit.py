"""What the kernel says of this process's memory (Linux)."""

from __future__ import annotations

import re
from pathlib import Path


def resident_kib(file: Path) -> int:
    """Return how much of `file` is in this process's memory, by the kernel's own count."""
    of_file = False
    total = 0
    for line in Path("/proc/self/smaps").read_text(errors="surrogateescape").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            of_file = line.endswith(f" {file}")
        elif of_file and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total
