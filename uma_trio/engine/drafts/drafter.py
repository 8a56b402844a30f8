"""Proposes drafts for the sequences of an engine, and learns what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from operator import mul

from uma_trio.backend.base import ContextLimits, IntArray
from uma_trio.engine.chunk import (
    EARLIER_ANSWERS,
    NO_DRAFT,
    OWN_TEXT,
    Draft,
    DraftOrigin,
    Outcome,
)
from uma_trio.engine.drafts.drafting import Contained, Drafting, Unread
from uma_trio.engine.drafts.lookup import (
    FIRST_BELIEF,
    INDEXED_A_TICK,
    NEWEST,
    PARTS,
    Lookup,
    Pool,
    Prompts,
    Runs,
    Survival,
    bucket_of,
    part_of,
)
from uma_trio.engine.sequences import Sequence

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
# A prepared tick is given up for a draft that is more likely right than wrong: the tick would save the
# host's part of one decode, the draft a whole one.
LIKELY = 0.5
_PARTS = tuple(part_of(distance) for distance in range(MOST_DRAFTS))


class _Guessed:
    """What is kept of one sequence. `first` is the latest guess at a token: where, which, its origin."""

    __slots__ = ("first", "lookup", "namespace", "prompt", "survival")

    def __init__(self, namespace: str | None, prompt: IntArray, begun: Runs | None) -> None:
        self.namespace = namespace  # that may know of its prompt
        self.prompt = prompt
        self.lookup = Lookup(len(prompt), begun)
        self.survival = Survival()
        self.first: tuple[int, int, DraftOrigin] | None = None


class Drafter(Drafting):
    """See the module, and :class:`uma_trio.engine.drafts.Drafting`."""

    def __init__(self) -> None:
        self._shared = Survival()
        self._pool = Pool()
        self._prompts = Prompts()
        self._guessed: dict[int, _Guessed] = {}

    def propose(self, running: Mapping[int, Sequence]) -> None:
        self._keep_only(running)
        for sequence, guessed in self._allowing(running):
            if sequence.view.decoding and guessed.lookup.index(
                sequence.tokens, sequence.known, NEWEST
            ):
                draft = self._noted(guessed, sequence, sequence.known, sequence.credit)
                if draft.tokens:
                    chances = self._survival(guessed.survival, draft.origin, len(draft.tokens))
                    draft = draft._replace(survival=chances)
                sequence.guess(draft)

    def unread(self, running: Mapping[int, Sequence]) -> list[Unread]:
        """Return a part of each prompt, and of earlier answers, that is not taken in.

        The newest tokens of an answer are taken in when it is guessed at.
        """
        found = [Unread(program, n) for program, n in self._pool.unread()]
        for sequence, guessed in self._allowing(running):
            n = guessed.lookup.unread(sequence.known)
            if n > NEWEST or (n > 0 and not sequence.view.decoding):
                n = min(n, INDEXED_A_TICK)
                found.append(Unread(sequence.submit.program, n, sequence))
        return found

    def take_in(self, part: Unread) -> None:
        sequence = part.sequence
        if sequence is None:
            self._pool.index(part.n_tokens)
        elif (guessed := self._guessed.get(sequence.handle)) is not None:
            guessed.lookup.index(sequence.tokens, sequence.known, part.n_tokens)

    def expects(self, outcomes: Iterable[Outcome], running: Mapping[int, Sequence]) -> bool:
        """Whether a likely draft follows what was just sampled, so that a tick is to be planned again.

        The commit of these outcomes is still to come.
        """
        for outcome in outcomes:
            sequence, guessed = running[outcome.chunk.key], self._guessed.get(outcome.chunk.key)
            if guessed is None or not outcome.tokens or sequence.submit.speculation == "off":
                continue
            tokens, known = sequence.tokens, sequence.known + 1
            tokens[known - 1] = outcome.tokens[-1].token  # as its commit is going to
            if guessed.lookup.index(tokens, known, NEWEST):
                self._judge_first(guessed, outcome)  # before the next guess is noted in its place
                draft = self._noted(guessed, sequence, known, sequence.credit - 1)
                chances = self._chances(guessed.survival, draft.origin)
                if draft.tokens and chances[_PARTS[0]] >= LIKELY:
                    return True
        return False

    def _allowing(self, running: Mapping[int, Sequence]) -> Iterator[tuple[Sequence, _Guessed]]:
        for key, sequence in running.items():
            if sequence.submit.speculation == "off":
                continue
            guessed = self._guessed.get(key)
            if guessed is None:
                guessed = self._guessed[key] = self._begun(sequence)
            yield sequence, guessed

    def _begun(self, sequence: Sequence) -> _Guessed:
        submit, prompt = sequence.submit, sequence.tokens[: sequence.n_prompt]
        namespace = submit.namespace if submit.keeps else None
        return _Guessed(namespace, prompt, self._prompts.take(namespace, prompt))

    def _keep_only(self, running: Mapping[int, Sequence]) -> None:
        for key in self._guessed.keys() - running.keys():
            gone = self._guessed.pop(key)
            runs = gone.lookup.prompt_runs()
            if gone.namespace is not None and runs is not None:
                self._prompts.add(gone.namespace, gone.prompt, runs)

    def learn(self, sequence: Sequence, outcome: Outcome) -> None:
        guessed = self._guessed.get(sequence.handle)
        if guessed is None:
            return
        if outcome.chunk.drafts:
            right = outcome.right
            # Of the guess at a token whose mask is late it is not known yet whether it is right.
            tried = right if outcome.late else len(outcome.chunk.drafts)
            self._judge(guessed, outcome.chunk.origin, right, tried)
        else:
            self._judge_first(guessed, outcome)

    def keep(self, sequence: Sequence) -> None:
        submit = sequence.submit
        if submit.namespace is None or not submit.keeps or submit.speculation == "off":
            return
        if sequence.n_generated >= LEAST_ANSWER:
            first = max(0, sequence.n_prompt - LED_IN_BY)
            text = sequence.tokens[first : sequence.known]
            self._pool.add(submit.namespace, text, submit.program)

    def forget(self, mine: Callable[[str], bool]) -> None:
        self._pool.forget(mine)
        self._prompts.forget(mine)

    def _judge_first(self, guessed: _Guessed, outcome: Outcome) -> None:
        if guessed.first is None or not outcome.tokens:
            return
        place, token, origin = guessed.first
        if place == outcome.chunk.start + outcome.chunk.n_tokens:
            self._judge(guessed, origin, int(token == outcome.tokens[0].token), 1)

    def _judge(self, guessed: _Guessed, origin: DraftOrigin, right: int, tried: int) -> None:
        guessed.first = None
        guessed.survival.learn(origin, right, tried, FADE)
        self._shared.learn(origin, right, tried, SHARED_FADE)

    def _noted(self, guessed: _Guessed, sequence: Sequence, known: int, credit: int) -> Draft:
        draft = self._guess(guessed, sequence, known, credit)
        guessed.first = (known, draft.tokens[0], draft.origin) if draft.tokens else None
        return draft

    def _guess(self, guessed: _Guessed, sequence: Sequence, known: int, credit: int) -> Draft:
        tokens = sequence.tokens
        # What does not fit into its stream or its answer is not guessed.
        most = min(MOST_DRAFTS, credit - 1, len(tokens) - known - 1)
        if most <= 0:
            return NO_DRAFT
        drafts, match = guessed.lookup.propose(tokens, known, most)
        source = OWN_TEXT
        others, longer = self._pool.propose(sequence.submit.namespace, tokens, known, most)
        if longer > match:
            drafts, match, source = others, longer, EARLIER_ANSWERS
        drafts = _before_an_end(drafts, sequence.sampler.ends)
        return Draft(drafts, origin=DraftOrigin(source, match)) if drafts else NO_DRAFT

    def _survival(self, own: Survival, origin: DraftOrigin, n: int) -> tuple[float, ...]:
        own.forget(origin, REST)
        self._shared.forget(origin, SHARED_REST)
        chances = self._chances(own, origin)
        return tuple(accumulate([chances[part] for part in _PARTS[:n]], mul))

    def _chances(self, own: Survival, origin: DraftOrigin) -> list[float]:
        first = (FIRST_BELIEF[bucket_of(origin.match)],) * PARTS
        beliefs = self._shared.chances(origin, first, SHARED_WEIGHT)
        return own.chances(origin, beliefs, OWN_WEIGHT)


def drafter_for(limits: ContextLimits, given: Drafting | None, *, wanted: bool) -> Drafting:
    """Return what guesses ahead: the one that is `given` or one that looks texts up, if that is of use.

    Guesses have to be `wanted`, and a backend with these limits has to be able to check them.
    """
    if wanted and limits.n_rows > limits.n_slots and limits.can_go_back:
        return Contained(given or Drafter())
    return Drafting()


def _before_an_end(drafts: tuple[int, ...], ends: frozenset[int]) -> tuple[int, ...]:
    if ends.isdisjoint(drafts):
        return drafts
    return drafts[: next(n for n, token in enumerate(drafts) if token in ends)]
