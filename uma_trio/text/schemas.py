"""Changes to JSON Schemas: what cannot be enforced, what a tool leaves open, a part by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

# Those that llguidance enforces; by JSON Schema, any other one only annotates.
FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_NUMBERS: Final = ("integer", "number")  # whose formats, such as int32, are annotations everywhere
_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_VALUES: Final = frozenset({"enum", "const", "default", "examples", "example"})


def without_annotations(schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a schema without unknown formats and `uniqueItems`, and what was removed, each once."""
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


# An object that says one of these may be meant to have more members than it names.
_SAYS_MORE: Final = frozenset(
    {
        *("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
        *("minProperties", "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef"),
    }
)


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` without members that it does not name, where it says nothing of others.

    JSON Schema allows any others then, and a weak model makes arguments up, which fail. Applies to
    `properties` and `items` only: combined or referenced schemas may get members from each other.
    """
    found = dict(schema)
    properties = found.get("properties")
    if isinstance(properties, Mapping) and properties:
        found["properties"] = {key: _closed_part(value) for key, value in properties.items()}
        if not found.keys() & _SAYS_MORE and _names_all(found.get("required"), properties):
            found["additionalProperties"] = False
    if "items" in found:
        found["items"] = _closed_part(found["items"])
    return found


def _names_all(required: Any, properties: Mapping[str, Any]) -> bool:
    """Whether everything that is required is named: nothing would be an instance otherwise."""
    return required is None or (
        isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )


def _closed_part(value: Any) -> Any:
    """Return a part of a schema, closed if it is an object; a reference may stand for anything."""
    return closed(value) if isinstance(value, Mapping) and not value.keys() & {"$ref"} else value


_NOWHERE: Final = object()


def part_of(whole: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema`, a part of `whole`, with everything that it references in it under ``$defs``."""
    names: dict[str, str] = {}
    moved: dict[str, Any] = {}

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        found = {key: move(each) for key, each in value.items()}
        reference = value.get("$ref")
        if isinstance(reference, str) and (name := take_along(reference)):
            found["$ref"] = f"#/$defs/{name}"
        return found

    def take_along(reference: str) -> str:
        if reference not in names:
            target = _target(whole, reference)
            if target is _NOWHERE:
                return ""
            name = names[reference] = f"part{len(names)}"
            moved[name] = move(target)  # which may lead back here
        return names[reference]

    alone: dict[str, Any] = move(schema)
    return {**alone, "$defs": {**alone.get("$defs", {}), **moved}} if moved else alone


def _target(whole: Mapping[str, Any], reference: str) -> Any:
    root, *steps = unquote(reference).split("/")
    if root != "#":
        return _NOWHERE
    found: Any = whole
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return _NOWHERE
    return found
