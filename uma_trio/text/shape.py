"""What an answer can be asked to look like; :mod:`uma_trio.text.constrain` enforces it."""

from __future__ import annotations

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
    """It is not known whether the shape can be enforced; a retry may help."""


class Unknown(Exception):
    """The shape has to be compiled first."""


@frozen
class Shape:
    """What an answer has to look like, with what the request calls it (`field`).

    `text` is a JSON Schema, a regular expression in Rust's syntax, a JSON list of strings, or a GBNF or
    Lark grammar. A "loose schema" (without what cannot be enforced) and a "reply" are the daemon's own.
    """

    kind: Kind
    text: str
    field: str = "schema"
    loosened: tuple[str, ...] = ()
