"""Replies that are rows of messages, each with a header: those of Muse and Solar Open."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from uma_trio.text.replies.bodies import Calls, atoms
from uma_trio.text.replies.format import CallSyntax, Thought
from uma_trio.text.replies.maker import Maker, pass_on
from uma_trio.text.replies.source import Source, Steps, compact

_MAX_HEADER: Final = 512


class Frames:
    """Reads the messages of one reply. `think` reads reasoning up to its end."""

    def __init__(
        self,
        syntax: CallSyntax,
        thought: Thought | None,
        source: Source,
        maker: Maker,
        think: Callable[[], Steps[None]],
    ) -> None:
        self._source, self._maker, self._think = source, maker, think
        self._open = compact(syntax.message_open)
        self._thought = "" if thought is None else compact(thought.open)
        self._text = compact(syntax.text_header)
        before, _, behind = syntax.call_header.partition("{}")
        self._call, self._behind_name = compact(before), compact(behind)
        self._first = atoms(syntax.message_open)[0]
        self._ends = tuple(syntax.message_ends.split())

    def read(self, calls: Calls | None) -> Steps[None]:
        """Read messages, except for reasoning in front of them."""
        source = self._source
        triggers = () if calls is None else calls.triggers
        yield from self._header()
        while found := (
            yield from pass_on(source, self._maker, (*triggers, self._first, *self._ends))
        ):
            if found in self._ends:
                yield from source.take(found)
                yield from self._header()
            elif calls is not None and found in triggers:
                yield from calls.read()
            elif not (yield from self._header()):
                self._maker.text(source.through(found[0]))

    def _header(self) -> Steps[bool]:
        source = self._source
        found = False
        while True:
            found = (yield from source.take(self._open)) or found
            if not self._thought or not (yield from source.take(self._thought)):
                break
            yield from self._think()
            found = True
        if self._text and (yield from source.take(self._text)):
            yield from source.peek()
            return True
        return (yield from self._call_header()) or found

    def _call_header(self) -> Steps[bool]:
        source, end = self._source, re.compile(re.escape(self._behind_name))
        if not self._call or not (yield from source.stands(self._call)):
            return False
        source.keep()
        whole = yield from source.take(self._call)
        if self._behind_name:
            yield from source.until(end, _MAX_HEADER)
            whole = yield from source.take(self._behind_name)
        text = source.kept_text()
        self._maker.text("" if whole or source.cut else text)
        return True
