"""Calls in a reply, after their trigger: generators that read a `Source` and drive a `Maker`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from uma_trio.text.replies.format import CallSyntax
from uma_trio.text.replies.literals import CLOSING, TEXT, Literals, elements_of, json_of, quoted
from uma_trio.text.replies.maker import Maker
from uma_trio.text.replies.source import Source, Steps, begun, compact, fits
from uma_trio.text.slices import json_value

_ATOM: Final = re.compile(r"\]<\]\w+\[>\[|<[^<>\s]*>?|\[[^\[\]\s]*\]?|[^\s<\[]+")
_NOT_NAME: Final = re.compile(r"[^\w.:/-]")
_MAX_NAME: Final = 256
_MAX_KEY: Final = 1024


def atoms(marker: str) -> list[str]:
    """Return the tags and words of a marker."""
    return _ATOM.findall(marker)


def _is_tag(atom: str) -> bool:
    return atom[0] in "<[" and len(atom) > 3


class Calls:
    """Reads one section of calls, or one call."""

    def __init__(self, syntax: CallSyntax, source: Source, maker: Maker) -> None:
        self.syntax = syntax
        self._source = source
        self._maker = maker
        marks = atoms(syntax.start)
        first = [mark for mark in marks[1:] if _is_tag(mark)]
        #: How calls are recognised; none for those that have nothing before them.
        self.triggers: tuple[str, ...] = tuple(dict.fromkeys(marks[:1] + first))
        #: The beginning of a reply whose calls have no text before them.
        self.beginning = ""
        if syntax.bare:
            self.triggers, self.beginning = (), (syntax.start.strip() or "{")[0]
        self._section = compact(syntax.section_open)
        opening = atoms(syntax.open)
        #: How a call begins, and how it does for models that leave out the first markers.
        self._opens = ["".join(opening)]
        self._opens += ["".join(opening[n:]) for n, m in enumerate(opening) if n and _is_tag(m)]
        self._known_only = syntax.bare
        self._between = compact(syntax.between)
        self._close = atoms(syntax.close)
        self._named_closer = "{}" in syntax.value_close
        if self._named_closer:
            self._close = ["".join(self._close)]
        self._section_close = atoms(syntax.section_close)
        self._id_open = compact(syntax.id_open)
        self._id_close = compact(syntax.id_close)
        self._after_name = compact(syntax.after_name)
        # A line end next to a value is part of the marker where the template writes one there.
        self._line_before = syntax.key_close[-1:].isspace()
        self._line_behind = "\n" if syntax.value_close[:1].isspace() else ""
        self._behind_value = [compact(syntax.key_open), *self._close]
        self._cut = False  # whether the arguments of the latest call are not whole
        self._body = {
            "object": self._object,
            "named": self._named,
            "tagged": self._tagged,
            "literal": self._literal,
        }[syntax.style]

    def read(self) -> Steps[None]:
        """Read calls from the trigger on; what turns out to be none is text.

        Without the first markers, and inside reasoning, only a known tool makes it a call: a model may write
        about calls there. What a reply cut off here has of an uncertain call is dropped.
        """
        source, syntax, maker = self._source, self.syntax, self._maker
        source.keep()
        n_calls = 0
        source.short = False
        whole = yield from source.take(self._section)
        self._known_only = syntax.bare or maker.thinking or not whole
        while (yield from self._next(first=not n_calls)):
            maker.end(cut=self._cut)
            n_calls += 1
            yield from self._skip(self._close)
            source.keep()
            if not self._section and not syntax.bare:
                break
            if self._between and not (yield from source.take(self._between)):
                break
            if self._section_close and (
                yield from self._source.starts_with(self._section_close[0])
            ):
                break
        if source.short and source.cut:
            source.drop_rest()
            source.kept = False
            return
        if not n_calls and not source.pos:
            yield from source.peek()
            source.pos += 1  # or it would be found again
        text = source.kept_text()
        if n_calls:
            yield from self._skip(self._section_close)
            yield from source.peek()
            text = text.strip()
        maker.text(text)

    def _next(self, *, first: bool) -> Steps[bool]:
        for number, marker in enumerate(self._opens if first else self._opens[:1]):
            if (yield from self._source.take(marker)):
                self._known_only |= number > 0
                return (yield from self._body())
        return False

    def _skip(self, markers: Sequence[str]) -> Steps[None]:
        for marker in markers:
            yield from self._source.take(marker)

    def _object(self) -> Steps[bool]:
        source = self._source
        if (yield from source.peek()) != "{":
            return False
        source.pos += 1
        expected = (self.syntax.name_key, self.syntax.arguments_key, "type")
        members: dict[str, str] = {}
        started = False
        while (yield from source.peek()) == '"':
            key = yield from self._key()
            if key is None or (self.syntax.bare and key not in expected):
                return started
            if key == self.syntax.arguments_key and self._name_of(members) and not started:
                started = True
                self._begin(self._name_of(members), self._id_of(members))
                yield from self._arguments()
            else:
                value = yield from self._whole()
                if value is None:
                    return started
                members.setdefault(key, value)
                if key == self.syntax.name_key and not self._name_of(members):
                    return started
            if (yield from source.peek()) == ",":
                source.pos += 1
        name = self._name_of(members)
        if started or not name or not source.text.startswith("}", source.pos):
            source.pos += started and source.text.startswith("}", source.pos)
            return started
        source.pos += 1
        self._begin(name, self._id_of(members))
        self._maker.arguments(_unwrapped(members.get(self.syntax.arguments_key, "")))
        self._cut = False
        return True

    def _name_of(self, members: Mapping[str, str]) -> str:
        name = _text_of(members.get(self.syntax.name_key, '""'))
        return name if self._is_taken(name) else ""

    def _is_taken(self, name: str) -> bool:
        return not self._known_only or self._maker.has_tool(name)

    def _id_of(self, members: Mapping[str, str]) -> str:
        return _text_of(members.get(self.syntax.id_key, '""'))

    def _begin(self, name: str, id_: str) -> None:
        """Begin a call, which ends the reasoning. Code that read all of its arguments clears `_cut`."""
        self._cut = True
        self._maker.thinking = False
        self._maker.start(name, id_)
        self._source.kept = False

    def _arguments(self) -> Steps[None]:
        if (yield from self._source.peek()) in ("{", "["):
            self._cut = not (yield from self._source.value(self._maker.arguments))
            return
        value = yield from self._whole()
        if value is not None:
            self._cut = False
            self._maker.arguments(_unwrapped(value))

    def _key(self) -> Steps[str | None]:
        """Read a key and the following colon; None if the text is something else."""
        value = yield from self._whole()
        if value is None or not (yield from self._source.take(":")):
            return None
        return _text_of(value)

    def _whole(self) -> Steps[str | None]:
        """Read a value as a whole; None if the reply ends in it."""
        parts: list[str] = []
        whole = yield from self._source.value(parts.append)
        return "".join(parts) if whole else None

    def _named(self) -> Steps[bool]:
        source = self._source
        name, id_ = yield from self._called()
        if not name:
            return False
        first = yield from source.peek()
        if first == "{":
            self._begin(name, id_)
            self._cut = not (yield from source.value(self._maker.arguments))
            return True
        if self._close and (yield from self._source.starts_with(self._close[0])):
            self._begin(name, id_)
            self._maker.arguments("{}")
            self._cut = False
            return True
        return False

    def _called(self) -> Steps[tuple[str, str]]:
        """Read a name up to the arguments, and the id with it; both "" if this is no call."""
        source, before = self._source, ""
        if self._id_close:
            yield from source.peek()
            before = (yield from source.until(_NOT_NAME, _MAX_NAME)) or ""
            if not (yield from source.take(self._id_close)):
                return "", ""
        name, id_ = yield from self._name()
        id_ = id_ or before
        if name and self._id_open and (yield from source.take(self._id_open)):
            id_ = (yield from source.until(_NOT_NAME, _MAX_NAME)) or ""
        if not name or not self._is_taken(name) or not (yield from source.take(self._after_name)):
            return "", ""
        return name, id_

    def _name(self) -> Steps[tuple[str, str]]:
        yield from self._source.peek()
        header = yield from self._source.until(_NOT_NAME, _MAX_NAME)
        if not header or not self.syntax.name_in_id:
            return header or "", ""
        return header.removeprefix("functions.").rpartition(":")[0] or header, header

    def _literal(self) -> Steps[bool]:
        source, syntax, maker = self._source, self.syntax, self._maker
        name, _ = yield from self._called()
        if not name:
            return False
        self._begin(name, "")
        maker.arguments("{")
        close = CLOSING[self._after_name[-1]]
        literals = Literals(source, syntax.quote)
        kinds = partial(maker.kinds, name)
        if not (yield from literals.members(close, maker.arguments, kinds)):
            return self._broken_off()
        maker.arguments("}")
        self._cut = False
        return True

    def _tagged(self) -> Steps[bool]:
        source, syntax, maker = self._source, self.syntax, self._maker
        name, _ = yield from self._called()
        if not name:
            return False
        opener, closer = compact(syntax.key_open), compact(syntax.key_close)
        other = compact(syntax.key_close_json)
        if not (yield from source.starts_with(opener)) and not (yield from self._closes()):
            return False
        self._begin(name, "")
        maker.arguments("{")
        before = ""
        behind_key = re.compile(f"[{re.escape(closer[0] + other[:1])}]")
        while not (self._named_closer and (yield from source.starts_with(self._close[0]))) and (
            yield from source.take(opener)
        ):
            key = yield from source.until(behind_key, _MAX_KEY)
            plain = key is not None and (yield from source.take(closer))
            if key is None or (not plain and not (other and (yield from source.take(other)))):
                return self._broken_off()
            key = key.strip()
            kinds = maker.kinds(name, key)
            maker.arguments(f"{before}{quoted(key)}: ")
            before = ", "
            if other:
                kinds = TEXT if plain else kinds - TEXT
            if not (yield from self._value(name, key, kinds)):
                return self._broken_off()
        if not (yield from self._closes()):
            return self._broken_off()
        maker.arguments("}")
        self._cut = False
        return True

    def _closes(self) -> Steps[bool]:
        """Whether a call ends here: by its marker, or with the reply, if the model ended that."""
        for marker in self._close:
            if (yield from self._source.starts_with(marker)):
                return True
        source = self._source
        return (source.ended and not source.cut) or not (self._close or source.short)

    def _broken_off(self) -> bool:
        """Leave a call that has begun open. What there is of the next marker or key is no text."""
        if self._source.short:
            self._source.drop_rest()
        return True

    def _value(self, name: str, key: str, kinds: frozenset[str]) -> Steps[bool]:
        """Read a value up to its closing tag; false if the reply ended in it, and its JSON is left open."""
        source = self._source
        if self._line_before and (source.pos < len(source.text) or (yield from source.more())):
            source.pos += source.text.startswith("\n", source.pos)
        closer, read = self.syntax.value_close.strip(), json_of
        if self._named_closer:
            closer = closer.replace("{}", key)
            read = partial(elements_of, self.syntax.key_open[:-1], self._maker.schema(name, key))
        return (yield from self._maker.value(kinds, partial(self._up_to, closer), read))

    def _up_to(self, closer: str, out: Callable[[str], object]) -> Steps[bool]:
        """Pass on a text up to its closing tag, without a line end before it. False if the reply ended first."""
        source = self._source
        while True:
            text, at = source.text, source.pos
            place = text.find(closer, at)
            while place >= 0 and (goes_on := self._continues(place + len(closer))) is False:
                place = text.find(closer, place + 1)
            if place >= 0 and goes_on:
                out(text[at:place].removesuffix(self._line_behind))
                source.pos = place + len(closer)
                return True
            safe = len(text) - begun(text, closer) if place < 0 else place
            safe -= safe > at and text[safe - 1] == self._line_behind
            out(text[at:safe])
            source.pos = safe
            if not (yield from source.more()):
                if place >= 0:  # and what has begun behind it may be what goes on there
                    source.pos = place + len(closer)
                elif not source.cut:
                    out(source.text[safe:])
                return place >= 0

    def _continues(self, place: int) -> bool | None:
        """Whether what may follow a value follows at `place`; None if that is not certain yet."""
        source = self._source
        found = [fits(source.text, place, marker) for marker in self._behind_value]
        if any(end is not None and end >= 0 for end in found):
            return True
        return None if None in found else False


def _text_of(value: str) -> str:
    decoded = json_value(value, "")
    return decoded if isinstance(decoded, str) else value


def _unwrapped(arguments: str) -> str:
    if not arguments or arguments == "null":
        return "{}"
    return _text_of(arguments) if arguments.startswith('"') else arguments
