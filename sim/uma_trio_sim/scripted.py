"""A model that says what it is told to, token by token, in a vocabulary that may be a real model's.

It is for examining what a model's reply becomes on its way through the daemon: reply formats, grammars,
streams. Nothing is loaded but a vocabulary, and nothing takes time::

    vocabulary = LlamaVocabulary.load(path)
    says = vocabulary.tokenize("Hello", add_special=False, parse_special=True).tolist()
    backend = ScriptedBackend([says], vocabulary=vocabulary, chat_template=template)

It insists: where something else than its next token was chosen, because a grammar refused that, it
wants the same token again behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uma_trio_sim.fake import FakeBackend, mix


class ScriptedBackend(FakeBackend):
    """A :class:`FakeBackend` whose n-th prompt is answered with the n-th of `replies`.

    Further prompts get the last one. Behind a reply it wants to end. Equal prompts are one.
    """

    def __init__(self, replies: Sequence[Sequence[int]], **options: Any) -> None:
        super().__init__(**options)
        self._replies = [list(reply) for reply in replies]
        self._end = min(self.vocabulary.end_tokens)
        self._n_prompts = 0
        self._places: dict[int, tuple[int, int]] = {}  # which reply and token come behind a history

    def _compute(self, n_tokens: int) -> None:
        histories: dict[int, int] = {}
        for i in range(n_tokens):
            slot, token = int(self.batch.slot[i]), int(self.batch.token[i])
            cells = self._cells[slot]
            before = histories.get(slot, cells[-1] if cells else self._key)
            histories[slot] = history = mix(before, token)
            if history in self._places or not self.batch.want[i]:
                continue  # known, or inside a prompt, which may go on behind an earlier reply
            if before in self._places:
                reply, place = self._places[before]
                self._places[history] = reply, place + (self._wanted(reply, place) == token)
            else:
                self._places[history] = min(self._n_prompts, len(self._replies) - 1), 0
                self._n_prompts += 1
        super()._compute(n_tokens)

    def _wanted(self, reply: int, place: int) -> int:
        tokens = self._replies[reply]
        return tokens[place] if place < len(tokens) else self._end

    def _choice(self, history: int) -> int:
        """Return the next token of the script."""
        return self._wanted(*self._places[history]) if history in self._places else self._end
