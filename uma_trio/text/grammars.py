"""What llguidance receives: sources, limits, a vocabulary. Also for processes, so imports nothing slow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from uma_trio.text.shape import Kind, Unconstrainable

# Items in a row of Earley's table. A row takes time by the square of its items, and by the cube where
# an answer can be read in many ways: 700 ms for a token of several lexemes at 2000.
MAX_ITEMS: Final = 2000
# In the daemon. 250 of 300 schemas of guidance-ai/jsonschemabench need less (248 less than 150), and no token
# of any ambiguous grammar that was tried took more than 5 ms then.
MAX_ITEMS_HERE: Final = 300


def _limits(max_items: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=max_items,
        initial_lexer_fuel=1_000_000,  # some 20 ms
        step_lexer_fuel=100_000,  # some 7 ms, which hardly anything needs
        max_grammar_size=200_000,
        max_lexer_states=50_000,  # of 1 to 2 kB each
        verbose_errors=False,
    )


LIMITS: Final = _limits(MAX_ITEMS)
LIMITS_HERE: Final = _limits(MAX_ITEMS_HERE)
JSON: Final[Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n[ ]{0,40}",
    "coerce_one_of": False,  # these two loosen, and a schema may ask for them by "x-guidance"
    "lenient": False,
}
LOOSE: Final[Any] = {**JSON, "coerce_one_of": True, "lenient": True}
_LOOSE_KINDS: Final = ("loose schema", "reply")  # of a reply each schema is looked at before
_MAX_WORDS: Final = 300
_MOST_SPACE: Final = 1000
_SPACES: Final = re.compile(r"\s+")
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: \[(.*)\]")


class Words:
    """A vocabulary as llguidance expects it; without the model's `tokenize` the longest tokens are taken."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        end_tokens: Sequence[int],
        tokenize: Callable[[str], list[int]] | None = None,
    ) -> None:
        self._pieces = pieces
        self._tokenize = tokenize
        self._known = {piece: token for token, piece in enumerate(pieces) if piece}
        self._most = max(map(len, pieces))
        self.tokens: Sequence[bytes] = [
            piece or b"\xff<%d>" % token for token, piece in enumerate(pieces)
        ]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self.eos_token_id = min(end_tokens, default=0)
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        """Return tokens of the bytes of `text`: the model's own, unless its tokeniser changes the text."""
        data = text.encode()
        if self._tokenize is not None:
            ids = self._tokenize(text)
            if b"".join([self._pieces[i] for i in ids]) == data:
                return ids
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
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


def tokenizer_of(words: Words, n_vocab: int, end_tokens: Sequence[int]) -> LLTokenizer:
    """Return llguidance's form of a vocabulary. Takes a second for 152k tokens, with the GIL."""
    given: Any = words
    return LLTokenizer(given, n_vocab=n_vocab, eos_token=sorted(end_tokens))


def source_of(kind: Kind, text: str) -> str:
    """Return what llguidance compiles, in quadratic time with the GIL. Raises :class:`Unconstrainable`."""
    try:
        return _SOURCES[kind](text)
    except RecursionError as error:
        raise Unconstrainable("is nested too deeply") from error
    except Exception as error:  # a parser of foreign text; it may raise anything
        raise Unconstrainable(_reason(str(error))) from error


def compiled(
    tokenizer: LLTokenizer, kind: Kind, source: str, limits: LLParserLimits = LIMITS
) -> LLMatcher:
    """Return the matcher of a source, without the GIL. Raises :class:`Unconstrainable`, also over `limits`."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    refuse_failed(matcher)
    for warning in matcher.get_grammar_warnings() if kind not in _LOOSE_KINDS else ():
        if _UNIMPLEMENTED.search(warning):
            raise Unconstrainable(_reason(warning))
    return matcher


def refuse_failed(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise Unconstrainable(_reason(matcher.get_error()))


def unforced(source: str) -> str:
    """Return a source whose masks also allow other tokenisations of a forced text than that of `Words`."""
    head = '%llguidance {"no_forcing": true}\n'
    try:
        (grammar,) = json.loads(source)["grammars"]
    except (ValueError, KeyError, TypeError):
        return head + source
    if grammar.get("json_schema") is not None:
        return f"{head}start: %json {json.dumps(grammar['json_schema'], ensure_ascii=False)}\n"
    return head + str(grammar["lark_grammar"])


def _of_choice(text: str) -> str:
    words = json.loads(text)
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        raise ValueError("must be a list of at least one string")
    return LLMatcher.grammar_from_regex("|".join(re.escape(word) for word in words))


def _of_grammar(text: str) -> str:
    # `any_to_lark` takes time by the square of each run of white space: 2 s for 10,000 line ends.
    if max(map(len, _SPACES.findall(text)), default=0) > _MOST_SPACE:
        raise ValueError(f"it has more than {_MOST_SPACE} characters of white space in a row")
    return LLMatcher.grammar_from_lark(any_to_lark(text))


_SOURCES: Final[dict[Kind, Callable[[str], str]]] = {
    "schema": partial(LLMatcher.grammar_from_json_schema, overrides=JSON),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "loose schema": partial(LLMatcher.grammar_from_json_schema, overrides=LOOSE),
    "reply": LLMatcher.grammar_from_lark,
}


def _reason(message: str) -> str:
    found = _UNIMPLEMENTED.search(message)
    if found is not None:
        return f"uses {found[1]}, which cannot be enforced; leave it out"
    if "NoExtension" in message:
        return "allows no answer at all"
    text = " ".join(message.removesuffix("<non-verbose/>").split())
    return f"is not usable: {text if len(text) <= _MAX_WORDS else text[: _MAX_WORDS - 3] + '...'}"
