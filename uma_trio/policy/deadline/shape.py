"""The shape of a batch, and rows that are computed and discarded because a larger tick is faster.

*Ballast* rows fill a tick to a size that takes less time. Where a change of shape (tokens, logits rows) needs a new
graph, :func:`keep_shape` keeps it: a prompt asks for a logits row only in its last chunk, so each prompt would change
the shape twice at its end. Instead every chunk asks for a row, as if the prompt ended there, and for as many rows
as the previous tick of the same size.
"""

from __future__ import annotations

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

MOST_BALLAST = 3
# One tick in so many has no ballast: without, a size that is too high would never be measured again.
TRY_WITHOUT = 256


def ballast_for(cost: CostModel, work: Work, room: int) -> tuple[int, float]:
    """Return how many rows, at most `room`, make `work` quickest, and the seconds it then takes."""
    best, takes_s = 0, cost.seconds(work)
    if (
        work.tokens == 1
    ):  # nothing is quicker, and noise must not make its sums others (docs/explained/memory.md)
        return best, takes_s
    worth_s = cost.tuning.ballast_worth * takes_s
    for extra in range(1, min(MOST_BALLAST, room) + 1):
        seconds = cost.seconds(work, tokens=extra, rows=extra)
        if seconds < worth_s:
            best, takes_s, worth_s = extra, seconds, seconds
    return best, takes_s


def add_ballast(state: SchedulerState, plan: Plan) -> Plan:
    """Add rows in a scratch slot where the staircase goes down.

    Useful rows were added before, as far as there were any and the limit allowed. What a change of shape
    costs is no reason: the shape of the tick before would then be kept for ever.
    """
    cost = plan.memory.cost
    if cost is None or not plan.items:
        return plan
    room = min(state.spare_rows, min(state.n_batch, state.empty_cells) - plan.n_tokens)
    work = planned_work(state, plan, captured=True)
    best, _ = ballast_for(cost, work, room)
    in_turn = plan.limit.isolated and state.tick // cost.tuning.isolated_in_turn % 2
    tries_without = in_turn or (
        state.tick % TRY_WITHOUT == 0
        and (not _is_mixed(state, plan) or cost.seconds(work) <= plan.limit.seconds)
    )
    return plan if tries_without or not best else evolve(plan, ballast=best)


def _is_mixed(state: SchedulerState, plan: Plan) -> bool:
    return any(item.key in state.best_effort for item in plan.items)


def keep_shape(state: SchedulerState, plan: Plan) -> Plan:
    """Ask for unread rows of the last prompt, so that mixed ticks have one shape."""
    cost = plan.memory.cost
    if cost is None or not cost.recapture_s or not plan.items:
        return plan
    prompts = [item for item in plan.items if item.phase == "prefill"]
    if len(prompts) in (0, len(plan.items)) or plan.items[-1].phase != "prefill":
        return plan
    ends = [state.views[item.key].rows(item.n_tokens) > 0 for item in prompts]
    if ends[-1]:  # its row is read, and unread rows have to come behind it
        return plan
    work, before = planned_work(state, plan), state.before
    rows = before.rows if before.tokens == work.tokens else 0
    rows = min(max(rows, work.rows + (not any(ends))), len(state.sequences))
    extra = min(rows - work.rows, plan.items[-1].n_tokens)
    return evolve(plan, extra_rows=extra) if extra > 0 else plan
