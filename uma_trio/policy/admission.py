"""Who gets a free slot: interactive first, fair among clients, nobody passed over for ever.

A person does not wait until a batch job has ended: where no room is left, one background request
gives its own back, and is computed again later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from uma_trio.policy.evolving import evolve
from uma_trio.policy.state import AdmissionState, Waiting

# How often a request may see later ones go before it without a token of its own meanwhile. Then it
# is next in its turn, whatever its lane and size: room is kept free for it, a person's aside, and
# once it has a place it keeps it. After the second number room is kept from persons, too.
MAX_PASSED_OVER, MOST_PASSED_OVER = 8, 64


def admit(state: AdmissionState) -> tuple[int, ...]:
    """Return who gets a slot now, in that order.

    A request that does not fit into the free cells lets smaller ones pass, but only so often.
    What is admitted fits together.
    """
    slots, cells = state.free_slots, state.free_cells
    if slots <= 0 or not state.waiting:
        return ()
    running = Counter(held.client for held in state.running)
    left = list(state.waiting)
    admitted: list[int] = []
    while left and slots > 0:
        chosen = _next(left, running, cells)
        if chosen is None:
            break
        admitted.append(chosen.key)
        left.remove(chosen)
        running[chosen.client] += 1
        slots -= 1
        cells -= chosen.cells
    return tuple(admitted)


def _next(left: Sequence[Waiting], running: Mapping[int, int], cells: int) -> Waiting | None:
    """Return who of those that are left is next, and fits into `cells`."""
    may = [waiting for waiting in left if waiting.cells <= cells]
    overdue = [waiting for waiting in left if waiting.passed_over >= MAX_PASSED_OVER]
    if overdue:
        first = min(overdue, key=lambda waiting: (-waiting.passed_over, waiting.arrived))
        if first.cells <= cells:
            return first
        if first.passed_over >= MOST_PASSED_OVER:
            return None
        may = [waiting for waiting in may if waiting.lane == "interactive"]
    return min(may, key=lambda waiting: _rank(waiting, running), default=None)


def gives_place(state: AdmissionState) -> tuple[int, ...]:
    """Return which background requests make room for an interactive one, where `admit` found nobody.

    The one of which least has to be computed again, of those whose room alone is enough: so one that
    has just come back goes again, and the others get done. If no single one's is, several in that
    order, as where somebody whose turn it is comes first. Who was passed over `MAX_PASSED_OVER`
    times keeps its place until its next token. Nobody where no person would get in by it.
    """
    persons = {w.key: w.cells for w in state.waiting if w.lane == "interactive"}
    if not persons:
        return ()
    missing = min(persons.values()) - state.free_cells
    could = [
        held
        for held in state.running
        if held.lane == "background" and held.passed_over < MAX_PASSED_OVER
    ]
    could.sort(key=lambda held: (held.computed, -held.key))
    together = [tuple(could[:n]) for n in range(2, len(could) + 1)]
    for going in [*[(held,) for held in could], *together]:
        cells = sum(held.cells for held in going)
        if cells < missing:
            continue
        slots, cells = state.free_slots + len(going), state.free_cells + cells
        if not persons.keys().isdisjoint(admit(evolve(state, free_slots=slots, free_cells=cells))):
            return tuple(held.key for held in going)
    return ()


def _rank(waiting: Waiting, running: Mapping[int, int]) -> tuple[bool, int, float, int]:
    """Interactive before background, then the client with least running, then who came first."""
    return (
        waiting.lane == "background",
        running.get(waiting.client, 0),
        waiting.arrived,
        waiting.key,
    )
