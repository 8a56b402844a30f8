"""The latency contract: best-effort work may slow interactive streams down only so far."""

from __future__ import annotations

from functools import partial

from attrs import frozen

from uma_trio.policy.accounting import account
from uma_trio.policy.contract.ballast import add_ballast
from uma_trio.policy.contract.bandwidth import guard_bandwidth
from uma_trio.policy.contract.drafts import add_drafts
from uma_trio.policy.contract.error_budget import keep_error_budget
from uma_trio.policy.contract.fill import fill_within_limit
from uma_trio.policy.contract.held_drafts import hold_drafts
from uma_trio.policy.contract.learn import learn_cost
from uma_trio.policy.contract.limit import set_limit
from uma_trio.policy.contract.rules import CAPTURED_SHAPES, FREE_SHAPES, Rules
from uma_trio.policy.contract.shape import keep_shape
from uma_trio.policy.decode import leave_out_parked, select_interactive
from uma_trio.policy.evolving import evolve
from uma_trio.policy.pipeline import Pipeline
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState


@frozen
class ContractPolicy:
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

    def without(self, *names: str) -> ContractPolicy:
        """Return it with some of the `optional` stages left out. Raises :class:`PolicyError`."""
        captured = self.captured.without(*names)
        return ContractPolicy(
            self.free.without(*(n for n in names if n in self.free.optional)), captured
        )


def _pipeline(rules: Rules) -> Pipeline:
    return Pipeline(
        stages={
            "parking": leave_out_parked,
            "learning": partial(learn_cost, rules=rules),
            "error-budget": partial(keep_error_budget, rules=rules),
            "decode": select_interactive,
            "guard": partial(set_limit, rules=rules),
            "fill": partial(fill_within_limit, rules=rules),
            "bandwidth": guard_bandwidth,
            "shape": keep_shape,
            "drafts": hold_drafts if rules.holds_sizes else add_drafts,
            "stairs": add_ballast,
            "accounting": account,
        },
        needed=frozenset({"parking", "decode", "fill", "accounting"}),
    )


contract = ContractPolicy(_pipeline(FREE_SHAPES).without("shape"), _pipeline(CAPTURED_SHAPES))
"""The latency contract: interactive streams first, best-effort work within the tick's limit."""
