"""A slow reader is an input of scheduling, not a stall: no credit, no work."""

from __future__ import annotations

from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan, Skip
from uma_trio.policy.state import SchedulerState


def leave_out_parked(state: SchedulerState, plan: Plan) -> Plan:
    """Skip every sequence whose stream is full; its KV stays, everyone else goes on."""
    parked = tuple(
        Skip(view.key, "parked: its reader is behind")
        for view in state.sequences
        if view.credit <= 0
    )
    return evolve(plan, skipped=plan.skipped + parked) if parked else plan
