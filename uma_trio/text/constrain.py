"""Answers that keep to a grammar: JSON Schema, regular expressions, choices, GBNF and Lark.

A shape is enforced or refused with the reason, and never loosened. Compiling blocks; it and each step
are bounded by llguidance's fuel. JSON is written without white space, or with single spaces and indented
lines: a grammar that allows any white space lets a model write it for ever.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from attrs import frozen
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from uma_trio.backend.base import Vocabulary
from uma_trio.text import grammars
from uma_trio.text.confinement import ApartFollower, Confinement, fits_in_daemon
from uma_trio.text.shape import MAX_BYTES, NotChecked, Shape, Unconstrainable, Unknown
from uma_trio.text.shape_worker import Verdict
from uma_trio.text.slices import digest, utf8_length

# 350 schemas of guidance-ai/jsonschemabench took 44 MiB: on average 64 KiB and 60 bytes a byte of the
# schema, the worst three times what is reckoned here. Only where no process has measured it.
_ENTRY_BYTES: Final = 65_536
_BYTES_A_BYTE: Final = 100
CACHE_BYTES: Final = 64 << 20
_LEAST_BYTES: Final = 65_536
_REMEMBERED: Final = 1024  # verdicts, of some hundred bytes each
# The rest of an answer is followed in another process once a step in this one took so long, with the lock
# held. A row of the parser is bounded (`LIMITS_HERE`), so that no step takes much longer.
_STEP_S: Final = 0.010
# llguidance prepares a vocabulary with the lock held, some 10 us a token: 20 ms for so many.
_SMALL_VOCABULARY: Final = 2048
_WORD: Final = 32
# Between parts of JSON hardly any token is allowed: then only words with a bit in them are unpacked.
_SPARSE: Final = 4


class Grammarian:
    """Compiles shapes for a vocabulary, with a cache of `cache_bytes`. Safe to use from any thread.

    With a `confinement` a shape is compiled there first, and here only if it is plain and small, and the
    vocabulary is prepared already or small too: preparing one here would stop every other thread.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        cache_bytes: int = CACHE_BYTES,
        confinement: Confinement | None = None,
    ) -> None:
        self._vocabulary, self._most_bytes, self._confinement = vocabulary, cache_bytes, confinement
        #: About how much memory the cache takes.
        self.kept_bytes = 0
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        # Why it is refused, "" if it is followed in a process of its own, None if it was only checked.
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    @property
    def known(self) -> KnownShapes:
        """Return the cached verdict, without compiling."""
        return KnownShapes(self)

    def follow(self, shape: Shape, *, known_only: bool = False) -> Follower | ApartFollower:
        """Return what follows one answer. Raises :class:`Unconstrainable`; `Unknown` if it is `known_only`."""
        n_bytes, key = _measured(shape)
        with self._lock:
            known = self._compiled.get(key)
            verdict = self._verdicts.get(key)
        if known is not None:
            return self._copy_of(key, shape, *known)
        if verdict is None:
            if known_only:
                raise Unknown
            if self._confinement is None:
                source = grammars.source_of(shape.kind, shape.text)
                return self._compile(key, shape, source, _ENTRY_BYTES + _BYTES_A_BYTE * n_bytes)
            found = self._checked(key, shape, self._confinement)
            is_prepared = self._made is not None or self._vocabulary.n_vocab <= _SMALL_VOCABULARY
            if fits_in_daemon(found) and is_prepared:
                return self._compile(key, shape, found.source, max(found.kept_bytes, _LEAST_BYTES))
            self._note(key, verdict := "")
        if self._confinement is None:
            raise Unconstrainable("is not usable")
        self._refuse_known(verdict, self._confinement)
        if known_only and not self._confinement.is_warm:
            raise Unknown
        return self._confinement.follow(shape, key)

    def check(self, shape: Shape, *, known_only: bool = False) -> None:
        """Find out whether a shape can be enforced. Blocks. Raises as `follow` does."""
        if self._confinement is None:
            self.follow(shape, known_only=known_only)
            return
        _, key = _measured(shape)
        with self._lock:
            known = key in self._compiled or key in self._verdicts
            verdict = self._verdicts.get(key)
        self._refuse_known(verdict, self._confinement)
        if not known:
            if known_only:
                raise Unknown
            self._checked(key, shape, self._confinement)
            self._note(key, None)

    @staticmethod
    def _refuse_known(verdict: str | None, confinement: Confinement) -> None:
        if verdict:
            confinement.note("refused again")
            raise Unconstrainable(verdict)

    def _checked(self, key: bytes, shape: Shape, confinement: Confinement) -> Verdict:
        try:
            return confinement.check(shape)
        except NotChecked:
            raise
        except Unconstrainable as error:
            self._note(key, str(error))
            raise

    def _move(self, key: bytes, shape: Shape, confinement: Confinement) -> ApartFollower:
        """Return what follows an answer that turned out to be slow, and each later one of its shape."""
        with self._lock:
            _, freed = self._compiled.pop(key, (None, 0))
            self.kept_bytes -= freed
        self._note(key, "")
        confinement.note("moved")
        return confinement.follow(shape, key, revive=False)  # on the engine's thread

    def _note(self, key: bytes, verdict: str | None) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)

    def _copy_of(self, key: bytes, shape: Shape, compiled: LLMatcher, n_bytes: int) -> Follower:
        with self._lock:
            self._remember(key, compiled, n_bytes)
            copy = compiled.deep_copy()
        if self._confinement is None:
            return Follower(copy, self._vocabulary)
        return Follower(copy, self._vocabulary, partial(self._move, key, shape, self._confinement))

    def _remember(self, key: bytes, compiled: LLMatcher, n_bytes: int) -> None:
        """Cache a shape as the latest, and drop the oldest beyond the limit. Under the lock."""
        if key not in self._compiled:
            self._compiled[key] = (compiled, n_bytes)
            self.kept_bytes += n_bytes
        self._compiled.move_to_end(key)
        while self.kept_bytes > self._most_bytes and len(self._compiled) > 1:
            _, (_, freed) = self._compiled.popitem(last=False)
            self.kept_bytes -= freed

    def prepare(self) -> None:
        """Prepare the vocabulary with the GIL, before the daemon serves: a second for a large one."""
        if self._confinement is not None:
            self._confinement.warm()
        self._tokenizer()

    def close(self) -> None:
        """End the processes and drop what is compiled: the collector does not see that it holds the vocabulary."""
        with self._lock:
            self._made = None
            self._compiled.clear()
        if self._confinement is not None:
            self._confinement.close()

    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                vocabulary = self._vocabulary
                words = grammars.Words(
                    vocabulary.pieces(), sorted(vocabulary.end_tokens), self._tokens
                )
                self._made = grammars.tokenizer_of(
                    words, vocabulary.n_vocab, sorted(vocabulary.end_tokens)
                )
            return self._made

    def _tokens(self, text: str) -> list[int]:
        found = self._vocabulary.tokenize(text, add_special=False, parse_special=False)
        ids: list[int] = found.tolist()
        return ids

    def _compile(self, key: bytes, shape: Shape, source: str, n_bytes: int) -> Follower:
        limits = grammars.LIMITS if self._confinement is None else grammars.LIMITS_HERE
        matcher = grammars.compiled(self._tokenizer(), shape.kind, source, limits)
        Follower(matcher, self._vocabulary).allowed()  # the first step may take long
        grammars.refuse_failed(matcher)
        return self._copy_of(key, shape, matcher, n_bytes)


