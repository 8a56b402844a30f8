"""Values that are written as text in a reply: which JSON they are, by the argument's schema."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from uma_trio.text.replies.source import Source, Steps

TEXT: Final = frozenset({"string"})
_MOST_LITERAL: Final = 4096  # characters that are read as Python: the parser holds the GIL
_TAG: Final = re.compile(r"<(/?)([^<>]+)>")
_ITEM: Final = "item"
_KINDS: Final[Mapping[type, str]] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def kinds_of(schema: Any) -> frozenset[str]:
    """Return the types that the top level of a schema allows; none if it does not restrict them."""
    if not isinstance(schema, dict):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(words, list) and words:
        return frozenset(_KINDS.get(type(word), "") for word in words)
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(several, list) and all(parts := [kinds_of(part) for part in several]):
            return frozenset().union(*parts)
    return frozenset()


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a value: itself, that of a Python literal, or a string that holds it.

    Models write ``True`` and ``None`` where templates do. Other kinds than `kinds` are texts, if allowed.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
        written = text
    except (ValueError, RecursionError):
        try:
            value = _python(text.strip())
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return json.dumps(text, ensure_ascii=False)
    kind = _KINDS.get(type(value), "")
    allowed = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return written if allowed or "string" not in kinds else json.dumps(text, ensure_ascii=False)


def elements_of(mark: str, schema: Any, text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a value with members in elements (``item`` in lists), each tag after `mark`."""
    root: list[tuple[str, Any]] = []
    stack, texts, schemas = [root], [text.partition(mark)[0]], [schema]
    for piece in text.split(mark)[1:]:
        tag = _TAG.match(piece)
        if tag is None or len(stack) > _DEPTH or (tag[1] and len(stack) == 1):
            return json_of(text, kinds)
        if not tag[1]:
            stack.append([])
            texts.append(piece[tag.end() :])
            schemas.append(_member(schemas[-1], tag[2]))
            continue
        value = _element(stack.pop(), texts.pop(), schemas.pop())
        stack[-1].append((tag[2], value))
    if len(stack) > 1:
        return json_of(text, kinds)
    return _element(root, texts[0], schema)


def _member(schema: Any, key: str) -> Any:
    inner: Any = None
    if isinstance(schema, dict):
        properties = schema.get("properties")
        inner = properties.get(key) if isinstance(properties, dict) else None
        inner = schema.get("items") if inner is None and key == _ITEM else inner
    return inner


def _element(members: list[tuple[str, str]], text: str, schema: Any) -> str:
    kinds = kinds_of(schema)
    if not members:
        empty = {frozenset({"object"}): "{}", frozenset({"array"}): "[]"}.get(kinds - {"null"})
        return empty if empty is not None and not text.strip() else json_of(text, kinds)
    if all(key == _ITEM for key, _ in members) and "object" not in kinds:
        return f"[{', '.join([value for _, value in members])}]"
    written = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members]
    return f"{{{', '.join(written)}}}"


def _python(text: str) -> Any:
    """Return what a literal of Python means. Raises what :func:`ast.literal_eval` does."""
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    if text[:1] not in ("[", "{") or len(text) > _MOST_LITERAL:
        raise ValueError(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.literal_eval(text)


def _no_number(word: str) -> Any:
    """Refuse ``NaN`` and its kind, which JSON does not know."""
    raise ValueError(word)


CLOSING: Final = {"{": "}", "[": "]", "(": ")"}
_DEPTH: Final = 64  # each level is a generator that every piece of the reply goes through
_MAX_KEY: Final = 1024
_MAX_SCALAR: Final = 1024
_KEY_END: Final = re.compile(r"[:=,(){}\[\]]")
_SCALAR_END: Final = re.compile(r"[,})\]]")
_ESCAPE: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL
)
_LONGEST_ESCAPE: Final = 10
_ESCAPES: Final = {
    **{char: f"\\{char}" for char in "bfnrt"},
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\n": "",
    "/": "/",
}
_NULL: Final = frozenset({"null"})  # texts are quoted, so a bare None is none, whatever the schema
_NO_KINDS: Final[frozenset[str]] = frozenset()

Out = Callable[[str], object]


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def inside(text: str) -> str:
    """Return a text escaped for a JSON string."""
    return quoted(text)[1:-1]


