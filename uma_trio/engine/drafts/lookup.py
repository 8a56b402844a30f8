"""What followed the last tokens of a sequence where they stood before in its own text."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from attrs import frozen

from uma_trio.backend.base import IntArray
from uma_trio.engine.chunk import DraftOrigin
from uma_trio.policy.fairness import Path

ORDERS = (8, 4, 2)
LONGEST_MATCH = 32  # a longer one says no more
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
    place does: a changed file is written in the order of the old one.
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


ANSWER_ORDERS = (8, 4)
# A token takes some 260 bytes: in two dictionaries, and twice in a ring. So a namespace takes 4 MB.
MOST_TOKENS = 16_384
MOST_NAMESPACES = 4  # the one that was used last is kept
MOST_WAITING = 64  # answers that are not indexed yet
# A token takes some 400 bytes in the dictionaries of three orders: 13 MB at most.
MOST_PROMPT_TOKENS = 32_768
MOST_PROMPTS = 16
BORDER = -1  # between two answers: no token


class EarlierAnswers:
    """The latest tokens of one namespace's answers, in a ring, and where runs of them stood.

    What is overwritten is forgotten at once, so that adding a token takes the same time however many
    there were.
    """

    __slots__ = ("_end", "_places", "_ring", "_room")

    def __init__(self, room: int = MOST_TOKENS) -> None:
        self._room = room
        # Each token is written twice, so that any part of the ring is one slice.
        self._ring: IntArray = np.full(2 * room, BORDER, np.int32)
        self._end = 0  # how many tokens were ever added
        self._places: tuple[dict[bytes, int], ...] = tuple({} for _ in ANSWER_ORDERS)

    def __len__(self) -> int:
        """Return how many runs are known."""
        return sum(map(len, self._places))

    def add(self, tokens: IntArray) -> None:
        """Add tokens behind those that were added last."""
        ring, room = self._ring, self._room
        for token in tokens.tolist():
            at = self._end % room
            if self._end >= room:
                self._forget(self._end - room)
            ring[at] = ring[at + room] = token
            self._end += 1
            for order, places in zip(ANSWER_ORDERS, self._places, strict=True):
                if self._end >= order:
                    places[self._part(self._end - order, order).tobytes()] = self._end

    def propose(self, tokens: IntArray, known: int, most: int) -> tuple[tuple[int, ...], int]:
        """Return up to `most` guesses at what follows the first `known` tokens, and the match length."""
        for order, places in zip(ANSWER_ORDERS, self._places, strict=True):
            if order > known:
                continue
            place = places.get(tokens[known - order : known].tobytes())
            if place is None:
                continue
            copied = self._part(place, min(most, self._end - place)).tolist()
            if BORDER in copied:
                copied = copied[: copied.index(BORDER)]
            if copied:
                first = max(0, self._end - self._room, place - LONGEST_MATCH)
                before = self._part(first, place - first)
                return tuple(copied), matched(before, tokens[:known], order)
        return (), 0

    def _part(self, first: int, n: int) -> IntArray:
        at = first % self._room
        return self._ring[at : at + n]

    def _forget(self, first: int) -> None:
        for order, places in zip(ANSWER_ORDERS, self._places, strict=True):
            run = self._part(first, order).tobytes()
            if places.get(run) == first + order:
                del places[run]


class Pool:
    """The answers of each namespace. Answers are taken in little by little, the oldest go."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, EarlierAnswers] = OrderedDict()
        self._waiting: deque[tuple[str, IntArray, Path]] = deque(maxlen=MOST_WAITING)

    def add(self, namespace: str, tokens: IntArray, program: Path = ()) -> None:
        """Take in an answer to `program` as :meth:`index` gets to it; of a long one the end is kept."""
        border = np.full(1, BORDER, np.int32)
        kept = np.concatenate([border, tokens[1 - MOST_TOKENS :]])
        self._waiting.append((namespace, kept, program))

    def unread(self, most: int = INDEXED_A_TICK) -> Iterator[tuple[Path, int]]:
        """Yield whose tokens :meth:`index` takes in next, and how many, up to `most` together."""
        for _, tokens, program in self._waiting:
            if most <= 0:
                return
            yield program, min(most, len(tokens))
            most -= len(tokens)

    def index(self, most: int = INDEXED_A_TICK) -> None:
        """Take in up to `most` of the tokens that wait."""
        while self._waiting and most > 0:
            namespace, tokens, program = self._waiting.popleft()
            self._of(namespace).add(tokens[:most])
            if len(tokens) > most:
                self._waiting.appendleft((namespace, tokens[most:], program))
            most -= len(tokens)

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop all answers of the namespaces that are `mine`."""
        for namespace in [name for name in self._answers if mine(name)]:
            del self._answers[namespace]
        left = [one for one in self._waiting if not mine(one[0])]
        self._waiting.clear()
        self._waiting.extend(left)

    def propose(
        self, namespace: str | None, tokens: IntArray, known: int, most: int
    ) -> tuple[tuple[int, ...], int]:
        """Return up to `most` guesses at what follows the first `known` tokens, and the match length.

        From answers of this namespace only; None has none.
        """
        answers = None if namespace is None else self._answers.get(namespace)
        return ((), 0) if answers is None else answers.propose(tokens, known, most)

    def _of(self, namespace: str) -> EarlierAnswers:
        answers = self._answers.setdefault(namespace, EarlierAnswers())
        self._answers.move_to_end(namespace)
        if len(self._answers) > MOST_NAMESPACES:
            self._answers.popitem(last=False)
        return answers


@frozen(eq=False)
class _Prompt:
    """A prompt of a namespace, and what is known of it."""

    namespace: str
    tokens: IntArray
    runs: Runs


class Prompts:
    """Indexed prompts by namespace; the oldest go."""

    def __init__(self) -> None:
        self._kept: deque[_Prompt] = deque()
        self._n_tokens = 0

    @property
    def n_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return self._n_tokens

    def add(self, namespace: str, tokens: IntArray, runs: Runs) -> None:
        """Keep what is known of the prompt `tokens`; too long a one is not kept."""
        if len(tokens) > MOST_PROMPT_TOKENS:
            return
        self._kept.append(_Prompt(namespace, tokens.copy(), runs))
        self._n_tokens += len(tokens)
        while self._n_tokens > MOST_PROMPT_TOKENS or len(self._kept) > MOST_PROMPTS:
            self._n_tokens -= len(self._kept.popleft().tokens)

    def take(self, namespace: str | None, tokens: IntArray) -> Runs | None:
        """Return what is known of the longest prompt that `tokens` begin with; it is kept no longer."""
        found: _Prompt | None = None
        for one in self._kept:
            n = len(one.tokens)
            if one.namespace != namespace or (found is not None and n <= len(found.tokens)):
                continue
            if n <= len(tokens) and np.array_equal(one.tokens, tokens[:n]):
                found = one
        if found is None:
            return None
        self._kept.remove(found)
        self._n_tokens -= len(found.tokens)
        return found.runs

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop the prompts of the namespaces that are `mine`."""
        self._kept = deque([one for one in self._kept if not mine(one.namespace)])
        self._n_tokens = sum(len(one.tokens) for one in self._kept)