@frozen
class KnownShapes:
    """What a :class:`Grammarian` has compiled or refused. Takes no longer than a digest of the shape."""

    _grammarian: Grammarian

    def follow(self, shape: Shape) -> Follower | ApartFollower:
        return self._grammarian.follow(shape, known_only=True)

    def check(self, shape: Shape) -> None:
        self._grammarian.check(shape, known_only=True)


def _measured(shape: Shape) -> tuple[int, bytes]:
    most = MAX_BYTES[shape.kind]
    # A byte at least for each character: what is far too long is not written down.
    n_bytes = len(shape.text)
    if n_bytes <= most:
        n_bytes = utf8_length(shape.text)
    if n_bytes > most:
        raise Unconstrainable(f"takes more than {most} bytes")
    return n_bytes, digest(shape.kind, shape.text)


class Follower:
    """Follows one answer through its grammar. For one thread at a time.

    Where a step is slow or too ambiguous, what `move` returns follows the rest; without it nothing can.
    """

    __slots__ = ("_accepted", "_apart", "_failed", "_matcher", "_move", "_vocabulary", "_words")

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        move: Callable[[], ApartFollower] | None = None,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words = np.zeros((vocabulary.n_vocab + 31) // 32, np.int32)
        self._failed = False
        self._move = move
        self._apart: ApartFollower | None = None
        self._accepted: list[int] = []

    @property
    def elsewhere(self) -> bool:
        return self._apart is not None

    @property
    def problem(self) -> str | None:
        return None if self._apart is None else self._apart.problem

    def allows(self, token: int) -> bool:
        if self._apart is not None:
            return self._apart.allows(token)
        if token in self._vocabulary.end_tokens:
            return self._matcher.is_accepting()
        if self._failed:
            return False
        began = time.thread_time()
        allowed = self._matcher.validate_tokens([token]) == 1
        self._look_at(began)
        return allowed and not self._failed

    def allowed(self) -> NDArray[np.intp]:
        if self._apart is not None:
            return self._apart.allowed()
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
        if self._apart is None:
            # A copy takes 0.02 ms, more after a long answer, and loses 8 % of what the next mask has cached.
            began = time.thread_time()
            follower = Follower(self._matcher.deep_copy(), self._vocabulary)
            follower._failed = self._failed
            self._look_at(began)
        return follower.allowed if self._apart is None else self._apart.deferred()

    def accept(self, token: int) -> None:
        if self._apart is not None:
            self._apart.accept(token)
            return
        began = time.thread_time()
        fits = self._matcher.consume_token(token)
        self._accepted.append(token)
        self._look_at(began, fits=fits)

    def take_back(self) -> None:
        if self._apart is not None:
            self._apart.take_back()
            return
        self._accepted.pop()
        self._matcher.rollback(1)

    def _look_at(self, began: float, *, fits: bool = True) -> None:
        if fits and time.thread_time() - began <= _STEP_S:
            return
        if self._move is None:
            self._failed = True
            return
        self._apart = self._move()
        self._apart.begin(self._accepted)
