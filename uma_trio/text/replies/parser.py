"""From the text of a reply to its events, as it comes. Sans-IO: text in, events out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from uma_trio.text.chat import Tool
from uma_trio.text.replies.bodies import Calls
from uma_trio.text.replies.channels import channels
from uma_trio.text.replies.events import Event
from uma_trio.text.replies.format import ReplyFormat, Thought
from uma_trio.text.replies.frames import Frames
from uma_trio.text.replies.harmony import harmony
from uma_trio.text.replies.maker import Maker, pass_on
from uma_trio.text.replies.source import Source, Steps, compact


def new_id() -> str:
    """Return an id of a call: nine letters and digits, which every family's template takes."""
    return f"c{secrets.token_hex(4)}"


class ReplyParser:
    """Reads one reply of a model that writes by `format`.

    How the text is cut into pieces changes nothing but how the events are cut. Text that is not what
    the format expects comes back as :class:`Content`: nothing is lost but markers and the white
    space around them, and nothing is raised. Once a call has begun, what follows up to its end is its
    arguments, JSON or not. Arguments whose end has not come are never whole JSON. `thinking` says that
    the prompt opened the reasoning already, `continued` that some of it stands there, so that white
    space at the beginning is part of it. `tools` are those of the request: they tell texts from other
    values where calls are tagged. Without `calls`, markers of calls are text.
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
        """Whether what comes next is reasoning, as far as is known."""
        return self._maker.thinking

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the reply; return what it says for certain."""
        if not text:
            return []
        self._source.feed(text)
        next(self._run)
        return self._maker.taken()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return what was held back; the reply is over, and nothing may be fed behind it.

        If it was `cut`, by a bound or a stop string, what has begun like a call or a marker is dropped:
        it would have become one. If the model ended it, that is text.
        """
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

            def think() -> Steps[None]:
                return self._think(thought or Thought("", ""), calls)

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
        """Read reasoning up to its closing marker, or to a call: models forget to close it then.

        What stands in the middle of a line is talk about calls, unless it is a control token.
        """
        source, maker = self._source, self._maker
        continued = self._continued and maker.thinking
        maker.thinking = True
        if not continued:
            yield from source.peek()
        triggers = () if calls is None else calls.triggers
        for trigger in triggers:
            if calls is not None and maker.thinking and (yield from source.stands(trigger)):
                yield from calls.read()
        while maker.thinking and (
            found := (yield from pass_on(source, maker, (thought.close, *triggers)))
        ):
            if found == thought.close:
                maker.thinking = False
                yield from source.take(compact(found))
                yield from source.peek()
            elif calls is not None and (found.startswith("<|") or source.begins_line()):
                yield from calls.read()
            else:
                maker.text(source.through(found[0]))
