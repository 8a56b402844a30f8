"""The compute thread: one scheduler for the work of all models.

With one model it computes tick after tick. With several it asks all of them before each tick or part of one, chooses by
:mod:`uma_trio.machine.work`, and limits what it chose such that the readers of the others get their next tokens in time.
Nothing is scheduled within something else: what takes long is computed in parts. A work that raises ends alone: the
others go on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import trio
from attrs import define, evolve

from uma_trio.machine.background import IDLE_S, BackgroundFailed, BackgroundScheduler
from uma_trio.machine.bell import Bell
from uma_trio.machine.work import PART_S, Claim, Grant, Work, choose, free_s, leads

# Readers that are ahead by so long leave the machine to a thread that loads a model, 5 ms or more at a time. What that
# thread does meanwhile makes single ticks several times as long.
LEAD_S, LEAST_S = 0.2, 0.005
# Work without readers goes on meanwhile.
_LOADING: Final = Claim(has_work=True, wants_s=LEAD_S, used_s=math.inf)
_WHOLE: Final = Grant()
_RESUMED: Final = Grant(is_resumed=True)
# A work whose latest tick is longer ago than this waits for another model's.
NOTED_S: Final = 0.25
Died = Callable[[Exception], object]
_T = TypeVar("_T")


def _now(call: Callable[[], object]) -> None:
    call()


@define(eq=False)
class _Member:
    """One work, and what it had of the machine. `ended` is called on trio's thread when it is computed no more."""

    work: Work
    died: Died
    ended: Callable[[], object] = lambda: None
    last_at: float = 0.0
    begins_at: float = math.inf  # when the tick of its readers has to begin
    used_s: float = 0.0
    rests_until: float = -math.inf
    is_leaving: bool = False  # written by trio's thread
    is_dead: bool = False

    def is_resting(self, now: float) -> bool:
        """Whether there is nothing to compute for it, as far as is known."""
        return now < self.rests_until and not self.work.is_called


