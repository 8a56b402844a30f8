"""How a model writes its replies: a record that parser and grammar are both driven by."""

from __future__ import annotations

from typing import Final

from attrs import frozen


@frozen
class ReplyFormat:
    """How a model marks reasoning and calls of tools in its replies. See the parser."""

    name: str


PLAIN: Final = ReplyFormat("plain")
