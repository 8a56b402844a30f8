"""Guesses at simulated answers: where there are some, how likely they are, and which are right.

Nobody writes the answers of a simulation, so nothing can be looked up in them. :class:`Guesses`
says place by place what a drafter would have had; :class:`SimulatedDrafter` makes an engine's
drafts of that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul

from attrs import define, evolve, frozen

from uma_trio.engine.chunk import OWN_TEXT, Draft, DraftOrigin, Outcome
from uma_trio.engine.drafts.drafter import LIKELY, MOST_DRAFTS
from uma_trio.engine.drafts.drafting import Drafting
from uma_trio.engine.sequences import Sequence as Running
from uma_trio_sim.fake import FakeBackend, mix

_ORIGIN = DraftOrigin(OWN_TEXT, 0)
_PLACES = 2048  # of an answer that are drawn; behind them they begin again


@frozen(eq=False)
class Guesses:
    """The guesses at one answer: the probability that each is right if all before it are, and which are.

    Behind the last place they begin again. Empty: no guesses.
    """

    chances: Sequence[float] = ()
    right: Sequence[bool] = ()

    @classmethod
    def always(cls, chance: float) -> Guesses:
        """Return guesses at every place that are right with this probability."""
        return cls((chance,) * _PLACES)

    def settled(self, draw: random.Random) -> Guesses:
        """Return these guesses with `draw` deciding which are right, unless `right` already does."""
        if self.right:
            return self
        return evolve(self, right=[draw.random() < chance for chance in self.chances])

    def behind(self, place: int, most: int) -> tuple[list[bool], list[float]]:
        """Return up to `most` guesses from a place on: which are right, and each one's probability."""
        n = len(self.chances)
        right: list[bool] = []
        chances: list[float] = []
        while n and len(right) < most and self.chances[place % n] > 0:
            chances.append(self.chances[place % n])
            right.append(self.right[place % n])
            place += 1
        return right, chances


NO_GUESSES = Guesses()
Texts = Callable[[random.Random], Guesses]
"""What can be guessed of another answer: drawn."""


@define
class _Said:
    """How far an answer is: what stands for its first `known` tokens in the backend."""

    known: int
    history: int


class SimulatedDrafter(Drafting):
    """See :class:`uma_trio.engine.drafts.Drafting`: it knows what the model is about to say.

    What a guess is worth is known, and not learnt.
    """

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self._guesses: dict[int, Guesses] = {}
        self._said: dict[int, _Said] = {}

    def expect(self, handle: int, guesses: Guesses) -> None:
        """Guess so at the answer of a request that is about to come."""
        if guesses.chances:
            self._guesses[handle] = guesses

    def propose(self, running: Mapping[int, Running]) -> None:
        """Draft for each sequence that decodes."""
        for key, sequence in running.items():
            guesses = self._guesses.get(key)
            if guesses is None or not sequence.view.decoding:
                continue
            known = sequence.known
            most = min(MOST_DRAFTS, sequence.credit - 1, len(sequence.tokens) - known - 1)
            right, chances = guesses.behind(known - sequence.n_prompt, most)
            if right:
                tokens = self._tokens(sequence, right)
                sequence.guess(Draft(tokens, tuple(accumulate(chances, mul)), _ORIGIN))

    def expects(self, outcomes: Iterable[Outcome], running: Mapping[int, Running]) -> bool:
        """Whether a likely draft follows what was just sampled."""
        for outcome in outcomes:
            sequence, guesses = running[outcome.chunk.key], self._guesses.get(outcome.chunk.key)
            if guesses is None or not outcome.tokens or sequence.credit <= 2:
                continue
            place = sequence.known + len(outcome.tokens) - sequence.n_prompt
            if any(chance >= LIKELY for chance in guesses.behind(place, 1)[1]):
                return True
        return False

    def keep(self, sequence: Running) -> None:
        """Forget an answer that has ended."""
        self._guesses.pop(sequence.handle, None)
        self._said.pop(sequence.handle, None)

    def _tokens(self, sequence: Running, right: Sequence[bool]) -> tuple[int, ...]:
        """Return guesses at what follows the tokens of a sequence, wrong ones where they are to be."""
        said = self._said.setdefault(sequence.handle, _Said(0, self._backend.history(())))
        if said.known < sequence.known:
            new = sequence.tokens[said.known : sequence.known].tolist()
            said.history, said.known = self._backend.history(new, said.history), sequence.known
        tokens, history = [], said.history
        for is_right in right:
            truth = self._backend.favourite(history)
            history = mix(history, truth)
            tokens.append(truth if is_right else truth ^ 1)
        return tuple(tokens)
