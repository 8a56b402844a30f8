"""The events of a reply, and the builder of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from attrs import frozen

from uma_trio.text.chat import Call, Tool
from uma_trio.text.replies.literals import TEXT, Out, inside, json_of, kinds_of
from uma_trio.text.replies.source import Source, Steps
from uma_trio.text.slices import in_utf8


@frozen
class Content:
    text: str


@frozen
class Reasoning:
    text: str


@frozen
class CallStart:
    """A call begins. `index` counts the calls of one reply from 0, `id` is unique in it."""

    index: int
    id: str
    name: str


@frozen
class Arguments:
    """The next piece of a call's arguments. Joined they are JSON, if the model wrote JSON."""

    index: int
    text: str


@frozen
class CallEnd:
    """The arguments of a call are whole, or with `cut` the reply ended inside them."""

    index: int
    cut: bool = False


Event = Content | Reasoning | CallStart | Arguments | CallEnd


@frozen
class ParsedReply:
    content: str
    reasoning: str
    calls: tuple[Call, ...]


def collect(events: Iterable[Event]) -> ParsedReply:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[CallStart, list[str]]] = []
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, CallStart):
            calls.append((event, []))
        elif isinstance(event, Arguments):
            calls[event.index][1].append(event.text)
    made = tuple(Call(start.id, start.name, "".join(parts)) for start, parts in calls)
    return ParsedReply("".join(content), "".join(reasoning), made)


class Maker:
    """The events of one reply, for a request's tools. `thinking`: the next text is reasoning."""

    __slots__ = ("_ids", "_n", "_tools", "events", "thinking")

    def __init__(self, ids: Callable[[], str], tools: Sequence[Tool], *, thinking: bool) -> None:
        self.events: list[Event] = []
        self.thinking = thinking
        self._ids = ids
        self._n = 0
        self._tools = {tool.name: tool for tool in tools}

    def taken(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def text(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(text) if self.thinking else Content(text))

    def content(self, text: str) -> None:
        if text:
            self.events.append(Content(text))

    def start(self, name: str, id: str = "") -> None:  # noqa: A002
        self.events.append(CallStart(self._n, id or self._ids(), in_utf8(name)))

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(Arguments(self._n, in_utf8(text)))

    def value(
        self,
        kinds: frozenset[str],
        through: Callable[[Out], Steps[bool]],
        read: Callable[[str, frozenset[str]], str] = json_of,
    ) -> Steps[bool]:
        """Add an argument of these kinds, whose text `through` reads; false if the reply ended in it."""
        if kinds == TEXT:
            self.arguments('"')
            whole = yield from through(lambda text: self.arguments(inside(text)))
            self.arguments('"' if whole else "")
            return whole
        parts: list[str] = []
        whole = yield from through(parts.append)
        text = "".join(parts)
        self.arguments(read(text, kinds) if whole else f'"{inside(text)}')
        return whole

    def end(self, *, cut: bool) -> None:
        """End the call; `cut`: its arguments are not whole."""
        self.events.append(CallEnd(self._n, cut))
        self._n += 1

    def has_tool(self, name: str) -> bool:
        return name in self._tools

    def kinds(self, name: str, key: str) -> frozenset[str]:
        """Return the types that an argument may have by its tool's schema; none if unknown."""
        return kinds_of(self.schema(name, key))

    def schema(self, name: str, key: str) -> Any:
        tool = self._tools.get(name)
        properties: Any = {} if tool is None else tool.parameters.get("properties")
        return properties.get(key) if isinstance(properties, dict) else None


def pass_on(
    source: Source, maker: Maker, triggers: tuple[str, ...], *, trims: bool = True
) -> Steps[str]:
    """Pass on text up to one of `triggers`, and return it, unread; "" at the end of the reply.

    With `trims` the white space before it is not read either.
    """
    pattern = _before(triggers, trims)
    firsts = "".join({trigger[0] for trigger in triggers})
    source.drop()
    while True:
        text, at = source.text, source.pos
        end = len(text)
        may_begin = (trims and text[-1:].isspace()) or any(map(text.__contains__, firsts))
        found = pattern.search(text, at) if pattern is not None and may_begin else None
        while found is not None:
            place = found.start(1)
            for trigger in triggers:
                if text.startswith(trigger, place):
                    maker.text(text[at : found.start()])
                    source.pos = found.start()
                    return trigger
            rest = text[place:]
            if any(trigger.startswith(rest) for trigger in triggers):  # or only space is there
                end = found.start()
                break
            found = pattern.search(text, place + 1) if pattern is not None else None
        maker.text(text[at:end])
        source.pos = end
        if not (yield from source.more()):
            rest = source.text[source.pos :]
            if not source.cut or rest.isspace():
                maker.text(rest)
            source.drop_rest()
            return ""


@lru_cache(maxsize=64)
def _before(triggers: tuple[str, ...], trims: bool) -> re.Pattern[str] | None:
    """Return what finds where a trigger may begin, with the white space before it, or that alone."""
    if not triggers:
        return None
    firsts = "|".join(sorted({re.escape(trigger[0]) for trigger in triggers}))
    return re.compile(rf"(?<!\s)\s*({firsts}|\Z)" if trims else f"({firsts})")
