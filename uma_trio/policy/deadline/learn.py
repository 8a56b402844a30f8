"""Correct the cost model by the ticks that were measured."""

from __future__ import annotations

from collections.abc import Iterator

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.rules import FREE_SHAPES, Rules
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import MeasuredTick, SchedulerState

# An isolated tick corrects the scale factor, a mixed one mostly its own step: a step that was measured
# too low would otherwise raise solo, and with it every limit.
ALONE_RATES = {"scale_rate": 0.2, "step_rate": 0.05}
MIXED_RATES = {"scale_rate": 0.02, "step_rate": 0.15}
# The first ticks of a shape teach nothing but what a change of shape costs, unless that is at most this part
# of them: a chunk of 256 tokens beside a reader is often the only one of its shape.
SMALL_CHANGE = 0.1


def learn_cost(state: SchedulerState, plan: Plan, rules: Rules = FREE_SHAPES) -> Plan:
    """Correct the cost model by what was measured, once a shape has settled."""
    cost, same = plan.memory.cost, 0
    if cost is None or not state.measured:
        return plan
    for tick, same in with_shapes(state):
        if same < rules.settling_ticks and not _hides_the_change(cost, tick.work):
            cost = cost.learn_change(tick.work, tick.decode_s)
        else:
            rates: dict[str, float] = {}  # with nobody to protect, both at once
            if tick.solo_s > 0:
                rates = MIXED_RATES if tick.mixed else ALONE_RATES
            # What passes between ticks with drafts is not what passes between others.
            host_s = None if state.memory.held_drafts.known else tick.host_s
            cost = cost.learn(tick.work, tick.decode_s, host_s, **rates)
    return evolve(plan, memory=evolve(plan.memory, cost=cost, same_shape=same))


def _hides_the_change(cost: CostModel, work: Work) -> bool:
    """Whether a change of shape is a small part of what a tick takes."""
    return cost.change_s <= SMALL_CHANGE * cost.seconds(work)


def with_shapes(state: SchedulerState) -> Iterator[tuple[MeasuredTick, int]]:
    """Yield each measured tick, and how many in a row up to it had the shape of the one before."""
    same = state.memory.same_shape
    for tick in state.measured:
        same = same + 1 if tick.work.after == tick.work.shape else 0
        yield tick, same
