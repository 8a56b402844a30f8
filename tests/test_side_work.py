"""Side work: no part is begun that is too long, and what is spent is charged, once, to whom it served."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import pytest
from attrs import define, field
from engine_kit import Bench
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.engine.sequences import Sequence
from uma_trio.engine.side import (
    MOST_SAVED_S,
    PACE_SHARE,
    TICK_SHARE,
    Desk,
    Ledger,
    Yields,
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
    ledger: Ledger
    path: Path
    parts: list[float]
    yields_to: Yields = "readers"
    makes_room: bool = False
    begun: list[tuple[float, float]] = field(factory=list)

    def look(self, running: Mapping[int, Sequence], *, alone: bool) -> bool:
        """Whether there is a part."""
        return bool(self.parts)

    def do(self, most_s: float) -> float:
        """Do the parts that fit."""
        took_s = 0.0
        while self.parts and self.parts[0] <= most_s - took_s:
            part_s = self.parts.pop(0)
            self.begun.append((part_s, most_s - took_s))
            self.clock.now += part_s
            self.ledger.spend(self.path, part_s)
            took_s += part_s
        return took_s

    def falls_short(self, left_s: float) -> bool:
        """Whether the next one takes more than is left."""
        return bool(self.parts) and 0 < left_s < self.parts[0]

    def do_idle(self, most_s: float) -> float | None:
        """Do one."""
        return 0.0 if self.do(min(most_s, self.parts[0] if self.parts else 0.0)) > 0 else None


@define(eq=False)
class Made:
    """A desk, its works, and what it charged; `readers` and `prompts` are who may run."""

    works: list[Parts]
    desk: Desk
    charged: Counter[Path]
    clock: Clock
    readers: dict[int, Sequence]
    prompts: dict[int, Sequence]

    def between_ticks(self) -> float:
        """Return how long the desk took between two ticks beside a reader."""
        before = self.clock.now
        self.desk.between_ticks(self.readers, 0, TICK_S)
        return self.clock.now - before


def desk(parts: list[list[float]], spare_s: float = SHARE_S) -> Made:
    """Return a desk with a work for each list of parts, of clients 1, 2, ...; a reader's tick can wait `spare_s`."""
    clock, ledger, charged = Clock(), Ledger(), Counter[Path]()
    works = [Parts(clock, ledger, (n,), list(each)) for n, each in enumerate(parts, start=1)]

    def charge(spent: Mapping[Path, float]) -> None:
        charged.update(spent)

    made = Desk(works, ledger, charge, PACE_S, clock, lambda _now: spare_s)
    return Made(works, made, charged, clock, running(read=True), running(read=False))


def running(*, read: bool) -> dict[int, Sequence]:
    """Return one interactive request, which somebody reads or which has no token yet."""
    bench = Bench()
    bench.submit("hello", 8)
    bench.engine.tick()
    if read:
        bench.ticks(2)
    found = dict(bench.engine.registry.running)
    assert [each.view.protected for each in found.values()] == [read]
    return found


seconds = st.floats(1e-4, 0.05)


@given(st.lists(st.lists(seconds, max_size=6), min_size=1, max_size=3), st.booleans())
def test_what_is_spent_is_what_is_charged(parts: list[list[float]], alone: bool) -> None:
    """For each client, over any number of ticks, whoever is bounded by whom."""
    made = desk(parts)
    for _ in range(40):
        made.desk.between_ticks(made.readers, 1 if alone else 0, TICK_S)
    spent: Counter[Path] = Counter()
    for work in made.works:
        for part_s, _ in work.begun:
            spent[work.path] += part_s
    assert dict(made.charged) == pytest.approx(dict(spent))
    assert sum(spent.values()) == pytest.approx(made.desk.spent_s)


