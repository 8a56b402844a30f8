"""A tool's schema whose objects have only the members that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
        found["properties"] = {key: _part(value) for key, value in properties.items()}
        if not found.keys() & _SAYS_MORE and _names_all(found.get("required"), properties):
            found["additionalProperties"] = False
    if "items" in found:
        found["items"] = _part(found["items"])
    return found


def _names_all(required: Any, properties: Mapping[str, Any]) -> bool:
    """Whether everything that is required is named: nothing would be an instance otherwise."""
    return required is None or (
        isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )


def _part(value: Any) -> Any:
    """Return a part of a schema, closed if it is an object; a reference may stand for anything."""
    return closed(value) if isinstance(value, Mapping) and not value.keys() & {"$ref"} else value
