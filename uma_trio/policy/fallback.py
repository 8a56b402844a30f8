"""A policy that fails costs one tick, which the baseline plans instead."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from uma_trio.policy.baseline import baseline
from uma_trio.policy.check import check_plan
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState


@frozen
class Fallback:
    """`policy`, whose exceptions and broken plans reach `failed` and nobody else.

    Every plan that it returns has passed :func:`uma_trio.policy.check.check_plan`. What the policy
    remembers stays as it was before the tick in which it failed.
    """

    policy: Policy
    failed: Callable[[Exception], object]

    def __call__(self, state: SchedulerState) -> Plan:
        """Return the plan of one tick; never raises because of `policy`."""
        try:
            plan = self.policy(state)
            check_plan(state, plan)
        except Exception as error:  # another package's code may run here
            self.failed(error)
            return baseline(state)
        return plan
