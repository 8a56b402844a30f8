"""Which waiting requests get a slot: interactive first, fair among clients, without starvation.

If there is no room for an interactive request, a background request is preempted and computed again
later. A parked request makes way for another client's request, and is computed again when its
reader is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from uma_trio.policy.evolving import evolve
from uma_trio.policy.floor import BUCKET_S, keeps_place
from uma_trio.policy.state import AdmissionState, Holder, Waiting

# How often a request may see later ones go before it without a token of its own meanwhile. Then it
# is next in its turn, whatever its size: room is kept free for it, a person's aside. A background request is next
# only while the lane is owed time (:mod:`uma_trio.policy.floor`). After the second number room is kept
# from persons, too.
MAX_PASSED_OVER, MOST_PASSED_OVER = 8, 64
# A reader that is behind for so long is away. A shorter stop is one of the machine's, and what has to
# be computed again would cost more than the wait.
AWAY_S = 1.0


def admit(state: AdmissionState) -> tuple[int, ...]:
    """Return the requests that get a slot, in order.

    A request that does not fit into the free cells lets smaller ones pass, a limited number of
    times. All admitted requests fit together.
    """
    slots, cells = state.free_slots, state.free_cells
    if slots <= 0 or not state.waiting:
        return ()
    running = Counter(node for held in state.running for node in held.path)
    owed = _owed(state)
    left = [waiting for waiting in state.waiting if owed or _may_return(waiting, state)]
    admitted: list[int] = []
    while left and slots > 0:
        chosen = _next(left, running, cells, owed=owed)
        if chosen is None:
            break
        admitted.append(chosen.key)
        left.remove(chosen)
        running.update(chosen.path)
        slots -= 1
        cells -= chosen.cells
        owed = owed and chosen.lane == "interactive"
    return tuple(admitted)


def _owed(state: AdmissionState) -> bool:
    """Whether a background request is to have a place in its turn, as the lane is owed time."""
    return state.bucket_s >= BUCKET_S and not any(held.tenured for held in state.running)


def _may_return(waiting: Waiting, state: AdmissionState) -> bool:
    """Whether a request may have a place that is free just now.

    A background request that was preempted would be again, by the next interactive one, as long as those come
    and go and the place is the only one.
    """
    if waiting.lane == "interactive" or not waiting.preempted or state.free_slots > 1:
        return True
    return not any(held.lane == "interactive" and not held.parked_s for held in state.running)


def _next(
    left: Sequence[Waiting], running: Mapping[int, int], cells: int, *, owed: bool
) -> Waiting | None:
    """Return who of those that are left is next, and fits into `cells`."""
    may = [waiting for waiting in left if waiting.cells <= cells]
    overdue = [waiting for waiting in left if waiting.passed_over >= MAX_PASSED_OVER]
    if overdue:
        # What the lane is not owed a background request gets before others of its lane, and after persons.
        turn = [waiting for waiting in overdue if owed or waiting.lane == "interactive"]
        first = min(turn or overdue, key=lambda waiting: (-waiting.passed_over, waiting.arrived))
        if turn and first.cells <= cells:
            return first
        if turn and first.passed_over >= MOST_PASSED_OVER:
            return None
        persons = [waiting for waiting in may if waiting.lane == "interactive"]
        may = persons or [waiting for waiting in may if waiting is first]
    return min(may, key=lambda waiting: _rank(waiting, running), default=None)


def gives_place(state: AdmissionState) -> tuple[int, ...]:
    """Return the background requests to preempt for an interactive one, if `admit` found nobody.

    Among the requests that free enough cells by themselves, the one with the fewest computed tokens
    is chosen; a request that was just computed again is therefore preempted first, and the others
    finish. If there is none, several are chosen in that order. One that has tenure is spared
    (:mod:`uma_trio.policy.floor`). Empty if no interactive request would be admitted.
    """
    persons = [waiting for waiting in state.waiting if waiting.lane == "interactive"]
    could = [
        held
        for held in state.running
        if held.lane == "background" and not keeps_place(held, state.bucket_s)
    ]
    return _making_room(state, could, lambda _going: persons)


def makes_way(state: AdmissionState) -> tuple[int, ...]:
    """Return the parked requests to preempt for another client's, if `admit` found nobody.

    Only requests whose readers have been away for `AWAY_S`, in the order of :func:`gives_place`. A
    client's request does not make way for another request of the same client, and an interactive one
    not for a background one.
    """

    def others(going: Sequence[Holder]) -> Sequence[Waiting]:
        clients = {held.client for held in going}
        person = any(held.lane == "interactive" for held in going)
        return [
            waiting
            for waiting in state.waiting
            if waiting.client not in clients and not (person and waiting.lane == "background")
        ]

    return _making_room(state, [held for held in state.running if is_away(held)], others)


def gives_back(state: AdmissionState, cells: int) -> tuple[int, ...]:
    """Return the background requests to preempt so that `cells` are free; empty if these cannot be.

    An interactive request whose reader is back gets the cells that it lent. In the order of
    :func:`gives_place`, and nobody whose cells the others' make unnecessary.
    """
    could = sorted(
        (held for held in state.running if held.lane == "background"),
        key=lambda held: (held.computed, -held.key),
    )
    going: list[int] = []
    free = state.free_cells
    for held in could:
        if free >= cells:
            break
        going.append(held.key)
        free += held.cells
    return tuple(going) if free >= cells else ()


def is_away(held: Holder) -> bool:
    """Whether its reader has been behind for so long that others may use its room."""
    return held.parked_s >= AWAY_S


def _making_room(
    state: AdmissionState,
    could: Sequence[Holder],
    whom_for: Callable[[Sequence[Holder]], Sequence[Waiting]],
) -> tuple[int, ...]:
    """Return who of those that `could` go does, so that somebody of `whom_for` them gets in."""
    could = sorted(could, key=lambda held: (held.computed, -held.key))
    together = [could[:n] for n in range(2, len(could) + 1)]
    for going in [*[[held] for held in could], *together]:
        for_them = {waiting.key: waiting.cells for waiting in whom_for(going)}
        slots = state.free_slots + len(going)
        cells = state.free_cells + sum(held.cells for held in going)
        if not for_them or cells < min(for_them.values()):
            continue
        if not for_them.keys().isdisjoint(admit(evolve(state, free_slots=slots, free_cells=cells))):
            return tuple(held.key for held in going)
    return ()


def _rank(waiting: Waiting, running: Mapping[int, int]) -> tuple[bool, tuple[int, ...], float, int]:
    """Interactive before background, then who has least running, then who came first.

    The outermost share that they do not have in common decides, so many names are not many shares.
    """
    return (
        waiting.lane == "background",
        tuple([running.get(node, 0) for node in waiting.path]),
        waiting.arrived,
        waiting.key,
    )
