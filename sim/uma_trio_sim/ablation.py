"""Policies without some of their stages, to see what each is for: ``deadline,-stairs,-bandwidth``."""

from __future__ import annotations

from typing import Final

from attrs import evolve, frozen

from uma_trio.policy.by_name import find_policy
from uma_trio.policy.pipeline import Pipeline, Policy, PolicyError
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

#: Stages without which there is no plan.
NEEDED: Final = frozenset({"parking", "decode", "fill", "prefill", "accounting"})
#: No stage: without it every request is treated as interactive.
LANES: Final = "lanes"


@frozen
class Ablated:
    """A pipeline without the stages `left_out`."""

    pipeline: Pipeline
    left_out: frozenset[str]
    needs_cost: bool

    @property
    def keeps_latency_cap(self) -> bool:
        """Whether its ticks are still limited by what streams were promised."""
        return self.pipeline.keeps_latency_cap and "guard" not in self.left_out

    def __call__(self, state: SchedulerState) -> Plan:
        if LANES in self.left_out:
            equal = tuple(evolve(view, lane="interactive") for view in state.sequences)
            state = evolve(state, sequences=equal)
        if "stairs" in self.left_out:  # or solo would be predicted with ballast that no tick has
            state = evolve(state, spare_rows=0)
        return self.pipeline(state)


def optional(pipeline: Pipeline) -> tuple[str, ...]:
    """Return the names of what can be left out."""
    return (LANES, *(name for name in pipeline.stages if name not in NEEDED))


def without(policy: Policy, *names: str) -> Policy:
    """Return `policy` without some of its stages. Raises :class:`PolicyError`."""
    if not isinstance(policy, Pipeline):
        raise PolicyError("the policy has no stages that could be left out")
    if unknown := sorted({*names} - {*optional(policy)}):
        raise PolicyError(
            f"{unknown[0]!r} cannot be left out; what can: {', '.join(optional(policy))}"
        )
    stages = {name: stage for name, stage in policy.stages.items() if name not in names}
    return Ablated(evolve(policy, stages=stages), frozenset(names), policy.needs_cost)


def ablated(spec: str) -> Policy:
    """Return the policy that a name and its left-out stages mean. Raises :class:`PolicyError`."""
    name, *left_out = (part.strip() for part in spec.split(","))
    policy = find_policy(name)
    if wrong := [part for part in left_out if not part.startswith("-")]:
        raise PolicyError(f"write {name},-STAGE to leave a stage out, not {wrong[0]!r}")
    return without(policy, *(part[1:].strip() for part in left_out)) if left_out else policy
