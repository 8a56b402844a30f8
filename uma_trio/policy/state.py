"""The input of a policy: a frozen snapshot of the engine, with the time in it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import cached_property

from attrs import field, frozen

from uma_trio.policy.cost import CostModel, Traffic, Work
from uma_trio.policy.evolving import value
from uma_trio.policy.tuning import TUNING, Tuning
from uma_trio.words import Awaits, Lane

# So many of a stream's places are for tokens on their way to and from its connection. Without one
# left it would be parked as if its reader were away, so tokens that are held do not take them.
PLACES_IN_FLIGHT = 6


#: How far readers are ahead at most, unless the ticks of deep prompts are longer.
USUAL_LEAD_S = 0.3
#: What a first token may take by what it takes alone, where all prompts can be done in that time.
STRETCH = 2.0
#: A wait that users hardly notice, whatever their prompt takes.
MOMENT_S = 0.15


@value
class FirstToken:
    """A prompt whose first token is waited for (:mod:`uma_trio.policy.stretch`). Seconds.

    `own_s` is what its tokens that were not cached when it arrived take alone. `ends` has, for each of those whose shares it
    uses, the outermost first, when a machine of that sender alone would have computed it. A `short` one fits into one tick.
    """

    arrived: float
    own_s: float
    ends: tuple[float, ...]
    short: bool = False


@value
class FirstTokens:
    """The common stretch of all first tokens that are waited for, with a slot and without.

    Senders are those on this `level` of the shares that prompts use.
    """

    stretch: float = STRETCH
    level: int = 0


@value
class SequenceView:
    """One sequence that has a slot, as the policy sees it.

    There are no phases, only counters. `pending` tokens are not in the KV cache; the last `drafted`
    of them are guesses at its answer, and `survival` has for each guess the probability that it and
    all before it are right.
    `computed` tokens are in the KV cache; the first `cached` of them came from the prefix cache.
    Each of the first `scored` tokens asks for a row of logits when it is computed, which gives the
    probability of the token after it; until they are computed, only some of these are `pending`.
    """

    key: int
    lane: Lane
    pending: int
    computed: int
    started: bool  # its first token has been sampled
    credit: int  # free places in its stream; 0 means its reader is behind
    arrived: float  # seconds, engine clock
    client: int = 0  # the sender
    first_token_at: float | None = None
    last_token_at: float | None = None
    target_ttft_s: float | None = None  # what its application asked for
    target_itl_s: float | None = None
    drafted: int = 0
    cached: int = 0
    survival: tuple[float, ...] = ()
    shown_at: float | None = None  # when its latest token is, or will be, shown to its reader
    pays_for_drafts: bool = True  # a tick may take longer for its guesses
    scored: int = 0
    within: tuple[int, ...] = ()  # whose shares `client` divides, the outermost first
    awaits: Awaits = "tokens"  # of the interactive lane; background requests have no reader
    first: FirstToken | None = None  # of its prompt, in the interactive lane; None: unknown
    waited_by: tuple[FirstToken, ...] = ()  # of those that wait for what they share with it

    @property
    def path(self) -> tuple[int, ...]:
        """The nodes whose share of machine time it uses, outermost first; the numbers are unique."""
        return (*self.within, self.client)

    @property
    def read(self) -> bool:
        """Whether its tokens are read as they come."""
        return self.lane == "interactive" and self.awaits == "tokens"

    @property
    def due(self) -> int:
        """The number of tokens to compute before its next token can be sampled."""
        return self.pending - self.drafted

    @property
    def uncached(self) -> int:
        """The number of its tokens that were computed, without those from the prefix cache."""
        return self.computed - self.cached

    @property
    def scoring(self) -> bool:
        """Whether each of its pending tokens asks for a row of logits."""
        return self.computed < self.scored

    @property
    def decoding(self) -> bool:
        """Whether its answer has begun and each tick can add to it."""
        return self.started and self.pending - self.drafted == 1

    @property
    def protected(self) -> bool:
        """Whether it is a stream whose reader keeps up."""
        ready = self.started and self.credit > 0 and self.read
        return ready and self.pending - self.drafted == 1

    def rows(self, n_tokens: int, n_drafts: int = 0) -> int:
        """Return the number of logits rows for `n` of its tokens, including `n_drafts` guesses.

        One row if the last token is the last one to compute, one for each draft after it, and one
        for each scored token.
        """
        if self.scoring:
            return n_tokens
        ends = n_tokens - n_drafts == self.pending - self.drafted
        return 1 + n_drafts if ends else 0


def is_prompt(view: SequenceView) -> bool:
    """Return whether it is an interactive request without a running answer."""
    return view.lane == "interactive" and not view.decoding


def is_newcomer(view: SequenceView, most_tokens: int) -> bool:
    """Whether it is an interactive prompt of which fewer than `most_tokens` were computed."""
    return view.lane == "interactive" and view.uncached < most_tokens and not view.decoding


@value
class Waiting:
    """A request that waits for a slot. `cells` is the number that admission would reserve.

    One that was `preempted` has had a slot before, and lost it. The first token of an interactive one is
    `due` then (:mod:`uma_trio.policy.stretch`), and takes `own_s` alone; without, it goes by its arrival.
    """

    key: int
    lane: Lane
    client: int  # the sender: peers share fairly among clients
    cells: int
    passed_over: int  # how often a later arrival was admitted before it
    arrived: float
    preempted: bool = False
    within: tuple[int, ...] = ()  # as of a sequence
    due: float | None = None
    own_s: float = 0.0

    @property
    def late_from(self) -> float:
        """When it has to have a slot, or its first token is late."""
        return math.inf if self.due is None else self.due - self.own_s - MOMENT_S

    @property
    def path(self) -> tuple[int, ...]:
        return (*self.within, self.client)


@value
class Holder:
    """A request that has a slot: its owner, and the value of its place.

    `cells` are reserved for it. `computed` tokens would be computed again after a preemption. It
    has been parked for `parked_s`, 0 if its reader keeps up. With tenure (:mod:`uma_trio.policy.floor`) its
    prompt took `unearned_s` longer to compute than its answer has, since it has this slot. It `yields` if it is
    an answer that is not read as it comes, and has kept its slot so far. `due` is that of the first token of an interactive
    prompt of which nothing was computed yet.
    """

    key: int
    lane: Lane
    client: int
    cells: int
    computed: int
    passed_over: int
    parked_s: float = 0.0
    arrived: float = 0.0
    tenured: bool = False
    unearned_s: float = 0.0
    within: tuple[int, ...] = ()  # as of a sequence
    yields: bool = False
    started: bool = True
    due: float | None = None

    @property
    def path(self) -> tuple[int, ...]:
        return (*self.within, self.client)


NO_WORK = Work(0, 0)


@value
class MeasuredTick:
    """A computed tick, for the policy to learn from.

    `itl` holds the inter-token latency, in seconds, of each stream that got a token. The other
    values come from its plan: `solo_s` is the predicted time of the interactive streams alone,
    `mixed` says whether other work was computed with them, and `background` is the part of that
    work that was not a newcomer's.
    """

    decode_s: float = 0.0
    host_s: float | None = 0.0  # between the decode before it and its own; None after an idle time
    work: Work = NO_WORK
    itl: Mapping[int, float] = field(factory=dict)
    solo_s: float = 0.0
    mixed: bool = False
    background: float = 0.0

    @property
    def n_tokens(self) -> int:
        """The number of rows of its batch, including ballast."""
        return self.work.tokens


@frozen
class Contract:
    """The promise to interactive streams, and the minimum for all other work.

    A token of a stream that is read comes at most a *step* after the token before it: `latency_cap`
    times solo, the predicted time of the streams that are read alone, or `reading_pace_s`, whichever is
    longer. For the first `newcomer_tokens` of a prompt a step may be `startup_cap` times solo in the
    first `startup_s` of a stream, and `pause_cap` times solo later.
    Streams leave at least `background_floor` of the machine's time to other work, whatever the cap.
    A paced token is shown at most `playout_s` after it was computed.
    """

    latency_cap: float = 1.2
    pause_cap: float = 4.0
    startup_cap: float = 2.0
    startup_s: float = 3.0
    background_floor: float = 0.05
    newcomer_tokens: int = 512
    interactive_weight: float = 10.0  # that lane's part of what streams leave, for 1 of the other
    bmt_budget: float | None = None  # bytes per second; None is no limit
    reading_pace_s: float = 0.0  # a step is at least so long; 0: by solo alone
    paid_drafts: bool = True  # drafts may make a tick longer, where that gives more tokens a second
    playout_s: float = 0.6

    @property
    def promised_cap(self) -> float:
        """The cap that can be kept: a step leaves the floor to other work, whatever `latency_cap` is."""
        return max(self.latency_cap, 1.0 / (1.0 - self.background_floor))


@value
class GuardMemory:
    """The memory of the latency guard.

    `mixed` and `background` are those of the :class:`MeasuredTick` that the planned tick will be.
    `newcomers` is the smoothed share of machine time of newcomers' prompts. `owed_s` is the machine
    time, in seconds, that background work is owed (:func:`~uma_trio.policy.accounting.owed_after`).
    `company_at` is the last time at which best-effort work was ready. `interval_s` is the smoothed time
    from one token of a stream to the next. `answers_owed_s` is the machine time that decoding answers
    are owed where prompts go first.
    """

    mixed: bool = False
    mixed_ticks: int = 0  # in a row, since the last isolated one
    isolated_ticks: int = 0  # still to come
    background: float = 0.0
    newcomers: float = 0.0
    owed_s: float = 0.0
    company_at: float | None = None
    interval_s: float = 0.0
    answers_owed_s: float = 0.0


@value
class Served:
    """The background decoders served last: since which tick, and its size."""

    keys: tuple[int, ...] = ()
    since: int = 0
    tokens: int = 0


@value
class Purse:
    """What a stream may still lose by guesses, in tokens of its time; it had `known` tokens."""

    left: float
    known: int


@value
class Memory:
    """The policy's memory between ticks. A plan contains the next memory."""

    target_tokens: int = 32
    decode_cursor: int = -1  # key served last, round robin goes on behind it
    prefill_cursor: int = -1
    cost: CostModel | None = None
    guard: GuardMemory = field(factory=GuardMemory)
    used_s: Mapping[int, float] = field(
        factory=dict
    )  # machine seconds of all on a path, for fairness
    lane_s: Mapping[Lane, float] = field(factory=dict)  # the same by lane, over its weight
    served: Served = field(factory=Served)
    purses: Mapping[int, Purse] = field(factory=dict)  # of streams that had guesses, by key
    prompts_share: float = 1.0  # the part of the machine that readers leave to prompts
    # By key, what a token takes a reader alone with its guesses, as a part of the time without.
    drafted_parts: Mapping[int, float] = field(factory=dict)
    part_of: Mapping[int, int] = field(
        factory=dict
    )  # whose share each of `used_s` divides; not the outermost


