"""The rules that every plan keeps, whoever's policy made it."""

from __future__ import annotations

from uma_trio.policy.pipeline import PolicyError
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState


def check_plan(state: SchedulerState, plan: Plan) -> None:
    """Raise :class:`PolicyError` if `plan` breaks a rule that the engine relies on.

    At most one item a sequence; every item's sequence exists, has credit and has that many
    tokens pending; the sum is within ``n_batch``. The engine checks every plan with it, since
    a policy may come from another package.
    """
    views = {view.key: view for view in state.sequences}
    total = unread = 0
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
        unread = item.n_tokens if item.n_tokens < view.pending else 0
    if not 0 <= plan.extra_rows <= unread:
        raise PolicyError(f"the plan asks for {plan.extra_rows} extra rows, and can for {unread}")
    if plan.ballast > state.spare_rows:
        raise PolicyError(f"the plan has {plan.ballast} ballast rows of {state.spare_rows}")
    total += plan.ballast
    if total > state.n_batch:
        raise PolicyError(f"the plan has {total} tokens, the batch holds {state.n_batch}")
