"""How numbers and texts of strangers are said to a person."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time as a person says it: 45 ms, 3.2 s, 12 min."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(n_bytes: float) -> str:
    """Return a size as a person says it: 812 MB, 4.1 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"


def count(number: float) -> str:
    """Return a large number as a person says it: 494M, 7.2B."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.0f}"


def several(number: int, noun: str) -> str:
    """Return a number with what it counts: 1 run, 12 runs, 4,096 tokens."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def harmless(text: str) -> str:
    """Return `text` without the control characters that would steer a terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


def one_line(text: str) -> str:
    """Return `text` with nothing that steers a terminal or the layout of a line.

    Everything that comes from a file goes through this before it is shown, logged or taken for a name.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)
