"""The waiting requests in the order in which they get places, sorted once for any room that there may be.

Interactive requests go by the deadlines of their first tokens (:mod:`uma_trio.policy.stretch`). Whose
answers have more than their even share of the slots stands behind the others: deadlines bound what
prompts take, not for how long an answer keeps its slot. Requests without deadlines, as those of the
background lane are, go by how many their senders have running, then by their arrival.

Sorting and grouping depend only on the waiting and running requests. Admission with a number of free
slots and cells then iterates over the senders, not over every request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from attrs import define, field

from uma_trio.policy.fairness import Path
from uma_trio.policy.floor import BUCKET_S
from uma_trio.policy.state import AdmissionState, Waiting
from uma_trio.words import Lane

# How often a request may see later ones go before it without a token of its own meanwhile. Then it
# is next in its turn, whatever its size: room is kept free for it, a person's aside. A background request is next
# only while the lane is owed time (:mod:`uma_trio.policy.floor`). After the second number room is kept
# from persons, too.
MAX_PASSED_OVER, MOST_PASSED_OVER = 8, 64

_Sender = tuple[Path, Sequence[Waiting], tuple[float, ...]]


@define
class _Group:
    """The requests of one lane and one sender, in order. The first `at` do not fit any more, or are gone.

    Answers of theirs have `beyond` more slots than their even share, level by level.
    """

    path: tuple[int, ...]
    members: Sequence[Waiting]
    beyond: tuple[float, ...]
    at: int = 0

    def first(self, gone: set[int], cells: int) -> Waiting | None:
        """Return the first that is not `gone` and fits; `cells` must not grow from call to call."""
        while self.at < len(self.members):
            one = self.members[self.at]
            if one.cells <= cells and one.key not in gone:
                return one
            self.at += 1
        return None


@define
class _Room:
    """What is left while requests get their places, one after the other."""

    slots: int
    cells: int
    owed: bool
    running: Counter[int]
    persons: Sequence[_Group]
    others: Sequence[_Group]
    gone: set[int] = field(factory=set)

    def give(self, chosen: Waiting) -> None:
        self.gone.add(chosen.key)
        self.running.update(chosen.path)
        self.slots -= 1
        self.cells -= chosen.cells
        self.owed = self.owed and chosen.lane == "interactive"

    def best(self, groups: Sequence[_Group]) -> Waiting | None:
        """Return the next request of those that fit.

        The outermost share that they do not have in common decides, so many names are not many shares.
        """
        found = [(group, one) for group in groups if (one := group.first(self.gone, self.cells))]
        if len(found) <= 1:
            return found[0][1] if found else None
        return min(found, key=lambda pair: _rank(pair[0], pair[1], self.running))[1]


class WaitingQueue:
    """The requests that wait for a slot, where at least `slots` are free."""

    def __init__(self, state: AdmissionState, slots: int) -> None:
        self._running = state.running
        self._owed = owed = _is_owed(state)
        self._left = state.waiting
        if not (owed or _may_return(state, slots)):
            self._left = tuple([one for one in state.waiting if not _was_preempted(one)])
        self._slots = len(state.running) + state.free_slots
        overdue = [
            one
            for one in self._left
            if one.passed_over >= MAX_PASSED_OVER and (one.due is None or one.due <= state.now)
        ]
        self._overdue = sorted(overdue, key=lambda one: (-one.passed_over, one.arrived))

    def in_order(self, slots: int, cells: int) -> Iterator[Waiting]:
        """Yield the requests that get one of `slots` free slots, in order. Together they fit into `cells`."""
        room = _Room(
            slots,
            cells,
            self._owed,
            self._counts.copy(),
            [_Group(*sender) for sender in self._groups["interactive"]],
            [_Group(*sender) for sender in self._groups["background"]],
        )
        while room.slots > 0:
            chosen = self._next(room)
            if chosen is None:
                return
            yield chosen
            room.give(chosen)

    def reserves_all(self, cells: int) -> bool:
        """Return whether all `cells` free cells are reserved for a request that needs more."""
        turn = self._first_overdue(set(), owed=self._owed)
        return turn is not None and turn.cells > cells and turn.passed_over >= MOST_PASSED_OVER

    @cached_property
    def _counts(self) -> Counter[int]:
        return Counter(node for holder in self._running for node in holder.path)

    @cached_property
    def _groups(self) -> Mapping[Lane, Sequence[_Sender]]:
        """Those that wait by lane and sender, in their order, with what answers have beyond their share."""
        groups: dict[Lane, dict[Path, list[Waiting]]] = {"interactive": {}, "background": {}}
        for one in sorted(self._left, key=_age):
            groups[one.lane].setdefault(one.path, []).append(one)
        answers = Counter(
            node for holder in self._running if holder.started for node in holder.path
        )
        paths = {holder.path for holder in self._running}.union(*groups.values())
        shares = even_shares(paths, self._slots)
        return {
            lane: [
                (path, members, tuple([max(0.0, answers[n] + 1 - shares[n]) for n in path]))
                for path, members in senders.items()
            ]
            for lane, senders in groups.items()
        }

    def _next(self, room: _Room) -> Waiting | None:
        first = self._first_overdue(room.gone, owed=True)
        if first is None:
            return room.best(room.persons) or room.best(room.others)
        # What the lane is not owed a background request gets before others of its lane, and after persons.
        turn = first if room.owed else self._first_overdue(room.gone, owed=False)
        if turn is not None and turn.cells <= room.cells:
            return turn
        if turn is not None and turn.passed_over >= MOST_PASSED_OVER:
            return None
        person = room.best(room.persons)
        if person is not None or turn is not None:
            return person
        return first if first.cells <= room.cells else None

    def _first_overdue(self, gone: set[int], *, owed: bool) -> Waiting | None:
        """Return the first overdue request, of the background lane only if that is `owed` time."""
        for one in self._overdue:
            if one.key not in gone and (owed or one.lane == "interactive"):
                return one
        return None


def even_shares(paths: Iterable[Path], slots: int) -> Mapping[int, float]:
    """Return the slots of every node on these paths if each share is divided evenly; at least 1."""
    shares: dict[int, float] = {}
    children: dict[int | None, set[int]] = {}
    paths = tuple(paths)
    for path in paths:
        for parent, node in zip((None, *path), path, strict=False):
            children.setdefault(parent, set()).add(node)
    for path in paths:
        whole = float(slots)
        for parent, node in zip((None, *path), path, strict=False):
            shares[node] = whole = max(1.0, whole / len(children[parent]))
    return shares


def _age(one: Waiting) -> tuple[float, int]:
    return (one.arrived if one.due is None else one.due), one.key


def _rank(
    group: _Group, one: Waiting, running: Mapping[int, int]
) -> tuple[tuple[float, ...], float, int]:
    if one.due is not None:
        return group.beyond, one.due, one.key
    return tuple([running.get(node, 0) for node in group.path]), one.arrived, one.key


def _is_owed(state: AdmissionState) -> bool:
    return state.bucket_s >= BUCKET_S and not any(holder.tenured for holder in state.running)


def _may_return(state: AdmissionState, slots: int) -> bool:
    """Whether a background request that was preempted may have a place where so many `slots` are free.

    It would be again, by the next interactive one, as long as those come and go and the place is the only
    one.
    """
    if slots > 1:
        return True
    return not any(holder.lane == "interactive" and not holder.parked_s for holder in state.running)


def _was_preempted(one: Waiting) -> bool:
    return one.preempted and one.lane == "background"
