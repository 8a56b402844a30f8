"""Proposes drafts for the sequences of an engine, and learns what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from operator import mul

from uma_trio.backend.base import IntArray, Limits
from uma_trio.engine.drafts.contained import Contained
from uma_trio.engine.drafts.drafting import Drafting, NoDrafts
from uma_trio.engine.drafts.lookup import Lookup, Runs
from uma_trio.engine.drafts.model import DraftModel
from uma_trio.engine.drafts.pool import Pool
from uma_trio.engine.drafts.prompts import Prompts
from uma_trio.engine.drafts.survival import (
    FIRST_BELIEF,
    PARTS,
    Survival,
    bucket_of,
    part_of,
)
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.step import (
    BY_MODEL,
    EARLIER_ANSWERS,
    NO_DRAFT,
    OWN_TEXT,
    PROMISED,
    Draft,
    Origin,
    Outcome,
)
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.deadline.draft_cost import best_of_model
from uma_trio.policy.deadline.drafts import WORTH
from uma_trio.policy.fairness import Path
from uma_trio.policy.plan import Plan

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
# How often a draft model's guess is right, as the belief to begin with: it is tried where that would pay.
MODEL_BELIEF = 0.8
# Whether a draft model is worth its time is looked at again after so many ticks.
LOOK_AGAIN = 16
# So much of the time of a tick may a draft model take to see texts, beside streams that are read.
FEEDING_SHARE = 0.25
MOST_FED = 512  # tokens a tick, where nobody reads
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
        self.first: tuple[int, int, Origin] | None = None


class Drafter:
    """See the module, and :class:`uma_trio.engine.drafts.Drafting`."""

    def __init__(self, model: DraftModel | None = None, cost: CostModel | None = None) -> None:
        self._shared = Survival()
        self._pool = Pool()
        self._prompts = Prompts()
        self._guessed: dict[int, _Guessed] = {}
        self._model = None if model is None or cost is None else _Modelled(model, cost)

    @property
    def took(self) -> Staircase | None:
        """What a decode of the draft model takes, if there is one."""
        return None if self._model is None else self._model.took

    @property
    def failures(self) -> int:
        """How often the draft model failed."""
        return 0 if self._model is None else self._model.failures

    def propose(self, running: Mapping[int, Sequence]) -> None:
        """Draft for each sequence that decodes and whose request allows it.

        Prompts that are still computed are indexed meanwhile.
        """
        self._keep_only(running)
        asked = self._model is not None and self._model.is_worth_it(running, self._shared)
        for sequence, guessed in self._indexed(running):
            if sequence.view.decoding:
                draft = self._noted(guessed, sequence, sequence.known, sequence.credit)
                if draft.tokens:
                    chances = self._survival(guessed.survival, draft.origin, len(draft.tokens))
                    draft = draft._replace(survival=chances)
                if asked:
                    draft = self._likelier(guessed, sequence, draft)
                sequence.guess(draft)

    def make(self, plan: Plan, running: Mapping[int, Sequence]) -> Mapping[Path, float]:
        """Let the draft model make what is planned of its guesses, all together."""
        return {} if self._model is None else self._model.make(plan, running)

    def index(self, running: Mapping[int, Sequence]) -> None:
        """Take in texts, while a tick is computed that nobody was drafted for."""
        for _ in self._indexed(running):
            pass

    def expects(self, outcomes: Iterable[Outcome], running: Mapping[int, Sequence]) -> bool:
        """Whether a likely draft follows what was just sampled, so that a tick is to be planned anew.

        The commit of these outcomes is still to come.
        """
        model = self._model
        for outcome in outcomes:
            sequence, guessed = running[outcome.step.key], self._guessed.get(outcome.step.key)
            if guessed is None or not outcome.tokens or sequence.submit.speculation == "off":
                continue
            if model is not None and sequence.credit > 2 and model.has_seen(sequence):
                return True
            tokens, known = sequence.tokens, sequence.known + 1
            tokens[known - 1] = outcome.tokens[-1].token  # as its commit is going to
            if guessed.lookup.index(tokens, known):
                self._judge_first(guessed, outcome)  # before the next guess is noted in its place
                draft = self._noted(guessed, sequence, known, sequence.credit - 1)
                chances = self._chances(guessed.survival, draft.origin)
                if draft.tokens and chances[_PARTS[0]] >= LIKELY:
                    return True
        return False

    def _likelier(self, guessed: _Guessed, sequence: Sequence, found: Draft) -> Draft:
        """Return what was found, or else as many guesses of the draft model, which cost.

        The model is asked where what was found is more likely wrong than right, and less likely than
        its own.
        """
        if self._model is None or not self._model.has_seen(sequence):
            return found
        most = min(MOST_DRAFTS, sequence.credit - 1, len(sequence.tokens) - sequence.known - 1)
        if most <= 0 or (found.survival and found.survival[0] >= LIKELY):
            return found
        chances = self._survival(guessed.survival, BY_MODEL, most)
        if found.survival and found.survival[0] >= chances[0]:
            return found
        return Draft((PROMISED,) * most, chances, BY_MODEL)

    def _indexed(self, running: Mapping[int, Sequence]) -> Iterator[tuple[Sequence, _Guessed]]:
        """Take in earlier answers and texts; yield each sequence whose text is known whole."""
        self._pool.index()
        for key, sequence in running.items():
            if sequence.submit.speculation == "off":
                continue
            guessed = self._guessed.get(key)
            if guessed is None:
                guessed = self._guessed[key] = self._begun(sequence)
            if guessed.lookup.index(sequence.tokens, sequence.known):
                yield sequence, guessed

    def _begun(self, sequence: Sequence) -> _Guessed:
        """Return what is kept of a new sequence, with what is known of the beginning of its prompt."""
        submit, prompt = sequence.submit, sequence.tokens[: sequence.n_prompt]
        namespace = submit.namespace if submit.keeps else None
        return _Guessed(namespace, prompt, self._prompts.take(namespace, prompt))

    def _keep_only(self, running: Mapping[int, Sequence]) -> None:
        """Drop what is kept of those that run no more, but for what the next turns go on from."""
        for key in self._guessed.keys() - running.keys():
            gone = self._guessed.pop(key)
            runs = gone.lookup.prompt_runs()
            if gone.namespace is not None and runs is not None:
                self._prompts.add(gone.namespace, gone.prompt, runs)

    def learn(self, sequence: Sequence, outcome: Outcome) -> None:
        """Note what became of a step of `sequence`."""
        guessed = self._guessed.get(sequence.handle)
        if guessed is None:
            return
        if outcome.step.drafts:
            right = outcome.right
            # Of the guess at a token whose mask is late nobody knows yet whether it is right.
            tried = right if outcome.late else len(outcome.step.drafts)
            self._judge(guessed, outcome.step.origin, right, tried)
        else:
            self._judge_first(guessed, outcome)

    def keep(self, sequence: Sequence) -> None:
        """Put the answer of a sequence that has ended into the pool, if its request shares."""
        submit = sequence.submit
        if submit.namespace is None or not submit.keeps or submit.speculation == "off":
            return
        if sequence.n_generated >= LEAST_ANSWER:
            first = max(0, sequence.n_prompt - LED_IN_BY)
            self._pool.add(submit.namespace, sequence.tokens[first : sequence.known])

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop what was kept of answers of the namespaces that are `mine`."""
        self._pool.forget(mine)
        self._prompts.forget(mine)

    def _judge_first(self, guessed: _Guessed, outcome: Outcome) -> None:
        """Judge a guess that was not computed by the token that came in its place, if that has come."""
        if guessed.first is None or not outcome.tokens:
            return
        place, token, origin = guessed.first
        if place == outcome.step.start + outcome.step.n_tokens:
            self._judge(guessed, origin, int(token == outcome.tokens[0].token), 1)

    def _judge(self, guessed: _Guessed, origin: Origin, right: int, tried: int) -> None:
        guessed.first = None
        guessed.survival.learn(origin, right, tried, FADE)
        self._shared.learn(origin, right, tried, SHARED_FADE)

    def _noted(self, guessed: _Guessed, sequence: Sequence, known: int, credit: int) -> Draft:
        """Return guesses, and note the first of them, to be judged by what follows."""
        draft = self._guess(guessed, sequence, known, credit)
        guessed.first = (known, draft.tokens[0], draft.origin) if draft.tokens else None
        return draft

    def _guess(self, guessed: _Guessed, sequence: Sequence, known: int, credit: int) -> Draft:
        """Return guesses at what follows the first `known` tokens, without their chances."""
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
        return Draft(drafts, origin=Origin(source, match)) if drafts else NO_DRAFT

    def _survival(self, own: Survival, origin: Origin, n: int) -> tuple[float, ...]:
        """Return for each of `n` guesses the chance that it and all before it are right."""
        own.forget(origin, REST)
        self._shared.forget(origin, SHARED_REST)
        chances = self._chances(own, origin)
        return tuple(accumulate([chances[part] for part in _PARTS[:n]], mul))

    def _chances(self, own: Survival, origin: Origin) -> list[float]:
        """Return for each part of the distances the chance that a guess of `origin` is right."""
        first = (_first_belief(origin),) * PARTS
        beliefs = self._shared.chances(origin, first, SHARED_WEIGHT)
        return own.chances(origin, beliefs, OWN_WEIGHT)


