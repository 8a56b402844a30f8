"""The latency contract: who reads a streamed answer is promised that others hardly slow it down."""

from __future__ import annotations

from uma_trio.policy.accounting import tally
from uma_trio.policy.contract.ballast import add_ballast
from uma_trio.policy.contract.bandwidth import guard_bandwidth
from uma_trio.policy.contract.error_budget import keep_ledger
from uma_trio.policy.contract.fill import fill_within_limit
from uma_trio.policy.contract.learn import learn_cost
from uma_trio.policy.contract.limit import set_limit
from uma_trio.policy.contract.shape import keep_shape
from uma_trio.policy.decode import leave_out_parked, select_interactive
from uma_trio.policy.pipeline import Pipeline

contract = Pipeline(
    stages={
        "parking": leave_out_parked,
        "learning": learn_cost,
        "ledger": keep_ledger,
        "decode": select_interactive,
        "guard": set_limit,
        "fill": fill_within_limit,
        "bandwidth": guard_bandwidth,
        "shape": keep_shape,
        "stairs": add_ballast,
        "tally": tally,
    },
    needed=frozenset({"parking", "decode", "fill", "tally"}),
)
"""The latency contract: interactive streams first, the rest as their patience allows."""
