"""The clock that readers are held to: it stands still while trio's loop does."""

from __future__ import annotations

import pytest
import trio
from attrs import define
from trio.testing import MockClock

from uma_trio.service.directory import Directory
from uma_trio.service.loop import BEAT_S, Presence


@define(eq=False)
class House:
    """A presence whose clock can jump, as it does for a loop that is held up."""

    jumped_s: float = 0.0

    def clock(self) -> float:
        """Return trio's time, and what it stood still for."""
        return trio.current_time() + self.jumped_s


class Running:
    """A request, as far as the directory looks at it."""

    handle = 1
    origin = None
    choice = 0
    streams = True


async def test_it_counts_while_requests_run(autojump_clock: MockClock) -> None:
    """And not before or after: an idle daemon is not woken for it."""
    house, directory = House(), Directory()
    presence = Presence(house.clock, directory)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(presence.run)
        await trio.sleep(5.0)
        assert presence() == 0.0
        directory.add(Running())  # type: ignore[arg-type]
        await trio.sleep(5.0)
        assert presence() == pytest.approx(5.0, abs=2 * BEAT_S)
        directory._running.clear()
        await trio.sleep(5.0)
        assert presence() == pytest.approx(5.0, abs=3 * BEAT_S)
        nursery.cancel_scope.cancel()


async def test_a_loop_that_stood_still_heard_nobody(autojump_clock: MockClock) -> None:
    """However long it was: no more than two beats of it are counted."""
    house, directory = House(), Directory()
    presence = Presence(house.clock, directory)
    directory.add(Running())  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(presence.run)
        await trio.sleep(1.0)
        house.jumped_s += 3600.0
        await trio.sleep(1.0)
        assert presence() == pytest.approx(2.0, abs=3 * BEAT_S)
        nursery.cancel_scope.cancel()
