"""What must hold of every text that somebody sends as a JSON Schema: it is compiled or refused, in bounds.

Whoever only takes tokens that are allowed comes to JSON, and each step is short. Time is the processor
time of the calling thread, so that a busy machine breaks nothing.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

from hypothesis import strategies as st

from uma_trio.text.constrain import Follower, Grammarian
from uma_trio.text.shape import Kind, Shape, Unconstrainable
from uma_trio_sim.fake import FakeVocabulary

Found = TypeVar("Found")

# Several times what was seen: llguidance's own limits (`_LIMITS` of uma_trio.text.constrain) count work, not
# time. A request waits 10 s for its schema at the most, and a tick never waits for a mask.
COMPILE_S: Final = 2.0
STEP_S: Final = 0.25
MEMORY_BYTES: Final = 128 << 20
_STEPS: Final = 200
_MESSAGE: Final = 400  # characters


def schema(data: bytes) -> None:
    """Any text is compiled or refused with one line; what was compiled is walked along."""
    text = data.decode("utf-8", "surrogateescape")
    grammarian, vocabulary = _ready()
    held = _peak_bytes()
    for kind in _KINDS:
        follower = _compiled(grammarian, Shape(kind, text))
        if follower is not None:
            _walk(follower, vocabulary, random.Random(zlib.crc32(data)))
    if _peak_bytes() - held > MEMORY_BYTES:
        raise AssertionError(f"took {_peak_bytes() - held} bytes")


_KINDS: Final[tuple[Kind, ...]] = ("schema", "loose schema")


def _compiled(grammarian: Grammarian, shape: Shape) -> Follower | None:
    """Return what follows an answer of this shape; None if it is refused as it may be."""
    try:
        return _in_time(COMPILE_S, lambda: grammarian.follow(shape))
    except Unconstrainable as refused:
        message = str(refused)
        if not message or len(message) > _MESSAGE or len(message.splitlines()) > 1:
            raise AssertionError(f"refused with {message!r}") from None
        message.encode()
    return None


def _walk(follower: Follower, vocabulary: FakeVocabulary, chance: random.Random) -> None:
    """Take some token that is allowed, and so on; what is whole then has to be JSON."""
    said = b""
    for _ in range(_STEPS):
        allowed = _in_time(STEP_S, follower.allowed).tolist()
        if not allowed:
            return  # llguidance's fuel is used up, which ends the request with its own code
        token = chance.choice(allowed)
        if not _in_time(STEP_S, lambda token=token: follower.allows(token)):
            raise AssertionError(f"{token} is allowed behind {said!r}, and is not")
        if token in vocabulary.end_tokens:
            json.loads(said)
            return
        follower.accept(token)
        follower.take_back()
        follower.accept(token)
        said += vocabulary.pieces()[token]


def _in_time(most_s: float, call: Callable[[], Found]) -> Found:
    """Return what `call` returns, or raise what it raises, within so much processor time."""
    began = time.thread_time()
    try:
        return call()
    except Exception:
        raise
    except BaseException as panic:  # of Rust: it would pass by whatever handles errors
        raise AssertionError(f"{type(panic).__name__}: {panic}") from panic
    finally:
        took = time.thread_time() - began
        if took > most_s:
            raise AssertionError(f"took {took:.2f} s")


@cache
def _ready() -> tuple[Grammarian, FakeVocabulary]:
    """Return a compiler whose first work is done; it remembers one schema at most."""
    vocabulary = FakeVocabulary()
    grammarian = Grammarian(vocabulary, cache_bytes=1)
    grammarian.follow(Shape("schema", "{}"))
    return grammarian, vocabulary


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# --- inputs -------------------------------------------------------------------------------------

_TYPES = ["object", "array", "string", "integer", "number", "boolean", "null"]
_NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([0.1, -0.5, 1e-300, 1e308, 2**31, 2**63, 10**30, -(2**70), 7, 1.0]),
)
_COUNTS = st.one_of(st.integers(0, 5), st.sampled_from([1000, 10**6, 2**31, 2**64, -1, 1.5, "3"]))
_PATTERNS = st.sampled_from(
    [
        *("^a+$", "a|b", "(a{1000}){1000}", "(a|aa)*b", "[^x]{0,5000}", "(?=a)b", "(", "\\d+", ""),
        *(".*a.{30}", "(.*){9}", "^\\p{L}*$", "\\1", "x{99999}", "(((((((((a*)*)*)*)*)*)*)*)*"),
    ]
)
_REFERENCES = st.sampled_from(
    [
        *("#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/$defs/none", "https://a.b/c"),
        *("#a", "", "#/%", "#/$defs/a/anyOf/0", "file:///etc/passwd"),
    ]
)
_FORMATS = st.sampled_from(
    ["date-time", "email", "uuid", "ipv6", "uri", "hostname", "regex", "x", "date", "duration"]
)
_NAMES = st.one_of(st.sampled_from(["a", "b", "", "$ref", "\U0001f98a", '"', "\\", "a" * 300]))
_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_NAMES, inner, max_size=3)
    ),
    max_leaves=6,
)


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas of the keywords of drafts 4 to 2020-12, whose subschemas are `inner`."""
    schemas = st.lists(inner, max_size=4)
    named = st.dictionaries(_NAMES, inner, max_size=4)
    words: dict[str, st.SearchStrategy[Any]] = {
        "type": st.one_of(st.sampled_from(_TYPES), st.lists(st.sampled_from(_TYPES), max_size=3)),
        **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), named),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), schemas),
        **dict.fromkeys(("items", "additionalProperties", "not", "if", "contains"), inner),
        "required": st.lists(_NAMES, max_size=4),
        **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _COUNTS),
        **dict.fromkeys(("minProperties", "maxProperties"), _COUNTS),
        **dict.fromkeys(("minimum", "maximum", "multipleOf", "exclusiveMinimum"), _NUMBERS),
        "pattern": _PATTERNS,
        "format": _FORMATS,
        "$ref": _REFERENCES,
        "enum": st.lists(_values, max_size=5),
        "const": _values,
        "x-guidance": st.dictionaries(
            st.sampled_from(["lenient", "whitespace_pattern", "item_separator", "x"]), _values
        ),
        **dict.fromkeys(("description", "title", "$id", "$schema", "$anchor"), st.text(max_size=9)),
        "uniqueItems": st.booleans(),
    }
    return st.fixed_dictionaries({}, optional=words).flatmap(_some)


