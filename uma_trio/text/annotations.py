"""The keywords of a JSON Schema that only annotate here: they describe an answer, without restricting it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Those that llguidance enforces; by JSON Schema, any other one only annotates.
FORMATS: Final = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)
_NUMBERS: Final = ("integer", "number")  # whose formats, such as int32, are annotations everywhere
_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_VALUES: Final = frozenset({"enum", "const", "default", "examples", "example"})


def without_annotations(schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a schema without unknown formats and `uniqueItems`, and what was removed, each once.

    Whether items are unique can only be seen at the end of an answer. `uniqueItems: false` is no demand.
    """
    dropped: dict[str, None] = {}
    return _without(schema, dropped), tuple(dropped)


def _without(schema: Mapping[str, Any], dropped: dict[str, None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            if schema.get("type") in _NUMBERS:
                continue
            dropped[f"format:{value}"] = None
        elif key == "uniqueItems" and isinstance(value, bool):
            if value:
                dropped[key] = None
        elif key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _part(part, dropped) for name, part in value.items()}
        else:
            found[key] = value if key in _VALUES else _part(value, dropped)
    return found


def _part(value: Any, dropped: dict[str, None]) -> Any:
    if isinstance(value, Mapping):
        return _without(value, dropped) if value else value
    if isinstance(value, list):
        return [_part(each, dropped) if each else each for each in value]
    return value
