"""A part of a JSON Schema by itself, with what its references lead to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

_NOWHERE: Final = object()


def part_of(whole: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema`, a part of `whole`, with everything that it references under ``$defs``.

    References that lead nowhere, or out of `whole`, stay as they are.
    """
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
