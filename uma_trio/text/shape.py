"""What an answer can be asked to look like. To enforce it is :mod:`uma_trio.text.constrain`'s."""

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


class Unconstrainable(Exception):
    """What is asked cannot be enforced, or is none; the message says why, to stand after its name."""


class NotChecked(Unconstrainable):
    """It is not known whether the shape can be enforced; to ask again may help."""


class Unknown(Exception):
    """The shape has to be compiled before an answer can be held to it."""


@frozen
class Shape:
    """What an answer has to look like.

    `text` is a JSON Schema, a regular expression in Rust's syntax, a JSON list of strings, or a
    grammar, GBNF or Lark. `field` is what the request calls it, for messages. The last two kinds are
    the daemon's own: a schema of which what cannot be enforced is left out, and a grammar of a reply.
    `loosened` is what was left out of a schema before.
    """

    kind: Kind
    text: str
    field: str = "schema"
    loosened: tuple[str, ...] = ()
