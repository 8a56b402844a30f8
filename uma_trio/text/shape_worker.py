"""What runs in the processes that check shapes and follow slow ones. See :mod:`.confinement`.

:class:`Check` is answered with a :class:`Verdict`. After :class:`Follow` each frame is a run of steps,
answered with :data:`ALLOWED` and the mask after them, or with :data:`FAILED` and why the answer cannot
continue. A worker that sends :data:`ALLOWED`, not :data:`WORN`, may follow another answer from :data:`RESET`.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLTokenizer

from uma_trio.confined.host import anonymous
from uma_trio.confined.link import WorkerLink
from uma_trio.text import grammars
from uma_trio.text.shape import Kind, Unconstrainable

STEP: Final = struct.Struct("<ci")
ACCEPT, TAKE_BACK, RESET = b"a", b"t", b"r"
ALLOWED, WORN, FAILED = b"m", b"w", b"f"
# CPU time that an answer has for each of its tokens, on average. Five times what 99 of 100 masks take
# (docs/explained/structured-output.md); an ambiguous grammar takes more with each token.
STEP_S: Final = 0.005
# A worker beyond that runs niced, below all other work.
_POLITE_S: Final = 0.1
_POLITE: Final = 5  # added to the niceness that it has
# A worker that holds more than this is not kept for another answer; how often that is looked at.
_KEPT_BYTES: Final = 8 << 20
_LOOK_EVERY: Final = 32
_TRIED_S: Final = 0.010
_TRIED_STEPS: Final = 24
_DEAR: Final = 48
_AMBIGUOUS: Final = (
    f"can be read in too many ways (more than {grammars.MAX_ITEMS} items in a row of the parser's table); "
    "make it less ambiguous"
)
_SIGNS: Final = frozenset(b'[]{}",:')


class Known(msgspec.Struct, frozen=True, array_like=True):
    pieces: Sequence[bytes]
    end_tokens: Sequence[int]


class Check(msgspec.Struct, frozen=True, tag="check", array_like=True):
    kind: Kind
    text: str


class Follow(msgspec.Struct, frozen=True, tag="follow", array_like=True):
    """Compile this checked shape and follow one answer, within `grace_s` of CPU time and `STEP_S` a token."""

    kind: Kind
    text: str
    grace_s: float = 0.5


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Why a shape is refused, or what llguidance compiles and its costs, in seconds of CPU time."""

    problem: str | None = None
    source: str = ""
    kept_bytes: int = 0
    compile_s: float = 0.0
    step_s: float = 0.0
    plain: bool = False


_REQUESTS: Final = msgspec.msgpack.Decoder(Check | Follow)


def prepare(setup: bytes) -> Callable[[WorkerLink], None]:
    """Return what a worker runs. Called once, in the host."""
    known = msgspec.msgpack.decode(setup, type=Known)
    words = grammars.Words(known.pieces, known.end_tokens)
    tokenizer = grammars.tokenizer_of(words, len(known.pieces), known.end_tokens)
    dear = dearest(known.pieces)

    def work(link: WorkerLink) -> None:
        request = _REQUESTS.decode(link.receive())
        if isinstance(request, Check):
            link.send(msgspec.msgpack.encode(_verdict(tokenizer, dear, request)))
            return
        held = anonymous()
        source = grammars.unforced(grammars.source_of(request.kind, request.text))
        matcher = grammars.compiled(tokenizer, request.kind, source)
        allowance = _Allowance(request.grace_s, held)
        while True:
            steps = link.receive()
            if steps.startswith(RESET):
                matcher.reset()
                allowance.renew()
                steps = steps[STEP.size :]
            found = _stepped(matcher, steps)
            if allowance.is_worn and found.startswith(ALLOWED):
                found = WORN + found[1:]
            link.send(found)
            allowance.take(steps)

    return work


