"""Who gets a free slot: interactive first, fair among clients, nobody passed over for ever.

A person does not wait until a batch job has ended: where no room is left, one background request
gives its own back, and is computed again later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from uma_trio.policy.evolving import evolve
from uma_trio.policy.state import AdmissionState, Waiting

# How often a request may see later ones go before it without a token of its own meanwhile; then it
# is next, whatever its lane and size, room is kept free for it, and once it has a place it keeps it.
MAX_PASSED_OVER = 8


def admit(state: AdmissionState) -> tuple[int, ...]:
    """Return the keys to admit now, in order.

    Each admitted request has a slot and its cells fit. A request too large for the room there
    is lets smaller ones pass, until it has been passed over `MAX_PASSED_OVER` times.
    """
    slots, cells = state.free_slots, state.free_cells
    if slots <= 0 or not state.waiting:
        return ()
    running = Counter(held.client for held in state.running)
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
        running[chosen.client] += 1
        slots -= 1
        cells -= chosen.cells
    return tuple(admitted)


def gives_place(state: AdmissionState) -> int | None:
    """Return which background request is to make room, for an interactive one that finds none.

    Of those whose room is enough the one of which least has to be computed again: so one that has
    just come back goes again, and the others get done. Who was passed over `MAX_PASSED_OVER` times
    keeps its place until its next token. None where somebody is admitted anyway, or where another is
    next in line.
    """
    persons = {w.key: w.cells for w in state.waiting if w.lane == "interactive"}
    if not persons or admit(state):
        return None
    missing = min(persons.values()) - state.free_cells
    could = [
        held
        for held in state.running
        if held.lane == "background"
        and held.passed_over < MAX_PASSED_OVER
        and held.cells >= missing
    ]
    for held in sorted(could, key=lambda held: (held.computed, -held.key)):
        slots, cells = state.free_slots + 1, state.free_cells + held.cells
        next_in = admit(evolve(state, free_slots=slots, free_cells=cells))
        if next_in and next_in[0] in persons:
            return held.key
    return None


def _rank(waiting: Waiting, running: Mapping[int, int]) -> tuple[bool, int, float, int]:
    """Interactive before background, then the client with least running, then who came first."""
    return (
        waiting.lane == "background",
        running.get(waiting.client, 0),
        waiting.arrived,
        waiting.key,
    )