def _first_belief(origin: Origin) -> float:
    return MODEL_BELIEF if origin == BY_MODEL else FIRST_BELIEF[bucket_of(origin.match)]


class _Modelled:
    """A draft model beside the one that is served: whether it pays, what it sees, what it guesses."""

    def __init__(self, model: DraftModel, cost: CostModel) -> None:
        self._model = model
        self._cost = cost
        self._ticks = 0
        self._pays = False

    def is_worth_it(self, running: Mapping[int, Sequence], shared: Survival) -> bool:
        """Say whether its guesses pay, by how often they were right; if so, let it see more of the texts."""
        model = self._model
        model.keep_only(running)
        if not model.works:
            self._pays = False
            return False
        shared.forget(BY_MODEL, SHARED_REST)
        if self._ticks % LOOK_AGAIN == 0:
            decoding = sum(sequence.view.decoding for sequence in running.values())
            chance = shared.chances(BY_MODEL, (MODEL_BELIEF,) * PARTS, SHARED_WEIGHT)[0]
            times = best_of_model(self._cost, model.took, max(1, decoding), chance)[1]
            self._pays = times >= WORTH
        self._ticks += 1
        if self._pays:
            wanted = [s for s in running.values() if s.submit.speculation == "auto"]
            model.feed(wanted, self._most_fed(running))
        return self._pays

    @property
    def took(self) -> Staircase:
        """What one of its decodes takes, by tokens."""
        return self._model.took

    @property
    def failures(self) -> int:
        """How often it failed."""
        return self._model.failures

    def has_seen(self, sequence: Sequence) -> bool:
        """Whether it pays and has seen enough of a sequence that pays for its guesses."""
        return self._pays and sequence.submit.speculation == "auto" and self._model.ready(sequence)

    def make(self, plan: Plan, running: Mapping[int, Sequence]) -> Mapping[Path, float]:
        """Make what is planned of its guesses; return the seconds by client that it took of late."""
        wanted = {
            item.key: (running[item.key], item.n_drafts)
            for item in plan.items
            if item.n_drafts and running[item.key].draft.origin == BY_MODEL
        }
        if wanted:
            for key, guesses in self._model.guess(wanted).items():
                running[key].keep_promise(guesses)
        return self._model.take_spent()

    def _most_fed(self, running: Mapping[int, Sequence]) -> int:
        """Return how many tokens it may see now: few where somebody reads."""
        read = sum(sequence.view.protected for sequence in running.values())
        if not read:
            return MOST_FED
        allowed_s = FEEDING_SHARE * self._cost.seconds(Work(read, read))
        took = self._model.took
        return max([n for n in took.at if took(n) <= allowed_s], default=0)


def drafter_for(limits: Limits, given: Drafting | None, *, wanted: bool) -> Drafting:
    """Return what guesses ahead: the one that is `given` or one that looks texts up, if that is of use.

    Guesses have to be `wanted`, and a backend with these limits has to be able to check them.
    """
    if wanted and limits.n_rows > limits.n_slots and limits.can_go_back:
        return Contained(given or Drafter())
    return NoDrafts()


def _before_an_end(drafts: tuple[int, ...], ends: frozenset[int]) -> tuple[int, ...]:
    """Return `drafts` up to what would end the answer: nothing is computed behind that."""
    if ends.isdisjoint(drafts):
        return drafts
    return drafts[: next(n for n, token in enumerate(drafts) if token in ends)]
