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
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from uma_trio.backend.base import Vocabulary
from uma_trio.text.shape import MAX_BYTES, Kind, Shape, Unconstrainable

# 350 schemas of guidance-ai/jsonschemabench took 44 MiB: on average 64 KiB and 60 bytes a byte of the
# schema, the worst three times what is reckoned here.
_ENTRY_BYTES: Final = 65_536
_BYTES_A_BYTE: Final = 100
CACHE_BYTES: Final = 64 << 20
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=100_000,  # some 7 ms, which hardly anything needs
    max_grammar_size=200_000,
    max_lexer_states=50_000,  # of 1 to 2 kB each
    verbose_errors=False,
)
JSON: Final[Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n[ ]{0,40}",
    "coerce_one_of": False,  # these two loosen, and a schema may ask for them by "x-guidance"
    "lenient": False,
}
LOOSE: Final[Any] = {**JSON, "coerce_one_of": True, "lenient": True}
_LOOSE_KINDS: Final = ("loose schema", "reply")  # of a reply each schema is looked at before
_MAX_WORDS: Final = 300
_WORD: Final = 32
# Between parts of JSON hardly any token is allowed: then only words with a bit in them are unpacked.
_SPARSE: Final = 4
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: \[(.*)\]")


class Grammarian:
    """Compiles shapes for a vocabulary, and remembers the latest. Any number of threads may call it.

    What is remembered takes about `cache_bytes`, reckoned from how long each shape is written.
    """

    def __init__(self, vocabulary: Vocabulary, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._most_bytes = cache_bytes
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()

    def follow(self, shape: Shape) -> Follower:
        """Return what follows one answer, its first step computed. Blocks.

        Raises:
            Unconstrainable: the shape is too large, none, or asks for what cannot be enforced.
        """
        most = MAX_BYTES[shape.kind]
        n_bytes = len(shape.text.encode("utf-8", "surrogatepass"))
        if n_bytes > most:
            raise Unconstrainable(f"takes more than {most} bytes")
        key = hashlib.sha256(f"{shape.kind} {shape.text}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = self._compiled.get(key)
        compiled = self._compile(shape) if known is None else known[0]
        with self._lock:
            self._remember(key, compiled, _ENTRY_BYTES + _BYTES_A_BYTE * n_bytes)
            copy = compiled.deep_copy()
        return Follower(copy, self._vocabulary)

    @property
    def held_bytes(self) -> int:
        """About how much memory what is remembered takes."""
        return self._held_bytes

    def _remember(self, key: bytes, compiled: LLMatcher, n_bytes: int) -> None:
        """Keep the latest; forget the oldest beyond what all together may take. Under the lock."""
        if key not in self._compiled:
            self._compiled[key] = (compiled, n_bytes)
            self._held_bytes += n_bytes
        self._compiled.move_to_end(key)
        while self._held_bytes > self._most_bytes and len(self._compiled) > 1:
            _, (_, freed) = self._compiled.popitem(last=False)
            self._held_bytes -= freed

    def _tokenizer(self) -> LLTokenizer:
        """Return the vocabulary in llguidance's words: half a second, once, for a large one."""
        with self._lock:
            if self._made is None:
                words: Any = _Words(self._vocabulary)
                ends = sorted(self._vocabulary.end_tokens)
                self._made = LLTokenizer(words, n_vocab=self._vocabulary.n_vocab, eos_token=ends)
            return self._made

    def _compile(self, shape: Shape) -> LLMatcher:
        try:
            source = _SOURCES[shape.kind](shape.text)
        except RecursionError as error:
            raise Unconstrainable("is nested too deeply") from error
        except Exception as error:  # a parser of foreign text; it may raise anything
            raise Unconstrainable(_reason(str(error))) from error
        matcher = LLMatcher(self._tokenizer(), source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise Unconstrainable(_reason(matcher.get_error()))
        for warning in matcher.get_grammar_warnings() if shape.kind not in _LOOSE_KINDS else ():
            if _UNIMPLEMENTED.search(warning):
                raise Unconstrainable(_reason(warning))
        Follower(matcher, self._vocabulary).allowed()  # the first step may take long
        if matcher.is_error():
            raise Unconstrainable(_reason(matcher.get_error()))
        return matcher


class Follower:
    """Walks one answer through its grammar, a token at a time. For one thread at a time."""

    __slots__ = ("_matcher", "_vocabulary", "_words")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words = np.zeros((vocabulary.n_vocab + 31) // 32, np.int32)

    def allows(self, token: int) -> bool:
        """Whether the answer may go on with `token`; with an end token, whether it may end."""
        if token in self._vocabulary.end_tokens:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token]) == 1

    def allowed(self) -> NDArray[np.intp]:
        """Return all tokens that the answer may go on with; none if the grammar has failed."""
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
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
        return Follower(self._matcher.deep_copy(), self._vocabulary).allowed

    def accept(self, token: int) -> None:
        """Go on behind `token`."""
        self._matcher.consume_token(token)

    def take_back(self) -> None:
        """Go back to before the latest `accept`."""
        self._matcher.rollback(1)


class _Words:
    """A vocabulary as llguidance asks for one. Control tokens are marked as no text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces = vocabulary.pieces()
        self._known = {piece: token for token, piece in enumerate(pieces) if piece}
        self._most = max(map(len, pieces))
        self.tokens: Sequence[bytes] = [
            piece or b"\xff<%d>" % token for token, piece in enumerate(pieces)
        ]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self.eos_token_id = min(vocabulary.end_tokens, default=0)
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        """Return tokens whose bytes are those of `text`: the model's own, if they are.

        Some vocabularies put a space before any text, or change it, which llguidance does not expect.
        """
        tokens = self._vocabulary.tokenize(text, add_special=False, parse_special=False)
        ids: list[int] = tokens.tolist()
        data = text.encode()
        return ids if b"".join([self._pieces[i] for i in ids]) == data else self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """Return the longest token that `data` begins with, and so on behind it."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            ends = range(min(len(data), at + self._most), at, -1)
            found = next((end for end in ends if data[at:end] in self._known), None)
            if found is None:  # not even the byte is a token
                return ids
            ids.append(self._known[data[at:found]])
            at = found
        return ids


def _of_schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, overrides=JSON)


def _of_loose_schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, overrides=LOOSE)


def _of_choice(text: str) -> str:
    words = json.loads(text)
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        raise ValueError("must be a list of at least one string")
    return LLMatcher.grammar_from_regex("|".join(re.escape(word) for word in words))


def _of_grammar(text: str) -> str:
    return LLMatcher.grammar_from_lark(any_to_lark(text))


_SOURCES: Final[dict[Kind, Callable[[str], str]]] = {
    "schema": _of_schema,
    "regex": LLMatcher.grammar_from_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "loose schema": _of_loose_schema,
    "reply": LLMatcher.grammar_from_lark,
}


def _reason(message: str) -> str:
    """Return why in one line, naming the keyword where there is one."""
    found = _UNIMPLEMENTED.search(message)
    if found is not None:
        return f"uses {found[1]}, which cannot be enforced; leave it out"
    if "NoExtension" in message:
        return "allows no answer at all"
    text = " ".join(message.removesuffix("<non-verbose/>").split())
    return f"is not usable: {text if len(text) <= _MAX_WORDS else text[: _MAX_WORDS - 3] + '...'}"
