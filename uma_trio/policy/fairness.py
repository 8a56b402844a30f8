"""Machine time, shared evenly among clients.

Each client has a counter of the machine seconds it was given. Who has least is served first. A
client that comes back after a pause starts at the least of those that stayed, so that nobody
saves up a claim by being idle (the lift of Sheng et al., OSDI 2024). Two clients that always
have work differ by at most two ticks' time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from uma_trio.policy.plan import PlanItem


def lift(used_s: Mapping[int, float], clients: Iterable[int]) -> dict[int, float]:
    """Return the counters of `clients`, newcomers at the least of those known."""
    present = set(clients)
    known = {client: used for client, used in used_s.items() if client in present}
    least = min(known.values(), default=0.0)
    return {client: known.get(client, least) for client in present}


def charged(
    used_s: Mapping[int, float],
    clients: Mapping[int, int],
    items: Sequence[PlanItem],
    took_s: float,
) -> dict[int, float]:
    """Return the counters after a tick of `took_s`, shared among its items by their tokens.

    `clients` names the client of each sequence that owns a slot.
    """
    used = lift(used_s, clients.values())
    per_token = took_s / sum(item.n_tokens for item in items)
    for item in items:
        used[clients[item.key]] += per_token * item.n_tokens
    return used
