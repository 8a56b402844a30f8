"""The timer of the playout buffer: on trio's clock, and as a file of the kernel's."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import trio
import trio.testing
from net_kit import give, take_from
from trio.testing import MockClock

from uma_trio.engine.messages import StreamItem, TokenOut
from uma_trio.service import timer as timers
from uma_trio.service.stream import GRAIN_S, Pipe, Playout, Reader
from uma_trio.service.timer import FileTimer, Timer, TrioTimer, finest_timer

linux = pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")
SOON_S = 0.002


@pytest.fixture(params=[TrioTimer, pytest.param(FileTimer, marks=linux)])
def real(request: pytest.FixtureRequest) -> Iterator[Timer]:
    """Return a timer by the real clock."""
    timer: Timer = request.param(time.monotonic)
    yield timer
    timer.close()


async def test_a_timer_goes_off_when_it_is_time(real: Timer) -> None:
    """Not before; and it stays so until another time is set."""
    at = time.monotonic() + SOON_S
    real.set(at)
    await real.wait()
    assert time.monotonic() >= at
    await real.wait()


async def test_a_time_that_has_passed_goes_off_at_once(real: Timer) -> None:
    """A wake that came late must not be lost."""
    real.set(time.monotonic() - 1)
    await real.wait()


async def test_a_time_may_be_set_once_a_timer_is_closed(real: Timer) -> None:
    """A daemon that goes down may still get tokens that are to be held."""
    real.close()
    real.set(time.monotonic())
    real.close()


async def test_an_earlier_time_counts_for_who_waits_already(real: Timer) -> None:
    """A stream may be due before all those that were there."""
    real.set(time.monotonic() + 1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(real.wait)
        await trio.testing.wait_all_tasks_blocked()
        real.set(time.monotonic() + SOON_S)


@linux
def test_a_file_timer_that_is_set_anew_has_not_gone_off() -> None:
    """Nobody reads the file, so that this has to take back what it counted."""
    timer = FileTimer(time.monotonic)
    try:
        for later in (time.monotonic() + 1000, math.inf):
            timer.set(0.0)
            assert select.select([timer._file], [], [], 1)[0]
            timer.set(later)
            assert not select.select([timer._file], [], [], 0)[0]
    finally:
        timer.close()


@linux
def test_a_closed_timer_has_no_file() -> None:
    """Closed twice, it closes nobody else's."""
    timer = FileTimer(time.monotonic)
    file = timer._file
    timer.close()
    other = os.open(os.devnull, os.O_RDONLY)
    try:
        assert other == file  # the number is somebody else's
        timer.close()
        os.fstat(other)
    finally:
        os.close(other)


def test_where_there_is_no_such_file_trio_keeps_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other systems, in a sandbox, and where no more files may be opened."""
    for error in (OSError("no more files"), AttributeError("timerfd_create")):

        def refused(clock: Callable[[], float], error: Exception = error) -> Timer:
            raise error

        monkeypatch.setattr(timers, "FileTimer", refused)
        assert isinstance(finest_timer(time.monotonic), TrioTimer)


async def test_streams_that_are_due_together_share_a_wake(autojump_clock: MockClock) -> None:
    """Within a grain; one that is due later gets its own."""
    wakes: list[float] = []

    class Counting(TrioTimer):
        async def wait(self) -> None:
            await super().wait()
            wakes.append(trio.current_time() - begun)

    begun = trio.current_time()
    playout = Playout(trio.current_time, timer=Counting(trio.current_time))
    pipes = [Pipe(playout, Reader()) for _ in range(3)]
    got: list[list[StreamItem]] = [[], [], []]

    async def read(n: int) -> None:
        while True:
            got[n] += await take_from(pipes[n])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(playout.run)
        for n in range(3):
            nursery.start_soon(read, n)
        for step in (1, 2):
            for n, late_s in enumerate((0.0, GRAIN_S / 2, 0.004)):
                give(pipes[n], TokenOut(step, "", None, begun + step / 100 + late_s))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert [len(items) for items in got] == [2, 2, 2]
    assert wakes == pytest.approx([0.01, 0.014, 0.02, 0.024], abs=1e-6)
