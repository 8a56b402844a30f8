"""One pass of the scheduler holds a bounded number of turns, and nobody who waits for one is forgotten."""

from __future__ import annotations

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.abc import Instrument

from uma_trio.service.loop import Passes


class Rounds(Instrument):
    """Counts the scheduler's passes."""

    def __init__(self) -> None:
        self.n = 0

    def before_io_wait(self, timeout: float) -> None:
        """Count one."""
        self.n += 1


@given(n=st.integers(1, 60), most=st.integers(1, 5), leave=st.sets(st.integers(0, 59)))
@settings(max_examples=50, deadline=None)
def test_a_pass_holds_so_many_turns_and_each_task_has_one(
    n: int, most: int, leave: set[int]
) -> None:
    """Also where some tasks are cancelled while they wait."""
    held: dict[int, int] = {}
    rounds = Rounds()

    async def one(passes: Passes, scope: trio.CancelScope, done: list[int], number: int) -> None:
        with scope:
            await passes.turn()
            held[rounds.n] = held.get(rounds.n, 0) + 1
            done.append(number)

    async def run() -> list[int]:
        passes, done = Passes(most), list[int]()
        scopes = [trio.CancelScope() for _ in range(n)]
        async with trio.open_nursery() as nursery:
            for number, scope in enumerate(scopes):
                nursery.start_soon(one, passes, scope, done, number)
            await trio.lowlevel.checkpoint()
            for number in leave & set(range(n)):
                scopes[number].cancel()
        return done

    done = trio.run(run, instruments=[rounds])
    assert set(done) >= set(range(n)) - leave
    assert max(held.values(), default=0) <= 2 * most


async def test_a_turn_is_a_checkpoint_with_room_and_without() -> None:
    """So that a caller in a loop can be cancelled, and lets others run."""
    passes = Passes(1)
    for _ in range(3):
        with trio.testing.assert_checkpoints():
            await passes.turn()
