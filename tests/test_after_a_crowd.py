"""What a lone stream pays for the cells of requests that have ended, in virtual time."""

from __future__ import annotations

import pytest
from engine_kit import Bench
from machine_kit import Clock
from test_copying import Device
from test_prefix_cache import letters

from uma_trio.backend.base import Overlap, nothing
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.prefix import Copying
from uma_trio_sim.fake import FakeBackend

# A 0.5B model on two cores without flash attention.
CPU = CostModel(
    Staircase((1, 4, 16, 64), (0.027, 0.036, 0.060, 0.209)),
    used_cell_s=1.2e-6,
    context_cell_s=1e-7,
)
TICKS = 8  # of 27 ms


class Processor(Device):
    """A processor whose tokens pay for every cell up to the highest. `spans` has these of all decodes."""

    device, bus = False, Copying(save_s=2e-6, restore_s=2e-6, scattered_s=40e-6)

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.spans: list[int] = []

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Compute, for as long as what is spanned takes."""
        self.spans.append(self.kv_high_water())
        slots = self.batch.slot[:n_tokens].tolist()
        rows = int(self.batch.want[:n_tokens].sum())
        own = sum(map(self.kv_length, slots))
        seconds = CPU.seconds(Work(n_tokens, rows, own, self.spans[-1]))

        def first() -> None:
            while_computing()
            self.clock.now += seconds

        return FakeBackend.decode(self, n_tokens, first)


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "afterwards"])
def test_a_lone_stream_is_at_its_speed_soon_after_a_crowd(beside: bool) -> None:
    """A fifth of a second later a token takes at most 1.05 times as long as in a cache of its own."""
    clock = Clock()
    made = Bench(
        Processor(clock),
        policy=find_policy("deadline"),
        clock=clock,
        settings=EngineSettings(prefix_bytes=1 << 24, cost=CPU),
    )
    backend = made.backend
    assert isinstance(backend, Processor)
    if beside:
        made.submit(letters(1, 60), 3000, namespace="a", smooth=True, client=1)
        made.ticks(3)
    crowd = [made.submit(letters(n, 400), 60, namespace="b", client=2)[1] for n in (2, 3, 4)]
    while not all(sink.ends for sink in crowd):
        made.ticks(1)
    crowded = max(backend.spans)
    if not beside:
        made.submit(letters(1, 60), 3000, namespace="a", smooth=True, client=1)
    made.ticks(TICKS)
    own = max(map(backend.kv_length, range(backend.limits.n_slots)))
    fresh_s, used_s = 0.027 + 1.2e-6 * own, 0.027 + 1.2e-6 * backend.spans[-1]
    assert crowded > own + 300
    assert used_s <= 1.05 * fresh_s
