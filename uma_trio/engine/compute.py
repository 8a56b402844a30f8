"""The compute task: one thread that computes the ticks of all loaded models.

With one model it computes tick after tick. With several it asks :mod:`uma_trio.engine.turn` before each tick whose
comes next, and limits it such that the readers of the others get their next tokens in time. A tick that pauses is asked
about in each pause: ticks of others are computed there, on the same thread. An engine that raises ends alone: the
others go on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from attrs import define, evolve

from uma_trio.engine.computed import Computed
from uma_trio.engine.idle import IDLE_S
from uma_trio.engine.inbox import Bell
from uma_trio.engine.turn import TickClaim, chosen, free_s, leads

# Readers who are ahead by so long leave the machine to a thread that loads a model, 5 ms or more at a time. What that
# thread does beside their ticks makes single ones several times as long.
LEAD_S, LEAST_S = 0.2, 0.005
# Work that nobody reads goes on meanwhile.
_LOADING: Final = TickClaim(works=True, wants_s=LEAD_S, used_s=math.inf)
# Whose latest tick is longer ago than this waits for another model's.
NOTED_S: Final = 0.25
Died = Callable[[Computed, Exception], None]
_T = TypeVar("_T")


@define(eq=False)
class _Member:
    """One engine, and what it had of the machine."""

    engine: Computed
    last_at: float
    used_s: float = 0.0
    rests_until: float = -math.inf
    dead: bool = False

    def rests(self, now: float) -> bool:
        """Whether there is nothing to compute for it, as far as is known."""
        return now < self.rests_until and not self.engine.inbox.rung


class ComputeTask:
    """Computes the engines that were added, until they are closed.

    `bell` is that of all their inboxes. `floor` is the part of the machine for work that nobody reads. `died` is
    called on the compute thread with an engine that raised; it is computed no more, and `gone` with one that was
    closed, when it is computed no more. `add` and `close` are for
    trio's thread, `run` is for the compute thread.
    """

    def __init__(
        self,
        bell: Bell,
        clock: Callable[[], float],
        died: Died,
        gone: Callable[[Computed], None] = lambda _engine: None,
        *,
        floor: float = 0.05,
    ) -> None:
        self._bell, self._clock, self._died, self._floor = bell, clock, died, floor
        self._gone = gone
        self._members: list[_Member] = []
        self._coming: deque[Computed] = deque()
        self._closed = False
        self._last: _Member | None = None
        self._ticking: list[_Member] = []  # all but the last are paused
        self._loading = 0  # written by trio's thread
        self._ticked_s = 0.0  # what ticks took within the one that is computed
        #: Counts the turns of `run`: it stands still only in a tick, and while there is nothing to do.
        self.rounds = 0

    @property
    def asleep(self) -> bool:
        """Whether there is nothing to compute."""
        return self._bell.asleep

    def add(self, engine: Computed) -> None:
        """Compute an engine from now on, until its inbox is closed."""
        self._coming.append(engine)
        self._bell.ring()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let readers be computed ahead, and leave the machine to other threads while they are. For trio's thread."""
        self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1

    def close(self) -> None:
        """Close all engines, and end :meth:`run` after the tick that is being computed."""
        if self._closed:
            return
        self._closed = True
        for engine in [*self._coming, *(member.engine for member in tuple(self._members))]:
            engine.inbox.close()
        self._bell.ring()

    def run(self) -> None:
        """Compute ticks until it and all engines are closed; sleep while there is nothing to compute.

        Idle time is used to save prefixes, one page at a time, and then to refine the staircase,
        one decode at a time; a request that arrives waits for one of these at most. Cheap saves are
        made at once, because the next request may arrive soon.
        """
        idle: float | None = IDLE_S
        while self._attend():
            self.rounds += 1
            idle = IDLE_S if self._turn() else self._rest(idle)

    def _attend(self) -> bool:
        """Take in engines that come, and let go those that were closed; False if this was all."""
        # `close` reads `_coming` first: an engine is in one of the two lists at any time.
        while self._coming:
            self._members.append(_Member(self._coming[0], self._clock()))
            self._coming.popleft()
        for member in [m for m in self._members if m.engine.inbox.closed]:
            self._leave(member)
            self._guarded(member, member.engine.publish)
            self._gone(member.engine)
        return bool(self._members or self._coming) or not self._closed

    def _turn(self) -> bool:
        """Compute the tick that comes next; False if there is none."""
        self._bell.rang = False
        now, members = self._clock(), self._members
        awake = members if len(members) == 1 else [m for m in members if not m.rests(now)]
        if len(awake) == 1 and not self._loading:
            return self._alone(awake[0], now)
        return self._chosen(None)

    def _alone(self, member: _Member, now: float) -> bool:
        """Compute a tick of the only engine that may have any; False if there is none."""
        if self._last is not member:
            member.engine.interrupted()
            self._last = member
        member.engine.limit(math.inf, leads=False)
        member.engine.registry.beside = None
        member.last_at, member.rests_until = now, -math.inf
        if len(self._members) == 1 or not member.engine.pauses:
            return self._tick(member)
        self._ticked_s, claim = 0.0, self._claim(member, now)
        if member.rests_until > -math.inf:
            return False
        return self._pausing(member, claim)  # others may come meanwhile

    def _chosen(self, paused: TickClaim | None) -> bool:
        """Compute the tick that comes next; False if there is none, or if the `paused` one comes before it."""
        now = self._clock()
        awake = [m for m in self._members if not m.rests(now) and m not in self._ticking]
        claims = [self._claim(member, now) for member in awake]
        if paused is not None:
            claims.append(paused)
        elif self._loading and any(claim.due_at < math.inf for claim in claims):
            claims.append(_LOADING)
        index = chosen(claims, now, self._floor)
        if index is None or index == len(awake):
            return index is not None and paused is None and self._leave_cores(claims, now)
        member, claim = awake[index], claims[index]
        self._note_who_waits(member, [m for m in awake if m is not member], now)
        free, leading = free_s(claims, index, now, self._floor), leads(claims, index)
        disturbed = self._loading > 0
        member.engine.limit(free, leads=leading, disturbed=disturbed)
        if self._last is not member:
            member.engine.interrupted()
        self._last = member
        outer_s, self._ticked_s = self._ticked_s, 0.0
        ticked = self._pausing(member, claim) or self._guarded(member, member.engine.aside)
        self._guarded(member, member.engine.publish)
        ended = self._clock()
        member.last_at = ended
        if not ticked:
            member.rests_until = ended + member.engine.rest_s
        elif claim.works:
            member.used_s += ended - now - self._ticked_s
        self._ticked_s = outer_s + ended - now
        member.engine.limit(math.inf, leads=leading, disturbed=disturbed)
        return True

    def _leave_cores(self, claims: list[TickClaim], now: float) -> bool:
        """Compute nothing as long as readers are ahead, or until a message comes."""
        free = free_s(claims, len(claims) - 1, now, self._floor)
        self._bell.wait(min(free, max(free - LEAD_S, LEAST_S)))
        self._last = None  # what passed is nobody's time between two ticks
        return True

    def _note_who_waits(self, chosen: _Member, others: list[_Member], now: float) -> None:
        """Note for who asks that the work of `others` has waited for a while, and for whose."""
        chosen.engine.registry.beside = None
        for member in others:
            waits = now - member.last_at > NOTED_S
            member.engine.registry.beside = chosen.engine.registry if waits else None

    def _pausing(self, member: _Member, claim: TickClaim) -> bool:
        """Compute a tick, and those of other engines in its pauses; False if there was none."""
        began = self._clock()

        def pause(left_s: float) -> None:
            since = self._clock()
            used_s = member.used_s + since - began - self._ticked_s
            here = evolve(claim, works=True, takes_s=left_s, used_s=used_s, wants_s=0.0)
            while self._chosen(evolve(here, waited_s=self._clock() - since)):
                pass

        member.engine.paused = pause
        self._ticking.append(member)
        try:
            return self._tick(member)
        finally:
            self._ticking.remove(member)
            member.engine.paused = None

    def _claim(self, member: _Member, now: float) -> TickClaim:
        """Return what an engine has to compute; if that is nothing it rests."""
        was_resting = member.rests_until > -math.inf
        member.engine.inbox.rung, member.rests_until = False, -math.inf
        found = self._guarded(member, lambda: member.engine.claim(now)) or TickClaim()
        if not found.works and found.due_at == math.inf:
            member.rests_until, member.last_at = now + member.engine.rest_s, now
            member.engine.interrupted()
            self._guarded(member, member.engine.publish)  # it may have been asked how things stand
        elif was_resting:
            # Who comes back has no claim to what others used meanwhile.
            least = min(
                [m.used_s for m in self._members if m is not member and not m.rests(now)],
                default=0.0,
            )
            member.used_s, member.last_at = max(member.used_s, least), now
        return evolve(found, waited_s=now - member.last_at, used_s=member.used_s)

    def _tick(self, member: _Member) -> bool:
        member.engine.inbox.rung = False
        return self._guarded(member, member.engine.tick) or False

    def _guarded(self, member: _Member, call: Callable[[], _T]) -> _T | None:
        """Call something of an engine; one that raises is let go."""
        if member.dead:
            return None
        try:
            return call()
        except Exception as error:
            member.dead = True
            if member in self._members:
                self._leave(member)
            self._died(member.engine, error)
            return None

    def _leave(self, member: _Member) -> None:
        """Compute an engine no more, and keep nothing of it: what it holds is memory for other models."""
        self._members.remove(member)
        self._last = None
        for other in self._members:
            other.engine.registry.beside = None

    def _rest(self, idle: float | None) -> float | None:
        """Do what can wait, or sleep; return how long to sleep next, None if nothing else is to be done."""
        members = list(self._members)
        if any(member.engine.registry.awaits_masks for member in members):
            self._bell.wait()
            return idle
        for member in members:
            if self._guarded(member, member.engine.aside):
                return idle
        if self._bell.wait(idle):
            return IDLE_S
        for member in members:
            seconds = self._guarded(member, member.engine.while_idle)
            if seconds is not None:
                return seconds
        return None
