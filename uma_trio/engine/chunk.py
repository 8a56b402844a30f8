"""The values of one tick: ``plan -> Chunk -> batch -> compute -> Outcome -> commit -> publish``.

A :class:`Chunk` is one sequence's part of a batch. An :class:`Outcome` is the result of a chunk. A
:class:`Tick` is a batch before it is computed, a :class:`TickResult` the same tick afterwards. All
of them are frozen; only :meth:`uma_trio.engine.sequences.Sequence.advance` changes a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from attrs import frozen

from uma_trio.backend.base import FloatArray
from uma_trio.engine.messages import InboxMessage, TokenLogprobs
from uma_trio.engine.sampling import (
    IMPOSSIBLE,
    LATE,
    NO_GUESS,
    NOT_FINITE,
    SampledTokens,
    TickSampler,
)
from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import Work
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState
from uma_trio.text.constraint import Constraint

NO_TOKENS: Final = SampledTokens([])
NO_SCORES: Final[Mapping[int, TokenLogprobs]] = {}

Describe = Callable[[FloatArray], Mapping[int, TokenLogprobs]]
"""Finds for each row of logits how likely the token behind it is; see :attr:`Drawn.logprobs`."""


OWN_TEXT: Final = "own text"
EARLIER_ANSWERS: Final = "earlier answers"


class DraftOrigin(NamedTuple):
    """The source of a draft, in words for people, and the length of its match, if there is one."""

    source: str = ""
    match: int = 0


NO_ORIGIN: Final = DraftOrigin()


class Draft(NamedTuple):
    """Guesses at a sequence's next tokens, with the chance that each and all before are right."""

    tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    origin: DraftOrigin = NO_ORIGIN


NO_DRAFT: Final = Draft()


class Chunk(NamedTuple):
    """`n_tokens` of the sequence `key`, from position `start`, in one batch.

    The last of them are `drafts`: guesses at tokens that are not sampled yet, found at `origin`.
    `first_row` and `n_rows` say which rows of the tick's logits belong to it: none while its prompt
    is unfinished, otherwise one for the last token that is known and one for each draft. `n_scored`
    of its tokens have a row each that is not sampled, since it says how likely the token behind
    them is: then these are all of its tokens, and `first_row` counts among such rows, which come
    before all others.
    """

    key: int
    start: int
    n_tokens: int
    first_row: int = 0
    n_rows: int = 0
    drafts: tuple[int, ...] = ()
    origin: DraftOrigin = NO_ORIGIN
    n_scored: int = 0


class Drawn(NamedTuple):
    """One sampled token, and its log probability if the request asked for it.

    `logprobs` is computed from `described` at its first use, which costs as much as sampling. Use
    it during the next decode; after that decode the values are overwritten.
    """

    token: int
    row: int = 0
    described: Mapping[int, TokenLogprobs] = {}

    @property
    def logprobs(self) -> TokenLogprobs | None:
        """The token's logarithmic probability and its alternatives, where asked for."""
        return self.described.get(self.row)


@frozen
class ChunkFault:
    """The reason why a chunk gave no token. Its request ends with this code and message."""

    code: str
    message: str


FAULTS: Final = {
    NOT_FINITE: ChunkFault(
        "E_RUNTIME_003",
        "the model produced logits that are not numbers; "
        "send the request again, and check the model file if it happens again",
    ),
    IMPOSSIBLE: ChunkFault(
        "E_RUNTIME_005",
        "no token continues the answer as its schema or grammar asks; simplify that, or bias less",
    ),
}
"""What :class:`TickSampler` answers in place of a token, and what that says."""


def fault_of(fault: ChunkFault, constraint: Constraint | None) -> ChunkFault:
    """Return what to say of a fault: a limit, if it is one that leaves the constraint no way on."""
    if fault is not FAULTS[IMPOSSIBLE] or constraint is None or constraint.problem is None:
        return fault
    return ChunkFault("E_LIMIT_007", constraint.problem)


class Outcome(NamedTuple):
    """What came of `chunk`: `kept` of its tokens stay in the KV cache, the rest were wrong drafts.

    `tokens` were sampled, in order: one for each row, up to the first draft that differs from what
    was sampled for the row before it. A `fault` means that there are none. With `late` the mask for
    the next one is still being made: the last token that was kept is to be computed again. `scores` are
    those of the tick by row, as lazy as :attr:`Drawn.logprobs`.
    """

    chunk: Chunk
    kept: int
    tokens: tuple[Drawn, ...] = ()
    fault: ChunkFault | None = None
    late: bool = False
    scores: Mapping[int, TokenLogprobs] = {}

    @property
    def right(self) -> int:
        """How many of the chunk's drafts were right, and are among `tokens`."""
        pairs = zip(self.chunk.drafts, self.tokens, strict=False)
        return sum([draft == drawn.token for draft, drawn in pairs])


