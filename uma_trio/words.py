"""Values of request fields that are one of a few words, and numbers and texts formatted for people."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final, Literal, get_args

Lane = Literal["interactive", "background"]
"""Whether a person or a program waits for the request, or it takes the time that is left."""
LANES: Final[tuple[Lane, ...]] = get_args(Lane)

Gives = Literal["text", "vectors", "scores"]
"""What a model makes of a text."""

Awaits = Literal["tokens", "answer", "nothing"]
"""What the client waits for: each token (a person reads), the whole answer, or nothing (the background lane)."""
AWAITS: Final[tuple[Awaits, ...]] = get_args(Awaits)

Pace = Literal["smooth", "asap"]
"""Whether early tokens are held back, so that they are shown evenly, or passed on at once."""

Speculation = Literal["off", "free", "auto"]
"""Which drafts are verified: none, those that cost nothing, or those that pay."""
SPECULATIONS: Final[tuple[Speculation, ...]] = get_args(Speculation)
BY_BACKEND: Final = "default"  # of the daemon's option: auto, but off on a GPU


def chosen(asked: Speculation | None, *, seeded: bool) -> Speculation:
    """Return which drafts a request may have; `asked` is None if it does not say.

    A request with a seed should get the same answer again, and drafts change the sizes of batches, in which llama.cpp rounds a row
    differently (docs/explained/memory.md).
    """
    if asked is None:
        return "off" if seeded else "auto"
    return asked


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `` (did you mean X?)`` for the closest known name, or nothing.

    `cutoff` is how similar the two must be, from 0 to 1.
    """
    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


MIB: Final = 1 << 20


def mib(n_bytes: int) -> str:
    """Return bytes in whole MiB: 1,024 MiB."""
    return f"{n_bytes / MIB:,.0f} MiB"


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
