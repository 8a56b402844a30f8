"""Values that stand in a reply as text: which JSON they are, by what an argument's schema allows."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any, Final

TEXT: Final = frozenset({"string"})
_MOST_LITERAL: Final = 4096  # characters that are read as Python: the parser holds the GIL
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
    """Return the types that a schema allows, as far as it says so at its top; none if it does not."""
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
    """Return the JSON of a value: itself, what it is in Python, or a string that holds it.

    Templates that write a value without turning it into JSON write ``True`` and ``None``, so models
    do. Where only some `kinds` are allowed, and texts are, a value of another kind is a text.
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
