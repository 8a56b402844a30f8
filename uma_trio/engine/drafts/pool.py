"""Earlier answers and prompts of a namespace, in which the next tokens of an answer are looked up, too.

Agents and scripts ask for nearly the same again. A namespace is who may share what was computed
(:attr:`uma_trio.engine.messages.Submit.namespace`): nobody's answer is guessed from that of another
user, nor from one that was asked for in private by another process.

A turn goes on where the prompt before it ended. What was indexed of the latest prompts is kept, so that a prompt of 10,000
tokens is not indexed again with each turn: for as long as that takes there are no guesses.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import numpy as np
from attrs import frozen

from uma_trio.backend.base import IntArray
from uma_trio.engine.drafts.lookup import INDEXED_A_TICK, LONGEST_MATCH, Runs, matched
from uma_trio.policy.fairness import Path

ORDERS = (8, 4)
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
        self._places: tuple[dict[bytes, int], ...] = tuple({} for _ in ORDERS)

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
            for order, places in zip(ORDERS, self._places, strict=True):
                if self._end >= order:
                    places[self._part(self._end - order, order).tobytes()] = self._end

    def propose(self, tokens: IntArray, known: int, most: int) -> tuple[tuple[int, ...], int]:
        """Return up to `most` guesses at what follows the first `known` tokens, and the match length."""
        for order, places in zip(ORDERS, self._places, strict=True):
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
        """Return `n` tokens from the one that was added as the `first`."""
        at = first % self._room
        return self._ring[at : at + n]

    def _forget(self, first: int) -> None:
        """Drop the runs that begin with the oldest token, unless they stood elsewhere since."""
        for order, places in zip(ORDERS, self._places, strict=True):
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
