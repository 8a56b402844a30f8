"""Incremental parsing of one answer into text, reasoning and tool calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from attrs import evolve

from uma_trio.engine.messages import Finished, FinishReason, StreamItem, TokenOut
from uma_trio.text.replies import CallEnd, CallStart, Content, Event, ReplyParser
from uma_trio.text.stream import StopStrings

Reason = FinishReason | Literal["tool_calls"]


class Reading:
    """Reads one answer, item by item. Without a parser all text is content.

    Text that may be the beginning of a marker is held back, so a token's events may contain the
    text of an earlier token.

    With a parser, the strings of `stop` end the content: not the reasoning, and not the markup
    of a call, which the engine cannot distinguish. Then every item has to pass :meth:`take` as it
    arrives from the engine, before :meth:`token` and :meth:`end` return its events.
    """

    __slots__ = (
        "_events",
        "_n_tokens",
        "_parser",
        "_stops",
        "cut_call",
        "loosened",
        "n_calls",
        "reasoning_tokens",
        "reshaped",
    )

    def __init__(
        self,
        parser: ReplyParser | None = None,
        loosened: tuple[str, ...] = (),
        stop: Sequence[str] = (),
        reshaped: tuple[str, ...] = (),
    ) -> None:
        self._parser = parser
        self._stops = StopStrings(stop) if parser is not None and any(stop) else None
        self._events: deque[list[Event]] = deque()  # of the items that were taken
        self._n_tokens = 0
        #: The tools whose arguments are not constrained to their whole schema.
        self.loosened = loosened
        #: The changes to the conversation that the chat template required.
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

    @property
    def stops(self) -> bool:
        """Whether a stop string may end the content here, so that :meth:`take` is needed."""
        return self._stops is not None

    @property
    def stopped(self) -> str | None:
        """The stop string that has ended the content."""
        return None if self._stops is None else self._stops.stopped

    def take(self, item: StreamItem) -> StreamItem | None:
        """Parse an item ahead; return the item that the reader gets instead, if any.

        After a stop string only the terminal item is returned, with reason "stop" in any case.
        """
        if isinstance(item, TokenOut):
            if self.stopped is not None:
                return None
            self._n_tokens += 1
            self._events.append(self._read(item))
        elif isinstance(item, Finished):
            was_stopped = self.stopped is not None
            self._events.append([] if was_stopped else self._read_end(item))
            if was_stopped or (self.stopped is not None and item.reason in ("stop", "length")):
                return evolve(
                    item,
                    reason="stop",
                    text="",
                    stop=self.stopped,
                    completion_tokens=self._n_tokens,
                    code=None,
                    message=None,
                )
        return item

    def token(self, item: TokenOut) -> list[Event]:
        """Return the events that are certain after this token."""
        return self._events.popleft() if self.stops else self._read(item)

    def end(self, finished: Finished) -> list[Event]:
        """Return the events of the text that was held back until the end."""
        return self._events.popleft() if self.stops else self._read_end(finished)

    def _read(self, item: TokenOut) -> list[Event]:
        if self._parser is None:
            return [Content(item.text)] if item.text else []
        events = self._until_stop(self._parser.feed(item.text))
        self._count(events)
        if self._parser.thinking:
            self.reasoning_tokens += 1
        return events

    def _read_end(self, finished: Finished) -> list[Event]:
        if self._parser is None:
            return [Content(finished.text)] if finished.text else []
        cut = finished.reason != "stop" or finished.stop is not None
        # Half a character at the end of a cut answer may be in a marker that would be cut with it.
        text = finished.text.removesuffix("\ufffd") if cut else finished.text
        events = self._parser.feed(text)
        events += self._parser.finish(cut=cut)
        events = self._until_stop(events)
        if self._stops is not None and (held := self._stops.finish()):
            events.append(Content(held))
        self.cut_call = any(isinstance(event, CallEnd) and event.cut for event in events)
        self._count(events)
        return events

    def _until_stop(self, events: list[Event]) -> list[Event]:
        """Return the events up to a stop string in the content, which spans nothing but content."""
        stops = self._stops
        if stops is None:
            return events
        found: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                text = stops.push(event.text)
                if text:
                    found.append(Content(text))
                if stops.stopped is not None:
                    break
            else:
                if held := stops.finish():
                    found.append(Content(held))
                found.append(event)
        return found

    def reason(self, finished: Finished) -> Reason:
        """Return the reason of the end: "tool_calls" after a call, but not inside one."""
        called = self.n_calls and finished.reason == "stop" and not self.cut_call
        return "tool_calls" if called else finished.reason

    def _count(self, events: Iterable[Event]) -> None:
        self.n_calls += sum([isinstance(event, CallStart) for event in events])
