"""The two orders of a tick: what runs between two decodes, and what beside one."""

from __future__ import annotations

import pytest
from engine_kit import KINDS, Bench, OnDevice

from uma_trio.backend.base import Overlap, nothing
from uma_trio_sim.fake import FakeBackend


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
