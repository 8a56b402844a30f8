"""If a policy fails, the baseline plans that tick."""

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
    """Wraps `policy`: its exceptions and invalid plans are reported to `failed` only.

    Every returned plan has passed :func:`uma_trio.policy.check.check_plan`. After a failure the
    policy's memory is the one before that tick.
    """

    policy: Policy
    failed: Callable[[Exception], object]

    def __call__(self, state: SchedulerState) -> Plan:
        """Return the plan of one tick. Exceptions of `policy` are never raised."""
        try:
            plan = self.policy(state)
            check_plan(state, plan)
        except Exception as error:  # another package's code may run here
            self.failed(error)
            return baseline(state)
        return plan
