"""Which waiting requests get a slot: interactive first, fair among clients, without starvation.

If there is no room for an interactive request, a background request is preempted and computed again
later. A parked request makes way for another client's request, and is computed again when its
reader is back. A prompt that has not begun makes way for a first token that would be late, and so does, once, an answer
that is not read as it comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from operator import attrgetter

from uma_trio.policy.floor import is_spared
from uma_trio.policy.line import WaitingQueue
from uma_trio.policy.state import AdmissionState, Holder, Waiting

# A reader that is behind for so long is away. A shorter stop is one of the machine's, and what has to
# be computed again would cost more than the wait.
AWAY_S = 1.0


def admit(state: AdmissionState) -> tuple[int, ...]:
    """Return the requests that get a slot, in order.

    A request that does not fit into the free cells lets smaller ones pass, a limited number of
    times. All admitted requests fit together.
    """
    slots = state.free_slots
    if slots <= 0 or not state.waiting:
        return ()
    chosen = WaitingQueue(state, slots).in_order(slots, state.free_cells)
    return tuple([waiting.key for waiting in chosen])


def preempt_for_interactive(state: AdmissionState) -> tuple[int, ...]:
    """Return the background requests to preempt for an interactive one, if `admit` found none.

    Among the requests that free enough cells by themselves, the one with the fewest computed tokens
    is chosen; a request that was just computed again is therefore preempted first, and the others
    finish. If there is none, several are chosen in that order. One that has tenure is spared
    (:mod:`uma_trio.policy.floor`). Empty if no interactive request would be admitted.
    """
    could = [
        holder
        for holder in state.running
        if holder.lane == "background" and not is_spared(holder, state.bucket_s)
    ]
    return _making_room(state, could, lambda _going: _is_interactive)


def preempt_parked(state: AdmissionState) -> tuple[int, ...]:
    """Return the parked requests to preempt for another client's, if `admit` found none.

    Only requests whose readers have been away for `AWAY_S`, in the order of :func:`preempt_for_interactive`. A
    client's request does not make way for another request of the same client, and an interactive one
    not for a background one.
    """

    def others(going: Sequence[Holder]) -> Callable[[Waiting], bool]:
        clients = {holder.client for holder in going}
        person = any(holder.lane == "interactive" for holder in going)
        return lambda waiting: (
            waiting.client not in clients and not (person and waiting.lane == "background")
        )

    return _making_room(state, [holder for holder in state.running if is_away(holder)], others)


def preempt_for_first_token(state: AdmissionState) -> tuple[int, ...]:
    """Return the requests to preempt for a first token that would be late, if `admit` found none.

    Prompts that are due later and of which nothing was computed go first, the latest before others: they lose nothing. Then
    answers that are not read as they come, each at most once: that of the client with most machine time goes
    first. An answer does not make way for another request of its conversation, and nothing for one that had a slot.
    """

    def late(going: Sequence[Holder]) -> Callable[[Waiting], bool]:
        clients = {holder.client for holder in going if holder.due is None}
        before = min([holder.due for holder in going if holder.due is not None], default=math.inf)
        return lambda waiting: (
            is_at_risk(waiting, state.now)
            and waiting.client not in clients
            and waiting.due is not None
            and waiting.due < before
        )

    if not any(is_at_risk(waiting, state.now) for waiting in state.waiting):
        return ()
    used_s = state.used_s
    unbegun = [(holder.due, holder) for holder in state.running if holder.due is not None]
    unbegun.sort(key=lambda pair: (-pair[0], -pair[1].key))
    answers = [holder for holder in state.running if holder.yields]
    answers.sort(key=lambda holder: [-used_s.get(node, 0.0) for node in holder.path])
    could = [*[holder for _, holder in unbegun], *answers]
    return _making_room(state, could, late, in_order=True)


def is_at_risk(waiting: Waiting, now: float) -> bool:
    """Whether the first token of a request that never had a slot is late if it does not get one now."""
    return waiting.due is not None and not waiting.preempted and now >= waiting.late_from


def preempt_for_reader(state: AdmissionState, cells: int) -> tuple[int, ...]:
    """Return the background requests to preempt so that `cells` are free; empty if these cannot be.

    An interactive request whose reader is back gets the cells that it lent. In the order of
    :func:`preempt_for_interactive`, without requests whose cells are not needed in the end.
    """
    could = sorted(
        (holder for holder in state.running if holder.lane == "background"),
        key=lambda holder: (holder.computed, -holder.key),
    )
    going: list[int] = []
    free = state.free_cells
    for holder in could:
        if free >= cells:
            break
        going.append(holder.key)
        free += holder.cells
    return tuple(going) if free >= cells else ()


def is_away(holder: Holder) -> bool:
    """Whether its reader has been behind for so long that others may use its room."""
    return holder.parked_s >= AWAY_S


def _making_room(
    state: AdmissionState,
    could: Sequence[Holder],
    whom_for: Callable[[Sequence[Holder]], Callable[[Waiting], bool]],
    *,
    in_order: bool = False,
) -> tuple[int, ...]:
    """Return which of the requests `could` are preempted, so that a request gets in that it is for.

    They go `in_order`, or else fewest computed tokens first.

    It runs in every tick with a waiting request, so a choice that cannot help costs nothing that
    grows with the queue.
    """
    if not could or not state.waiting:
        return ()
    smallest = _smallest(state.waiting)
    # How many slots are free matters only to a request that was preempted.
    matters = any(waiting.preempted for waiting in state.waiting)
    lines: dict[bool, WaitingQueue] = {}
    if not in_order:
        could = sorted(could, key=lambda holder: (holder.computed, -holder.key))
    for going, freed in _choices(could):
        slots, cells = state.free_slots + len(going), state.free_cells + freed
        is_for = whom_for(going)
        fitting = takewhile(lambda waiting, cells=cells: waiting.cells <= cells, smallest)  # type: ignore[misc]
        least = next(filter(is_for, fitting), None)
        if least is None:
            continue
        several = matters and slots > 1
        if several not in lines:
            lines[several] = WaitingQueue(state, slots)
        if _gets_in(lines[several], slots, cells, is_for, least.cells):
            return tuple(holder.key for holder in going)
    return ()


def _choices(could: Sequence[Holder]) -> Iterator[tuple[Sequence[Holder], int]]:
    yield from (((holder,), holder.cells) for holder in could)
    cells = accumulate([holder.cells for holder in could])
    yield from ((could[:n], freed) for n, freed in enumerate(cells, 1) if n > 1)


def _gets_in(
    line: WaitingQueue, slots: int, cells: int, is_for: Callable[[Waiting], bool], least: int
) -> bool:
    if line.reserves_all(cells):
        return False
    for chosen in line.in_order(slots, cells):
        if is_for(chosen):
            return True
        cells -= chosen.cells
        if cells < least:
            return False
    return False


def _smallest(requests: Iterable[Waiting]) -> Sequence[Waiting]:
    found: dict[tuple[str, int], Waiting] = {}
    for waiting in sorted(requests, key=attrgetter("cells")):
        found.setdefault((waiting.lane, waiting.client), waiting)
    return tuple(found.values())


def _is_interactive(waiting: Waiting) -> bool:
    return waiting.lane == "interactive"
