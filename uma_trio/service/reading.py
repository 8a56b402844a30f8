"""Parses the items of one answer into text, reasoning and tool calls."""

from __future__ import annotations

from typing import Literal

from uma_trio.engine.messages import Finished, FinishReason, TokenOut
from uma_trio.text.replies import CallEnd, CallStart, Content, Event, ReplyParser

Reason = FinishReason | Literal["tool_calls"]


class Reading:
    """Reads one answer, item by item. Without a parser all text is content.

    Text that may be the beginning of a marker is held back, so a token's events may contain the
    text of an earlier token.
    """

    __slots__ = ("_parser", "cut_call", "loosened", "n_calls", "reasoning_tokens", "reshaped")

    def __init__(
        self,
        parser: ReplyParser | None = None,
        loosened: tuple[str, ...] = (),
        reshaped: tuple[str, ...] = (),
    ) -> None:
        self._parser = parser
        #: The tools whose arguments are not held to their whole schema.
        self.loosened = loosened
        #: What was changed in the conversation, because the chat template refused it.
        self.reshaped = reshaped
        #: Whether the answer ended inside a call.
        self.cut_call = False
        #: How many calls have begun.
        self.n_calls: int = 0
        #: How many tokens were reasoning.
        self.reasoning_tokens: int = 0

    @property
    def plain(self) -> bool:
        """Whether the answer is plain text, so no parser is needed."""
        return self._parser is None

    def token(self, item: TokenOut) -> list[Event]:
        """Return the events that are certain after this token."""
        if self._parser is None:
            return [Content(item.text)] if item.text else []
        events = self._parser.feed(item.text)
        self._count(events)
        if self._parser.thinking:
            self.reasoning_tokens += 1
        return events

    def end(self, finished: Finished) -> list[Event]:
        """Return the events of the text that was held back until the end."""
        if self._parser is None:
            return [Content(finished.text)] if finished.text else []
        cut = finished.reason != "stop" or finished.stop is not None
        # Half a character at the end of a cut answer may be in a marker that would be cut with it.
        text = finished.text.removesuffix("\ufffd") if cut else finished.text
        events = self._parser.feed(text)
        events += self._parser.finish(cut=cut)
        self.cut_call = any(isinstance(event, CallEnd) and event.cut for event in events)
        self._count(events)
        return events

    def reason(self, finished: Finished) -> Reason:
        """Return the reason of the end: "tool_calls" if it came after a call, not inside one."""
        called = self.n_calls and finished.reason == "stop" and not self.cut_call
        return "tool_calls" if called else finished.reason

    def _count(self, events: list[Event]) -> None:
        self.n_calls += sum([isinstance(event, CallStart) for event in events])
