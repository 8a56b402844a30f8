"""Incremental parser of replies. Sans-IO: text in, events out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial

from uma_trio.text.chat import Tool
from uma_trio.text.replies.bodies import Calls
from uma_trio.text.replies.format import ReplyFormat, Thought
from uma_trio.text.replies.framed import Frames, channels, harmony
from uma_trio.text.replies.maker import Event, Maker, pass_on
from uma_trio.text.replies.source import Source, Steps, compact


def new_id() -> str:
    """Return an id of nine letters and digits, which every family's template accepts."""
    return f"c{secrets.token_hex(4)}"


class ReplyParser:
    """Reads one reply in a `format`.

    How the text is cut into pieces only changes how events are cut. Unexpected text is :class:`Content`:
    nothing is lost but markers and white space around them, and nothing raises. What follows the beginning
    of a call is its arguments, JSON or not; without their end they are never whole JSON. The prompt may have
    opened reasoning (`thinking`), with some of it (`continued`: white space at the beginning belongs to it).
    The request's `tools` separate texts from other values in tags. Without `calls`, their markers are text.
    """

    __slots__ = ("_continued", "_format", "_maker", "_run", "_source")

    def __init__(
        self,
        format: ReplyFormat,  # noqa: A002
        *,
        thinking: bool = False,
        continued: bool = False,
        tools: Sequence[Tool] = (),
        calls: bool = True,
        ids: Callable[[], str] = new_id,
    ) -> None:
        self._format = format
        self._continued = continued
        self._source = Source()
        self._maker = Maker(ids, tools, thinking=thinking)
        syntax = format.calls if calls else None
        style = "" if format.calls is None else format.calls.style
        if style == "harmony":
            self._run = harmony(self._source, self._maker, calls=calls)
        elif style == "channels":
            self._run = channels(self._source, self._maker, calls=calls)
        else:
            made = None if syntax is None else Calls(syntax, self._source, self._maker)
            self._run = self._reply(made)
        next(self._run)

    @property
    def thinking(self) -> bool:
        """Whether the next text is reasoning, as far as is certain."""
        return self._maker.thinking

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        self._source.feed(text)
        next(self._run)
        return self._maker.taken()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return what was held back. Half a call or marker is dropped if the reply was `cut`, else it is text."""
        self._source.ended = True
        self._source.cut = cut
        next(self._run, None)
        return self._maker.taken()

    def _reply(self, calls: Calls | None) -> Steps[None]:
        yield
        source, maker, thought = self._source, self._maker, self._format.thought
        if thought is not None:
            opened = yield from source.take(compact(thought.open))
            if opened or maker.thinking:
                yield from self._think(thought, calls)
            elif (yield from source.take(compact(thought.close))):  # of a thought that is empty
                yield from source.peek()
        syntax = self._format.calls
        if syntax is not None and syntax.message_open:
            think = partial(self._think, thought or Thought("", ""), calls)
            yield from Frames(syntax, thought, source, maker, think).read(calls)
            return
        if calls is None:
            yield from pass_on(source, maker, ())
            return
        if calls.beginning and (yield from source.first()) == calls.beginning:
            yield from calls.read()
        while (yield from pass_on(source, maker, calls.triggers)):
            yield from calls.read()

    def _think(self, thought: Thought, calls: Calls | None) -> Steps[None]:
        """Read reasoning up to its closing marker, or to a call: models forget to close it then."""
        source, maker = self._source, self._maker
        continued = self._continued and maker.thinking
        maker.thinking = True
        if not continued:
            yield from source.peek()
        triggers = () if calls is None else calls.triggers
        for trigger in triggers:
            if calls is not None and maker.thinking and (yield from source.starts_with(trigger)):
                yield from calls.read()
        while maker.thinking and (
            found := (yield from pass_on(source, maker, (thought.close, *triggers)))
        ):
            if found == thought.close:
                maker.thinking = False
                yield from source.take(compact(found))
                yield from source.peek()
            # In the middle of a line anything but a control token is talk about calls.
            elif calls is not None and (found.startswith("<|") or source.begins_line()):
                yield from calls.read()
            else:
                maker.text(source.through(found[0]))
