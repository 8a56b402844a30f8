"""Correct the cost model by the ticks that were measured."""

from __future__ import annotations

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

# An isolated tick corrects the scale factor, a mixed one mostly its own step: a step that was measured
# too low would otherwise raise solo, and with it every limit.
ALONE_RATES = {"scale_rate": 0.2, "step_rate": 0.05}
MIXED_RATES = {"scale_rate": 0.02, "step_rate": 0.15}
# The first ticks of a shape teach nothing but what a change of shape costs, unless that is at most this part
# of them: a chunk of 256 tokens beside a reader is often the only one of its shape.
SMALL_CHANGE = 0.1


def learn_cost(state: SchedulerState, plan: Plan) -> Plan:
    """Correct the cost model by what was measured."""
    cost = plan.memory.cost
    if cost is None or not state.measured:
        return plan
    for tick in state.measured:
        if _shows_a_change(cost, tick.work):
            cost = cost.learn_change(tick.work, tick.decode_s)
        else:
            rates: dict[str, float] = {}  # with nobody to protect, both at once
            if tick.solo_s > 0:
                rates = MIXED_RATES if tick.mixed else ALONE_RATES
            cost = cost.learn(tick.work, tick.decode_s, tick.host_s, **rates)
    return evolve(plan, memory=evolve(plan.memory, cost=cost))


def _shows_a_change(cost: CostModel, work: Work) -> bool:
    """Whether a tick is one of the first two of its shape, and that is much of what it takes."""
    if not cost.recapture_s or (work.repeats and work.settled):
        return False
    return cost.change_s > SMALL_CHANGE * cost.seconds(work)
