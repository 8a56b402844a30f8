"""A policy is a sequence of pure stages; each adds, reduces or skips work, with a reason.

``policy(state) -> plan``: the same state always gives the same plan, so a tick can be explained and
replayed. The memory of a policy is part of the plan and comes back in the next state.
:mod:`uma_trio.policy.by_name` finds policies by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState
from uma_trio.words import nearest

Policy = Callable[[SchedulerState], Plan]
Transformer = Callable[[SchedulerState, Plan], Plan]

LANES = "lanes"


class PolicyError(Exception):
    """An unknown policy, or a plan that breaks a rule. The message is for the operator."""


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
    """A policy with named stages, so that single stages can be left out.

    Stages in `needed` cannot be left out. Without `lanes` every request is treated as interactive.
    `needs_cost` says that the policy uses a cost model: the machine is then measured before the
    first tick, and a slot is reserved for ballast rows.
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
        """The names of the stages that can be left out."""
        return (LANES, *(name for name in self.stages if name not in self.needed))

    def without(self, *names: str) -> Pipeline:
        """Return a policy without some `optional` stages. Raises :class:`PolicyError`."""
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
    """Whether `policy` uses a cost model; True if it does not declare it."""
    return bool(getattr(policy, "needs_cost", True))


def keeps_latency_cap(policy: Policy) -> bool:
    """Whether `policy` keeps the promise of ``--latency-cap``; False if not declared."""
    return bool(getattr(policy, "keeps_latency_cap", False))
