"""Which shapes have no slow step, whatever the answer is: these may be followed in the daemon.

Earley's algorithm takes cubic time in the number of readings of a text. JSON has several only where
alternatives of a schema begin alike, so these are counted. Any other grammar may be ambiguous.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from uma_trio.text.shape import Kind

# An alternative of ten arrays of itself has steps of 5 to 10 ms for a token of 64 brackets, the
# dearest one that was found; one of thirty of 40 ms.
MAX_ALTERNATIVES: Final = 8
# Properties that may be left out are all possible next: a row of the parser has as many entries.
MAX_PROPERTIES: Final = 256
MAX_VALUES: Final = 20_000
_BRANCHES: Final = ("anyOf", "oneOf", "allOf")
_KEYED: Final = ("patternProperties", "dependentSchemas", "dependencies")
_SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})
_JSON: Final = "%json "


def is_plain(kind: Kind, text: str) -> bool:
    """Whether a shape that compiles can be followed in the daemon. Linear in the length of `text`."""
    if kind in ("regex", "choice"):
        return True  # one lexeme, whose steps are bounded by llguidance's fuel
    if kind == "grammar":
        return False
    try:
        schemas = list(_embedded(text)) if kind == "reply" else [json.loads(text)]
        return all(map(_is_plain_schema, schemas))
    except (ValueError, RecursionError):
        return False


def _embedded(grammar: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    at = grammar.find(_JSON)
    while at >= 0:
        schema, at = decoder.raw_decode(grammar, at + len(_JSON))
        yield schema
        at = grammar.find(_JSON, at)


def _is_plain_schema(schema: Any) -> bool:
    alternatives = n_values = 0
    left = [schema]
    while left:
        value = left.pop()
        n_values += 1
        if n_values > MAX_VALUES:
            return False
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            alternatives += _alternatives(value)
            properties = value.get("properties")
            if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
                return False
    return alternatives <= MAX_ALTERNATIVES


def _alternatives(schema: Mapping[str, Any]) -> int:
    """Return how many more ways than one there are to read a value that has begun."""
    n = sum(len(schema[key]) for key in _KEYED if isinstance(schema.get(key), dict))
    for key in _BRANCHES:
        branches = schema.get(key)
        if isinstance(branches, list):
            n += max(0, sum(map(_is_open, branches)) - 1)
    return n


def _is_open(branch: Any) -> bool:
    """Whether an alternative may begin with a bracket."""
    if not isinstance(branch, dict):
        return True
    if "const" in branch or "enum" in branch:
        return False
    kinds = branch.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return not all(isinstance(kind, str) and kind in _SCALARS for kind in kinds)
