"""Proposes drafts for the sequences of an engine, and learns what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul

from uma_trio.engine.drafts.lookup import Lookup
from uma_trio.engine.drafts.pool import Pool
from uma_trio.engine.drafts.survival import (
    FIRST_BELIEF,
    PARTS,
    Survival,
    bucket_of,
    part_of,
)
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.step import EARLIER_ANSWERS, NO_DRAFT, OWN_TEXT, Draft, Origin, Outcome

MOST_DRAFTS = 15  # with the token before them 16 rows; more pay only where nearly all are right
# Of a prompt its last tokens go into the pool with the answer, so that its beginning can be found.
LED_IN_BY = 8
LEAST_ANSWER = 16  # tokens; of shorter ones there is little to copy

# What is learnt of all sequences, and what of one, weigh against the belief before as so many guesses.
SHARED_WEIGHT, OWN_WEIGHT = 20.0, 6.0
# Counts of the past fade with each guess that is judged and, so that a kind of guess that was wrong is
# tried again, with each that is proposed.
FADE, SHARED_FADE = 0.9, 0.995
REST, SHARED_REST = 0.98, 0.998
_PARTS = tuple(part_of(distance) for distance in range(MOST_DRAFTS))


class _Guessed:
    """What is kept of one sequence."""

    __slots__ = ("lookup", "survival")

    def __init__(self) -> None:
        self.lookup = Lookup()
        self.survival = Survival()


class Drafter:
    """See the module. Every method is called on the engine's thread."""

    def __init__(self) -> None:
        self._shared = Survival()
        self._pool = Pool()
        self._guessed: dict[int, _Guessed] = {}

    def propose(self, running: Mapping[int, Sequence]) -> None:
        """Draft for each sequence that decodes and whose request allows it.

        Prompts that are still computed are indexed meanwhile.
        """
        self._pool.index()
        for sequence in running.values():
            if sequence.submit.speculation == "off":
                continue
            guessed = self._guessed.get(sequence.handle)
            if guessed is None:
                guessed = self._guessed[sequence.handle] = _Guessed()
            if guessed.lookup.index(sequence.tokens, sequence.known) and sequence.view.decoding:
                sequence.guess(self._draft(sequence, guessed))
        if len(self._guessed) > len(running):
            self._guessed = {key: kept for key, kept in self._guessed.items() if key in running}

    def learn(self, sequence: Sequence, outcome: Outcome, *, ended: bool) -> None:
        """Note what became of a step of `sequence`, whose answer has `ended` with it or not."""
        guessed = self._guessed.get(sequence.handle)
        if guessed is not None and outcome.step.drafts:
            origin, tried, right = outcome.step.origin, len(outcome.step.drafts), outcome.right
            guessed.survival.learn(origin, right, tried, FADE)
            self._shared.learn(origin, right, tried, SHARED_FADE)
        if ended and outcome.fault is None:
            self._keep(sequence)

    def _keep(self, sequence: Sequence) -> None:
        """Put a whole answer into the pool, if its request shares."""
        submit = sequence.submit
        if submit.namespace is None or submit.speculation == "off":
            return
        if sequence.n_generated >= LEAST_ANSWER:
            first = max(0, sequence.n_prompt - LED_IN_BY)
            self._pool.add(submit.namespace, sequence.tokens[first : sequence.known])

    def _draft(self, sequence: Sequence, guessed: _Guessed) -> Draft:
        known, tokens = sequence.known, sequence.tokens
        # What does not fit into its stream or its answer is not guessed.
        most = min(MOST_DRAFTS, sequence.credit - 1, len(tokens) - known - 1)
        if most <= 0:
            return NO_DRAFT
        drafts, match = guessed.lookup.propose(tokens, known, most)
        source = OWN_TEXT
        others, longer = self._pool.propose(sequence.submit.namespace, tokens, known, most)
        if longer > match:
            drafts, match, source = others, longer, EARLIER_ANSWERS
        drafts = _before_an_end(drafts, sequence.sampler.ends)
        if not drafts:
            return NO_DRAFT
        origin = Origin(source, match)
        return Draft(drafts, self._survival(guessed.survival, origin, len(drafts)), origin)

    def _survival(self, own: Survival, origin: Origin, n: int) -> tuple[float, ...]:
        """Return for each of `n` guesses the chance that it and all before it are right."""
        own.forget(origin, REST)
        self._shared.forget(origin, SHARED_REST)
        first = (FIRST_BELIEF[bucket_of(origin.match)],) * PARTS
        beliefs = self._shared.chances(origin, first, SHARED_WEIGHT)
        chances = own.chances(origin, beliefs, OWN_WEIGHT)
        return tuple(accumulate([chances[part] for part in _PARTS[:n]], mul))


def _before_an_end(drafts: tuple[int, ...], ends: frozenset[int]) -> tuple[int, ...]:
    """Return `drafts` up to what would end the answer: nothing is computed behind that."""
    if ends.isdisjoint(drafts):
        return drafts
    return drafts[: next(n for n, token in enumerate(drafts) if token in ends)]
