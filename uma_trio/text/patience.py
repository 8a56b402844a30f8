"""How long whoever asked for a shape waits: known to what runs for it in a helper thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Patience:
    """When the request that waits for a shape gives up (:func:`time.monotonic`); 0 once it was cancelled."""

    def __init__(self, until: float = math.inf) -> None:
        self.until = until


_CURRENT: ContextVar[Patience | None] = ContextVar("patience", default=None)


@contextmanager
def patient(patience: Patience) -> Iterator[None]:
    """Run a block with this patience on this thread."""
    token = _CURRENT.set(patience)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def waits_until() -> float:
    """Return when the current request gives up; infinity without one."""
    current = _CURRENT.get()
    return math.inf if current is None else current.until
