"""The model's weights as an owned object, and its vocabulary for any thread."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend._llama_binding import llama
from uma_trio.backend.base import IntArray, ModelError, SpecialToken

_NO_VOCABULARY: Final = 0  # LLAMA_VOCAB_TYPE_NONE
_NULL_TOKEN: Final = -1  # LLAMA_TOKEN_NULL
_SPM: Final = 1  # LLAMA_VOCAB_TYPE_SPM
_BPE: Final = 2  # LLAMA_VOCAB_TYPE_BPE
_PIECE_ROOM: Final = 1024
# llama.h, enum llama_token_attr
_UNKNOWN, _CONTROL, _USER_DEFINED, _LSTRIP, _RSTRIP = 1, 8, 16, 128, 256
# llama.cpp cuts text into words with std::regex, which recurses once for each character of a
# match (unicode_regex_split_stl): on a thread's usual stack of 8 MiB, a word, a line of dots or
# of spaces of some 4,000 to 25,000 characters, depending on the model's pattern, ends the
# process. No pattern goes on over a line end but for more white space.
_LONGEST_LINE: Final = 1000
_LINE_IN_TOKEN: Final = re.compile(rb"\n[A-Za-z]")
_BEFORE_LINES: Final = (
    "word",
    "12345",
    "end.",
    "it'",
    "a  )",
    "x = {",
    "Aa/",
    "don't",
    "\t-",
    "é!",
)
_BEHIND_LINES: Final = ("word", "s", "ll be", "I", "Zürich 12", "if (x)\n\n", "THE end\n")
_SLICE: Final = 16_384  # characters that are encoded while the GIL is held


class ModelHandle:
    """Owns a ``llama_model``: the weights live until the last user of this object is gone.

    So a helper thread that is still tokenising while the daemon stops is safe without a lock. `adapters` are those
    that were loaded for it, by their files as they were: they go with it.
    """

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self.adapters: dict[tuple[Path, Hashable], int] = {}
        self._free = llama.llama_model_free  # a global may be gone before this object is

    def __del__(self) -> None:
        self._free(self.pointer)


class LlamaVocabulary:
    """See :class:`uma_trio.backend.base.Vocabulary`. Immutable, so safe from any thread."""

    def __init__(self, model: ModelHandle) -> None:
        self._model = model
        self._vocab = int(llama.llama_model_get_vocab(model.pointer))
        kind = int(llama.llama_vocab_type(self._vocab))
        self._uses_regex = kind == _BPE
        if kind == _NO_VOCABULARY:
            raise ModelError("The model has no vocabulary, so it cannot read or write text.")
        self.n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))
        self.adds_bos = bool(llama.llama_vocab_get_add_bos(self._vocab))
        self.bos_text = self._text(int(llama.llama_vocab_bos(self._vocab)))
        self.eos_text = self._text(int(llama.llama_vocab_eos(self._vocab)))
        self.end_tokens = frozenset(self._build_end_tokens())
        self._pieces = self._build_pieces()
        self.parts_at_lines = kind in (_SPM, _BPE) and self._ends_tokens_at_lines()

    @classmethod
    def load(cls, path: Path) -> LlamaVocabulary:
        """Load only the vocabulary of the model at `path`: for tests and tools."""
        lib.start()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        pointer = llama.llama_model_load_from_file(str(path).encode(), params)
        if not pointer:
            raise ModelError(f"llama.cpp cannot read the vocabulary of {path}.")
        return cls(ModelHandle(pointer))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Return the tokens of `text` (int32). See the contract in ``backend.base``.

        Lines of more than 1000 characters are tokenised in parts, cut between words where
        there are any, which gives the same tokens unless the model joins words.
        """
        found = self.apart(text)
        if len(found) <= 1:
            return self._tokenize(text, add_special, parse_special)
        parts = [self._tokenize(part, False, parse_special) for part in found]
        if add_special:
            around = self._tokenize("", True, False)
            first = int(self.adds_bos and len(around) > 0)
            parts = [around[:first], *parts, around[first:]]
        return np.concatenate(parts)

    def apart(self, text: str) -> list[str]:
        return cut_long_lines(text) if self._uses_regex else [text]

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> IntArray:
        slices = (text[at : at + _SLICE] for at in range(0, len(text), _SLICE))
        data = b"".join(part.encode("utf-8", "replace") for part in slices)
        vocab, size = self._vocab, len(data)
        room = size + 8  # at most a token per byte, and the special ones around them
        while True:
            tokens = np.empty(room, np.int32)
            address = tokens.ctypes.data
            count = int(lib.tokenize(vocab, data, size, address, room, add_special, parse_special))
            if count >= 0:
                return tokens[:count].copy()
            if -count <= room or -count >= 1 << 31:  # INT32_MIN: more than an int can count
                raise ValueError("the text is too long for this tokenizer")
            room = -count

    def pieces(self) -> Sequence[bytes]:
        return self._pieces

    def specials(self) -> Sequence[SpecialToken]:
        ask, vocab = lib.attributes, ctypes.c_void_p(self._vocab)
        found = ((token, ask(vocab, token)) for token in range(self.n_vocab))
        return [
            SpecialToken(
                token,
                self._text(token),
                is_control=bool(has & (_CONTROL | _UNKNOWN)),
                strips_left=bool(has & _LSTRIP),
                strips_right=bool(has & _RSTRIP),
            )
            for token, has in found
            if has & (_CONTROL | _UNKNOWN | _USER_DEFINED)
        ]

    def _ends_tokens_at_lines(self) -> bool:
        """Whether a line end and the letter behind it are never of one token, nor change others.

        Both kinds of vocabularies join neighbours for as long as what they are together is a token. So where
        no token holds both, what is before is joined apart from what is behind. Words are cut before that:
        each pattern of llama.cpp (llama-vocab.cpp, `llm_tokenizer_bpe`) ends one there, and looks no
        further. Of a pattern that is not known yet a few texts tell.
        """
        if _LINE_IN_TOKEN.search(b"\0".join(self._pieces)):
            return False

        def tokens(text: str) -> list[int]:
            return [*map(int, self._tokenize("\n" + text, False, False))]

        mark = tokens("")
        return all(
            tokens(f"{before}\n{behind}") == tokens(f"{before}\n") + tokens(behind)[len(mark) :]
            for before in _BEFORE_LINES
            for behind in _BEHIND_LINES
        )

    def _text(self, token: int) -> str:
        """Return how a special token is written in a template."""
        if token == _NULL_TOKEN:
            return ""
        return (llama.llama_vocab_get_text(self._vocab, token) or b"").decode("utf-8", "replace")

    def _build_end_tokens(self) -> Iterator[int]:
        is_end, vocab = lib.is_eog, ctypes.c_void_p(self._vocab)
        return (token for token in range(self.n_vocab) if is_end(vocab, token))

    def _build_pieces(self) -> Sequence[bytes]:
        """Ask for every token once: 75 ms of CPU for a vocabulary of 152k."""
        ask, vocab = lib.token_to_piece, ctypes.c_void_p(self._vocab)
        pieces: list[bytes] = []
        room = _PIECE_ROOM
        while len(pieces) < self.n_vocab:
            buffer = ctypes.create_string_buffer(room)
            view, start = memoryview(buffer).cast("B"), ctypes.c_void_p(ctypes.addressof(buffer))
            for token in range(len(pieces), self.n_vocab):
                length = ask(vocab, token, start, room, 0, 0)
                if length < 0:  # this much is needed
                    room = -length
                    break
                pieces.append(bytes(view[:length]))
        return tuple(pieces)


