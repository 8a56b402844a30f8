"""The hint in a message about a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `` (did you mean X?)`` for the closest known name, or nothing.

    `cutoff` is how similar the two must be, from 0 to 1.
    """
    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""
