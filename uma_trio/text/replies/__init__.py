"""The parser of a model's reply: text, reasoning, tool calls.

A :class:`ReplyFormat` describes how a model writes them; :meth:`ReplyParser.feed` reads it piece by piece.
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
