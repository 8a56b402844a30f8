"""Token deadlines: readers are served ahead of time, and what they are ahead is spent on the others."""

from __future__ import annotations

from functools import partial

from attrs import frozen

from uma_trio.policy.accounting import account
from uma_trio.policy.deadline.ballast import add_ballast
from uma_trio.policy.deadline.bandwidth import guard_bandwidth
from uma_trio.policy.deadline.drafts import add_drafts
from uma_trio.policy.deadline.held_drafts import hold_drafts
from uma_trio.policy.deadline.learn import learn_cost
from uma_trio.policy.deadline.newcomers import note_newcomers
from uma_trio.policy.deadline.pace import pace_streams
from uma_trio.policy.deadline.rules import CAPTURED_SHAPES, FREE_SHAPES, Rules
from uma_trio.policy.deadline.shape import keep_shape
from uma_trio.policy.deadline.slack import set_slack
from uma_trio.policy.deadline.spend import spend_slack
from uma_trio.policy.decode import leave_out_parked, select_interactive
from uma_trio.policy.evolving import evolve
from uma_trio.policy.pipeline import Pipeline
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState


@frozen
class DeadlinePolicy:
    """The policy, by what the cost model says of a change of shape: it is `free`, or graphs are `captured`."""

    free: Pipeline
    captured: Pipeline
    needs_cost: bool = True

    def __call__(self, state: SchedulerState) -> Plan:
        """Return the plan of one tick."""
        cost = state.memory.cost
        chosen = self.free if cost is None or not cost.recapture_s else self.captured
        if state.spare_rows and "stairs" not in chosen.stages:
            # Or solo would be predicted with ballast that no tick has.
            state = evolve(state, spare_rows=0)
        return chosen(state)

    @property
    def keeps_latency_cap(self) -> bool:
        """Whether its ticks are limited by what streams were promised."""
        return "guard" in self.captured.stages

    @property
    def optional(self) -> tuple[str, ...]:
        """What it can be had without."""
        return self.captured.optional

    def without(self, *names: str) -> DeadlinePolicy:
        """Return it with some of the `optional` stages left out. Raises :class:`PolicyError`."""
        captured = self.captured.without(*names)
        return DeadlinePolicy(
            self.free.without(*(n for n in names if n in self.free.optional)), captured
        )


def _pipeline(rules: Rules) -> Pipeline:
    return Pipeline(
        stages={
            "parking": leave_out_parked,
            "learning": partial(learn_cost, rules=rules),
            "newcomers": note_newcomers,
            "decode": select_interactive,
            "guard": partial(set_slack, rules=rules),
            "fill": spend_slack,
            "bandwidth": guard_bandwidth,
            "shape": keep_shape,
            "drafts": hold_drafts if rules.holds_sizes else add_drafts,
            "pace": pace_streams,
            "stairs": add_ballast,
            "accounting": account,
        },
        needed=frozenset({"parking", "decode", "fill", "accounting"}),
    )


deadline = DeadlinePolicy(_pipeline(FREE_SHAPES).without("shape"), _pipeline(CAPTURED_SHAPES))
"""Each shown token has a time at which it is due; a tick lasts until the first of them, at the most."""