# How often the first guess behind a match of at least so many tokens was right in replayed agent
# steps, edits and prose, as the belief to begin with.
MATCHES = (2, 4, 8, 16)
FIRST_BELIEF = (0.35, 0.55, 0.75, 0.9)
# Distances are counted together from 0, 1, 2, 4 and 8 on: what held for longer holds on.
DISTANCES = (1, 2, 4, 8)
PARTS = len(DISTANCES) + 1
MOST_SURE = 0.995  # a chance is taken to be no more than that where others are compared with it
_BUCKETS = tuple(sum(match >= least for least in MATCHES[1:]) for match in range(MATCHES[-1] + 1))


class Survival:
    """Counts of guesses that were judged, and that were right; they fade with each that is.

    A guess is judged only if all before it were right.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], tuple[list[float], list[float]]] = {}

    def learn(self, origin: DraftOrigin, right: int, tried: int, fade: float) -> None:
        """Note that of `tried` guesses the first `right` were right."""
        self.forget(origin, fade)
        rights, judged = self._of(origin)
        for distance in range(min(right + 1, tried)):
            part = part_of(distance)
            judged[part] += 1.0
            rights[part] += distance < right

    def forget(self, origin: DraftOrigin, fade: float) -> None:
        """Let what was seen of guesses like these count less."""
        for counts in self._of(origin):
            counts[:] = [fade * n for n in counts]

    def chances(self, origin: DraftOrigin, beliefs: Sequence[float], weight: float) -> list[float]:
        """Return for each part of the distances the chance that a guess is right.

        A belief counts as much as `weight` guesses. Guesses that are found to be wrong so many times as
        often as was believed are believed to be, as many times, further away, where few were judged.
        """
        rights, judged = self._of(origin)
        chances, times = [], 1.0
        for right, n, belief in zip(rights, judged, beliefs, strict=True):
            wrong = 1.0 - min(belief, MOST_SURE)
            chance = (right + weight * max(0.0, 1.0 - times * wrong)) / (n + weight)
            times = (1.0 - chance) / wrong
            chances.append(chance)
        return chances

    def _of(self, origin: DraftOrigin) -> tuple[list[float], list[float]]:
        key = origin.source, bucket_of(origin.match)
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0.0] * PARTS, [0.0] * PARTS
        return counts


def bucket_of(match: int) -> int:
    """Return which of `FIRST_BELIEF` is that of a match of so many tokens."""
    return _BUCKETS[min(match, MATCHES[-1])]


def part_of(distance: int) -> int:
    """Return with which distances this one is counted."""
    return sum(distance >= least for least in DISTANCES)
