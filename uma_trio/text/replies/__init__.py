"""What a model's reply says: text, reasoning, calls of tools.

A :class:`ReplyFormat` says how a model writes them; :meth:`ReplyParser.feed` reads it piece by piece.
"""

from uma_trio.text.replies.format import PLAIN, ReplyFormat
from uma_trio.text.replies.maker import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    ParsedReply,
    Reasoning,
    collect,
)
from uma_trio.text.replies.parser import ReplyParser

__all__ = [
    "PLAIN",
    "Arguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "ParsedReply",
    "Reasoning",
    "ReplyFormat",
    "ReplyParser",
    "collect",
]
