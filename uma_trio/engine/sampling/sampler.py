"""From rows of logits to tokens: a :class:`TickSampler` for a whole tick, a :class:`Sampler` per sequence.

The rules and their order are those of llama.cpp's own chain (src/llama-sampler.cpp of the
vendored 0c1e57098): top_k, then top_p, then min_p, then temperature, then one draw. They are
numpy and not llama.cpp's chain because numpy is faster here (``benches/sampling.py``): the
chain first copies the row into 12-byte records, which alone costs more than everything below.

The logits are a view into the backend's memory and are left as they were: what must not be drawn
is masked in place for one tick. They are read once for all rows: by argmax, or for the short
lists from which greedy and top_k rows are chosen together. A row that needs more than a short
list is then looked at by itself; only a draw from the whole vocabulary, and top_p without top_k,
need a working copy of it (:attr:`Sampler.in_place`). One thread reads them all: after a decode
another takes as long to wake up as several rows take to be read.

Rows whose requests change logits (:mod:`uma_trio.engine.sampling.adjusting`) are edited where they
lie, chosen with all others, and put back. Where an answer is constrained the token is chosen like
any other and looked at then; only if it is refused the row is chosen from again, among the allowed
tokens and with a number of another stream. Rows that are to be described by `logprobs` are copied
as the model gave them, or as they were edited where that is wanted. Rows that use neither take no
other path than without such company.

Several rows of one sequence are a chain: each but the first is the row behind a guess at the token of
the row before it. What changes with each token (penalties, constraints) goes on along the chain as if
the guesses were right, and is taken back. A row behind a wrong guess is not reached.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import numpy as np
from attrs import frozen

from uma_trio.backend.base import FloatArray, IntArray
from uma_trio.engine.messages import SamplingParams, TokenLogprobs
from uma_trio.engine.sampling.adjusting import NO_TOKENS, Adjuster
from uma_trio.engine.sampling.checking import IMPOSSIBLE, UNREACHED, chains, check
from uma_trio.engine.sampling.drawing import Filters, Numbers, column, draw, draw_from_all, weigh
from uma_trio.engine.sampling.logprobs import (
    NOT_FINITE,
    Describer,
    Seen,
    greedy,
    likeliest_but,
    without,
)
from uma_trio.engine.sampling.masks import AT_ONCE, Mask, Masks
from uma_trio.engine.sampling.shortlist import IdArray, Shortlist, is_short, largest, nucleus
from uma_trio.text.constraint import Constraint

NO_GUESS: Final = -1
_NO_MAXIMUM: Final = "the row has no finite maximum"

# A draw that was refused within so many tokens is a sign that the next may be, too.
_SOON: Final = 8
# With fewer rows to draw from short lists, `largest` is quicker: it takes fewer calls of numpy.
_TOGETHER: Final = 3


class NonFinite(ArithmeticError):
    """A row of logits holds NaN or +inf, or nothing but -inf: no token can be chosen."""


class Sampler:
    """Chooses the tokens of one sequence, each with the random number of its place in the answer.

    The same parameters (with their seed), the same prompt and the same rows give the same tokens,
    whatever else runs, and whatever rows were chosen from in vain.

    A row is chosen from only after every token before it was given to `accept`, in order. That is
    also all there is to do when its sequence is preempted and computed again.
    """

    __slots__ = (
        "_again",
        "_behind",
        "_mask",
        "_n_accepted",
        "_numbers",
        "_place",
        "_refused",
        "adjuster",
        "constraint",
        "ends",
        "filters",
        "greedy",
        "has_history",
        "never",
        "params",
    )

    def __init__(
        self,
        params: SamplingParams,
        end_tokens: Collection[int],
        prompt: IntArray = NO_TOKENS,
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.constraint = constraint
        self.greedy = params.temperature <= 0.0
        self.ends = frozenset(params.stop_token_ids)  # each ends the answer, and is no part of it
        # A constraint may leave nothing but an end, which ends the answer then.
        if not params.ignore_eos or constraint is not None:
            self.ends |= frozenset(end_tokens)
        self.adjuster: Adjuster | None = None
        if Adjuster.needed(params):
            self.adjuster = Adjuster(params, self.ends, prompt)
        self.never: IdArray | None = None  # what must not be drawn
        if params.ignore_eos and end_tokens:
            self.never = np.array(sorted(set(end_tokens)), np.intp)
        self.filters = Filters.of(params)
        #: Whether what is sampled of a row depends on the tokens before it.
        self.has_history = self.adjuster is not None or constraint is not None
        self._numbers = Numbers(params.seed)
        self._again: Numbers | None = None
        self._place = 0  # how many tokens the answer has
        self._behind = 0  # how many rows behind these were drawn from since
        self._n_accepted = 0
        self._refused = -_SOON  # behind how many tokens the latest draw was refused
        # The latest, and behind how many tokens it holds.
        self._mask: tuple[int, Mask] | None = None
        if constraint is not None:
            self._again = Numbers(f"again {params.seed}")

    def __call__(self, row: FloatArray) -> int:
        """Give the answer the next token by one row of logits, ``[vocab]``. Raises `NonFinite`."""
        (token,) = choose(row[np.newaxis], [self])
        self.given(1)
        if token < 0:
            raise NonFinite(_NO_MAXIMUM)
        return token

    def accept(self, token: int) -> None:
        """Note that `token` is part of the answer."""
        self._n_accepted += 1
        if self._mask is not None and self._mask[0] < self._n_accepted:
            self.drop_mask()
        if self.adjuster is not None:
            self.adjuster.accept(token)
        if self.constraint is not None:
            self.constraint.accept(token)

    def random(self) -> float:
        """Return the number of [0, 1) of the next row that is drawn from, of one for each token."""
        number = self._numbers(self._place + self._behind)
        self._behind += 1
        return number

    def given(self, n: int) -> None:
        """Note that the answer has `n` tokens more; rows behind them were drawn from in vain."""
        self._place += n
        self._behind = 0

    def pick(self, row: FloatArray, likeliest: int) -> int:
        """Return the next token for a row whose (finite) maximum is known.

        What the request changes is changed in it already, what must not be drawn is -inf.
        """
        return likeliest if self.greedy else self._drawn(row, likeliest, self.random())

    def mask(self, masks: Masks, behind: int) -> Mask:
        """Return what its constraint allows, which stands `behind` tokens behind the answer.

        It is begun if it was not before, when its row had to sit out.
        """
        if self.constraint is None:
            raise ValueError("nothing constrains the answer")
        place = self._n_accepted + behind
        if self._mask is None or self._mask[0] != place:
            self.drop_mask()
            self._mask = place, masks.begin(self.constraint)
        return self._mask[1]

    def drop_mask(self) -> None:
        """Let the latest mask go, which delays those of others where it is still to be made."""
        if self._mask is not None:
            self._mask[1].drop()
            self._mask = None

    def foresee_mask(self, masks: Masks, *, elsewhere: bool) -> None:
        """Begin the next token's mask: if one of the latest was needed, or if it is found `elsewhere`."""
        bound, soon = self.constraint, self._n_accepted - self._refused < _SOON
        if bound is not None and (bound.elsewhere or (soon and not elsewhere)):
            self.mask(masks, 0)

    @property
    def waits_for_mask(self) -> bool:
        """Whether the mask that its next token needs is still being made."""
        return self._mask is not None and not self._mask[1].wait(0.0)

    def notify_of_mask(self, there: Callable[[], object]) -> None:
        """Have `there` called once that mask is made, on any thread; at once if none is."""
        if self._mask is None:
            there()
        else:
            self._mask[1].notify(there)

    def not_excluded(self, ids: IdArray) -> IdArray:
        """Return those of the allowed tokens that are no excluded end; all, if nothing else is left."""
        if self.never is None:
            return ids
        others = ids[np.isin(ids, self.never, invert=True)]
        return others if len(others) else ids

    def redraw(self, row: FloatArray, ids: IdArray, behind: int) -> int:
        """Return one of the tokens `ids`, where the one that `pick` gave for the row was refused.

        The row is `behind` tokens behind the answer.

        `IMPOSSIBLE` if none can be chosen. A draw from the whole vocabulary follows the probabilities
        of `ids` exactly, as a refused one is drawn again from these. With filters a refused draw is
        filtered again among them, as llama.cpp's server does it.
        """
        if not len(ids):
            return IMPOSSIBLE
        self._refused = self._n_accepted
        values = row[ids]
        likeliest = int(values.argmax())
        if values[likeliest] == -np.inf:
            # Before `min_tokens` no end can be drawn, but the constraint may leave nothing else.
            few = len(ids) <= len(self.ends)
            return int(ids[0]) if few and self.ends.issuperset(ids.tolist()) else IMPOSSIBLE
        if self.greedy or self._again is None:
            return int(ids[likeliest])
        return int(ids[self._drawn(values, likeliest, self._again(self._place + behind))])

    def _drawn(self, row: FloatArray, likeliest: int, u: float) -> int:
        top = row[likeliest]
        if self._filtered:
            ids, values = self._found(row, top)
            return int(ids[draw(self.filters.weights(values, top), u)])
        return draw_from_all(weigh(row, top, self.filters.scale), u)

    def candidates(self, row: FloatArray) -> tuple[IdArray, FloatArray]:
        """Return the tokens that can be drawn and their probabilities (for tests and tools).

        Likeliest first if a filter sorted them, by id otherwise. Raises `NonFinite`.
        """
        if self.adjuster is not None:
            row = row.copy()
            self.adjuster.apply(row)
        if self.never is not None:
            row = without(row, self.never)
        (likeliest,) = greedy(row[np.newaxis])
        if likeliest == NOT_FINITE:
            raise NonFinite(_NO_MAXIMUM)
        return self._drawable(row)

    def drawable(self, row: FloatArray, among: IdArray | None = None) -> tuple[IdArray, FloatArray]:
        """Return the tokens that a row was drawn from, and their probabilities, as `candidates` does.

        The row is edited already, and has a sane maximum. `among` are the tokens that its constraint
        allowed, if it refused the first one.
        """
        if among is not None:
            places, probs = self._drawable(row[among])
            return among[places], probs
        return self._drawable(row if self.never is None else without(row, self.never))

    def _drawable(self, row: FloatArray) -> tuple[IdArray, FloatArray]:
        likeliest = int(row.argmax())
        if self.greedy:
            return np.array([likeliest], np.intp), np.ones(1, np.float32)
        top = row[likeliest]
        ids, values = self._found(row, top)
        kept = self.filters.kept(values, top)
        probs = weigh(values[kept], top, self.filters.scale)
        return ids[kept], probs / probs.sum()

    def in_place(self, n_vocab: int) -> bool:
        """Whether a row of so many logits is read where it lies, and never copied whole."""
        params = self.params
        if self.greedy:
            return True
        if params.top_k > 0:
            return is_short(params.top_k, n_vocab)
        return params.min_p > 0.0 and params.top_p >= 1.0

    @property
    def _filtered(self) -> bool:
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    def _found(self, row: FloatArray, top: np.float32) -> tuple[IdArray, FloatArray]:
        """Return ids and logits of what the filters may leave, and little more than that.

        Descending where top_k or top_p is asked for, by id otherwise.
        """
        params = self.params
        if params.top_k > 0:
            return largest(row, params.top_k)
        if params.top_p < 1.0:
            return nucleus(row, top, params.top_p)
        ids = np.flatnonzero(row >= top + self.filters.min_logit)
        return ids, row[ids]


