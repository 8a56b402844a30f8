"""Constraints that a request can set on an answer; :mod:`uma_trio.text.constrain` enforces them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal

from attrs import frozen

Kind = Literal["schema", "regex", "choice", "grammar", "loose schema", "reply"]

MAX_BYTES: Final[dict[Kind, int]] = {
    "schema": 64 << 10,
    "regex": 64 << 10,
    "choice": 1 << 20,
    "grammar": 16 << 10,  # to translate GBNF takes time by the square of its rules: 0.4 s of these
    "loose schema": 1 << 20,
    "reply": 4 << 20,
}


#: Shapes that an answer may have where the model may call tools instead of answering.
BESIDE_TOOLS: Final[tuple[Kind, ...]] = ("schema", "choice")


class Unconstrainable(Exception):
    """The shape cannot be enforced, or is none. The message continues a sentence that begins with its name."""


class NotChecked(Unconstrainable):
    """Whether the constraint can be enforced was not determined; a retry may help."""


class Unknown(Exception):
    """The shape has to be compiled first."""


@frozen
class Shape:
    """What an answer has to look like, with what the request calls it (`field`).

    `text` is a JSON Schema, a regular expression in Rust's syntax, a JSON list of strings, or a grammar in
    GBNF or Lark. "loose schema" and "reply" are the daemon's own kinds.
    """

    kind: Kind
    text: str
    field: str = "schema"
    loosened: tuple[str, ...] = ()


class Patience:
    """The deadline of the request that waits for a constraint (:func:`time.monotonic`); 0 once it was cancelled."""

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
    """Return the deadline of the current request; infinity without one."""
    current = _CURRENT.get()
    return math.inf if current is None else current.until