class Literals:
    """Reads values of one notation. `quote` is its own; usual quotes are read, too."""

    __slots__ = ("_quotes", "_source")

    def __init__(self, source: Source, quote: str) -> None:
        self._source = source
        self._quotes = tuple(dict.fromkeys((quote, '"', "'")))

    def members(
        self, close: str, out: Out, kinds: Callable[[str], frozenset[str]] | None, depth: int = 0
    ) -> Steps[bool]:
        """Read members and the bracket that closes them; false if it does not come.

        Their JSON goes to `out`, without brackets. `kinds` are the types of a member; None in a list.
        """
        before, allowed = "", _NO_KINDS
        while item := (yield from self._next(close)):
            if kinds is not None:
                key = yield from self._key()
                if key is None:
                    return False
                before, allowed = f"{before}{quoted(key)}: ", kinds(key)
            out(before)
            before = ", "
            if not (yield from self._value(out, allowed, depth)):
                return False
        return item is None

    def _next(self, close: str) -> Steps[bool | None]:
        """Advance to the next item; None after the closing bracket, false if the reply ended."""
        source = self._source
        while char := (yield from source.peek()):
            source.pos += char in (close, ",")
            if char == close:
                return None
            if char != ",":
                return True
        return False

    def _key(self) -> Steps[str | None]:
        """Read a key, quoted or not, and its separator."""
        source = self._source
        quote = yield from self._quote()
        if quote:
            parts: list[str] = []
            if not (yield from self._text(quote, parts.append)):
                return None
            key: str | None = json.loads(f'"{"".join(parts)}"')
        else:
            bare = yield from source.until(_KEY_END, _MAX_KEY)
            key = (bare or "").strip() or None
        char = "" if key is None else (yield from source.peek())
        if not char or char not in ":=":
            return None
        source.pos += 1
        return key

    def _value(self, out: Out, kinds: frozenset[str], depth: int) -> Steps[bool]:
        source = self._source
        first = yield from source.peek()
        if first and first in CLOSING and depth < _DEPTH:
            source.pos += 1
            brackets, kinds_of = ("{}", lambda _: _NO_KINDS) if first == "{" else ("[]", None)
            out(brackets[0])
            whole = yield from self.members(CLOSING[first], out, kinds_of, depth + 1)
            out(brackets[1] if whole else "")
            return whole
        quote = yield from self._quote()
        if quote:
            out('"')
            whole = yield from self._text(quote, out)
            out('"' if whole else "")
            return whole
        word = yield from source.until(_SCALAR_END, _MAX_SCALAR)
        if not word:
            return False
        out(json_of(word.strip(), kinds and kinds | _NULL))
        return True

    def _quote(self) -> Steps[str]:
        first = yield from self._source.peek()
        for quote in self._quotes:
            if first and quote[0] == first and (yield from self._source.take(quote)):
                return quote
        return ""

    def _text(self, quote: str, out: Out) -> Steps[bool]:
        """Read a text up to its closing quote. Only one of a single character can be escaped."""
        if len(quote) > 1:
            return (yield from self._source.through_text(quote, lambda text: out(inside(text))))
        source, special = self._source, re.compile(rf"[{quote}\\]")
        while True:
            found = special.search(source.text, source.pos)
            end = len(source.text) if found is None else found.start()
            out(inside(source.text[source.pos : end]))
            source.pos = end
            if found is None:
                if not (yield from source.more()):
                    return False
            elif found[0] == quote:
                source.pos += 1
                return True
            elif (escaped := (yield from self._escaped())) is None:
                return False
            else:
                out(escaped)

    def _escaped(self) -> Steps[str | None]:
        """Read an escape sequence, in the form of a JSON string; None if it is incomplete."""
        source = self._source
        while (found := _ESCAPE.match(source.text, source.pos)) is None:
            if len(source.text) - source.pos >= _LONGEST_ESCAPE:
                source.pos += 1
                return "\\\\"
            if not (yield from source.more()):
                return None
        source.pos = found.end()
        kind, digits = found[0][1], found[0][2:]
        if kind == "u":  # a surrogate pair, as in JSON
            return f"\\u{digits}"
        if kind in "xU" and digits:
            number = int(digits, 16)
            return inside(chr(number)) if number <= 0x10FFFF else inside(found[0])
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        return inside(kind if kind in "\"'\\" else found[0])
