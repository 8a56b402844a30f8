"""The mutable record of a request. Only the engine's thread uses it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from attrs import define

from uma_trio.engine.chunk import NO_DRAFT, Chunk, Draft, Drawn, Outcome
from uma_trio.engine.messages import (
    FinishReason,
    PromptProgress,
    Submit,
    TokenLogprobs,
)
from uma_trio.engine.playout import show_times
from uma_trio.engine.sampling import Sampler
from uma_trio.observe.records import RequestRecord, Wait
from uma_trio.policy.evolving import evolve
from uma_trio.policy.state import (
    PLACES_IN_FLIGHT,
    FirstToken,
    Holder,
    SequenceView,
    Waiting,
)
from uma_trio.text.stream import TokenText
from uma_trio.words import Awaits, Lane

# A background request reserves its prompt and this part of what it may generate; the rest it
# takes while there is room, and gives back by being preempted (docs/internals/design.md).
BACKGROUND_SHARE = 4

NO_SLOT = -1  # a backend refuses it, so that a sequence without a slot does no harm


def cells_needed(known: int, remaining: int, lane: Lane, *, preempted: bool) -> int:
    """Return the KV cells to reserve for a request that may have `remaining` more tokens."""
    # A request that was preempted gets its whole room the second time, or it would be preempted again.
    if lane == "background" and not preempted:
        remaining = min(remaining, max(1, remaining // BACKGROUND_SHARE))
    return known + remaining


class Delivery(NamedTuple):
    """The tokens that one committed outcome gives to the stream of `sequence`, from the `nth` on.

    `texts` is None if the `tokens` are not decoded yet. `itl_s` is the time since the token before,
    None for the first one. `first` says that this tick completed the prompt. `reason` is the reason
    of the end, if the request has ended. `shows` has the time at which each token is shown, if that
    is not at once. `gap_s` is the longest time between two shown tokens, as `itl_s` is between two
    computed ones.
    """

    sequence: Sequence
    tokens: tuple[Drawn, ...]
    texts: tuple[str, ...] | None
    at: float
    nth: int
    itl_s: float | None
    lane: Lane
    first: bool
    reason: FinishReason | None
    shows: tuple[float, ...] | None = None
    gap_s: float | None = None

    @property
    def held_s(self) -> float:
        """How long the last of its tokens is held back."""
        return 0.0 if self.shows is None else self.shows[-1] - self.at


class Sequence:
    """A request inside the engine.

    `view` is its state as the policy sees it: the `computed` tokens (in the KV cache) and the
    `pending` tokens (known or drafted, and not computed). A tick computes pending tokens. When the
    last of them is computed, the next token can be sampled. `draft` contains the drafted tokens.
    """

    __slots__ = (
        "admitted",
        "blocked_since",
        "blocked_until",
        "cached_tokens",
        "draft",
        "forgiven",
        "lent",
        "n_prompt",
        "parked_since",
        "passed_over",
        "preempted",
        "prefix_s",
        "reported_tokens",
        "reserved",
        "sampler",
        "scores",
        "slot",
        "submit",
        "tenancy",
        "text",
        "tokens",
        "view",
    )

    def __init__(self, submit: Submit, sampler: Sampler, text: TokenText) -> None:
        n_prompt = len(submit.prompt)
        self.n_prompt = n_prompt
        self.submit = submit
        self.sampler = sampler
        self.text = text
        self.tokens = np.zeros(n_prompt + submit.max_tokens, np.int32)
        self.tokens[:n_prompt] = submit.prompt
        self.view = SequenceView(
            key=submit.handle,
            lane=submit.lane,
            pending=n_prompt,
            computed=0,
            started=False,
            credit=submit.credit,
            arrived=submit.submitted,
            client=submit.client,
            within=submit.within,
            awaits=submit.awaits,
            target_ttft_s=submit.targets.ttft_s,
            target_itl_s=submit.targets.itl_s,
            pays_for_drafts=submit.speculation == "auto",
            scored=0 if submit.params.prompt_logprobs is None else n_prompt - 1,
        )
        # What the model thought of each token of its prompt behind the first; the publisher's.
        self.scores: list[TokenLogprobs] = []
        self.draft = NO_DRAFT
        self.slot = NO_SLOT
        self.reserved = 0
        # Cells that it had reserved besides, which are there for others while it is parked.
        self.lent = 0
        self.parked_since: float | None = None  # on the clock of readers, see :class:`Registry`
        self.passed_over = 0
        self.forgiven = 0  # how often it had been passed over when it had its last token
        self.preempted = False
        self.tenancy = Tenancy()
        self.admitted: float | None = None
        self.blocked_since: float | None = (
            None  # when it began to wait for its beginning, if it does
        )
        self.blocked_until = -math.inf  # when it waited no longer
        self.prefix_s = 0.0  # how long it has waited for its beginning, before that
        self.cached_tokens = 0  # of its prompt, that lay in the cache when it was admitted first
        self.reported_tokens = -1  # of its prompt that its stream knows to be computed

    @property
    def handle(self) -> int:
        """Its handle, unique for the life of the daemon."""
        return self.submit.handle

    @property
    def lane(self) -> Lane:
        """The lane: interactive if a person waits for the answer, else background."""
        return self.view.lane

    @property
    def computed(self) -> int:
        """The number of its tokens in the KV cache."""
        return self.view.computed

    @property
    def known(self) -> int:
        """The number of its tokens: the prompt and the sampled tokens."""
        return self.view.computed + self.view.due

    @property
    def credit(self) -> int:
        """The number of tokens that its stream still takes; at 0 it is parked."""
        return self.view.credit

    @property
    def first_token(self) -> float | None:
        """The time of its first token, on the engine's clock."""
        return self.view.first_token_at

    @property
    def n_generated(self) -> int:
        """The number of sampled tokens."""
        return self.known - self.n_prompt

    @property
    def smooth(self) -> bool:
        """Whether its tokens may be held to be sent at even intervals."""
        return self.submit.smooth and self.view.lane == "interactive"

    @property
    def awaits(self) -> Awaits:
        """What its client waits for."""
        return "nothing" if self.view.lane == "background" else self.view.awaits

    @property
    def yields(self) -> bool:
        """Whether it is an answer that makes way for first tokens: it is not read, and it never made way before."""
        return self.awaits == "answer" and self.view.started and not self.preempted

    @property
    def cells(self) -> int:
        """The number of KV cells that it should reserve, in its current lane and state."""
        remaining = self.submit.max_tokens - self.n_generated
        return cells_needed(self.known, remaining, self.lane, preempted=self.preempted)

    def advance(
        self, outcome: Outcome, now: float, pace: float = 0.0, playout_s: float = 0.0
    ) -> Delivery:
        """Apply the outcome of a chunk, and return the delivery to its stream.

        Only this method makes progress. Tokens after one that ends the request are dropped. With a
        `pace` tokens are shown that many seconds after one another, and none later than `playout_s`
        from `now`.
        """
        if self.draft.tokens:
            self.guess(NO_DRAFT)
        self.sampler.given(len(outcome.tokens))
        view = self.view
        known = view.computed + view.pending
        if not outcome.tokens:
            kept = outcome.chunk.start + outcome.kept
            self.view = evolve(view, computed=kept, pending=known - kept)
            return Delivery(self, (), (), now, self.n_generated, None, view.lane, False, None)
        given, texts, reason = self._take(outcome.tokens, known)
        n, last = len(given), view.last_token_at
        itl_s = now - last if n and last is not None else None
        shows: tuple[float, ...] | None = None
        shown_at, gap_s = now, itl_s
        if n and reason is None and (pace or (view.shown_at or now) > now):  # else all is shown now
            times = self.show_times(n, now, pace, playout_s)
            shown_at = times[-1]
            if self.smooth:
                shows, gap_s = times, _longest_gap(view, times)
        self.view = after_tokens(view, known + n, n, now, shown_at)
        if n:
            self.forgiven = self.passed_over
        return Delivery(
            self,
            given,
            texts,
            now,
            known + n - self.n_prompt,
            itl_s,
            view.lane,
            view.first_token_at is None,
            reason,
            shows,
            gap_s,
        )

    def show_times(self, n: int, now: float, pace: float, playout_s: float) -> tuple[float, ...]:
        """Return when `n` tokens are shown that were sampled `now`, none of them the last."""
        view, places = self.view, self.submit.credit
        return show_times(
            view.shown_at,
            now,
            n,
            pace=pace,
            since_s=0.0 if view.last_token_at is None else now - view.last_token_at,
            held=places - view.credit,  # or just on their way
            most=places - PLACES_IN_FLIGHT,
            most_s=playout_s,
        )

    def _take(
        self, drawn: tuple[Drawn, ...], known: int
    ) -> tuple[tuple[Drawn, ...], tuple[str, ...] | None, FinishReason | None]:
        sampler, tokens = self.sampler, self.tokens
        texts: list[str] | None = [] if self.submit.stop else None
        reason: FinishReason | None = None
        given = 0
        for one in drawn:
            token = one.token
            if token in sampler.ends:
                reason = "stop"
                break
            tokens[known + given] = token
            given += 1
            if sampler.has_history:
                sampler.accept(token)
            if texts is not None:  # only its text tells whether it has ended
                texts.append(self.text.push(token))
                if self.text.stopped is not None:
                    reason = "stop"
                    break
            if known + given >= len(tokens):
                reason = "length"
                break
        found = None if texts is None else tuple(texts)
        return (drawn if given == len(drawn) else drawn[:given]), found, reason

    def guess(self, draft: Draft) -> None:
        """Draft the next tokens of its answer; the next chunk verifies and removes them."""
        if not (draft.tokens or self.draft.tokens):
            return
        self.draft = draft
        due, n = self.view.due, len(draft.tokens)
        self.view = evolve(self.view, pending=due + n, drafted=n, survival=draft.survival)

    def wait_for(self, first: FirstToken | None) -> None:
        """Note when its prompt counts as arrived; None: it is to be noted again."""
        self.view = evolve(self.view, first=first)

    def inherit(self, firsts: tuple[FirstToken, ...]) -> None:
        """Note the requests that wait for what they share with it: it is due when the first of them is."""
        if self.view.waited_by != firsts:
            self.view = evolve(self.view, waited_by=firsts)

    def rewind(self, computed: int) -> None:
        """Note that only its first `computed` tokens are in the KV cache."""
        self.guess(NO_DRAFT)
        cached = min(self.view.cached, computed)
        pending = self.known - computed
        self.view = evolve(self.view, computed=computed, pending=pending, cached=cached)

    def resume(self, cached: int) -> None:
        """Note that its first `cached` tokens are in the KV cache without having been computed."""
        pending = self.known - cached
        self.view = evolve(self.view, computed=cached, pending=pending, cached=cached)
        if not self.preempted:
            self.cached_tokens = min(cached, self.n_prompt)

    def progress(self, now: float) -> list[PromptProgress]:
        """Return the progress of its prompt that its stream does not know yet.

        What was cached comes first. A preempted prompt reports nothing until it has more than before.
        """
        news: list[PromptProgress] = []
        began = now if self.admitted is None else self.admitted
        for n in (self.cached_tokens, min(self.computed, self.n_prompt)):
            if n > self.reported_tokens:
                self.reported_tokens = n
                queue_s = began - self.submit.submitted
                news.append(
                    PromptProgress(self.n_prompt, self.cached_tokens, n, queue_s, now - began)
                )
        return news

    def holds(self, now: float) -> bool:
        """Whether a token of it is held until it is due, or just on its way."""
        return self.smooth and self.view.shown_at is not None and self.view.shown_at > now

    def give_credit(self, n: int, *, reader_was_away: bool = False) -> None:
        """Note that its stream takes `n` more tokens.

        With `reader_was_away` it waited for its reader, and that time does not count as inter-token
        latency.
        """
        last = None if reader_was_away else self.view.last_token_at
        self.view = evolve(self.view, credit=self.view.credit + n, last_token_at=last)

    def move_to(self, lane: Lane) -> None:
        """Move it to a lane."""
        self.view = evolve(self.view, lane=lane)

    def waiting(self, due: float | None, shared: int = 0) -> Waiting:
        """Return its record for admission; `shared` of its cells are in use by others already."""
        first = self.view.first
        return Waiting(
            self.submit.handle,
            self.lane,
            self.submit.client,
            within=self.submit.within,
            cells=self.cells - shared,
            passed_over=self.passed_over - self.forgiven,
            arrived=self.submit.submitted,
            preempted=self.preempted,
            due=due,
            own_s=0.0 if first is None else first.own_s,
        )

    @property
    def has_begun(self) -> bool:
        """Whether some of its tokens were computed since it has its slot."""
        return self.view.started or self.view.uncached > 0

    def holder(self, readers_s: float, due: float | None = None) -> Holder:
        """Return its record for admission while it has a slot; `readers_s` is on the clock of `parked_since`.

        `due` is that of its first token.
        """
        return Holder(
            self.submit.handle,
            self.lane,
            self.submit.client,
            within=self.submit.within,
            cells=self.reserved,
            computed=self.computed,
            passed_over=self.passed_over - self.forgiven,
            parked_s=0.0 if self.parked_since is None else readers_s - self.parked_since,
            arrived=self.submit.submitted,
            tenured=self.tenancy.tenured,
            unearned_s=self.tenancy.unearned_s,
            started=self.view.started,
            yields=self.yields,
            due=None if self.has_begun else due,
        )

    def report(self, now: float, wait: Wait | None = None) -> RequestRecord:
        """Return a record of the request without how its time was spent."""
        submit = self.submit
        record = RequestRecord(
            handle=submit.handle,
            lane=self.lane,
            state="",
            submitted=submit.submitted,
            prompt_tokens=self.n_prompt,
            awaits=self.awaits,
            wait=wait,
            namespace=submit.namespace,
        )
        self.describe(record, now)
        return record

    def describe(self, record: RequestRecord, now: float) -> None:
        """Update the present state in a record of the request."""
        first = self.first_token
        streaming_s = 0.0 if first is None else now - first
        record.state, record.lane = self._state(), self.lane
        record.computed_tokens, record.cached_tokens = self.computed, self.cached_tokens
        record.completion_tokens = self.n_generated
        record.tokens_per_s = self.n_generated / streaming_s if streaming_s > 0 else 0.0
        record.ahead_s = max(0.0, (self.view.shown_at or now) - now) if self.smooth else 0.0
        record.passed_over = self.passed_over
        record.admitted, record.first_token = self.admitted, first
        record.prefix_s = self.prefix_s
        if self.blocked_since is not None:
            record.prefix_s += now - self.blocked_since

    def _state(self) -> str:
        if self.slot == NO_SLOT:
            return "preempted" if self.preempted else "queued"
        if self.credit <= 0:
            return "parked"
        return "decode" if self.view.decoding else "prefill"


