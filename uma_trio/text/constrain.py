"""Answers that keep to a grammar: JSON Schema, regular expressions, choices, GBNF and Lark.

A :class:`Grammarian` compiles a :class:`Shape` for one vocabulary, by llguidance; a :class:`Follower`
walks one answer through what was compiled. Compiling blocks and belongs into a helper thread. It is
bounded by what llguidance calls fuel, and so is each step, so that no schema takes a tick for
itself. What is asked for is enforced or refused with the reason, and never loosened.

JSON is written without white space, or with single spaces and indented lines where a person would
put them: a grammar that allows any white space lets a model go on with it for ever.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from uma_trio.backend.base import Vocabulary
from uma_trio.text.apart import ApartFollower
from uma_trio.text.confinement import Confinement, NotChecked, fits_in_daemon
from uma_trio.text.grammars import (
    Words,
    compiled,
    refuse_failed,
    source_of,
    tokenizer_of,
)
from uma_trio.text.shape import MAX_BYTES, Shape, Unconstrainable
from uma_trio.text.shape_worker import Verdict

# 350 schemas of guidance-ai/jsonschemabench took 44 MiB: on average 64 KiB and 60 bytes a byte of the
# schema, the worst three times what is reckoned here. Only where no process has measured it.
_ENTRY_BYTES: Final = 65_536
_BYTES_A_BYTE: Final = 100
CACHE_BYTES: Final = 64 << 20
_LEAST_BYTES: Final = 65_536
_REMEMBERED: Final = 1024  # verdicts, of some hundred bytes each
# A step that took longer than this, with the lock held, is the last one of its answer.
_STEP_S: Final = 0.020
# llguidance prepares a vocabulary with the lock held, some 10 us a token: 20 ms for so many.
_SMALL_VOCABULARY: Final = 2048
_WORD: Final = 32
# Between parts of JSON hardly any token is allowed: then only words with a bit in them are unpacked.
_SPARSE: Final = 4


class Grammarian:
    """Compiles shapes for a vocabulary, and remembers the latest. Any number of threads may call it.

    With a `confinement` a shape is compiled there first, and in this process only if it is plain and
    small; refusals are remembered. Unless `prepare` was called before, or the vocabulary is small, every
    shape is followed there: preparing a vocabulary here would hold up everybody. What is compiled
    here takes `cache_bytes` at most, as measured there, or as reckoned from how long each shape is
    written.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        cache_bytes: int = CACHE_BYTES,
        confinement: Confinement | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._most_bytes = cache_bytes
        self._confinement = confinement
        if confinement is not None:
            confinement.figures.held_bytes = lambda: self._held_bytes
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        # Why it is refused, or "" if it is followed in a process of its own.
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def follow(self, shape: Shape) -> Follower | ApartFollower:
        """Return what follows one answer. Blocks.

        Raises:
            Unconstrainable: the shape is too large, none, or asks for what cannot be enforced.
        """
        n_bytes, key = _measured(shape)
        with self._lock:
            known = self._compiled.get(key)
            verdict = self._verdicts.get(key)
        if known is not None:
            return self._copy_of(key, *known)
        if verdict is None:
            if self._confinement is None:
                source = source_of(shape.kind, shape.text)
                return self._compile(key, shape, source, _ENTRY_BYTES + _BYTES_A_BYTE * n_bytes)
            found = self._checked(key, shape, self._confinement)
            if fits_in_daemon(found) and self._is_prepared():
                return self._compile(key, shape, found.source, max(found.held_bytes, _LEAST_BYTES))
            self._note(key, verdict := "")
        if verdict or self._confinement is None:
            raise Unconstrainable(verdict or "is not usable")
        return self._confinement.follow(shape)

    def knows(self, shape: Shape) -> bool:
        """Whether `follow` would compile nothing."""
        try:
            _, key = _measured(shape)
        except Unconstrainable:
            return True
        return key in self._compiled or key in self._verdicts

    def check(self, shape: Shape) -> None:
        """Find out whether a shape can be enforced. Blocks. Raises as `follow` does."""
        if self._confinement is None:
            self.follow(shape)
            return
        _, key = _measured(shape)
        with self._lock:
            known = key in self._compiled or key in self._passed
            verdict = self._verdicts.get(key)
        if verdict:
            raise Unconstrainable(verdict)
        if not known and verdict is None:
            self._checked(key, shape, self._confinement)
            with self._lock:
                self._passed[key] = None
                while len(self._passed) > _REMEMBERED:
                    self._passed.popitem(last=False)

    @property
    def held_bytes(self) -> int:
        """About how much memory what is remembered takes."""
        return self._held_bytes

    def _checked(self, key: bytes, shape: Shape, confinement: Confinement) -> Verdict:
        """Return what a process says of a shape; remember a refusal."""
        try:
            return confinement.check(shape)
        except NotChecked:
            raise
        except Unconstrainable as error:
            self._note(key, str(error))
            raise

    def _note(self, key: bytes, verdict: str) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)

    def _copy_of(self, key: bytes, compiled: LLMatcher, n_bytes: int) -> Follower:
        with self._lock:
            self._remember(key, compiled, n_bytes)
            copy = compiled.deep_copy()
        return Follower(copy, self._vocabulary)

    def _remember(self, key: bytes, compiled: LLMatcher, n_bytes: int) -> None:
        """Keep the latest; forget the oldest beyond what all together may take. Under the lock."""
        if key not in self._compiled:
            self._compiled[key] = (compiled, n_bytes)
            self._held_bytes += n_bytes
        self._compiled.move_to_end(key)
        while self._held_bytes > self._most_bytes and len(self._compiled) > 1:
            _, (_, freed) = self._compiled.popitem(last=False)
            self._held_bytes -= freed

    def prepare(self) -> None:
        """Prepare the vocabulary with the interpreter's lock: a second for a large one.

        Only before the daemon serves. Shapes are followed in other processes without it.
        """
        if self._confinement is not None:
            self._confinement.warm()
        self._tokenizer()

    def close(self) -> None:
        """End the processes that check and follow shapes."""
        if self._confinement is not None:
            self._confinement.close()

    def _is_prepared(self) -> bool:
        """Whether compiling here holds nobody up."""
        return self._made is not None or self._vocabulary.n_vocab <= _SMALL_VOCABULARY

    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                vocabulary = self._vocabulary
                words = Words(vocabulary.pieces(), sorted(vocabulary.end_tokens), self._tokens)
                self._made = tokenizer_of(words, vocabulary.n_vocab, sorted(vocabulary.end_tokens))
            return self._made

    def _tokens(self, text: str) -> list[int]:
        found = self._vocabulary.tokenize(text, add_special=False, parse_special=False)
        ids: list[int] = found.tolist()
        return ids

    def _compile(self, key: bytes, shape: Shape, source: str, n_bytes: int) -> Follower:
        matcher = compiled(self._tokenizer(), shape.kind, source)
        Follower(matcher, self._vocabulary).allowed()  # the first step may take long
        refuse_failed(matcher)
        return self._copy_of(key, matcher, n_bytes)