@value
class SchedulerState:
    """All inputs of a plan. The same state gives the same plan.

    `charges` are seconds of machine time beside ticks, by node of the shares, that `memory` does not include
    yet. `measured` are the ticks that `memory` has not learnt from yet, oldest first; usually one,
    the previous tick. A `prepared` state is made while that tick is computed: `now` and the
    sequences are those that its plan predicts, and its measurement comes with a later state.
    """

    now: float
    tick: int
    sequences: tuple[SequenceView, ...]
    n_batch: int
    free_cells: int
    tick_budget_s: float = 0.030
    contract: Contract = field(factory=Contract)
    traffic: Traffic | None = None
    n_rows: int = sys.maxsize  # logits rows that a batch may ask for, ballast included
    spare_rows: int = 0  # those of them that only ballast may use
    empty_cells: int = sys.maxsize  # of the KV cache, reserved ones that hold nothing yet included
    # Cells that a tick spans, where these sequences hold fewer or more.
    high_water: int | None = None
    before: Work = NO_WORK  # the tick before this one, measured or not
    measured: tuple[MeasuredTick, ...] = ()
    charges: tuple[tuple[int, float], ...] = ()
    prepared: bool = False
    interruptible: bool = False  # a tick of prompts can be given up for a request that comes
    first_tokens: FirstTokens = field(factory=FirstTokens)
    memory: Memory = field(factory=Memory)
    # Where other models have readers: drafts may let a tick take so long.
    most_s: float = math.inf

    @property
    def tuning(self) -> Tuning:
        """The constants to plan with: those of the cost model."""
        cost = self.memory.cost
        return TUNING if cost is None else cost.tuning

    @cached_property
    def views(self) -> Mapping[int, SequenceView]:
        return {view.key: view for view in self.sequences}

    @cached_property
    def protected(self) -> tuple[SequenceView, ...]:
        """The streams that the contract protects."""
        return tuple([view for view in self.sequences if view.protected])

    @cached_property
    def best_effort(self) -> Mapping[int, SequenceView]:
        """All other sequences that can use machine time, by key."""
        read = {view.key for view in self.protected}
        return {v.key: v for v in self.sequences if v.credit > 0 and v.key not in read}

    @property
    def drafting(self) -> bool:
        return max([view.drafted for view in self.sequences], default=0) > 0

    @cached_property
    def paths(self) -> frozenset[tuple[int, ...]]:
        """The paths of the sequences that can use machine time."""
        return frozenset([view.path for view in self.sequences if view.credit > 0])

    @cached_property
    def used_cells(self) -> int:
        """The number of KV cells that a tick spans, of all sequences."""
        if self.high_water is not None:
            return self.high_water
        return sum([view.computed for view in self.sequences])


@frozen
class AdmissionState:
    """All inputs of admission: the waiting requests, the running ones, and the free room.

    `bucket_s` is the machine time that background work is owed (:mod:`uma_trio.policy.floor`), and
    `used_s` the seconds used by each node (:mod:`uma_trio.policy.fairness`).
    """

    waiting: tuple[Waiting, ...]
    running: tuple[Holder, ...] = ()
    free_slots: int = 0
    free_cells: int = 0
    bucket_s: float = math.inf
    now: float = math.inf
    used_s: Mapping[int, float] = field(factory=dict)
