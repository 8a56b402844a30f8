"""What runs in the processes that check shapes and follow the dear ones. See :mod:`.confinement`.

A worker's first frame says what it is for. :class:`Check` is answered with a :class:`Verdict`. After
:class:`Follow` each frame is a run of steps, of which :data:`MASK` is answered with the bits of the
allowed tokens, none if there is no way on.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from llguidance import LLMatcher, LLTokenizer

from uma_trio.confined.host import anonymous
from uma_trio.confined.link import Link
from uma_trio.text.grammars import Words, compiled, refuse_failed, source_of, tokenizer_of, unforced
from uma_trio.text.plain import is_plain
from uma_trio.text.shape import Kind, Unconstrainable

STEP: Final = struct.Struct("<ci")
ACCEPT, TAKE_BACK, MASK = b"a", b"t", b"m"
# An answer whose steps take longer than 20 ms on average is ended: it would keep a core busy.
STEP_S: Final = 0.020
GRACE_S: Final = 1.0
_TRIED_S: Final = 0.010
_TRIED_STEPS: Final = 24
_DEAR: Final = 48


class Known(msgspec.Struct, frozen=True, array_like=True):
    """The vocabulary."""

    pieces: Sequence[bytes]
    end_tokens: Sequence[int]


class Check(msgspec.Struct, frozen=True, tag="check", array_like=True):
    """Compile this and say what it took."""

    kind: Kind
    text: str


class Follow(msgspec.Struct, frozen=True, tag="follow", array_like=True):
    """Compile this, which has been checked, and follow one answer."""

    kind: Kind
    text: str


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What came of a shape: why it is refused, or else what llguidance compiles, and what it took.

    `step_s` is the longest step of a short walk. All are times of the CPU.
    """

    problem: str | None = None
    source: str = ""
    held_bytes: int = 0
    compile_s: float = 0.0
    step_s: float = 0.0
    plain: bool = False


_ASKED: Final = msgspec.msgpack.Decoder(Check | Follow)


def prepare(setup: bytes) -> Callable[[Link], None]:
    """Return what a worker runs. Called once, in the host."""
    known = msgspec.msgpack.decode(setup, type=Known)
    words = Words(known.pieces, known.end_tokens)
    tokenizer = tokenizer_of(words, len(known.pieces), known.end_tokens)
    dear = _dear(known.pieces)

    def work(link: Link) -> None:
        asked = _ASKED.decode(link.receive())
        if isinstance(asked, Check):
            link.send(msgspec.msgpack.encode(_verdict(tokenizer, dear, asked)))
            return
        source = unforced(source_of(asked.kind, asked.text))
        matcher = compiled(tokenizer, asked.kind, source)
        spent = _Spent()
        while True:
            steps = link.receive()
            link.send(_stepped(matcher, steps) if spent.has_room() else b"")

    return work


class _Spent:
    """What one answer has taken."""

    def __init__(self) -> None:
        self._until = time.process_time() + GRACE_S

    def has_room(self) -> bool:
        """Count a step; False once they took too long altogether."""
        self._until += STEP_S
        return time.process_time() < self._until


def _stepped(matcher: LLMatcher, steps: bytes) -> bytes:
    """Take steps; return what is allowed behind the last one."""
    for step, token in STEP.iter_unpack(steps):
        if step == ACCEPT:
            matcher.consume_token(token)
        elif step == TAKE_BACK:
            matcher.rollback(token)
    mask = matcher.compute_bitmask()
    return b"" if matcher.is_error() else mask


def _verdict(tokenizer: LLTokenizer, dear: Sequence[int], asked: Check) -> Verdict:
    held = anonymous()
    began = time.process_time()
    try:
        source = source_of(asked.kind, asked.text)
        matcher = compiled(tokenizer, asked.kind, source)
        matcher.compute_bitmask()  # the first step may take long
        refuse_failed(matcher)
    except Unconstrainable as error:
        return Verdict(problem=str(error))
    took = time.process_time() - began
    plain = is_plain(asked.kind, asked.text)
    step = _walked(matcher, dear) if plain else 0.0
    # What follows is held for each answer, too, and what was read is not.
    return Verdict(None, source, max(0, anonymous() - held), took, step, plain)


def _walked(matcher: LLMatcher, dear: Sequence[int]) -> float:
    """Walk, first by the dearest tokens and then by any of them; return how long the longest step took."""
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
    return worst


def _dear(pieces: Sequence[bytes]) -> list[int]:
    """Return tokens of many lexemes, the longest first, and every single byte."""
    signs = frozenset(b'[]{}",: \n0a')
    found = [
        token for token, piece in enumerate(pieces) if len(piece) > 1 and signs.issuperset(piece)
    ]
    found.sort(key=lambda token: -len(pieces[token]))
    return [*found[:_DEAR], *(token for token, piece in enumerate(pieces) if len(piece) == 1)]