class _Allowance:
    """The time and memory of one answer, and whether its process is reusable."""

    def __init__(self, grace_s: float, kept_bytes: int) -> None:
        self._grace_s = grace_s
        self._most_bytes = kept_bytes + _KEPT_BYTES
        self._frames = 0
        self._is_polite = False
        self.is_worn = anonymous() > self._most_bytes
        self.renew()

    def renew(self) -> None:
        self._since = time.process_time()

    def take(self, steps: bytes) -> None:
        self._since += STEP_S * sum([step == ACCEPT for step, _ in STEP.iter_unpack(steps)])
        over = time.process_time() - self._since
        if over > self._grace_s:
            os.kill(os.getpid(), signal.SIGPROF)
        elif over > _POLITE_S and not self._is_polite:
            self._is_polite = self.is_worn = True
            os.nice(_POLITE)
        self._frames += 1
        if not self._frames % _LOOK_EVERY and anonymous() > self._most_bytes:
            self.is_worn = True


def _stepped(matcher: LLMatcher, steps: bytes) -> bytes:
    for step, token in STEP.iter_unpack(steps):
        if step == ACCEPT:
            matcher.consume_token(token)
        else:
            matcher.rollback(token)
    mask = matcher.compute_bitmask()
    if not matcher.is_error():
        return ALLOWED + mask
    error = matcher.get_error()
    return FAILED + (_AMBIGUOUS.encode() if "items" in error else b"")


def _verdict(tokenizer: LLTokenizer, dear: Sequence[int], request: Check) -> Verdict:
    held = anonymous()
    began = time.process_time()
    try:
        source = grammars.source_of(request.kind, request.text)
        matcher = grammars.compiled(tokenizer, request.kind, source)
        matcher.compute_bitmask()  # the first step may take long
        grammars.refuse_failed(matcher)
    except Unconstrainable as error:
        return Verdict(problem=str(error))
    took = time.process_time() - began
    if not is_plain(request.kind, request.text):
        return Verdict(None, source, max(0, anonymous() - held), took)
    step = _walked(grammars.compiled(tokenizer, request.kind, source, grammars.LIMITS_HERE), dear)
    # What follows is held for each answer, too, and what was read is not.
    return Verdict(None, source, max(0, anonymous() - held), took, step, plain=True)


def _walked(matcher: LLMatcher, dear: Sequence[int]) -> float:
    """Return the longest step of two walks; infinity if one exceeded the daemon's limits."""
    until = time.process_time() + _TRIED_S
    worst = _longest_step(matcher.deep_copy(), dear, lambda found: found[0], until)
    return max(worst, _longest_step(matcher.deep_copy(), dear, random.Random(0).choice, until))


def _longest_step(
    walker: LLMatcher, dear: Sequence[int], choose: Callable[[Sequence[int]], int], until: float
) -> float:
    worst = 0.0
    for _ in range(_TRIED_STEPS):
        began = time.process_time()
        mask = walker.compute_bitmask()
        now = time.process_time()
        worst = max(worst, now - began)
        found = [token for token in dear if mask[token >> 3] >> (token & 7) & 1]
        if not found or now > until or walker.is_stopped():
            break
        for token in found[:2]:
            began = time.process_time()
            walker.validate_tokens([token])
            worst = max(worst, time.process_time() - began)
        began = time.process_time()
        walker.consume_token(choose(found))
        worst = max(worst, time.process_time() - began)
        if walker.is_error():
            return math.inf
    return worst


def dearest(pieces: Sequence[bytes]) -> list[int]:
    """Return the tokens of most lexemes of JSON, those of most first, and every single byte."""
    found = [
        (sum([byte in _SIGNS for byte in piece]), token)
        for token, piece in enumerate(pieces)
        if len(piece) > 1
    ]
    most = heapq.nlargest(_DEAR, [each for each in found if each[0] > 1])
    singles = [token for token, piece in enumerate(pieces) if len(piece) == 1]
    return [*(token for _, token in most), *singles]


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
