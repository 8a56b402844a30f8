"""The two orders of a tick: what runs between two decodes, and what beside one."""

from __future__ import annotations

from typing import cast

import pytest
from attrs import fields
from engine_kit import KINDS, Bench, OnDevice

from uma_trio.backend.base import Overlap, nothing
from uma_trio.engine.chunk import Tick
from uma_trio.engine.orders import Order, Overlapped, Serial, TickParts
from uma_trio_sim.fake import FakeBackend

PREPARED, PLANNED = cast("Tick", "the prepared tick"), cast("Tick", "the planned tick")


def spoken(*, prepared: bool = False) -> tuple[TickParts, list[str]]:
    """Return parts that note their names in the list, with or without a prepared tick that comes next."""
    said: list[str] = []

    def part(name: str) -> object:
        def do(*_args: object) -> Tick | None:
            said.append(name)
            if name == "take_prepared":
                return PREPARED if prepared else None
            return PLANNED if name == "plan" else None

        return do

    return TickParts(**{each.name: part(each.name) for each in fields(TickParts)}), said


def a_tick(order: Order) -> Tick | None:
    """Go through a tick in this order."""
    tick = order.next_tick(1.0)
    if tick is not None:
        order.beside(tick)
    return tick


def test_on_a_cpu_a_tick_is_planned_from_what_is_committed_and_published_right_before_the_decode() -> (
    None
):
    """Commit, plan, publish: nothing is prepared, and nothing is left for the time of the decode."""
    parts, said = spoken(prepared=True)
    assert a_tick(Serial(parts)) is PLANNED
    assert said == [
        *("commit", "take_in", "side_work", "plan"),
        *("publish", "masks_elsewhere", "decode_begins"),
    ]


def test_on_a_gpu_a_prepared_tick_is_submitted_and_its_predecessor_committed_beside_it() -> None:
    """Submit, then commit, publish and prepare while it is computed."""
    parts, said = spoken(prepared=True)
    assert a_tick(Overlapped(parts, Serial(parts))) is PREPARED
    assert said == [
        *("take_prepared", "side_work"),
        *("commit_beside", "publish", "masks_here", "prepare"),
    ]


def test_on_a_gpu_what_was_not_foreseen_is_committed_before_the_next_plan() -> None:
    """The order of a CPU for this once; the tick behind it is prepared again."""
    parts, said = spoken()
    assert a_tick(Overlapped(parts, Serial(parts))) is PLANNED
    assert said == [
        *("take_prepared", "commit", "take_in", "side_work", "plan"),
        *("commit_beside", "publish", "masks_here", "prepare"),
    ]


class Changing(OnDevice):
    """A device of which it shows that it `waits` like a CPU."""

    waits = False

    @property
    def traits(self) -> object:  # type: ignore[override]
        """What it has lately done."""
        return FakeBackend.traits.fget(self) if self.waits else super().traits  # type: ignore[attr-defined]

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute as one of the two."""
        if self.waits:
            return FakeBackend.decode(self, n_tokens, while_computing)
        return super().decode(n_tokens, while_computing)


@pytest.mark.parametrize("after", range(1, 5))
def test_a_device_may_change_its_order_at_any_tick(after: int) -> None:
    """What was prepared or waits for its commit is not lost, in either direction."""
    backend = Changing()
    bench = Bench(backend)
    streams = [bench.submit(prompt, max_tokens=12) for prompt in ("hello", "another one")]
    for _ in range(3):
        bench.ticks(after)
        backend.waits = not backend.waits
    bench.run()
    assert [stream.tokens for _, stream in streams] == [
        bench.expected("hello", 12),
        bench.expected("another one", 12),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_published_by_the_next_tick_in_both_orders(kind: type[FakeBackend]) -> None:
    """It is out when the decode behind it has begun, and not before."""
    bench = Bench(kind())
    _, stream = bench.submit("hello", max_tokens=12)
    for n in range(5):
        bench.engine.tick()
        assert len(stream.tokens) == n