def _longest_gap(view: SequenceView, times: tuple[float, ...]) -> float | None:
    if view.last_token_at is None or view.shown_at is None:
        return None  # there is none, or its reader was away
    return max([at - before for before, at in pairwise((view.shown_at, *times))])


def after_tokens(
    view: SequenceView, known: int, n: int, now: float, shown_at: float
) -> SequenceView:
    """Return where a sequence of `known` tokens stands, the last `n` of which were sampled `now`.

    All are computed but the last of those, which is shown at `shown_at`. With `n` 0 it was sampled
    that nothing follows.
    """
    pending = min(n, 1)
    return SequenceView(
        key=view.key,
        lane=view.lane,
        pending=pending,
        computed=known - pending,
        started=True,
        credit=view.credit - n,
        arrived=view.arrived,
        client=view.client,
        within=view.within,
        first_token_at=now if view.first_token_at is None else view.first_token_at,
        last_token_at=now if n else view.last_token_at,
        target_ttft_s=view.target_ttft_s,
        target_itl_s=view.target_itl_s,
        cached=view.cached,
        pays_for_drafts=view.pays_for_drafts,
        shown_at=shown_at if n else view.shown_at,
        awaits=view.awaits,
        first=view.first,
    )


def foreseen(
    sequence: Sequence, chunk: Chunk | None, now: float, pace: float = 0.0, playout_s: float = 0.0
) -> SequenceView | None:
    """Return where `sequence` stands if `chunk` gives it one token at the time `now`.

    It is shown as in :meth:`Sequence.advance`. None if that token is the last that it may have, or
    if `chunk` holds drafts: how many of those are kept cannot be foreseen. The sequence may end with
    any other token, too.
    """
    view = sequence.view
    if chunk is None:
        return view
    if not chunk.n_rows:
        computed = chunk.start + chunk.n_tokens
        pending = sequence.known - computed
        return evolve(view, computed=computed, pending=pending, drafted=0, survival=())
    if chunk.drafts or sequence.known + 1 >= len(sequence.tokens):
        return None
    (shown_at,) = sequence.show_times(1, now, pace, playout_s)
    return after_tokens(view, sequence.known + 1, 1, now, shown_at)


def same_place(view: SequenceView, planned: SequenceView) -> bool:
    """Whether a plan for `planned` is one for `view`: token times and spare credit may differ."""
    return (
        view.computed == planned.computed
        and view.pending == planned.pending
        and view.lane == planned.lane
        and (view.credit > 0) == (planned.credit > 0)
    )


@define
class Tenancy:
    """Of one request. `tenured` and `unearned_s` are those of :class:`~uma_trio.policy.state.Holder`.

    The first `furthest` of its tokens were computed before it lost a slot.
    """

    furthest: int = 0
    tenured: bool = False
    unearned_s: float = 0.0

    def begin(self) -> None:
        """Note that it has a slot."""
        self.tenured, self.unearned_s = False, 0.0

    def lose(self, computed: int) -> None:
        """Note that it loses its slot, and `computed` tokens with it."""
        self.furthest = max(self.furthest, computed)

    def spend(self, chunk: Chunk, seconds: float, *, decoding: bool) -> float:
        """Note that it had `seconds` of a tick for `chunk`; return what of that is not spent again."""
        again = min(max(0, self.furthest - chunk.start), chunk.n_tokens)
        self.unearned_s += -seconds if decoding and not again else seconds
        return seconds * (1.0 - again / chunk.n_tokens)
