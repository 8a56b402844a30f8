"""A policy is a row of pure transformers; each adds, trims or refuses, and says why.

``policy(state) -> plan``: the same state gives the same plan, whoever runs it and whenever, so
that a tick can be explained and replayed. What a policy remembers travels in the plan's memory
and comes back in the next state. How policies are found by name is :mod:`uma_trio.policy.by_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState
from uma_trio.spelling import nearest

Policy = Callable[[SchedulerState], Plan]
Transformer = Callable[[SchedulerState, Plan], Plan]

LANES = "lanes"


class PolicyError(Exception):
    """No such policy, or a plan that breaks a rule. The message is for the operator."""


def compose(*transformers: Transformer) -> Policy:
    """Return the policy that applies `transformers` in order, starting from an empty plan."""

    def policy(state: SchedulerState) -> Plan:
        plan = Plan(memory=state.memory)
        for transformer in transformers:
            plan = transformer(state, plan)
        return plan

    return policy


@frozen
class Pipeline:
    """A policy whose transformers have names, so that it can be had without one of them.

    `needed` are those without which there is no plan at all. Without `lanes` every request is
    an interactive one. `needs_cost` says whether it plans by a cost model: the machine is then
    measured before the first tick, and a slot is kept for ballast rows.
    """

    stages: Mapping[str, Transformer]
    needed: frozenset[str]
    lanes: bool = True
    needs_cost: bool = True

    def __call__(self, state: SchedulerState) -> Plan:
        """Return the plan of one tick."""
        if not self.lanes:
            equal = tuple(evolve(view, lane="interactive") for view in state.sequences)
            state = evolve(state, sequences=equal)
        plan = Plan(memory=state.memory)
        for transformer in self.stages.values():
            plan = transformer(state, plan)
        return plan

    @property
    def optional(self) -> tuple[str, ...]:
        """What it can be had without."""
        return (LANES, *(name for name in self.stages if name not in self.needed))

    def without(self, *names: str) -> Pipeline:
        """Return it with some of the `optional` stages left out. Raises :class:`PolicyError`."""
        known = ", ".join(self.optional)
        for name in names:
            if name in self.needed:
                raise PolicyError(f"{name!r} is needed for any plan; what can be left out: {known}")
            if name not in self.optional:
                hint = nearest(name, self.optional)
                raise PolicyError(f"it has no part {name!r}{hint}; what can be left out: {known}")
            if names.count(name) > 1:
                raise PolicyError(f"{name!r} is left out twice; once is enough")
        stages = {name: stage for name, stage in self.stages.items() if name not in names}
        return evolve(self, stages=stages, lanes=self.lanes and LANES not in names)


def needs_cost(policy: Policy) -> bool:
    """Whether `policy` plans by a cost model; one that does not declare it may."""
    return bool(getattr(policy, "needs_cost", True))


def keeps_latency_cap(policy: Policy) -> bool:
    """Whether `policy` keeps the promise of ``--latency-cap``; one that does not declare it does not."""
    return bool(getattr(policy, "keeps_latency_cap", False))
