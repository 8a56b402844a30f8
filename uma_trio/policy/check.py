"""The rules for plans of any policy; if a policy breaks them or fails, the baseline plans that tick."""

from __future__ import annotations

import math
from collections.abc import Callable

from attrs import frozen

from uma_trio.policy.baseline import baseline
from uma_trio.policy.pipeline import Policy, PolicyError
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.state import SchedulerState, SequenceView


def check_plan(state: SchedulerState, plan: Plan) -> None:
    """Raise :class:`PolicyError` if `plan` breaks a rule that the engine relies on.

    - There is at most one item per sequence.
    - The sequence of every item exists, has credit and has that many tokens pending; drafts follow
      the last known token.
    - Tokens are within ``n_batch`` and logits rows within ``n_rows``, including ballast.
    - Paces are finite and not negative.

    The engine checks every plan, because a policy may come from another package.
    """
    views = dict(state.views)
    tokens, rows, unread = plan.ballast, plan.ballast + plan.extra_rows, 0
    for item in plan.items:
        view = views.pop(item.key, None)
        if view is None:
            raise PolicyError(f"sequence {item.key} is planned twice, or does not exist")
        n, due = item.n_tokens, view.pending - view.drafted
        if item.n_drafts or not 0 < n <= due or view.credit <= 0:
            _check_item(view, item)
        asked = view.rows(n, item.n_drafts) if item.n_drafts or view.scored else int(n == due)
        tokens, rows = tokens + n, rows + asked
        unread = 0 if asked else n
    if not 0 <= plan.extra_rows <= unread:
        raise PolicyError(f"the plan asks for {plan.extra_rows} extra rows, and can for {unread}")
    if not 0 <= plan.ballast <= state.spare_rows:
        raise PolicyError(f"the plan has {plan.ballast} ballast rows of {state.spare_rows}")
    if tokens > state.n_batch:
        raise PolicyError(f"the plan has {tokens} tokens, the batch holds {state.n_batch}")
    if rows > state.n_rows:
        raise PolicyError(f"the plan asks for {rows} logits rows, a batch may for {state.n_rows}")
    for key, pace in plan.paces.items():
        if not 0 <= pace < math.inf:
            raise PolicyError(f"sequence {key} is paced at {pace} s, which is no number of seconds")


def _check_item(view: SequenceView, item: PlanItem) -> None:
    if view.credit <= 0:
        raise PolicyError(f"sequence {item.key} is planned, but its reader is behind")
    if not 0 < item.n_tokens <= view.pending:
        raise PolicyError(
            f"sequence {item.key} gets {item.n_tokens} tokens of {view.pending} pending"
        )
    if not 0 <= item.n_drafts <= min(view.drafted, item.n_tokens - 1):
        raise PolicyError(
            f"sequence {item.key} gets {item.n_drafts} drafts of {view.drafted} "
            f"among {item.n_tokens} tokens"
        )
    known = item.n_tokens - item.n_drafts
    if known > view.due or (item.n_drafts and known < view.due):
        raise PolicyError(
            f"sequence {item.key} gets {known} tokens before its drafts, and has {view.due} of them"
        )


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
