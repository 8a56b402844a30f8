"""Control tokens spelled by a client's text: marked before a template sees it, and found in the prompt.

Prompts are tokenised as by llama.cpp, so that each spelling of a control token becomes one. A client's
text must not make one, not even with the adjacent text of a template. So a character that occurs nowhere
else is put into every spelling in such texts, and into parts of one at their edges. It is removed from
the rendered prompt, and no control token is recognised where it was.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

#: Hexagrams: printable, so that `repr` keeps them, without case, and no white space.
MARKS: Final = tuple(map(chr, range(0x4DC0, 0x4E00)))
_LEAST_EDGE: Final = 2
_LEAST_INNER: Final = 5  # a shorter token, such as <s>, is looked for as a whole
_AROUND: Final = "<>[]{}()|/ \uff5c"


class Spellings:
    """The spellings of one vocabulary: `controls`, and `markers` that become tokens in any text."""

    def __init__(self, controls: Sequence[str], markers: Sequence[str]) -> None:
        controls = [word for word in controls if len(word) > 1]
        self._markers = [word for word in markers if len(word) > 1]
        every = [*controls, *self._markers]
        self._controls = _pattern(controls)
        self._overlap = _overlapping(controls)
        self._ordered = sorted(controls, key=lambda word: len(word.encode()), reverse=True)
        self._inner = _pattern(list(map(_telling_part, every)))
        parts = (part for word in every for part in (word.strip(_AROUND), word[1:-1]))
        self._whole = {part for part in parts if part}
        self._longest = max(map(len, every), default=0)
        self._firsts, self._lasts = {w[0] for w in every}, {w[-1] for w in every}
        self._heads = {w[:n] for w in every for n in range(_LEAST_EDGE, len(w))}
        self._tails = {w[-n:] for w in every for n in range(_LEAST_EDGE, len(w))}

    def marked(self, text: str, mark: str, named: Container[str] = ()) -> str:
        """Return `text` with `mark` in every possible part of a spelling; names that templates compare stay."""
        places = set() if text in named else self._places(text)
        if not places:
            return text
        edges = [0, *sorted(places), len(text)]
        return mark.join([text[a:b] for a, b in pairwise(edges)])

    def _places(self, text: str) -> set[int]:
        if not text or not self._longest:
            return set()
        if text in self._whole:
            return {min(1, len(text) - 1)}
        places: set[int] = set()
        found = self._inner.search(text)
        while found is not None:
            places.add(found.start() + 1)
            found = self._inner.search(text, found.start() + 1)
        reach = min(self._longest, len(text))
        if any(first in text[-reach:] for first in self._firsts):
            places |= {
                len(text) - n + 1 for n in range(_LEAST_EDGE, reach + 1) if text[-n:] in self._heads
            }
        if any(last in text[:reach] for last in self._lasts):
            places |= {n - 1 for n in range(_LEAST_EDGE, reach + 1) if text[:n] in self._tails}
        return places

    def specials(self, text: str, marks: Sequence[int]) -> list[int]:
        """Return the start and end of each control token in `text`, except those around one of `marks`."""
        found: list[int] = []
        left = iter(marks)
        mark = next(left, None)
        for start, end in self._found(text):
            while mark is not None and mark <= start:
                mark = next(left, None)
            if mark is None or mark >= end:
                found += (start, end)
        return found

    def cuts(self, text: str, marks: Sequence[int]) -> list[int]:
        """Return those of `marks` that are inside a marker."""
        return [place for place in marks if any(_spans(w, text, place) for w in self._markers)]

    def _found(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the spellings in `text` as llama.cpp finds them: the longest first, wherever they are."""
        if not self._overlap:
            yield from (found.span() for found in self._controls.finditer(text))
            return
        taken: list[tuple[int, int]] = []
        for word in self._ordered:
            at = text.find(word)
            while at >= 0:
                end = at + len(word)
                if all(end <= a or at >= b for a, b in taken):
                    taken.append((at, end))
                    at = text.find(word, end)
                else:
                    at = text.find(word, at + 1)
        yield from sorted(taken)


def _spans(word: str, text: str, place: int) -> bool:
    return word in text[max(0, place - len(word) + 1) : place + len(word) - 1]


def _telling_part(word: str) -> str:
    """Return `word` without its edges, which a template may add, unless the rest is a plain name."""
    inner = word[1:-1]
    return word if len(word) < _LEAST_INNER or inner.isidentifier() else inner


def free_marks(values: Iterable[Any], marks: Iterable[str] = MARKS) -> list[str]:
    """Return those of `marks` that occur in none of these values, not even escaped."""
    left = set(marks)
    for text in texts_in(values):
        if not text.isascii():
            left.difference_update(text)
        if "\\u4d" in text.lower():
            left = {mark for mark in left if f"u{ord(mark):x}" not in text.lower()}
    return sorted(left)


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts_in(key)
            yield from texts_in(inner)
    elif not isinstance(value, int | float | None):
        for inner in value:
            yield from texts_in(inner)


def unmarked(text: str, marks: Sequence[str]) -> tuple[str, dict[str, list[int]]]:
    """Return `text` without `marks`, escaped or not, and the places of each of them."""
    places: dict[str, list[int]] = {mark: [] for mark in marks}
    names = {f"{ord(mark):x}": mark for mark in marks}
    pieces = re.split(rf"([{''.join(marks)}])|\\+u({'|'.join(names)})", text)
    kept: list[str] = []
    at = 0
    for piece, mark, name in zip(
        pieces[::3], [*pieces[1::3], None], [*pieces[2::3], None], strict=True
    ):
        kept.append(piece)
        at += len(piece)
        if mark or name:
            places[mark or names[str(name)]].append(at)
    return "".join(kept), places


def _overlapping(words: Sequence[str]) -> bool:
    heads = {word[:n] for word in words for n in range(1, len(word) + 1)}
    whole = set(words)
    return any(
        word[n:] in heads or any(word[n:end] in whole for end in range(n + 1, len(word)))
        for word in words
        for n in range(1, len(word))
    )


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_branches(tree) if words else r"(?!)")


def _branches(tree: dict[str, Any]) -> str:
    ends = "" in tree
    singles = [char for char, node in tree.items() if char and set(node) == {""}]
    rest = [
        re.escape(char) + _branches(node)
        for char, node in tree.items()
        if char and char not in singles
    ]
    if singles:
        rest.append(
            f"[{''.join(map(re.escape, singles))}]" if len(singles) > 1 else re.escape(singles[0])
        )
    if not rest:
        return ""
    if len(rest) == 1 and not ends:
        return rest[0]
    return f"(?:{'|'.join(rest)})" + ("?" if ends else "")
