"""The compute thread with works whose parts take virtual time: who is late, who starves, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import trio
from attrs import define, field
from engine_kit import Doze
from hypothesis import given
from hypothesis import strategies as st
from machine_kit import Clock

from uma_trio.machine.background import EARLY_S, IDLE_S, Background, Part
from uma_trio.machine.bell import Bell
from uma_trio.machine.machine import Machine, run_machine
from uma_trio.machine.work import CAREFUL, Claim, Grant, Kind, Work

STEP_S = 0.040


@define(eq=False)
class Costed:
    """A work with so many `parts` to compute that nobody reads, of `part_s` each; it stops between two of them."""

    clock: Clock
    parts: int = 0
    part_s: float = 0.005
    kind: Kind = "answer"
    background: Background = field(factory=Background)
    raises: Exception | None = None
    is_closed: bool = False
    is_called: bool = False
    rest_s: float = math.inf
    can_stop: bool = True
    delayed_by: Work | None = None
    running: Mapping[int, object] = field(factory=dict)
    done_at: float = math.inf
    done: Callable[[], object] = lambda: None
    published: int = 0

    def claim(self, now: float) -> Claim:
        """Return what is left."""
        self.is_called = False
        return Claim(has_work=self.parts > 0, least_s=self.part_s, kind=self.kind)

    def advance(self, grant: Grant) -> bool:
        """Compute parts that fit, one at least."""
        if self.raises is not None:
            raise self.raises
        self.is_called = False
        if not self.parts:
            return False
        left_s = min(grant.most_s, grant.turn_s)
        while self.parts:
            self.parts, left_s = self.parts - 1, left_s - self.part_s
            self.clock.now += self.part_s
            if left_s < self.part_s:
                break
        if not self.parts:
            self.done_at = self.clock.now
            self.done()
        return True

    def interrupt(self) -> None:
        """Nothing is measured."""

    def publish(self) -> None:
        """Count."""
        self.published += 1

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


@define(eq=False)
class Read(Costed):
    """A stream of `tokens` that somebody reads, a step apart; `late_s` is how late each was there."""

    tokens: int = 40
    tick_s: float = 0.010
    late_s: list[float] = field(factory=list)
    _due_at: float = STEP_S

    def claim(self, now: float) -> Claim:
        """Return when the next token is due."""
        self.is_called = False
        if not self.tokens:
            return Claim()
        return Claim(self._due_at, self.tick_s, reach_s=STEP_S, load=self.tick_s / STEP_S)

    def advance(self, grant: Grant) -> bool:
        """Compute a token."""
        if not self.tokens:
            return False
        self.clock.now += self.tick_s
        self.tokens -= 1
        self.late_s.append(self.clock.now - self._due_at)
        self._due_at = max(self._due_at, self.clock.now) + STEP_S
        return True


def compute(clock: Clock, *works: Costed, idle_s: float = 0.0) -> None:
    """Compute works until nothing is left to do, with so much time to be idle in."""
    left_s = [idle_s]

    def sleeps(seconds: float | None) -> bool:
        if seconds is not None and left_s[0] > 0:
            clock.now += seconds
            left_s[0] -= seconds
            return False
        machine.close()
        return True

    machine = Machine(Doze(sleeps), clock)
    for work in works:
        machine.add(work)
    machine.run()


@given(
    st.lists(
        st.tuples(
            st.integers(1, 60), st.floats(0.001, 0.020), st.sampled_from(["answer", "background"])
        ),
        max_size=4,
    )
)
def test_a_token_that_is_read_is_late_by_one_part_at_most(
    others: list[tuple[int, float, Kind]],
) -> None:
    """Whatever other models compute; and all of that is computed in the end."""
    clock = Clock()
    reader = Read(clock)
    works = [Costed(clock, n, part_s, kind) for n, part_s, kind in others]
    compute(clock, reader, *works)
    longest_s = max((work.part_s for work in works), default=0.0)
    assert max(reader.late_s) <= longest_s + EARLY_S + (CAREFUL - 1) * reader.tick_s
    assert not any(work.parts for work in works)


def test_of_two_works_that_nobody_reads_neither_waits_for_the_end_of_the_other() -> None:
    clock = Clock()
    one, two = Costed(clock, 100), Costed(clock, 100)
    compute(clock, one, two)
    assert one.done_at == pytest.approx(two.done_at, abs=0.020)


def test_a_work_that_is_all_background_has_the_floor_while_a_client_waits_for_a_first_token() -> (
    None
):
    clock = Clock()
    prompt, batch = Costed(clock, 100, kind="interactive"), Costed(clock, 100, kind="background")
    compute(clock, prompt, batch)
    assert prompt.done_at < 1.10 * 100 * prompt.part_s
    assert not batch.parts


@define(eq=False)
class Saving:
    """A background work of so many parts; `at` has the time of each."""

    clock: Clock
    parts: int
    part_s: float
    bound = "readers"
    makes_room = True
    at: list[float] = field(factory=list)

    def claim(self, *, idle: bool) -> Part | None:
        """Return the next part while nothing is computed."""
        return Part(self.part_s) if idle and self.parts else None

    def advance(self, most_s: float, *, idle: bool) -> float:
        """Do one."""
        self.parts -= 1
        self.at.append(self.clock.now)
        self.clock.now += self.part_s
        return self.part_s


def test_long_parts_of_background_work_are_done_when_no_model_has_computed_for_a_while() -> None:
    clock = Clock()
    saving = Saving(clock, 3, 0.010)
    other = Costed(clock, 10)
    owner = Costed(clock, background=Background([saving]))  # type: ignore[list-item]
    compute(clock, owner, other, idle_s=5.0)
    assert saving.at[0] >= other.done_at + IDLE_S
    assert len(saving.at) == 3


async def test_a_work_that_raises_ends_alone_and_its_owner_is_notified_on_trios_thread() -> None:
    clock, deaths = Clock(), list[str]()
    post = trio.lowlevel.current_trio_token().run_sync_soon
    machine = Machine(Bell(), clock, post)
    error = RuntimeError("it broke")
    died, done = trio.Event(), trio.Event()
    broken = Costed(clock, 1, raises=error)
    other = Costed(clock, 50, done=lambda: post(done.set))

    def note(error: Exception) -> None:
        trio.lowlevel.current_task()  # raises on any other thread
        deaths.append(str(error))
        died.set()

    machine.add(broken, note)
    machine.add(other)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_machine, machine)
        await died.wait()
        await machine.remove(broken)
        await done.wait()
        machine.close()
    assert deaths == ["it broke"]


async def test_a_work_is_in_no_threads_hands_when_it_was_removed() -> None:
    """Also where the machine was closed, has ended, or was never to compute it."""
    clock = Clock()
    machine = Machine(Bell(), clock, trio.lowlevel.current_trio_token().run_sync_soon)
    works = [Costed(clock, 3) for _ in range(4)]
    machine.add(works[0])
    machine.add(works[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_machine, machine)
        await machine.remove(works[0])
        published = works[0].published
        machine.close()
        machine.add(works[2])
        await machine.remove(works[1])
        await machine.remove(works[2])
    await machine.remove(works[1])
    machine.add(works[3])
    await machine.remove(works[3])
    assert published
    assert all(work.is_closed for work in works)
    assert works[2].parts == works[3].parts == 3