@frozen(eq=False)
class Tick:
    """A planned tick whose batch is filled. `sampler` samples its rows of logits, in order.

    `in_place` of its `n_rows` are read without a copy. The batch holds `n_tokens`, ballast included.
    Before the rows that are sampled come `n_scored` that are not, which `describe` makes scores of.
    """

    state: SchedulerState
    plan: Plan
    chunks: tuple[Chunk, ...]
    sampler: TickSampler
    in_place: int
    n_tokens: int
    n_rows: int
    n_scored: int = 0
    describe: Describe | None = None

    @property
    def guesses(self) -> list[int]:
        """For each row the draft that follows it, or `NO_GUESS`; empty if there is no draft."""
        if not sum([item.n_drafts for item in self.plan.items]):
            return []
        return [
            guess for chunk in self.chunks if chunk.n_rows for guess in (*chunk.drafts, NO_GUESS)
        ]

    def read(
        self, logits: Callable[[int], FloatArray]
    ) -> tuple[SampledTokens, Mapping[int, TokenLogprobs]]:
        """Return what is made of the rows: a token for each that is sampled, scores of the others.

        `logits` gives so many rows, from the first.
        """
        first, end = self.n_scored, self.n_scored + self.n_rows
        if not end:
            return NO_TOKENS, NO_SCORES
        rows = logits(end)
        sampled = self.sampler(rows[first:], self.guesses) if self.n_rows else NO_TOKENS
        return sampled, NO_SCORES if self.describe is None else self.describe(rows[:first])

    @cached_property
    def work(self) -> Work:
        """What of it costs time."""
        return planned_work(self.state, self.plan)


@frozen(eq=False)
class TickResult:
    """A tick that was computed until `at` (engine's clock), with the seconds of its parts.

    `masks_s` has, for each token that a constraint refused, the time to find another one; it is
    part of `sampling_s`. `messages` arrived before the next tick was launched and are handled after
    its commit. With `after_idle` no decode came immediately before it, and its `host_s` is 0.
    """

    tick: Tick
    outcomes: tuple[Outcome, ...]
    at: float
    decode_s: float
    host_s: float
    sampling_s: float
    masks_s: Sequence[float] = ()
    messages: tuple[InboxMessage, ...] = ()
    after_idle: bool = False


def outcomes(
    chunks: Iterable[Chunk], sampled: SampledTokens, scores: Mapping[int, TokenLogprobs] = NO_SCORES
) -> tuple[Outcome, ...]:
    """Return what came of `chunks`, given the token that was chosen for each row of logits.

    A draft is kept if it is what was sampled for the row before it. The token sampled in place of
    the first wrong draft is right all the same: every token that it was sampled behind was kept.
    """
    tokens, described, found = sampled.tokens, sampled.logprobs, []
    for chunk in chunks:
        row = chunk.first_row
        if not chunk.n_rows:
            found.append(Outcome(chunk, chunk.n_tokens, scores=scores))
        elif chunk.n_rows == 1 and tokens[row] >= 0:
            found.append(Outcome(chunk, chunk.n_tokens, (Drawn(tokens[row], row, described),)))
        else:
            found.append(_checked(chunk, sampled))
    return tuple(found)


def ends_prompt(results: Iterable[Outcome]) -> bool:
    """Whether one of these gave a first token: behind several tokens that were no drafts."""
    return any(
        bool(one.tokens) and one.chunk.n_tokens - len(one.chunk.drafts) > 1 for one in results
    )


def _checked(chunk: Chunk, sampled: SampledTokens) -> Outcome:
    row, drafts, tokens = chunk.first_row, chunk.drafts, sampled.tokens
    right = 0
    while right < len(drafts) and tokens[row + right] == drafts[right]:
        right += 1
    kept, drawn = chunk.n_tokens - len(drafts) + right, tokens[row : row + right + 1]
    late = drawn[-1] == LATE
    if drawn[-1] in FAULTS and not right:
        return Outcome(chunk, kept, fault=FAULTS[drawn[-1]])
    if late or drawn[-1] in FAULTS:
        # What came before it is given first; a later chunk finds the fault again, or the mask.
        kept, drawn = kept - 1, drawn[:-1]
    described = sampled.logprobs
    given = tuple([Drawn(token, row + n, described) for n, token in enumerate(drawn)])
    return Outcome(chunk, kept, given, late=late)
