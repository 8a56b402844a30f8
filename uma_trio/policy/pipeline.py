"""A policy is a row of pure transformers; each adds, trims or refuses, and says why.

``policy(state) -> plan``: the same state gives the same plan, whoever runs it and whenever, so
that a tick can be explained and replayed. What a policy remembers travels in the plan's memory
and comes back in the next state. Other packages add policies through the entry point group
``uma_trio.policies``; see ``docs/SCHEDULER.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from uma_trio.policy.bandwidth import guard_bandwidth
from uma_trio.policy.budget import adapt_budget
from uma_trio.policy.decode import select_decoders, select_interactive
from uma_trio.policy.fill import fill_within_limit
from uma_trio.policy.guard import keep_ledger, learn_cost, set_limit
from uma_trio.policy.parking import leave_out_parked
from uma_trio.policy.plan import Plan
from uma_trio.policy.prefill import fill_with_prefill
from uma_trio.policy.stairs import add_ballast
from uma_trio.policy.state import SchedulerState
from uma_trio.policy.tally import tally

Policy = Callable[[SchedulerState], Plan]
Transformer = Callable[[SchedulerState, Plan], Plan]

ENTRY_POINT_GROUP = "uma_trio.policies"


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


baseline = compose(leave_out_parked, adapt_budget, select_decoders, fill_with_prefill)
"""Decode first, a token each; what is left of an adaptive budget goes to prompts."""

contract = compose(
    leave_out_parked,
    learn_cost,
    keep_ledger,
    select_interactive,
    set_limit,
    fill_within_limit,
    guard_bandwidth,
    add_ballast,
    tally,
)
"""The latency contract: interactive streams first, the rest as their patience allows."""

BUILT_IN: dict[str, Policy] = {"baseline": baseline, "contract": contract}


def find_policy(name: str) -> Policy:
    """Return the policy called `name`, ours or another package's.

    Raises :class:`PolicyError`, listing what there is.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = entry_points(group=ENTRY_POINT_GROUP)
    for entry in found:
        if entry.name == name:
            policy: Policy = entry.load()
            return policy
    known = ", ".join(sorted({*BUILT_IN, *(entry.name for entry in found)}))
    raise PolicyError(f"no policy is called {name!r}; there are: {known}")


def check_plan(state: SchedulerState, plan: Plan) -> None:
    """Raise :class:`PolicyError` if `plan` breaks a rule that the engine relies on.

    At most one item a sequence; every item's sequence exists, has credit and has that many
    tokens pending; the sum is within ``n_batch``. The engine checks every plan with it, since
    a policy may come from another package.
    """
    views = {view.key: view for view in state.sequences}
    total = 0
    for item in plan.items:
        view = views.pop(item.key, None)
        if view is None:
            raise PolicyError(f"sequence {item.key} is planned twice, or does not exist")
        if view.credit <= 0:
            raise PolicyError(f"sequence {item.key} is planned, but its reader is behind")
        if not 0 < item.n_tokens <= view.pending:
            raise PolicyError(
                f"sequence {item.key} gets {item.n_tokens} tokens of {view.pending} pending"
            )
        total += item.n_tokens
    if plan.ballast > state.spare_rows:
        raise PolicyError(f"the plan has {plan.ballast} ballast rows of {state.spare_rows}")
    total += plan.ballast
    if total > state.n_batch:
        raise PolicyError(f"the plan has {total} tokens, the batch holds {state.n_batch}")
