"""The policy of token deadlines: readers are computed ahead, and other work uses their slack."""

from __future__ import annotations

from attrs import frozen

from uma_trio.policy.accounting import account, learn_cost
from uma_trio.policy.deadline.bandwidth import guard_bandwidth
from uma_trio.policy.deadline.drafts import add_drafts
from uma_trio.policy.deadline.fill import fill_tick
from uma_trio.policy.deadline.first_tokens import note_first_tokens
from uma_trio.policy.deadline.shape import add_ballast, keep_shape
from uma_trio.policy.deadline.slack import note_newcomers, pace_streams, set_slack
from uma_trio.policy.decode import leave_out_parked, select_interactive
from uma_trio.policy.evolving import evolve
from uma_trio.policy.pipeline import Pipeline
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState


@frozen
class DeadlinePolicy:
    """A pipeline that knows what follows from leaving out some of its stages."""

    pipeline: Pipeline
    needs_cost: bool = True

    def __call__(self, state: SchedulerState) -> Plan:
        """Return the plan of one tick."""
        if state.spare_rows and "stairs" not in self.pipeline.stages:
            # Or solo would be predicted with ballast that no tick has.
            state = evolve(state, spare_rows=0)
        return self.pipeline(state)

    @property
    def keeps_latency_cap(self) -> bool:
        """Whether its ticks are limited by what streams were promised."""
        return "guard" in self.pipeline.stages

    @property
    def optional(self) -> tuple[str, ...]:
        """What it can be had without."""
        return self.pipeline.optional

    def without(self, *names: str) -> DeadlinePolicy:
        """Return it with some of the `optional` stages left out. Raises :class:`PolicyError`."""
        return DeadlinePolicy(self.pipeline.without(*names))


deadline = DeadlinePolicy(
    Pipeline(
        stages={
            "parking": leave_out_parked,
            "learning": learn_cost,
            "newcomers": note_newcomers,
            "decode": select_interactive,
            "first_tokens": note_first_tokens,
            "guard": set_slack,
            "fill": fill_tick,
            "bandwidth": guard_bandwidth,
            "shape": keep_shape,
            "drafts": add_drafts,
            "pace": pace_streams,
            "stairs": add_ballast,
            "accounting": account,
        },
        needed=frozenset({"parking", "decode", "fill", "accounting"}),
    )
)
"""Each shown token has a time at which it is due; a tick lasts until the first of them, at the most."""
