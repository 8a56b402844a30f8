"""From the text of a reply to its events, as it comes. Sans-IO: text in, events out."""

from __future__ import annotations

from uma_trio.text.replies.events import Content, Event
from uma_trio.text.replies.format import ReplyFormat


class ReplyParser:
    """Reads one reply of a model that writes by `format`.

    How the text is cut into pieces changes nothing but how the events are cut. Text that is not what
    the format expects comes back as :class:`Content`; nothing is lost, and nothing is raised.
    """

    __slots__ = ("_format",)

    def __init__(self, format: ReplyFormat) -> None:  # noqa: A002
        self._format = format

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the reply; return what it says for certain."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Return what was held back; the reply is over."""
        return []
