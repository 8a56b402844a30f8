"""What followed the last tokens of a sequence where they stood before in its own text."""

from __future__ import annotations

from typing import NamedTuple

from uma_trio.backend.base import IntArray

ORDERS = (8, 4, 2)
LONGEST_MATCH = 32  # a longer one tells no more
# A prompt is indexed at 1 us a token and order. So many a tick, of each text, take less than a millisecond.
INDEXED_A_TICK = 256
# Of a text that is guessed at: what a tick can add to it, and more.
NEWEST = 32


class Runs(NamedTuple):
    """For each order, where each run of so many of the first `end` tokens of a text was last followed."""

    end: int
    places: tuple[dict[bytes, int], ...]


def no_runs() -> Runs:
    """Return what is known of a text of which nothing was seen."""
    return Runs(1, tuple({} for _ in ORDERS))


class Lookup:
    """Where each run of 8, 4 and 2 tokens of one sequence was last followed by another token.

    Its prompt is indexed by itself, to be gone on from by the next turn (:meth:`prompt_runs`): `begun` is
    what an earlier one knew of its beginning, and is this one's from now on.

    The text that was copied last goes on being copied where it matches further back than the latest
    place does: whoever writes a changed file writes it in the order of the old one.
    """

    __slots__ = ("_answer", "_distance", "_indexed", "_n_prompt", "_prompt")

    def __init__(self, n_prompt: int = 0, begun: Runs | None = None) -> None:
        begun = begun or no_runs()
        self._n_prompt = n_prompt
        self._indexed = begun.end  # runs that end before this position are known
        self._prompt, self._answer = begun.places, no_runs().places
        self._distance = 0  # how far before the end of the text lies what was copied last

    def index(self, tokens: IntArray, known: int, most: int = INDEXED_A_TICK) -> bool:
        """Take in up to `most` of the first `known` tokens; say whether that was all of them."""
        start, stop = self._indexed, min(known, self._indexed + most)
        if start < stop:
            middle = min(max(start, self._n_prompt), stop)
            _take_in(self._prompt, tokens, start, middle)
            _take_in(self._answer, tokens, middle, stop)
            self._indexed = stop
        return stop >= known

    def unread(self, known: int) -> int:
        """Return how many of the first `known` tokens are not taken in."""
        return known - self._indexed

    def prompt_runs(self) -> Runs | None:
        """Return what is known of the prompt, if all of it is. Then this must not be used any more."""
        if not 1 < self._n_prompt <= self._indexed:
            return None
        return Runs(self._n_prompt, self._prompt)

    def propose(self, tokens: IntArray, known: int, most: int) -> tuple[tuple[int, ...], int]:
        """Return up to `most` guesses at what follows the first `known` tokens, and the match length.

        Everything must have been indexed. Without a match there is no guess, and the length is 0.
        """
        place, match = self._found(tokens, known)
        if not match:
            return (), 0
        copied = tokens[place : min(place + most, known)].tolist()
        # A text that repeats itself goes on repeating itself.
        while len(copied) < most:
            copied += copied[: most - len(copied)]
        return tuple(copied), match

    def _found(self, tokens: IntArray, known: int) -> tuple[int, int]:
        """Return where to copy from and how long the match is there; (0, 0) for nowhere."""
        place = match = 0
        for order, prompt, answer in zip(ORDERS, self._prompt, self._answer, strict=True):
            if order >= known:
                continue
            run = tokens[known - order : known].tobytes()
            found = answer.get(run) or prompt.get(run)  # the answer is behind the prompt
            if found is not None:
                place, match = found, matched(tokens[:found], tokens[:known], order)
                break
        if match < LONGEST_MATCH and 0 < self._distance < known:
            following = known - self._distance
            length = matched(tokens[:following], tokens[:known], 0)
            if length > match and length >= ORDERS[-1]:
                place, match = following, length
        if match:
            self._distance = known - place
        return place, match


def _take_in(places: tuple[dict[bytes, int], ...], tokens: IntArray, start: int, stop: int) -> None:
    """Note the runs that end from `start` on, before `stop`."""
    if start >= stop:
        return
    first = max(0, start - ORDERS[0])
    data = tokens[first:stop].tobytes()
    for order, known in zip(ORDERS, places, strict=True):
        for end in range(max(start, order), stop):
            known[data[4 * (end - order - first) : 4 * (end - first)]] = end


def matched(before: IntArray, known: IntArray, at_least: int) -> int:
    """Return how many tokens `before` and `known` end with in common, from `at_least` on."""
    most = min(LONGEST_MATCH, len(before), len(known))
    one, other = before[-most:].tolist(), known[-most:].tolist()
    length = at_least
    while length < most and one[-length - 1] == other[-length - 1]:
        length += 1
    return length