class _LongRuns:
    """The runs of 1000 characters of one kind in a text, found one after the other.

    Only where half as many stand in one block is looked closer: a search for 1000 would begin again
    at each character of a run of 999, and hold the GIL all the time.
    """

    def __init__(self, consists: Callable[[str], bool], text: str) -> None:
        self._consists, self._text = consists, text
        self._found: int | None = -1

    def first(self, start: int) -> int | None:
        """Return where the first one from `start` begins; `start` must not go back."""
        if self._found is not None and self._found < start:
            self._found = next(self._long(start), None)
        return self._found

    def _long(self, start: int) -> Iterator[int]:
        half = _LONGEST_LINE // 2
        text, consists = self._text, self._consists
        for block in range(start + -start % half, len(text) - half + 1, half):
            if not consists(text[block : block + half]):
                continue
            begin = block
            while begin > start and consists(text[begin - 1]):
                begin -= 1
            run = text[begin : begin + _LONGEST_LINE]
            if len(run) == _LONGEST_LINE and consists(run):
                yield begin


def _is_one_line(text: str) -> bool:
    return "\n" not in text


def cut_long_lines(text: str) -> list[str]:
    """Cut `text` into parts whose lines and runs of white space have at most 1000 characters.

    It is cut before a space that ends a word, else behind a character that belongs to no word,
    else anywhere; ``"".join`` gives `text` back.
    """
    parts = []
    start = 0
    runs = [_LongRuns(_is_one_line, text), _LongRuns(str.isspace, text)]
    while begins := [begin for run in runs if (begin := run.first(start)) is not None]:
        begin = min(begins)
        end = begin + _LONGEST_LINE
        cut = end
        for place in range(end - 1, begin + _LONGEST_LINE // 2, -1):
            if text[place] == " " and not text[place - 1].isspace():
                cut = place
                break
            if cut == end and not text[place - 1].isalnum():
                cut = place
        parts.append(text[start:cut])
        start = cut
    parts.append(text[start:])
    return [part for part in parts if part]
