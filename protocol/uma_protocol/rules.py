"""Rules for the values of a request: one class for each kind of value, and the texts of faults.

A rule describes a value (`a string of 3 bytes`) and never quotes text, because the text may be a
prompt.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_SHOWN = 40
_SLICE = 16_384

# What a person would call a name. Anything else may be text that went astray.
_PLAIN = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_SHOWN}}}")

# C0, DEL and C1: nothing that a terminal or a log line could trip over.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


class FieldFault(NamedTuple):
    """A field, as a path from the top of the document, and its problem."""

    field: str
    problem: str


class Rule(Protocol):
    """The rule for one value."""

    @property
    def text(self) -> str:
        """The rule in words, to stand after `must be`."""

    def check(self, path: str, value: Any) -> FieldFault | None:
        """The first fault of a value found at a path, or None."""


class Field(NamedTuple):
    """One field of a request.

    HTTP accepts it under its `aliases`, too, and converts it by `read`. A model's configuration may set it if
    `model_default` is true.
    """

    name: str
    rule: Rule
    note: str
    required: bool = False
    aliases: tuple[str, ...] = ()
    model_default: bool = False
    read: Callable[[Any], Any] | None = None


class Text:
    """A string, with a length in bytes of UTF-8."""

    def __init__(self, low: int, high: int | None = None, *, printable: bool = False) -> None:
        self._low, self._high, self._printable = low, high, printable

    @property
    def text(self) -> str:
        """The rule in words."""
        if self._high is None:
            return "a string" if self._low == 0 else "a string that is not empty"
        kind = " without control characters" if self._printable else ""
        return f"a string of {self._low} to {self._high} bytes{kind}"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """Length is counted in bytes, which is what a buffer somewhere has to hold."""
        if not isinstance(value, str):
            return _wrong(path, self, value)
        try:
            size = _utf8_size(value)
        except UnicodeEncodeError:
            return FieldFault(path, "must be text that UTF-8 can express, without lone surrogates")
        if size < self._low or (self._high is not None and size > self._high):
            return _wrong(path, self, value)
        if self._printable and _CONTROL.search(value):
            return FieldFault(path, f"must be {self.text}, but it contains one")
        return None


class Integer:
    """A whole number in a range. `true` is not 1, and 1.0 is not 1."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    @property
    def text(self) -> str:
        """The rule in words."""
        return f"an integer from {self._low} to {self._high}"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """The type is compared exactly: bool is a subclass of int."""
        if type(value) is int and self._low <= value <= self._high:
            return None
        return _wrong(path, self, value)


class Number:
    """A finite number in a range, with or without a decimal point."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high

    @property
    def text(self) -> str:
        """The rule in words."""
        return f"a number from {self._low:.16g} to {self._high:.16g}"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """NaN fails every comparison, hence also this one."""
        if type(value) in (int, float) and self._low <= value <= self._high:
            return None
        return _wrong(path, self, value)


class Flag:
    """true or false."""

    text = "true or false"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """0 and 1 are numbers."""
        return None if type(value) is bool else _wrong(path, self, value)


class OneOf:
    """One of a few words."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = tuple(words)

    @property
    def text(self) -> str:
        """The rule in words."""
        return "one of " + ", ".join(self._words)

    def check(self, path: str, value: Any) -> FieldFault | None:
        """The word found is not repeated: whoever swaps two fields puts a prompt here."""
        return (
            None if isinstance(value, str) and value in self._words else _wrong(path, self, value)
        )


class ListOf:
    """A list of values of one kind, with a length."""

    def __init__(self, low: int, high: int, item: Rule, plural: str) -> None:
        self._low, self._high, self._item, self._plural = low, high, item, plural

    @property
    def text(self) -> str:
        """The rule in words."""
        return f"a list of {self._low} to {self._high} {self._plural}"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """The first item at fault is named by its position, from 0."""
        if not isinstance(value, list | tuple) or not self._low <= len(value) <= self._high:
            return _wrong(path, self, value)
        faults = (self._item.check(f"{path}[{i}]", item) for i, item in enumerate(value))
        return next((fault for fault in faults if fault), None)


class Record:
    """An object with fields of its own."""

    def __init__(self, *fields: Field) -> None:
        self.fields = fields

    @property
    def text(self) -> str:
        """The rule in words."""
        return "an object with " + ", ".join(
            f"`{field.name}` ({field.rule.text})" for field in self.fields
        )

    def check(self, path: str, value: Any) -> FieldFault | None:
        """Fields inside are named by a dotted path."""
        if not isinstance(value, dict):
            return _wrong(path, self, value)
        return check(self.fields, value, prefix=f"{path}.")


