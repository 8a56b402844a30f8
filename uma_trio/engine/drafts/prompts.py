"""What was indexed of the latest prompts, for the next turns of their conversations.

A turn goes on where the prompt before it ended, so that a prompt of 10,000 tokens is not indexed again with
each turn: for as long as that takes there are no guesses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from attrs import frozen

from uma_trio.backend.base import IntArray
from uma_trio.engine.drafts.lookup import Runs

# A token takes some 400 bytes in the dictionaries of three orders: 13 MB at most.
MOST_TOKENS = 32_768
MOST_PROMPTS = 16


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
        if len(tokens) > MOST_TOKENS:
            return
        self._kept.append(_Prompt(namespace, tokens.copy(), runs))
        self._n_tokens += len(tokens)
        while self._n_tokens > MOST_TOKENS or len(self._kept) > MOST_PROMPTS:
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
