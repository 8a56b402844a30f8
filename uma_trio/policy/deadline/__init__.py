"""Token deadlines: readers are served ahead of time, and what they are ahead is spent on the others."""

from __future__ import annotations

from functools import partial

from uma_trio.policy.accounting import account
from uma_trio.policy.contract import ContractPolicy
from uma_trio.policy.contract.ballast import add_ballast
from uma_trio.policy.contract.bandwidth import guard_bandwidth
from uma_trio.policy.contract.drafts import add_drafts
from uma_trio.policy.contract.held_drafts import hold_drafts
from uma_trio.policy.contract.learn import learn_cost
from uma_trio.policy.contract.rules import CAPTURED_SHAPES, FREE_SHAPES, Rules
from uma_trio.policy.contract.shape import keep_shape
from uma_trio.policy.deadline.pace import pace_streams
from uma_trio.policy.deadline.shares import note_shares
from uma_trio.policy.deadline.slack import set_slack
from uma_trio.policy.deadline.spend import spend_slack
from uma_trio.policy.decode import leave_out_parked, select_interactive
from uma_trio.policy.pipeline import Pipeline


def _pipeline(rules: Rules) -> Pipeline:
    return Pipeline(
        stages={
            "parking": leave_out_parked,
            "learning": partial(learn_cost, rules=rules),
            "shares": note_shares,
            "decode": select_interactive,
            "guard": partial(set_slack, rules=rules),
            "fill": spend_slack,
            "bandwidth": guard_bandwidth,
            "shape": keep_shape,
            "drafts": hold_drafts if rules.holds_sizes else add_drafts,
            "pace": pace_streams,
            "stairs": partial(add_ballast, captured=True),
            "accounting": account,
        },
        needed=frozenset({"parking", "decode", "fill", "accounting"}),
    )


deadline = ContractPolicy(_pipeline(FREE_SHAPES).without("shape"), _pipeline(CAPTURED_SHAPES))
"""Each shown token has a time at which it is due; a tick lasts until the first of them, at the most."""
