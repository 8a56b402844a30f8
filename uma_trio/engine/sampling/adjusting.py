"""What a request changes of its logits before a token is chosen: bias, penalties, masks.

The order is llama.cpp's: `logit_bias` is added, `repeat_penalty` divides what is positive and
multiplies what is not, `frequency_penalty` and `presence_penalty` are subtracted; then what must
not be drawn yet becomes -inf. The repeat penalty looks at the last `repeat_last_n` tokens of prompt
and answer, as llama.cpp's does; the other two at the answer alone, as OpenAI's do.

Rows are edited where they lie, a few logits each, and put back as they were: a copy of the row
would cost more than everything here. A tick costs in proportion to the distinct tokens that are
looked at, and a token that is accepted costs the same however many there were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

import numpy as np

from uma_trio.backend.base import FloatArray, IntArray
from uma_trio.engine.messages import SamplingParams
from uma_trio.engine.sampling.shortlist import IdArray

NO_TOKENS: Final[IntArray] = np.empty(0, np.int32)

Edits = list[tuple[IdArray, FloatArray]]  # which logits were changed, and what they were


class Adjuster:
    """Edits the rows of one sequence.

    `ends` are the tokens that would end the answer; they are masked until there are `min_tokens`.
    `prompt` is what the repeat penalty knows before the first token.
    """

    __slots__ = (
        "_bias",
        "_biased",
        "_ends",
        "_frequency",
        "_generated",
        "_n_left",
        "_presence",
        "_recent",
        "_repeat",
        "_supposed",
    )

    def __init__(
        self, params: SamplingParams, ends: Collection[int], prompt: IntArray = NO_TOKENS
    ) -> None:
        self._biased = np.array([token for token, _ in params.logit_bias], np.intp)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._repeat = np.float32(params.repeat_penalty)
        self._recent: _Recent | None = None
        if params.repeat_penalty != 1.0 and params.repeat_last_n != 0:
            self._recent = _Recent(prompt, params.repeat_last_n)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._generated: Bag | None = None
        if params.frequency_penalty or params.presence_penalty:
            self._generated = Bag()
        self._ends = np.array(sorted(set(ends)), np.intp)
        self._n_left = params.min_tokens if len(self._ends) else 0
        self._supposed: list[tuple[int, int | None, int]] = []  # token, what left, what was left

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether a request changes any logit, so that its rows need an `Adjuster`."""
        return bool(
            params.logit_bias
            or params.frequency_penalty
            or params.presence_penalty
            or params.min_tokens
            or (params.repeat_penalty != 1.0 and params.repeat_last_n != 0)
        )

    def accept(self, token: int) -> None:
        """Add a token of the answer to the history."""
        if self._recent is not None:
            self._recent.add(token)
        if self._generated is not None:
            self._generated.add(token)
        if self._n_left:
            self._n_left -= 1

    def suppose(self, token: int) -> None:
        """Go on as if `token` was accepted, until `take_back`."""
        left = None if self._recent is None else self._recent.add(token)
        self._supposed.append((token, left, self._n_left))
        if self._generated is not None:
            self._generated.add(token)
        if self._n_left:
            self._n_left -= 1

    def take_back(self) -> None:
        """Go back to what was accepted."""
        while self._supposed:
            token, left, self._n_left = self._supposed.pop()
            if self._recent is not None:
                self._recent.take_back(token, left)
            if self._generated is not None:
                self._generated.remove(token)

    def apply(self, row: FloatArray) -> Edits:
        """Edit one row of logits in place; `undo` takes what is returned.

        A NaN or +inf stays one, so that a check of the row finds it.
        """
        edits: Edits = []
        if len(self._biased):
            values = row[self._biased]
            edits.append((self._biased, values))
            row[self._biased] = values + self._bias
        if self._recent is not None and (bag := self._recent.bag):
            ids = bag.ids.copy()  # what is supposed next changes the bag
            values = row[ids]
            edits.append((ids, values))
            with np.errstate(over="ignore"):
                row[ids] = np.where(values > 0, values / self._repeat, values * self._repeat)
        if self._generated:
            bag = self._generated
            ids = bag.ids.copy()
            values = row[ids]
            edits.append((ids, values))
            row[ids] = values - (bag.counts * self._frequency + self._presence)
        if self._n_left:
            values = row[self._ends]
            edits.append((self._ends, values))
            row[self._ends] = np.where(values < np.inf, -np.inf, values)
        return edits

    @staticmethod
    def undo(row: FloatArray, edits: Edits) -> None:
        """Put back what `apply` changed."""
        for ids, values in reversed(edits):
            row[ids] = values


class Bag:
    """Tokens, and how many there are of each: `ids` and `counts` are arrays made without a loop.

    False if it is empty. To add and to remove one costs the same however many there are.
    """

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, tokens: IntArray = NO_TOKENS) -> None:
        ids, counts = np.unique(tokens, return_counts=True)
        room = max(16, 2 * len(ids))
        self._ids = np.zeros(room, np.intp)
        self._counts = np.zeros(room, np.float32)
        self._ids[: len(ids)] = ids
        self._counts[: len(ids)] = counts
        self._places = {token: place for place, token in enumerate(ids.tolist())}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> IdArray:
        """Return the tokens that are in it, each once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> FloatArray:
        """Return how often each of `ids` is in it."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Put one in."""
        place = self._places.get(token)
        if place is None:
            place = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._places[token] = place
            self._ids[place] = token
            self._counts[place] = 0
        self._counts[place] += 1

    def remove(self, token: int) -> None:
        """Take one out that is in it."""
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place]:
            return
        last = len(self._places) - 1  # takes the place that is left
        moved = int(self._ids[last])
        self._ids[place], self._counts[place] = moved, self._counts[last]
        self._places[moved] = place
        del self._places[token]


class _Recent:
    """The last `n` tokens (all, if it is negative): in order, to know which leaves, and as a bag."""

    __slots__ = ("_left", "_tokens", "bag")

    def __init__(self, prompt: IntArray, n: int) -> None:
        known = prompt if n < 0 else prompt[-n:]
        self.bag = Bag(known)
        self._tokens: deque[int] | None = None  # nothing ever leaves
        if n >= 0:
            self._tokens = deque(known.tolist())
            self._left = n - len(self._tokens)

    def add(self, token: int) -> int | None:
        """Add the latest; the oldest leaves if there are too many, and is returned."""
        self.bag.add(token)
        if self._tokens is None:
            return None
        self._tokens.append(token)
        if self._left:
            self._left -= 1
            return None
        oldest = self._tokens.popleft()
        self.bag.remove(oldest)
        return oldest

    def take_back(self, token: int, left: int | None) -> None:
        """Undo the latest `add`, which was of `token` and returned `left`."""
        if self._tokens is not None:
            self._tokens.pop()
            if left is None:
                self._left += 1
            else:
                self._tokens.appendleft(left)
                self.bag.add(left)
        self.bag.remove(token)