def _some(whole: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a few of the keywords that were drawn: all together contradict each other."""
    names = sorted(whole)
    if not names:
        return st.just({})
    picked = st.lists(st.sampled_from(names), max_size=4, unique=True)
    return picked.map(lambda some: {name: whole[name] for name in some})


_schemas = st.recursive(
    st.one_of(st.booleans(), st.sampled_from([{"type": kind} for kind in _TYPES]), _values),
    _keywords,
    max_leaves=10,
)
_DEEP = [
    '{"items":' * n + "true" + "}" * n if kind == "items" else "[" * n + "]" * n
    for n in (20, 200, 5000)
    for kind in ("items", "list")
]
_HOSTILE = [
    *_DEEP,
    '{"$ref": "#"}',
    '{"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}',
    '{"type": "string", "maxLength": 1000000000}',
    '{"type": "array", "items": {}, "minItems": 100000, "maxItems": 1000000}',
    '{"enum": [' + ", ".join(f'"{n:05}"' for n in range(5000)) + "]}",
    '{"properties": {' + ", ".join(f'"p{n}": {{}}' for n in range(1500)) + "}}",
    '{"type": "integer", "minimum": 3, "maximum": 1' + "0" * 400 + "}",
    '{"type": "number", "multipleOf": 1e-300}',
    '{"a": 1, "a": 2}',
    '{"type": "strin\ud800"}'.encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    "NaN",
    "",
    "{",
]


def _written(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


# Hypothesis makes an input smaller by moving towards the alternatives that stand first.
schemas = st.one_of(
    st.binary(max_size=30),
    _schemas.map(_written),
    st.sampled_from([text.encode() for text in sorted(_HOSTILE, key=len)]),
)
"""Texts that are schemas, nearly schemas, or nothing of the sort."""
