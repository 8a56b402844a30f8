"""Shapes that can be read in many ways, or whose parts overlap: what makes a parser's steps long.

Each is drawn by a :class:`random.Random`, so that a seed is enough for a benchmark, and Hypothesis can draw
one that it makes smaller.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

from uma_trio.text.shape import Kind

Drawn = tuple[Kind, str]
_Schema = dict[str, Any]

_SELF: Final[_Schema] = {"$ref": "#"}
_COUNTS: Final = (0, 1, 2, 3, 8, 30, 100, 1000)
_MANY: Final = (1, 2, 3, 8, 9, 30, 120)
_SCALARS: Final[list[_Schema]] = [
    {},
    {"type": "string"},
    {"type": "number"},
    {"type": "integer", "multipleOf": 3},
    {"const": "a" * 40},
    {"enum": ["a", "ab", "abc", 1, None]},
    {"type": "string", "pattern": "^(a|ab|b)*a.{8}$"},
    {"type": "string", "maxLength": 300},
    {"type": ["array", "object", "null"]},
]
_TERMINALS: Final = (
    *('"a"', '"["', '"]"', '""', '"ab"', '"{"', '","', '":"', "[a-c]", "[^x]", "[ \\n]*"),
    *('"a"*', '"a"{0,9}', "[a-z]{2,40}", '"" "a"?', '"a"+'),
)
_EXPRESSIONS: Final = (
    *("a", "b", "ab", "[a-c]", ".", "\\[", '"', "\\s", ",", "a{3,90}", "(a|ab)", "[^a]", "\\w"),
    "a{0,4000}",
)


def drawn(chance: random.Random) -> Drawn:
    """Return some shape: a JSON Schema more often than anything else, as a daemon gets them."""
    return chance.choice([_schema, _schema, _schema, _reply, _regex, _choice, _gbnf, _lark])(chance)


def _schema(chance: random.Random) -> Drawn:
    whole = _part(chance, 3)
    if chance.random() < 0.4:
        names = [f"d{n}" for n in range(chance.choice((1, 3, 8)))]
        whole = {"$defs": {name: _part(chance, 2, names) for name in names}, **whole}
    return "schema", json.dumps(whole)


def _part(chance: random.Random, depth: int, names: list[str] | None = None) -> _Schema:
    """Return a schema that holds itself, or one of `names`, in some of its places."""
    if depth == 0:
        refers = {"$ref": f"#/$defs/{chance.choice(names)}"} if names else _SELF
        return chance.choice([*_SCALARS, refers, refers, refers])

    def inner() -> _Schema:
        return _part(chance, chance.randrange(depth), names)

    kinds: list[Callable[[], _Schema]] = [
        lambda: chance.choice(_SCALARS),
        lambda: {"type": "array", "items": inner()},
        lambda: {chance.choice(["anyOf", "anyOf", "oneOf"]): _alike(chance, inner)},
        lambda: _counted(chance, inner),
        lambda: _object(chance, inner),
        lambda: {"prefixItems": [inner()] * chance.choice(_MANY), "items": inner()},
        lambda: {"allOf": [inner() for _ in range(chance.randrange(1, 4))]},
        lambda: {"patternProperties": {f"^{c}": inner() for c in "abcdefghi"[: chance.randrange(1, 10)]}},
    ]  # fmt: skip
    return chance.choice(kinds)()


def _alike(chance: random.Random, inner: Callable[[], _Schema]) -> list[_Schema]:
    """Return alternatives that begin alike."""
    n = chance.choice(_MANY)
    one = inner()
    if chance.random() < 0.5:
        return [{"type": "array", "items": one, "minItems": k % 7} for k in range(n)]
    return [{"type": "object", "properties": {f"p{k}": one, "q": one}} for k in range(n)]


def _counted(chance: random.Random, inner: Callable[[], _Schema]) -> _Schema:
    least, more = chance.choice(_COUNTS[:5]), chance.choice(_COUNTS)
    return {"type": "array", "items": inner(), "minItems": least, "maxItems": least + more}


def _object(chance: random.Random, inner: Callable[[], _Schema]) -> _Schema:
    n = chance.choice((1, 3, 20, 100, 250, 300))
    one, name = inner(), chance.choice(["p", "a" * 30, "", '"', "]"])
    found: _Schema = {"type": "object", "properties": {f"{name}{k}": one for k in range(n)}}
    if chance.random() < 0.5:
        found["additionalProperties"] = chance.choice([False, inner()])
    if chance.random() < 0.3:
        found["required"] = [f"{name}{k}" for k in range(0, n, chance.choice((1, 2, 9)))]
    return found


def _reply(chance: random.Random) -> Drawn:
    """Return a grammar of ours that holds schemas."""
    schemas = [_part(chance, 2) for _ in range(chance.choice((1, 2, 5)))]
    calls = " | ".join([f'"{n}" %json {json.dumps(one)}' for n, one in enumerate(schemas)])
    return "reply", f'start: (call "\\n"?){{1,64}}\ncall: {calls}\n'


def _regex(chance: random.Random) -> Drawn:
    return "regex", _expression(chance, 4)


def _expression(chance: random.Random, depth: int) -> str:
    if depth == 0:
        return chance.choice(_EXPRESSIONS)
    parts = [_expression(chance, chance.randrange(depth)) for _ in range(chance.randrange(1, 5))]
    whole = (
        f"({chance.choice(['|', ''])})".join(parts) if chance.random() < 0.1 else "|".join(parts)
    )
    if chance.random() < 0.5:
        whole = "".join(parts)
    return f"({whole})" + chance.choice(["", "*", "?", "+", "{0,9}", "{2,60}", "{14}"])


def _choice(chance: random.Random) -> Drawn:
    text, n = chance.choice(["a", "ab", "[]", "x y", "é"]), chance.choice((1, 3, 50, 400))
    step = chance.choice((1, 7, 100, 2000)) if n < 50 else 1
    return "choice", json.dumps([text * (k * step + 1) + chance.choice("ab") for k in range(n)])


def _gbnf(chance: random.Random) -> Drawn:
    return "grammar", "\n".join(["root ::= r0", *_rules(chance, "::=")])


def _lark(chance: random.Random) -> Drawn:
    parts = [
        "r0 r0",
        "r0 r0 r0",
        '"a"',
        "/[a-z]+/",
        "/[^x]{1,9}/",
        "",
        '"[" r0 "]"',
        'r0{1,9} "a"?',
        "T",
        "%json {}",
    ]
    rules = [chance.choice(parts) for _ in range(chance.randrange(1, 9))]
    return "grammar", "start: r0\nr0: " + " | ".join(['"b"', *rules]) + "\nT: /a*/ | /(a|b)+/\n"


def _rules(chance: random.Random, sign: str) -> list[str]:
    """Return rules that call each other, left and right, some of them for nothing."""
    n = chance.choice((1, 2, 4, 30))
    names = [f"r{k}" for k in range(n)]
    words = [*names, *names[:3], *_TERMINALS]

    def alternative() -> str:
        return " ".join(chance.choice(words) for _ in range(chance.randrange(1, 5)))

    return [
        f"{name} {sign} "
        + " | ".join([chance.choice(_TERMINALS[:4]), *(alternative() for _ in range(chance.randrange(1, 5)))])
        for name in names
    ]  # fmt: skip
