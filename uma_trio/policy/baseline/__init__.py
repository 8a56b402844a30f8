"""The simplest policy that is of use: a budget of tokens a tick, learnt from how long ticks take."""

from __future__ import annotations

from uma_trio.policy.baseline.budget import adapt_budget, fill_with_prefill
from uma_trio.policy.decode import leave_out_parked, select_decoders
from uma_trio.policy.pipeline import Pipeline

baseline = Pipeline(
    stages={
        "parking": leave_out_parked,
        "budget": adapt_budget,
        "decode": select_decoders,
        "prefill": fill_with_prefill,
    },
    needed=frozenset({"parking", "decode", "prefill"}),
    needs_cost=False,
)
"""Decode first, a token each; what is left of an adaptive budget goes to prompts."""