class _Lists:
    """Draws for the rows `listed` from their short lists, and finds the likeliest of the others."""

    def __init__(self, samplers: Sequence[Sampler], listed: list[int], n_vocab: int) -> None:
        ks = [1] * len(samplers)
        for row in listed:
            ks[row] = samplers[row].params.top_k
        self._shortlist = Shortlist(n_vocab, ks)
        self._samplers, self._listed = samplers, listed
        self._filters = self._filters_of(listed)

    def __call__(self, logits: FloatArray) -> list[int]:
        """Return a token for each row, or NOT_FINITE."""
        ids, values = self._shortlist(logits)
        finite = np.isfinite(values[:, 0])
        tokens: list[int] = np.where(finite, ids[:, 0], NOT_FINITE).tolist()
        drawn, filters = self._listed, self._filters
        if not finite.all():
            drawn = [row for row in drawn if finite[row]]
            filters = self._filters_of(drawn)
        if len(drawn) < len(tokens):
            values = values[drawn]
        weights = filters.weights(values, values[:, :1])
        places = draw(weights, column([self._samplers[row].random() for row in drawn], np.float64))
        for row, place in zip(drawn, places.tolist(), strict=True):
            tokens[row] = int(ids[row, place])
        return tokens

    def _filters_of(self, rows: list[int]) -> Filters:
        return Filters.together([self._samplers[row].filters for row in rows])


