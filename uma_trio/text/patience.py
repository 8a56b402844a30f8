"""How long whoever asked for a shape waits: known to what runs for it in a helper thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Patience:
    """Ends at `until`, on :func:`time.monotonic`; 0 once the request was given up."""

    def __init__(self, until: float = math.inf) -> None:
        self.until = until


_CURRENT: ContextVar[Patience | None] = ContextVar("patience", default=None)


@contextmanager
def patient(patience: Patience) -> Iterator[None]:
    """Within this block, on this thread, this is how long anything is waited for."""
    token = _CURRENT.set(patience)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def waits_until() -> float:
    """Return when the current request has waited long enough; infinity if it is nobody's."""
    current = _CURRENT.get()
    return math.inf if current is None else current.until