class Object:
    """Any object of at most `high` bytes."""

    def __init__(self, high: int) -> None:
        self._high = high

    @property
    def text(self) -> str:
        """The rule in words."""
        return f"an object of at most {self._high} bytes of JSON"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """Size is that of the compact encoding, which is what somebody else has to carry."""
        if not isinstance(value, dict):
            return _wrong(path, self, value)
        least = _least_bytes(value, self._high)
        if least > self._high:
            return FieldFault(path, f"must be {self.text}, but it takes at least {least}")
        try:
            compact = json.dumps(
                value, ensure_ascii=False, allow_nan=False, separators=(",", ":")
            ).encode()
        except (TypeError, ValueError, RecursionError):
            return FieldFault(
                path, "must be plain JSON: finite numbers and valid text, not too deep"
            )
        if len(compact) > self._high:
            return FieldFault(path, f"must be {self.text}, but it takes {len(compact)}")
        return None


class ByToken:
    """An object with a number for each of at most `most` token ids.

    In JSON the names of its members are strings of digits.
    """

    _ID = re.compile("0|[1-9][0-9]{0,9}")

    def __init__(self, most: int, number: Rule) -> None:
        self._most, self._number = most, number

    @property
    def text(self) -> str:
        """The rule in words."""
        return (
            f"an object of at most {self._most} token ids, each with {self._number.text}, "
            'such as {"15043": -1}'
        )

    def check(self, path: str, value: Any) -> FieldFault | None:
        """A number at fault is named by its id; a name at fault is not repeated."""
        if not isinstance(value, dict) or len(value) > self._most:
            return _wrong(path, self, value)
        for name, number in value.items():
            if not self._ID.fullmatch(str(name)) or int(name) > MAX_INT32:
                return FieldFault(path, f"must be {self.text}, but a name is not a token id")
            fault = self._number.check(f"{path}.{name}", number)
            if fault is not None:
                return fault
        return None


class Either:
    """A value that one of two rules allows."""

    def __init__(self, one: Rule, other: Rule) -> None:
        self._one, self._other = one, other

    @property
    def text(self) -> str:
        """The rule in words."""
        return f"{self._one.text}, or {self._other.text}"

    def check(self, path: str, value: Any) -> FieldFault | None:
        """A list at fault is described by the rule for lists, any other value by both rules."""
        if self._one.check(path, value) is None:
            return None
        fault = self._other.check(path, value)
        if fault is None or isinstance(value, list):
            return fault
        return FieldFault(path, f"must be {self.text}")


class AnyValue:
    """A value that is checked where it is used; `text` says what it should be."""

    def __init__(self, text: str) -> None:
        self.text = text

    def check(self, path: str, value: Any) -> FieldFault | None:
        """Accept the value."""
        return None


def check(
    fields: tuple[Field, ...], document: dict[str, Any], prefix: str = ""
) -> FieldFault | None:
    """The first fault of a document: an unknown field, a missing one, or one against its rule.

    Args:
        fields: what the document may contain.
        document: the parsed object.
        prefix: the path of the document itself, to name its fields by.
    """
    known = {field.name: field for field in fields}
    for name in document:
        if name not in known:
            return FieldFault(prefix + shown(name), f"is not a known field{nearest(name, known)}")
    for field in fields:
        if field.name in document:
            fault = field.rule.check(prefix + field.name, document[field.name])
            if fault is not None:
                return fault
        elif field.required:
            return FieldFault(prefix + field.name, f"is missing: it must be {field.rule.text}")
    return None


def shown(name: str) -> str:
    """A field's name for a message: short, and without anything that disturbs a terminal."""
    return name if _PLAIN.fullmatch(name) else "(a name not repeated here)"


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint that names the closest known word, or nothing when none is close."""
    # The search is quadratic in the length of the name, and the name is the peer's.
    close = difflib.get_close_matches(name, list(known), n=1) if len(name) <= MAX_SHOWN else []
    return f"; did you mean {close[0]}?" if close else ""


def _wrong(path: str, rule: Rule, value: Any) -> FieldFault:
    """Say what a value must be and what kind of thing it is."""
    fix = "; leave the field out to get the default" if value is None else ""
    return FieldFault(path, f"must be {rule.text}, but it is {_describe(value)}{fix}")


def _utf8_size(text: str, errors: str = "strict") -> int:
    """The bytes of a text in UTF-8. One call of `encode` gets a slice, since it holds the GIL."""
    if text.isascii():
        return len(text)
    starts = range(0, len(text), _SLICE)
    return sum(len(text[at : at + _SLICE].encode(errors=errors)) for at in starts)


def _least_bytes(value: Any, most: int) -> int:
    """A number of bytes that a value takes in JSON at least. Looks at no more than it takes to exceed `most`."""
    total, left = 0, [value]
    while left and total <= most:
        found = left.pop()
        if isinstance(found, str):
            total += len(found) + 2
        elif isinstance(found, dict):
            total += 2 + 3 * len(found)
            if total <= most:
                total += sum(len(name) for name in found if isinstance(name, str))
                left += found.values()
        elif isinstance(found, list | tuple):
            total += 2 + max(0, len(found) - 1)
            if total <= most:
                left += found
        else:
            total += 1
    return total


def _describe(value: Any) -> str:
    """A value in words, without any of its text."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            small = math.isfinite(value) and abs(value) < 10**18
            return str(value) if small else "a number out of any range"
        case str():
            return f"a string of {_utf8_size(value, 'replace')} bytes"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return "an object"
