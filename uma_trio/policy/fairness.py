"""Machine time, shared evenly among clients.

Each client has a counter of the machine seconds it was given. Who has least is served first. A
client that comes back after a pause starts at the least of those that stayed, so that nobody
saves up a claim by being idle (the lift of Sheng et al., OSDI 2024). Two clients that always
have work differ by at most two ticks' time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState


def lift(used_s: Mapping[int, float], clients: Iterable[int]) -> dict[int, float]:
    """Return the counters of `clients`, newcomers at the least of those known."""
    present = set(clients)
    known = {client: used for client, used in used_s.items() if client in present}
    least = min(known.values(), default=0.0)
    return {client: known.get(client, least) for client in present}


def charge(state: SchedulerState, plan: Plan) -> Plan:
    """Share the tick's predicted time among its items by their tokens."""
    if not plan.items:
        return plan
    clients = {view.key: view.client for view in state.sequences}
    used = lift(plan.memory.used_s, clients.values())
    per_token = (plan.predicted_s or plan.n_tokens) / plan.n_tokens
    for item in plan.items:
        used[clients[item.key]] += per_token * item.n_tokens
    return evolve(plan, memory=evolve(plan.memory, used_s=used))