_NO_LOGPROBS: Final[Mapping[int, TokenLogprobs]] = {}


@frozen(eq=False)
class SampledTokens:
    """The tokens of a tick, and what the model thought of those whose requests asked, by row.

    `NOT_FINITE` stands for a row with NaN or +inf, or without any finite logit that may be drawn;
    `IMPOSSIBLE` for one whose constraint leaves no token; `UNREACHED` for one behind a wrong guess;
    `LATE` for one whose mask is not there yet. These have no logprobs. Logprobs are computed when the
    first of them is looked at, or when the same :class:`TickSampler` is used again. `masks_s` is for each
    token that a constraint refused how long it took to find another, unless it is late.
    """

    tokens: list[int]
    logprobs: Mapping[int, TokenLogprobs] = _NO_LOGPROBS
    masks_s: Sequence[float] = ()


class TickSampler:
    """Chooses the tokens of one tick: a sampler for each row of ``[n, n_vocab]`` logits, in order.

    It is made before the logits are there, and may be used again for the same rows of later ticks:
    what depends on the samplers' parameters only is done here. What depends on their history is
    asked of the samplers each time.
    """

    def __init__(self, samplers: Sequence[Sampler], n_vocab: int, masks: Masks = AT_ONCE) -> None:
        self._samplers = tuple(samplers)
        listed = [
            row
            for row, sampler in enumerate(samplers)
            if not sampler.greedy and is_short(sampler.params.top_k, n_vocab)
        ]
        self._lists = None
        if len(listed) >= _TOGETHER:
            self._lists = _Lists(samplers, listed, n_vocab)
        else:
            listed = []
        drawn = set(listed)
        # Rows that follow a row of their own sequence, in order, and the same as a set.
        self._chained = [
            row for row in range(1, len(samplers)) if samplers[row] is samplers[row - 1]
        ]
        self._follows = frozenset(self._chained)
        self._apart = [
            (row, s) for row, s in enumerate(samplers) if not s.greedy and row not in drawn
        ]
        bound = [(row, s, s.never) for row, s in enumerate(samplers) if s.never is not None]
        # What must not be drawn is hardly ever the likeliest: greedy rows are looked at after.
        self._checked = [(row, ids, frozenset(ids.tolist())) for row, s, ids in bound if s.greedy]
        hidden = [(row, ids) for row, s, ids in bound if not s.greedy]
        self._masked: tuple[IdArray, IdArray] | None = None
        if hidden:
            rows = np.repeat([row for row, _ in hidden], [len(ids) for _, ids in hidden])
            self._masked = rows, np.concatenate([ids for _, ids in hidden])
        adjusters = [(row, s.adjuster) for row, s in enumerate(samplers)]
        self._adjusted = [(row, adjuster) for row, adjuster in adjusters if adjuster is not None]
        self._chains = chains(samplers)
        self._alone = len(self._chains) == len(samplers) - len(self._chained)
        self._masks = masks
        wanted = [(row, s.params.logprobs) for row, s in enumerate(samplers)]
        tops = {row: n_top for row, n_top in wanted if n_top is not None}
        drawn_by = {row: samplers[row] for row in tops if samplers[row].params.post_sampling}
        self._seen_edited = [row for row, s in drawn_by.items() if s.adjuster is not None]
        self._describe = Describer(tops, n_vocab, drawn_by) if tops else None

    def __call__(self, logits: FloatArray, guesses: Sequence[int] = ()) -> SampledTokens:
        """Return the next token of each row; the rows are left as they were.

        The tokens are those that each sampler gives for its row alone, in whatever company; a row
        without a sane maximum concerns no other. `guesses` are, if there are any, for each row the
        token behind it that the next row was computed with, or `NO_GUESS`.
        """
        masks_s: Sequence[float] = ()
        seen = Seen()
        if self._adjusted or self._chains:
            tokens, masks_s = self._changed_tokens(logits, guesses, seen)
        else:
            tokens = self._tokens(logits, guesses)
        if guesses:
            for row in self._chained:
                if tokens[row - 1] != guesses[row - 1]:
                    tokens[row] = UNREACHED
        if self._describe is None:
            return SampledTokens(tokens, masks_s=masks_s)
        return SampledTokens(tokens, self._describe(logits, tokens, seen), masks_s)

    def _changed_tokens(
        self, logits: FloatArray, guesses: Sequence[int], seen: Seen
    ) -> tuple[list[int], Sequence[float]]:
        """Return the tokens of rows of which some are edited for the tick, or constrained.

        With them comes how long each refused token took. What the description of a row needs that
        is not in the row itself is noted in `seen`.
        """
        edits = []
        try:
            for row, adjuster in self._adjusted:
                if guesses and row in self._follows:
                    adjuster.suppose(guesses[row - 1])
                edits.append((row, adjuster.apply(logits[row])))
            tokens = self._tokens(logits, guesses)
            took = check(
                logits, tokens, guesses, self._chains, self._masks, seen.among, alone=self._alone
            )
            for row in self._seen_edited:
                seen.edited[row] = logits[row].copy()
            return tokens, took
        finally:
            for row, changed in edits:
                Adjuster.undo(logits[row], changed)
            for _, adjuster in self._adjusted:
                adjuster.take_back()

    def _tokens(self, logits: FloatArray, guesses: Sequence[int]) -> list[int]:
        masked = self._masked
        if masked is None:
            return self._choose(logits, guesses)
        hidden = logits[masked]
        logits[masked] = -np.inf  # cheaper than a copy of the rows, and undone
        try:
            tokens = self._choose(logits, guesses)
        finally:
            logits[masked] = hidden
        sane = hidden < np.inf
        if not sane.all():
            for row in masked[0][~sane].tolist():
                tokens[row] = NOT_FINITE
        return tokens

    def _choose(self, logits: FloatArray, guesses: Sequence[int]) -> list[int]:
        if guesses and self._follows and self._lists is None:
            return _one_by_one(self._samplers, self._follows, logits, guesses)
        tokens = self._lists(logits) if self._lists else greedy(logits).tolist()
        for row, ids, never in self._checked:
            if tokens[row] in never:
                tokens[row] = likeliest_but(logits[row], ids)
        for row, sampler in self._apart:
            # A token that a constraint may replace later says nothing yet.
            final = bool(guesses) and row in self._follows and sampler.constraint is None
            if final and tokens[row - 1] != guesses[row - 1]:
                tokens[row] = UNREACHED  # to draw for it would take time
            elif tokens[row] != NOT_FINITE:
                tokens[row] = sampler.pick(logits[row], tokens[row])
        return tokens