class Machine:
    """Computes what was added until it is removed.

    All messages to its works ring the `bell`. `floor` is the part of the machine for work without readers. `post` has a function
    called on trio's thread. `add`, `remove` and `close` are for trio's thread, `run` is for the compute thread.
    """

    def __init__(
        self,
        bell: Bell,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None] = _now,
        *,
        floor: float = 0.05,
    ) -> None:
        self.bell = bell
        #: Gives the background work of all models its time.
        self.background = BackgroundScheduler(clock)
        self._clock, self._post, self._floor = clock, post, floor
        self._members: list[_Member] = []  # written by the compute thread
        self._added: deque[_Member] = deque()
        self._by_work: dict[Work, _Member] = {}  # trio's
        self._closed = self._ended = False
        self._last: _Member | None = None
        self._idle_since: float | None = None
        self._loading = 0  # written by trio's thread
        #: Counts the turns of `run`: it stands still only in a part, and while there is nothing to do.
        self.rounds = 0

    # --- for trio's thread ---

    @property
    def asleep(self) -> bool:
        """Whether there is nothing to compute."""
        return self.bell.asleep

    def add(self, work: Work, died: Died = lambda _error: None) -> None:
        """Compute a work from now on, until it is removed; once the machine is closed, close it only.

        `died` is called on trio's thread with what it raised; it is computed no more then, and need not be removed.
        """
        if self._closed:
            work.close()
            return
        member = _Member(work, died)
        self._by_work[work] = member
        self._added.append(member)
        self.bell.ring()

    async def remove(self, work: Work) -> None:
        """Close a work, and return when it is computed no more.

        Returns at once if it has died, or if the machine has ended.
        """
        work.close()
        member = self._by_work.get(work)
        if member is None or self._ended:
            return
        removed = trio.Event()
        member.ended = removed.set
        member.is_leaving = True
        self.bell.ring()
        with trio.CancelScope(shield=True):
            await removed.wait()

    def close(self) -> None:
        """Close all works, and end :meth:`run` after the part that is being computed."""
        if self._closed:
            return
        self._closed = True
        for work, member in self._by_work.items():
            work.close()
            member.is_leaving = True
        self.bell.ring()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let readers be computed ahead, and leave the machine to other threads while they are."""
        self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1

    def _forget(self, member: _Member, error: Exception | None) -> None:
        self._by_work.pop(member.work, None)
        if error is not None:
            member.died(error)
        member.ended()

    def _end(self) -> None:
        self._ended = True
        for member in [*self._by_work.values()]:
            self._forget(member, None)

    # --- on the compute thread ---

    def run(self) -> None:
        """Compute until it is closed; sleep while there is nothing to compute.

        Idle time is used for background work, one part at a time; a request that arrives waits for one of these at most.
        Quick parts are done at once, because the next request may arrive soon.
        """
        try:
            while self._attend():
                self.rounds += 1
                if self._turn():
                    self._idle_since = None
                else:
                    self._rest()
        finally:
            self._post(self._end)

    def _attend(self) -> bool:
        while self._added:
            member = self._added.popleft()
            member.last_at = self._clock()
            self._members.append(member)
        for member in [m for m in self._members if m.is_leaving]:
            self._leave(member)
            self._guarded(member, member.work.publish)
            self._post(lambda left=member: self._forget(left, None))  # type: ignore[misc]
        return bool(self._members or self._added) or not self._closed

    def _turn(self) -> bool:
        self.bell.rang = False
        now, members = self._clock(), self._members
        awake = members if len(members) == 1 else [m for m in members if not m.is_resting(now)]
        if len(awake) == 1 and not self._loading:
            return self._compute_only(awake[0], now)
        return self._compute_chosen(awake, now)

    def _compute_only(self, member: _Member, now: float) -> bool:
        self.background.others_at = math.inf
        member.work.delayed_by = None
        grant = _WHOLE if self._last is member else _RESUMED
        if len(self._members) > 1 and member.work.can_stop:
            # A request for another model may arrive meanwhile, or one of these has rested.
            next_s = min(m.rests_until for m in self._members if m is not member) - now
            grant = evolve(grant, turn_s=max(next_s, PART_S), is_shared=True)
        self._last = member
        member.last_at, member.rests_until = now, -math.inf
        return self._guarded(member, lambda: member.work.advance(grant)) or False

    def _compute_chosen(self, awake: list[_Member], now: float) -> bool:
        claims = [self._claim(member, now) for member in awake]
        if self._loading and any(claim.due_at < math.inf for claim in claims):
            claims.append(_LOADING)
        index = choose(claims, now, self._floor)
        if index is None:
            return False
        if index == len(awake):
            return self._leave_cores(claims, now)
        member, claim = awake[index], claims[index]
        self._note_delays(member, [m for m in awake if m is not member], now)
        free = free_s(claims, index, now, self._floor)
        self.background.others_at = now + free
        is_alone = all(each.is_empty for n, each in enumerate(claims) if n != index)
        grant = Grant(
            most_s=free,
            turn_s=math.inf if is_alone else PART_S,
            leads=leads(claims, index),
            disturbed=self._loading > 0,
            is_shared=len(self._members) > 1,
            is_resumed=self._last is not member,
        )
        self._last = member
        ticked = self._guarded(member, lambda: member.work.advance(grant))
        self._guarded(member, member.work.publish)
        member.last_at = self._clock()
        if not ticked:
            member.rests_until = member.last_at + member.work.rest_s
        elif claim.has_work:
            member.used_s += member.last_at - now
        return True

    def _leave_cores(self, claims: list[Claim], now: float) -> bool:
        free = free_s(claims, len(claims) - 1, now, self._floor)
        self.bell.wait(min(free, max(free - LEAD_S, LEAST_S)))
        self._last = None  # what passed belongs to no model's time between two ticks
        return True

    def _note_delays(self, chosen: _Member, others: list[_Member], now: float) -> None:
        chosen.work.delayed_by = None
        for member in others:
            waits = now - member.last_at > NOTED_S
            member.work.delayed_by = chosen.work if waits else None

    def _claim(self, member: _Member, now: float) -> Claim:
        others = [m.begins_at for m in self._members if m is not member]
        self.background.others_at = min(others, default=math.inf)
        was_resting, member.rests_until = member.rests_until > -math.inf, -math.inf
        found = self._guarded(member, lambda: member.work.claim(now)) or Claim()
        member.begins_at = found.begins_at
        if found.is_empty:
            member.rests_until, member.last_at = now + member.work.rest_s, now
            member.work.interrupt()
            self._guarded(member, member.work.publish)  # it may have been asked for a snapshot
        elif was_resting:
            # A work that had nothing to compute has no claim to what others used meanwhile.
            awake = [m for m in self._members if m is not member and not m.is_resting(now)]
            least = min([m.used_s for m in awake], default=0.0)
            member.used_s, member.last_at = max(member.used_s, least), now
        return evolve(found, waited_s=now - member.last_at, used_s=member.used_s)

    def _guarded(self, member: _Member, call: Callable[[], _T]) -> _T | None:
        if member.is_dead:
            return None
        try:
            return call()
        except Exception as error:
            self._end_member(member, error)
            return None

    def _end_member(self, member: _Member, error: BaseException | None) -> None:
        member.is_dead = True
        if member in self._members:
            self._leave(member)
        died = error if isinstance(error, Exception) else RuntimeError("it failed")
        self._post(lambda: self._forget(member, died))

    def _leave(self, member: _Member) -> None:
        self._members.remove(member)
        self._last = None
        for other in self._members:
            other.work.delayed_by = None

    def _rest(self) -> None:
        if self._idle_since is None:
            self._idle_since = self._clock()
        members = list(self._members)
        models = [member.work.background for member in members]
        self.background.others_at = math.inf
        try:
            wait_s = self.background.idle(models, self._idle_since)
        except BackgroundFailed as failed:
            self._end_member(members[failed.n], failed.__cause__)
            return
        left_s = self._idle_since + IDLE_S - self._clock()
        if left_s > 0 and wait_s is None:
            wait_s = left_s  # some of what works wait for only needs time
        if any(member.work.running for member in self._members):
            # A reader that is away gives its place to another request by time alone.
            wait_s = IDLE_S if wait_s is None else min(wait_s, IDLE_S)
        if wait_s != 0 and self.bell.wait(wait_s):
            self._idle_since = None


async def run_machine(machine: Machine) -> None:
    """Run `machine` in a worker thread until :meth:`Machine.close`.

    Being cancelled closes it and waits for the running part, which is not interrupted.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_close_when_cancelled, machine)
        # abandon_on_cancel stays False: nothing else may touch the llama_context meanwhile.
        await trio.to_thread.run_sync(machine.run, limiter=trio.CapacityLimiter(1))
        nursery.cancel_scope.cancel()


async def _close_when_cancelled(machine: Machine) -> None:
    try:
        await trio.sleep_forever()
    finally:
        machine.close()
