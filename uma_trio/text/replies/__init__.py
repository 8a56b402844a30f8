"""What a model's reply says: its text, its reasoning, its calls of tools.

A :class:`ReplyFormat` says how a model writes them, a :class:`ReplyParser` reads them from text that
comes in pieces::

    parser = ReplyParser(PLAIN)
    for piece in pieces:
        for event in parser.feed(piece):
            ...
    for event in parser.finish():
        ...
"""

from uma_trio.text.replies.events import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    Said,
    collect,
)
from uma_trio.text.replies.format import PLAIN, ReplyFormat
from uma_trio.text.replies.parser import ReplyParser

__all__ = [
    "PLAIN",
    "Arguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "Reasoning",
    "ReplyFormat",
    "ReplyParser",
    "Said",
    "collect",
]