@given(st.lists(st.lists(seconds, max_size=6), min_size=1, max_size=3))
def test_no_part_is_begun_that_is_longer_than_the_allowance(parts: list[list[float]]) -> None:
    """Beside readers the parts between two ticks take no longer than the share and what was put by."""
    made = desk(parts)
    earned_s = 0.0
    for _ in range(40):
        before, earned_s = made.clock.now, earned_s + SHARE_S
        made.desk.between_ticks(made.readers, 0, TICK_S)
        took_s = made.clock.now - before
        assert took_s <= earned_s + 1e-9
        earned_s -= took_s
    for work in made.works:
        assert all(part_s <= most_s for part_s, most_s in work.begun)


def test_what_is_too_little_for_a_part_adds_up() -> None:
    """A page of a slow bus is restored after some ticks, not never."""
    made = desk([[2.5 * SHARE_S]])
    after = [made.between_ticks() for _ in range(3)]
    assert after == [0.0, 0.0, 2.5 * SHARE_S]


def test_nothing_adds_up_where_no_part_waits() -> None:
    """Who had nothing to do has no claim to a longer wait of readers later."""
    made = desk([[]])
    for _ in range(10):
        made.between_ticks()
    made.works[0].parts += [SHARE_S, SHARE_S]
    assert made.between_ticks() == SHARE_S


def test_where_nobody_reads_it_is_done_as_far_as_there_is_any() -> None:
    """Nobody's token is late by it."""
    made = desk([[0.05] * 4])
    made.desk.between_ticks(made.prompts, 0, TICK_S)
    assert made.works[0].parts == []


def test_what_makes_room_comes_first_where_nobody_reads() -> None:
    """Others take the place of what was saved; beside readers the more urgent work is first."""
    for read in (True, False):
        made = desk([[0.001], [0.001]])
        made.works[1].makes_room = True
        order: list[Path] = []
        for work in made.works:
            work.begun = Noted(order, work.path)
        made.desk.between_ticks(made.readers if read else made.prompts, 0, TICK_S)
        assert order == ([(1,), (2,)] if read else [(2,), (1,)])


@pytest.mark.parametrize("read", [False, True])
def test_saving_takes_two_per_cent_of_the_time_on_all_models_together(read: bool) -> None:
    """While a client waits for a token."""
    one, other = desk([[0.001] * 1000], math.inf), desk([[0.001] * 1000], math.inf)
    other.desk.saving_budget = one.desk.saving_budget
    other.clock = other.desk.clock = other.works[0].clock = one.clock
    for made in (one, other):
        made.works[0].makes_room = True
    for _ in range(500):
        one.clock.now += TICK_S
        for made in (one, other):
            made.desk.between_ticks(made.readers if read else made.prompts, 0, TICK_S)
    spent_s = one.desk.spent_s + other.desk.spent_s
    assert spent_s == pytest.approx(SAVING_SHARE * one.clock.now + MOST_SAVED_S, abs=0.002)


def test_work_for_nobody_who_runs_keeps_to_its_share() -> None:
    """Indexing delays no tick by more, even one that nobody reads, and not what a request waits for."""
    made = desk([[0.004], [SHARE_S / 2] * 4], math.inf)
    made.works[1].yields_to = "ticks"
    made.desk.between_ticks(made.prompts, 0, TICK_S)
    assert made.clock.now == pytest.approx(0.004 + SHARE_S / 2)


def test_while_nothing_is_computed_one_part_is_done_at_a_time() -> None:
    """The inbox is looked at between two."""
    made = desk([[0.002], [0.0005, 0.0005]])
    assert made.desk.while_idle(1e-3) == 0
    assert (made.works[0].parts, made.works[1].parts) == ([0.002], [0.0005])
    assert made.desk.while_idle(math.inf) == 0
    assert made.works[0].parts == []
    assert made.desk.while_idle(math.inf) == 0
    assert made.desk.while_idle(math.inf) is None


class Noted(list[tuple[float, float]]):
    """Notes the order in which works began a part."""

    def __init__(self, order: list[Path], path: Path) -> None:
        super().__init__()
        self._order, self._path = order, path

    def append(self, part: tuple[float, float]) -> None:
        """Note it."""
        self._order.append(self._path)
        super().append(part)
