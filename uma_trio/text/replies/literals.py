"""Values that are written as text in a reply: which JSON they are, by the argument's schema."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

TEXT: Final = frozenset({"string"})
_MOST_LITERAL: Final = 4096  # characters that are read as Python: the parser holds the GIL
_TAG: Final = re.compile(r"<(/?)([^<>]+)>")
_ITEM: Final = "item"
_DEPTH: Final = 64
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
    """Return the types that a schema allows, as far as its top says so; none if it does not."""
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

    Templates that do not write JSON write ``True`` and ``None``, and so do models. A value that is none of
    the `kinds`, where texts are allowed, is a text.
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
    """Return the JSON of a value whose members are elements, each tag behind `mark`.

    Lists have elements of the name ``item``. Anything else is read by `json_of`.
    """
    root: list[tuple[str, Any]] = []
    stack, said, schemas = [root], [text.partition(mark)[0]], [schema]
    for piece in text.split(mark)[1:]:
        tag = _TAG.match(piece)
        if tag is None or len(stack) > _DEPTH or (tag[1] and len(stack) == 1):
            return json_of(text, kinds)
        if not tag[1]:
            stack.append([])
            said.append(piece[tag.end() :])
            schemas.append(_member(schemas[-1], tag[2]))
            continue
        value = _element(stack.pop(), said.pop(), schemas.pop())
        stack[-1].append((tag[2], value))
    if len(stack) > 1:
        return json_of(text, kinds)
    return _element(root, said[0], schema)


def _member(schema: Any, key: str) -> Any:
    inner: Any = None
    if isinstance(schema, dict):
        properties = schema.get("properties")
        inner = properties.get(key) if isinstance(properties, dict) else None
        inner = schema.get("items") if inner is None and key == _ITEM else inner
    return inner


def _element(members: list[tuple[str, str]], said: str, schema: Any) -> str:
    kinds = kinds_of(schema)
    if not members:
        empty = {frozenset({"object"}): "{}", frozenset({"array"}): "[]"}.get(kinds - {"null"})
        return empty if empty is not None and not said.strip() else json_of(said, kinds)
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
