"""A policy is a sequence of pure stages; each adds, reduces or skips work, with a reason.

``policy(state) -> plan``: the same state always gives the same plan, so a tick can be explained and
replayed. The memory of a policy is part of the plan and comes back in the next state.
:mod:`uma_trio.policy.by_name` finds policies by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

Policy = Callable[[SchedulerState], Plan]
Transformer = Callable[[SchedulerState, Plan], Plan]


class PolicyError(Exception):
    """An unknown policy, or a plan that breaks a rule. The message is for the operator."""


@frozen
class Pipeline:
    """A policy of named stages, which are applied in order to an empty plan.

    `needs_cost`: it uses a cost model, so the machine is measured before the first tick and a slot is reserved for
    ballast rows. `keeps_latency_cap`: its ticks are limited by what ``--latency-cap`` promises to streams.
    """

    stages: Mapping[str, Transformer]
    needs_cost: bool = True
    keeps_latency_cap: bool = False

    def __call__(self, state: SchedulerState) -> Plan:
        plan = Plan(memory=state.memory)
        for transformer in self.stages.values():
            plan = transformer(state, plan)
        return plan


def compose(*transformers: Transformer) -> Policy:
    """Return the policy that applies `transformers` in order, starting from an empty plan."""
    return Pipeline({str(place): stage for place, stage in enumerate(transformers)})


def needs_cost(policy: Policy) -> bool:
    """Return whether `policy` uses a cost model; True if it does not declare it."""
    return bool(getattr(policy, "needs_cost", True))


def keeps_latency_cap(policy: Policy) -> bool:
    """Return whether `policy` keeps the promise of ``--latency-cap``; False if not declared."""
    return bool(getattr(policy, "keeps_latency_cap", False))
