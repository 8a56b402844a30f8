"""Guesses at the next tokens of a sequence, looked up in its own text, and how often they are right.

Whoever repeats, quotes or edits a text writes what was there before. A :class:`Lookup` finds where the
last 8, 4 or 2 tokens of a sequence stood before and proposes what followed them there. Proposals cost
rows in a batch, so a policy has to know what each is worth: :class:`Survival` learns how often a guess
at a given distance is right, by the length of the match.
"""

from __future__ import annotations

from collections.abc import Mapping

from uma_trio.backend.base import IntArray
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.step import Outcome

MOST_DRAFTS = 15  # with the token before them 16 rows; more pay only where nearly all are right
ORDERS = (8, 4, 2)
LONGEST_MATCH = 16  # a longer one tells no more
# A prompt is indexed at 1 us a token and order. So many a tick take half a millisecond.
INDEXED_A_TICK = 256

# How often the first guess behind a match of at least so many tokens was right in replayed agent
# steps, edits and prose, as the belief to begin with; it weighs as much as so many guesses.
MATCHES = (2, 4, 8, LONGEST_MATCH)
FIRST_BELIEF = (0.35, 0.55, 0.75, 0.9)
SHARED_WEIGHT, OWN_WEIGHT = 20.0, 6.0
# Counts of the past fade, so that a sequence whose guesses were wrong is tried again.
FADE, SHARED_FADE, REST = 0.9, 0.995, 0.98


class Lookup:
    """Where each run of 8, 4 and 2 tokens of one sequence was last followed by another token."""

    __slots__ = ("_indexed", "_places")

    def __init__(self) -> None:
        self._indexed = 1  # runs that end before this position are known
        self._places: tuple[dict[bytes, int], ...] = tuple({} for _ in ORDERS)

    def index(self, tokens: IntArray, known: int, most: int = INDEXED_A_TICK) -> bool:
        """Take in up to `most` of the first `known` tokens; say whether that was all of them."""
        start, stop = self._indexed, min(known, self._indexed + most)
        if start < stop:
            first = max(0, start - ORDERS[0])
            data = tokens[first:stop].tobytes()
            for order, places in zip(ORDERS, self._places, strict=True):
                for end in range(max(start, order), stop):
                    places[data[4 * (end - order - first) : 4 * (end - first)]] = end
            self._indexed = stop
        return stop >= known

    def propose(self, tokens: IntArray, known: int, most: int) -> tuple[tuple[int, ...], int]:
        """Return up to `most` guesses at what follows the first `known` tokens, and the match length.

        Everything must have been indexed. Without a match there is no guess, and the length is 0.
        """
        for order, places in zip(ORDERS, self._places, strict=True):
            if order >= known:
                continue
            place = places.get(tokens[known - order : known].tobytes())
            if place is not None:
                copied = tokens[place : min(place + most, known)].tolist()
                # A text that repeats itself goes on repeating itself.
                while copied and len(copied) < most:
                    copied += copied[: most - len(copied)]
                return tuple(copied), _matched(tokens, known, place, order)
        return (), 0


def _matched(tokens: IntArray, known: int, place: int, at_least: int) -> int:
    """Return how many tokens before `place` are those before `known`, from `at_least` on."""
    most = min(LONGEST_MATCH, place)
    length = at_least
    while length < most and tokens[place - length - 1] == tokens[known - length - 1]:
        length += 1
    return length


def _before_an_end(drafts: tuple[int, ...], ends: frozenset[int]) -> tuple[int, ...]:
    """Return `drafts` up to what would end the answer: nothing is computed behind that."""
    if ends.isdisjoint(drafts):
        return drafts
    return drafts[: next(n for n, token in enumerate(drafts) if token in ends)]


class Survival:
    """How often guesses were right, by the length of their match; counts fade with each guess.

    A guess is judged only if all before it were right. That chance is taken to be the same for each
    distance: a match that held for longer holds on.
    """

    __slots__ = ("_right", "_seen")

    def __init__(self) -> None:
        self._right = [0.0] * len(MATCHES)
        self._seen = [0.0] * len(MATCHES)

    def learn(self, match: int, right: int, tried: int, fade: float) -> None:
        """Note that of `tried` guesses the first `right` were right."""
        n = _bucket(match)
        judged = min(right + 1, tried)
        self._right[n] = fade * self._right[n] + right
        self._seen[n] = fade * self._seen[n] + judged

    def forget(self, fade: float) -> None:
        """Let what was seen count less."""
        self._right = [fade * n for n in self._right]
        self._seen = [fade * n for n in self._seen]

    def chance(self, match: int, belief: float, weight: float) -> float:
        """Return the chance that a guess is right, by what was seen and a belief of that weight."""
        n = _bucket(match)
        return (self._right[n] + weight * belief) / (self._seen[n] + weight)


def _bucket(match: int) -> int:
    return sum(match >= least for least in MATCHES[1:])


class _Guessed:
    """What is kept of one sequence."""

    __slots__ = ("lookup", "match", "survival")

    def __init__(self) -> None:
        self.lookup = Lookup()
        self.survival = Survival()
        self.match = 0  # of its latest proposal


class Drafter:
    """Proposes drafts for the sequences of an engine, and learns what became of them."""

    def __init__(self) -> None:
        self._shared = Survival()
        self._guessed: dict[int, _Guessed] = {}

    def propose(self, running: Mapping[int, Sequence]) -> None:
        """Draft for each sequence that decodes and whose request allows it."""
        for sequence in running.values():
            if sequence.view.decoding and sequence.submit.speculation != "off":
                self._propose(sequence)
        if len(self._guessed) > len(running):
            self._guessed = {key: kept for key, kept in self._guessed.items() if key in running}

    def _propose(self, sequence: Sequence) -> None:
        guessed = self._guessed.get(sequence.handle)
        if guessed is None:
            guessed = self._guessed[sequence.handle] = _Guessed()
        known, tokens = sequence.known, sequence.tokens
        # What does not fit into its stream or its answer is not guessed.
        most = min(MOST_DRAFTS, sequence.credit - 1, len(tokens) - known - 1)
        if not guessed.lookup.index(tokens, known) or most <= 0:
            sequence.draft((), ())
            return
        drafts, match = guessed.lookup.propose(tokens, known, most)
        drafts = _before_an_end(drafts, sequence.sampler.ends)
        guessed.match = match
        guessed.survival.forget(REST)
        sequence.draft(drafts, self._survival(guessed, match, len(drafts)))

    def _survival(self, guessed: _Guessed, match: int, n: int) -> tuple[float, ...]:
        """Return for each of `n` guesses the chance that it and all before it are right."""
        if not n:
            return ()
        belief = FIRST_BELIEF[_bucket(match)]
        shared = self._shared.chance(match, belief, SHARED_WEIGHT)
        chance = guessed.survival.chance(match, shared, OWN_WEIGHT)
        return tuple([chance ** (distance + 1) for distance in range(n)])

    def learn(self, outcome: Outcome) -> None:
        """Note what became of the drafts of a step, if it had any."""
        tried = len(outcome.step.drafts)
        guessed = self._guessed.get(outcome.step.key)
        if not tried or guessed is None:
            return
        right = outcome.kept - (outcome.step.n_tokens - tried)
        guessed.survival.learn(guessed.match, right, tried, FADE)
        self._shared.learn(guessed.match, right, tried, SHARED_FADE)
