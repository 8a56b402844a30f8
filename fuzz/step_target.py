"""What must hold of every shape: no step in the daemon's own process takes long, whatever an answer says.

An input is a kind of shape, a line end, and the shape. It is checked in a process of its own, as the daemon does
it. If it is to be followed in the daemon, answers are walked through it: by the tokens of most lexemes,
and by any. What is asked there holds the interpreter's lock, and so everybody up: no step may take more
than 20 ms of the thread's processor time. A shape of longer steps has to be followed apart, from its
first token or from the step on that was too large.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple, TypeVar, get_args

import numpy as np
from hypothesis import strategies as st

from uma_trio.backend.base import IntArray, Vocabulary
from uma_trio.text.confinement import Confinement
from uma_trio.text.constrain import Follower, Grammarian
from uma_trio.text.shape import Kind, Shape, Unconstrainable
from uma_trio.text.shape_worker import dearest
from uma_trio_sim.fake import FakeVocabulary

from .ambiguous import drawn

Found = TypeVar("Found")

STEP_S: Final = 0.020
_WALKS: Final = 4
_STEPS: Final = 120
_WALK_S: Final = 0.4
_RUNS: Final = (
    b"[",
    b"]",
    b"[]",
    b"[],",
    b"},{",
    b'{"',
    b'":{"',
    b"a",
    b" ",
    b"\n",
    b",",
    b'"",',
    b"{}",
)


class Runs:
    """A vocabulary with more long runs of brackets than any model's: 8, 24 and 64 bytes of each."""

    end_tokens = FakeVocabulary.end_tokens
    bos_text, eos_text, adds_bos = FakeVocabulary.bos_text, FakeVocabulary.eos_text, True

    def __init__(self) -> None:
        bytewise = FakeVocabulary()
        runs = [(run * 64)[:n] for run in _RUNS for n in (8, 24, 64)]
        self._pieces = [*bytewise.pieces(), *dict.fromkeys(runs)]
        self.n_vocab = len(self._pieces)
        self.tokenize: Callable[..., IntArray] = bytewise.tokenize

    def pieces(self) -> Sequence[bytes]:
        """Return each token's bytes."""
        return self._pieces


class Took(NamedTuple):
    """A step of an answer that had said so much."""

    what: str
    seconds: float
    said: bytes


def step(data: bytes) -> None:
    """Follow answers of any shape that is followed here; every step is short."""
    kind, _, text = data.decode("utf-8", "surrogateescape").partition("\n")
    if kind not in get_args(Kind):
        return
    grammarian, vocabulary, dear = _ready()
    shape = Shape(kind, text)  # type: ignore[arg-type] # looked at above
    for walk in range(_WALKS):
        try:
            follower = grammarian.follow(shape)
        except Unconstrainable:
            return
        if not isinstance(follower, Follower):
            return
        for took in walked(follower, vocabulary, dear, random.Random(zlib.crc32(data) + walk)):
            if took.seconds > STEP_S:
                raise AssertionError(
                    f"{took.what} took {took.seconds * 1e3:.0f} ms behind {took.said[-80:]!r}"
                )


def walked(
    follower: Follower, vocabulary: Vocabulary, dear: Sequence[int], chance: random.Random
) -> Iterator[Took]:
    """Walk an answer as long as it is followed here; tell of each step that holds the lock."""
    pieces, said = vocabulary.pieces(), b""
    until = time.thread_time() + _WALK_S
    # Some answers are of dear tokens only, some of any, most of both.
    share = chance.choice((1.0, 0.9, 0.5, 0.0))
    for _ in range(_STEPS):
        allowed = follower.allowed()
        ends = [token for token in allowed.tolist() if token in vocabulary.end_tokens]
        going_on = np.setdiff1d(allowed, ends)
        if not len(going_on) or follower.elsewhere or time.thread_time() > until:
            return
        found = np.array(dear)[np.isin(dear, going_on)].tolist()
        for token in {*found[:3], dear[0], chance.choice(dear)}:
            yield Took("a look", _timed(lambda token=token: follower.allows(token)), said)
        yield Took("a copy", _timed(follower.deferred), said)
        if found and chance.random() < share:
            token = chance.choice(found[: chance.choice((1, 4, len(found)))])
        else:
            token = int(chance.choice(going_on.tolist()))
        yield Took("a step", _timed(lambda token=token: follower.accept(token)), said)
        said += pieces[token]


def _timed(call: Callable[[], Found]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


@cache
def _ready() -> tuple[Grammarian, Vocabulary, Sequence[int]]:
    """Return what follows shapes as a daemon does, which remembers little."""
    vocabulary = Runs()
    grammarian = Grammarian(vocabulary, cache_bytes=1, confinement=Confinement(vocabulary))
    grammarian.prepare()
    return grammarian, vocabulary, dearest(vocabulary.pieces())


# --- inputs -------------------------------------------------------------------------------------


def _written(chance: random.Random) -> bytes:
    kind, text = drawn(chance)
    return f"{kind}\n{text}".encode("utf-8", "surrogatepass")


shapes = st.one_of(
    st.sampled_from([b"schema\n{}", b"regex\na*"]), st.randoms(use_true_random=False).map(_written)
)
"""Shapes that can be read in many ways."""
