"""The policy of token deadlines: readers are computed ahead, and other work uses their slack."""

from __future__ import annotations

from uma_trio.policy.accounting import account, learn_cost
from uma_trio.policy.deadline.bandwidth import guard_bandwidth
from uma_trio.policy.deadline.drafts import add_drafts
from uma_trio.policy.deadline.fill import fill_tick
from uma_trio.policy.deadline.first_tokens import note_first_tokens
from uma_trio.policy.deadline.shape import add_ballast, keep_shape
from uma_trio.policy.deadline.slack import note_newcomers, pace_streams, set_slack
from uma_trio.policy.decode import leave_out_parked, select_interactive
from uma_trio.policy.pipeline import Pipeline

deadline = Pipeline(
    stages={
        "parking": leave_out_parked,
        "learning": learn_cost,
        "newcomers": note_newcomers,
        "decode": select_interactive,
        "first_tokens": note_first_tokens,
        "guard": set_slack,
        "fill": fill_tick,
        "bandwidth": guard_bandwidth,
        "shape": keep_shape,
        "drafts": add_drafts,
        "pace": pace_streams,
        "stairs": add_ballast,
        "accounting": account,
    },
    keeps_latency_cap=True,
)
"""Each shown token has a time at which it is due; a tick lasts until the first of them, at the most."""