def _one_by_one(
    samplers: Sequence[Sampler],
    follows: Collection[int],
    logits: FloatArray,
    guesses: Sequence[int],
) -> list[int]:
    """Return the token of each row of ``logits[n, vocab]``; those that follow a wrong guess are `UNREACHED`.

    A row is as long as the vocabulary, so a look at one behind a wrong guess is time for nothing. `follows` are the rows that were computed with the guess of the row before them.
    """
    tokens: list[int] = []
    for row, sampler in enumerate(samplers):
        # A token that a constraint may replace later says nothing yet.
        final = row in follows and sampler.constraint is None
        if final and tokens[row - 1] != guesses[row - 1]:
            tokens.append(UNREACHED)
            continue
        (token,) = greedy(logits[row : row + 1]).tolist()
        if not sampler.greedy:
            token = sampler.pick(logits[row], token) if token != NOT_FINITE else token
        elif sampler.never is not None and token in sampler.never:
            token = likeliest_but(logits[row], sampler.never)
        tokens.append(token)
    return tokens


def choose(logits: FloatArray, samplers: Sequence[Sampler]) -> list[int]:
    """Return the next token of each row of ``logits[n, vocab]``, as a :class:`TickSampler` does."""
    return TickSampler(samplers, logits.shape[1])(logits).tokens
