"""Side work: no part is begun that is too long, and what is spent is charged, once, to whom it served."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.machine.background import (
    IDLE_S,
    MOST_SAVED_S,
    PACE_SHARE,
    TICK_SHARE,
    Background,
    BackgroundScheduler,
    Bound,
    Charges,
    Load,
    Part,
)
from uma_trio.policy.fairness import Path
from uma_trio.policy.prefix import SAVING_SHARE

TICK_S, PACE_S = 0.020, 0.040
SHARE_S = max(TICK_SHARE * TICK_S, PACE_SHARE * (PACE_S - TICK_S))


class Clock:
    """Time that passes by work only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@define(eq=False)
class Parts:
    """A work whose `parts` take so many seconds each; what was `begun` within how much is kept."""

    clock: Clock
    charges: Charges
    path: Path
    parts: list[float]
    bound: Bound = "readers"
    makes_room: bool = False
    begun: list[tuple[float, float]] = field(factory=list)

    def claim(self, *, idle: bool) -> Part | None:
        """Return the next part."""
        return Part(self.parts[0], waits=True) if self.parts else None

    def advance(self, most_s: float, *, idle: bool) -> float:
        """Do the parts that fit."""
        took_s = 0.0
        while self.parts and self.parts[0] <= most_s - took_s and not (idle and took_s):
            part_s = self.parts.pop(0)
            self.begun.append((part_s, most_s - took_s))
            self.clock.now += part_s
            self.charges.spend(self.path, part_s)
            took_s += part_s
        return took_s


@define(eq=False)
class Made:
    """A scheduler, the works of a model, and what was charged; a reader's tick can wait `spare_s`."""

    works: list[Parts]
    scheduler: BackgroundScheduler
    background: Background
    charged: Counter[Path]
    clock: Clock
    spare_s: float

    def between_ticks(self, *, read: bool = True, alone: bool = False) -> float:
        """Return how long it took between two ticks beside one request, which somebody reads or which has no token yet."""
        before = self.clock.now
        self.scheduler.between_ticks(
            self.background,
            lambda: Load(
                tick_s=TICK_S,
                spare_s=self.spare_s,
                pace_s=PACE_S,
                is_read=read and not alone,
                has_people=True,
                has_others=not read,
            ),
        )
        return self.clock.now - before


def made_of(parts: list[list[float]], spare_s: float = SHARE_S) -> Made:
    """Return a work for each list of parts, of clients 1, 2, ..., and their scheduler."""
    clock, charges, charged = Clock(), Charges(), Counter[Path]()
    works = [Parts(clock, charges, (n,), list(each)) for n, each in enumerate(parts, start=1)]

    def charge(spent: Mapping[Path, float]) -> None:
        charged.update(spent)

    background = Background(works, charges, charge)
    return Made(works, BackgroundScheduler(clock), background, charged, clock, spare_s)


seconds = st.floats(1e-4, 0.05)


@given(st.lists(st.lists(seconds, max_size=6), min_size=1, max_size=3), st.booleans())
def test_what_is_spent_is_what_is_charged(parts: list[list[float]], alone: bool) -> None:
    """For each client, over any number of ticks, whoever is bounded by whom."""
    made = made_of(parts)
    for _ in range(40):
        made.between_ticks(alone=alone)
    spent: Counter[Path] = Counter()
    for work in made.works:
        for part_s, _ in work.begun:
            spent[work.path] += part_s
    assert dict(made.charged) == pytest.approx(dict(spent))
    assert sum(spent.values()) == pytest.approx(made.background.spent_s)


@given(st.lists(st.lists(seconds, max_size=6), min_size=1, max_size=3))
def test_no_part_is_begun_that_is_longer_than_the_allowance(parts: list[list[float]]) -> None:
    """Beside readers the parts between two ticks take no longer than the share and what was put by."""
    made = made_of(parts)
    earned_s = 0.0
    for _ in range(40):
        before, earned_s = made.clock.now, earned_s + SHARE_S
        made.between_ticks()
        took_s = made.clock.now - before
        assert took_s <= earned_s + 1e-9
        earned_s -= took_s
    for work in made.works:
        assert all(part_s <= most_s for part_s, most_s in work.begun)


def test_what_is_too_little_for_a_part_adds_up() -> None:
    """A page of a slow bus is restored after some ticks, not never."""
    made = made_of([[2.5 * SHARE_S]])
    after = [made.between_ticks() for _ in range(3)]
    assert after == [0.0, 0.0, 2.5 * SHARE_S]


def test_nothing_adds_up_where_no_part_waits() -> None:
    """Who had nothing to do has no claim to a longer wait of readers later."""
    made = made_of([[]])
    for _ in range(10):
        made.between_ticks()
    made.works[0].parts += [SHARE_S, SHARE_S]
    assert made.between_ticks() == SHARE_S


def test_where_nobody_reads_it_is_done_as_far_as_there_is_any() -> None:
    """Nobody's token is late by it."""
    made = made_of([[0.05] * 4])
    made.between_ticks(read=False)
    assert made.works[0].parts == []


def test_what_makes_room_comes_first_where_nobody_reads() -> None:
    """Others take the place of what was saved; beside readers the more urgent work is first."""
    for read in (True, False):
        made = made_of([[0.001], [0.001]])
        made.works[1].makes_room = True
        order: list[Path] = []
        for work in made.works:
            work.begun = Noted(order, work.path)
        made.between_ticks(read=read)
        assert order == ([(1,), (2,)] if read else [(2,), (1,)])


@pytest.mark.parametrize("read", [False, True])
def test_saving_takes_two_per_cent_of_the_time_on_all_models_together(read: bool) -> None:
    """While a client waits for a token."""
    one, other = made_of([[0.001] * 1000], math.inf), made_of([[0.001] * 1000], math.inf)
    other.scheduler = one.scheduler
    other.clock = other.works[0].clock = one.clock
    for made in (one, other):
        made.works[0].makes_room = True
    for _ in range(500):
        one.clock.now += TICK_S
        for made in (one, other):
            made.between_ticks(read=read)
    spent_s = one.background.spent_s + other.background.spent_s
    assert spent_s == pytest.approx(SAVING_SHARE * one.clock.now + MOST_SAVED_S, abs=0.002)


def test_work_for_nobody_who_runs_keeps_to_its_share() -> None:
    """Indexing delays no tick by more, even one that nobody reads, and not what a request waits for."""
    made = made_of([[0.004], [SHARE_S / 2] * 4], math.inf)
    made.works[1].bound = "ticks"
    made.between_ticks(read=False)
    assert made.clock.now == pytest.approx(0.004 + SHARE_S / 2)


def test_while_nothing_is_computed_one_part_is_done_at_a_time() -> None:
    """Quick ones at once, and others after half a second; the inbox is looked at between two."""
    made = made_of([[0.002], [0.0005, 0.0005]])

    def idle() -> float | None:
        return made.scheduler.idle([made.background], 0.0)

    assert [idle(), idle()] == [0, 0]
    assert [work.parts for work in made.works] == [[0.002], []]
    wait_s = idle()
    assert wait_s == pytest.approx(IDLE_S - 0.001)
    made.clock.now += wait_s
    assert idle() == 0
    assert idle() is None


class Noted(list[tuple[float, float]]):
    """Notes the order in which works began a part."""

    def __init__(self, order: list[Path], path: Path) -> None:
        super().__init__()
        self._order, self._path = order, path

    def append(self, part: tuple[float, float]) -> None:
        """Note it."""
        self._order.append(self._path)
        super().append(part)
