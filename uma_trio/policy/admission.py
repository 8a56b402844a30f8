"""Who gets a free slot: interactive first, fair among clients, nobody passed over for ever."""

from __future__ import annotations

from uma_trio.policy.state import AdmissionState, Waiting

# How often a request may see later ones go before it; then it is next, whatever its lane and
# size, and room is kept free for it.
MAX_PASSED_OVER = 8


def admit(state: AdmissionState) -> tuple[int, ...]:
    """Return the keys to admit now, in order.

    Each admitted request has a slot and its cells fit. A request too large for the room there
    is lets smaller ones pass, until it has been passed over `MAX_PASSED_OVER` times.
    """
    slots, cells = state.free_slots, state.free_cells
    if slots <= 0 or not state.waiting:
        return ()
    running = dict(state.running_by_client)
    left = list(state.waiting)
    admitted: list[int] = []
    while left and slots > 0:
        overdue = [w for w in left if w.passed_over >= MAX_PASSED_OVER]
        fitting = [w for w in left if w.cells <= cells]
        if overdue:
            chosen = min(overdue, key=lambda w: w.arrived)
            if chosen.cells > cells:
                break  # the room that comes free is kept for it
        elif fitting:
            chosen = min(fitting, key=lambda w: _rank(w, running))
        else:
            break
        admitted.append(chosen.key)
        left.remove(chosen)
        running[chosen.client] = running.get(chosen.client, 0) + 1
        slots -= 1
        cells -= chosen.cells
    return tuple(admitted)


def _rank(waiting: Waiting, running: dict[int, int]) -> tuple[bool, int, float, int]:
    """Interactive before background, then the client with least running, then who came first."""
    return (
        waiting.lane == "background",
        running.get(waiting.client, 0),
        waiting.arrived,
        waiting.key,
    )
