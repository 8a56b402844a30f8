"""What copies of cells take on a device is known before anybody has a request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_kit import Bench
from machine_kit import Clock, Machine
from test_prefix_cache import letters

from uma_trio.backend.base import Saved, Traits
from uma_trio.engine.planner import EngineSettings
from uma_trio.policy.by_name import find_policy
from uma_trio.policy.cost import CostModel, Staircase
from uma_trio.policy.costing.copying import copies_file, known_copies, time_copies
from uma_trio.policy.prefix import SCATTERED, Copying

BUS = Copying(save_s=20e-6, restore_s=30e-6, scattered_s=200e-6)
COST = CostModel(Staircase((1, 64), (0.003, 0.008)), spanned_cell_s=500e-9)


class Device(Machine):
    """A machine with a device, whose copies take the time of a `bus`. `saved` counts tokens."""

    device, bus = True, BUS

    def __init__(self, clock: Clock) -> None:
        super().__init__(COST, clock, n_batch=64, n_slots=5)
        self.saved = 0

    @property
    def traits(self) -> Traits:
        """Shapes cost something where graphs are captured."""
        return Traits(shape_costs=self.device)

    def kv_save(self, slot: int, first: int, last: int, page: int) -> Sequence[Saved] | None:
        """Save, and let the time pass."""
        apart = self.kv_runs(slot, first, last) >= SCATTERED
        self.clock.now += (last - first) * (self.bus.scattered_s if apart else self.bus.save_s)
        self.saved += last - first
        return super().kv_save(slot, first, last, page)

    def kv_restore(self, slot: int, saved: Sequence[Saved]) -> bool:
        """Restore, and let the time pass."""
        before = self.kv_length(slot)
        done = super().kv_restore(slot, saved)
        self.clock.now += (self.kv_length(slot) - before) * self.bus.restore_s
        return done


def test_a_device_is_timed_as_it_is() -> None:
    """Cells side by side, scattered ones, and the way back; the cache is empty afterwards."""
    clock = Clock()
    device = Device(clock)
    found = time_copies(device, clock)
    assert found is not None
    assert found.save_s == pytest.approx(BUS.save_s)
    assert found.restore_s == pytest.approx(BUS.restore_s)
    assert found.scattered_s == pytest.approx(BUS.scattered_s)
    assert device.kv_used() == 0


def test_a_processor_is_not_timed() -> None:
    """The first pages tell; a decode would be dear there."""
    clock = Clock()
    device = Device(clock)
    device.device = False
    assert time_copies(device, clock) is None
    assert not device.took


@pytest.mark.parametrize("what", ["save", "restore"])
def test_a_copy_that_fails_leaves_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known then, and the cache is empty."""
    clock = Clock()
    device = Device(clock)
    monkeypatch.setattr(device, "kv_fails", lambda how: how == what)
    assert time_copies(device, clock) is None
    assert device.kv_used() == 0


def test_a_device_is_timed_at_its_first_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later starts recall the same figures, and compute nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clock = Clock()
    first, second = Device(clock), Device(clock)
    found = known_copies(first, clock)
    assert found is not None
    assert first.took
    assert known_copies(second, clock) == found
    assert not second.took


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff", b'{"save_s":0.0,"restore_s":1.0,"scattered_s":1.0}', b'{"save_s":"a"}'],
)
def test_a_file_of_copies_that_cannot_be_used_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Damage, and figures that no machine has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clock = Clock()
    device = Device(clock)
    path = copies_file(device)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    found = known_copies(device, clock)
    assert found is not None
    assert found.save_s == pytest.approx(BUS.save_s)
    assert known_copies(Device(clock), clock) == found
    assert path.read_bytes() != content


def test_a_processor_has_no_file_of_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed there, and nothing of a device with the same name is used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clock = Clock()
    known_copies(Device(clock), clock)
    processor = Device(clock)
    processor.device = False
    assert known_copies(processor, clock) is None


def saved_beside_a_reader(copying: Copying | None) -> tuple[int, float]:
    """Return how many tokens of an ended request are saved while a stream is read, and the longest gap."""
    clock = Clock()
    device = Device(clock)
    made = Bench(
        device,
        policy=find_policy("deadline"),
        clock=clock,
        settings=EngineSettings(prefix_bytes=1 << 24, cost=COST, copying=copying),
    )
    made.submit(letters(1, 40), 600, namespace="a", smooth=True, client=1)
    made.ticks(3)
    _, other = made.submit(letters(2, 320), 1, namespace="b", client=2)
    while not other.ends:
        made.ticks(1)
    longest_s = 0.0
    for _ in range(300):
        began = clock.now
        made.ticks(1)
        longest_s = max(longest_s, clock.now - began)
    return device.saved, longest_s


def test_a_device_with_a_known_price_saves_while_somebody_reads() -> None:
    """Not in idle time only, and no token of the reader is later than its pace."""
    assert saved_beside_a_reader(None)[0] == 0
    saved, longest_s = saved_beside_a_reader(BUS)
    assert saved >= 256
    assert longest_s < 0.040
