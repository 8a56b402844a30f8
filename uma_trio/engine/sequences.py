"""The one mutable record of a request, touched by the engine's thread only."""

from __future__ import annotations

import numpy as np

from uma_trio.engine.messages import SequenceReport, SequenceState, Submit
from uma_trio.engine.sampling import Sampler
from uma_trio.policy.evolving import evolve
from uma_trio.policy.state import Holder, Lane, SequenceView, Waiting
from uma_trio.text.stream import TokenText

# A background request reserves its prompt and this part of what it may generate; the rest it
# takes while there is room, and gives back by being preempted (design.md, "KV room").
BACKGROUND_SHARE = 4

NO_SLOT = -1  # a backend refuses it, so that a sequence without a slot can harm nobody


def cells_needed(known: int, remaining: int, lane: Lane, *, preempted: bool) -> int:
    """Return how many KV cells a request should reserve that may have `remaining` tokens more."""
    # Who was preempted once gets its whole room the second time, or it would be again.
    if lane == "background" and not preempted:
        remaining = min(remaining, max(1, remaining // BACKGROUND_SHARE))
    return known + remaining


class Sequence:
    """A request inside the engine.

    Two counters say everything about its progress: `known` tokens (prompt and generated) and
    `computed` ones (in the KV cache). A tick lets the second catch up with the first; when it
    does, the next token can be sampled. Preemption only sets `computed` back to 0.
    """

    __slots__ = (
        "admitted",
        "computed",
        "credit",
        "first_token",
        "forgiven",
        "known",
        "lane",
        "last_token",
        "passed_over",
        "preempted",
        "reserved",
        "sampler",
        "slot",
        "submit",
        "text",
        "tokens",
        "worst_young_s",
    )

    def __init__(self, submit: Submit, sampler: Sampler, text: TokenText) -> None:
        n_prompt = len(submit.prompt)
        self.submit = submit
        self.sampler = sampler
        self.text = text
        self.lane: Lane = submit.lane
        self.tokens = np.zeros(n_prompt + submit.max_tokens, np.int32)
        self.tokens[:n_prompt] = submit.prompt
        self.known = n_prompt
        self.computed = 0
        self.credit = submit.credit
        self.slot = NO_SLOT
        self.reserved = 0
        self.passed_over = 0
        self.forgiven = 0  # how often it had been passed over when it had its last token
        self.preempted = False
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.worst_young_s: float | None = 0.0  # longest gap of its first seconds; None: told

    @property
    def handle(self) -> int:
        """Its name, unique for the life of the daemon."""
        return self.submit.handle

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return self.known - self.computed

    @property
    def decoding(self) -> bool:
        """Whether its next step is one token that yields one token."""
        return self.first_token is not None and self.pending == 1

    @property
    def n_prompt(self) -> int:
        """How long its prompt is."""
        return len(self.submit.prompt)

    @property
    def n_generated(self) -> int:
        """How many tokens were sampled."""
        return self.known - len(self.submit.prompt)

    @property
    def cells(self) -> int:
        """How many KV cells it should reserve, as its lane and state are now."""
        remaining = self.submit.max_tokens - self.n_generated
        return cells_needed(self.known, remaining, self.lane, preempted=self.preempted)

    def append(self, token: int) -> None:
        """Add a sampled token to what is known."""
        self.tokens[self.known] = token
        self.known += 1

    def view(self) -> SequenceView:
        """Return what the policy may see."""
        return SequenceView(
            key=self.submit.handle,
            lane=self.lane,
            pending=self.known - self.computed,
            computed=self.computed,
            started=self.first_token is not None,
            credit=self.credit,
            arrived=self.submit.submitted,
            client=self.submit.client,
            first_token_at=self.first_token,
            last_token_at=self.last_token,
            target_ttft_s=self.submit.targets.ttft_s,
            target_gap_s=self.submit.targets.gap_s,
        )

    def view_after(self, n_tokens: int, now: float) -> SequenceView | None:
        """Return what the policy may see once so many more are computed, which will be `now`.

        None if the token that comes of it is the last it may have. It may end with any other, too.
        """
        view = self.view()
        if n_tokens < view.pending:
            computed, pending = view.computed + n_tokens, view.pending - n_tokens
            return evolve(view, computed=computed, pending=pending) if n_tokens else view
        if self.n_generated + 1 >= self.submit.max_tokens:
            return None
        return evolve(
            view,
            pending=1,
            computed=self.known,
            started=True,
            credit=view.credit - 1,
            first_token_at=now if view.first_token_at is None else view.first_token_at,
            last_token_at=now,
        )

    def is_at(self, view: SequenceView) -> bool:
        """Whether a plan for `view` is one for it: token times and how much credit may differ."""
        return (
            self.computed == view.computed
            and self.known - self.computed == view.pending
            and self.lane == view.lane
            and (self.credit > 0) == (view.credit > 0)
        )

    def waiting(self) -> Waiting:
        """Return what admission may see."""
        return Waiting(
            key=self.submit.handle,
            lane=self.lane,
            client=self.submit.client,
            cells=self.cells,
            passed_over=self.passed_over - self.forgiven,
            arrived=self.submit.submitted,
        )

    def holder(self) -> Holder:
        """Return what admission may see of it while it has a slot."""
        return Holder(
            key=self.submit.handle,
            lane=self.lane,
            client=self.submit.client,
            cells=self.reserved,
            computed=self.computed,
            passed_over=self.passed_over - self.forgiven,
        )

    def report(self, now: float) -> SequenceReport:
        """Return what a person may see."""
        streaming_s = (now - self.first_token) if self.first_token is not None else 0.0
        return SequenceReport(
            handle=self.submit.handle,
            state=self._state(),
            lane=self.lane,
            prompt_tokens=self.n_prompt,
            computed_tokens=self.computed,
            completion_tokens=self.n_generated,
            tokens_per_s=self.n_generated / streaming_s if streaming_s > 0 else 0.0,
            age_s=now - self.submit.submitted,
        )

    def _state(self) -> SequenceState:
        if self.slot == NO_SLOT:
            return "preempted" if self.preempted else "queued"
        if self.credit <= 0:
            return "parked"
        return "decode" if self.decoding else "prefill"