def _measured(shape: Shape) -> tuple[int, bytes]:
    """Return how long a shape is and its digest. Raises :class:`Unconstrainable` if it is too long."""
    most = MAX_BYTES[shape.kind]
    n_bytes = len(shape.text.encode("utf-8", "surrogatepass"))
    if n_bytes > most:
        raise Unconstrainable(f"takes more than {most} bytes")
    text = f"{shape.kind} {shape.text}".encode("utf-8", "surrogatepass")
    return n_bytes, hashlib.sha256(text).digest()


class Follower:
    """Walks one answer through its grammar, a token at a time. For one thread at a time."""

    __slots__ = ("_failed", "_matcher", "_vocabulary", "_words")

    elsewhere: ClassVar = False

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words = np.zeros((vocabulary.n_vocab + 31) // 32, np.int32)
        self._failed = False

    def allows(self, token: int) -> bool:
        """Whether the answer may go on with `token`; with an end token, whether it may end."""
        if token in self._vocabulary.end_tokens:
            return self._matcher.is_accepting()
        if self._failed:
            return False
        began = time.thread_time()
        allowed = self._matcher.validate_tokens([token]) == 1
        self._look_at(began)
        return allowed and not self._failed

    def allowed(self) -> NDArray[np.intp]:
        """Return all tokens that the answer may go on with; none if the grammar has failed."""
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._failed or self._matcher.is_error():
            return np.empty(0, np.intp)
        some = np.flatnonzero(words)
        if len(some) < len(words) // _SPARSE:
            few = np.unpackbits(words[some].view(np.uint8), bitorder="little")
            which, bit = np.nonzero(few.reshape(-1, _WORD))
            return some[which] * _WORD + bit
        bits = np.unpackbits(
            words.view(np.uint8), count=self._vocabulary.n_vocab, bitorder="little"
        )
        return np.flatnonzero(bits)

    def deferred(self) -> Callable[[], NDArray[np.intp]]:
        """Return what `allowed` is here and now, to be called later, in any thread, once."""
        # A copy takes 0.02 ms, and 8 % off what the next mask finds prepared.
        follower = Follower(self._matcher.deep_copy(), self._vocabulary)
        follower._failed = self._failed
        return follower.allowed

    def accept(self, token: int) -> None:
        """Go on behind `token`."""
        began = time.thread_time()
        self._matcher.consume_token(token)
        self._look_at(began)

    def take_back(self) -> None:
        """Go back to before the latest `accept`."""
        self._matcher.rollback(1)

    def _look_at(self, began: float) -> None:
        """Let the answer fail if its grammar holds everybody up."""
        if time.thread_time() - began > _STEP_S:
            self._failed = True
