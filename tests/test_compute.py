"""Whether a device computes on after the call of llama_decode came back, as its latest decodes tell."""

from __future__ import annotations

import pytest

from uma_trio.backend import llama
from uma_trio.backend.base import DecodeStatus
from uma_trio.backend.llama import OVER, DecodeCall


class Device:
    """Stands in for llama.cpp: a call takes `called_s`, and its end is waited for as long as `left_s`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called_s, self.left_s = 0.0002, 0.003

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def decode(self, _context: int, _batch: object) -> int:
        """Begin a decode."""
        self.now += self.called_s
        return DecodeStatus.OK

    def synchronize(self, _context: int) -> None:
        """Wait for its end."""
        self.now += self.left_s


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Return the device that decodes are computed by."""
    made = Device()
    monkeypatch.setattr(llama, "perf_counter", made.clock)
    monkeypatch.setattr(llama.lib, "decode", made.decode)
    monkeypatch.setattr(llama.lib, "synchronize", made.synchronize)
    return made


def decoded(compute: DecodeCall, times: int) -> None:
    """Compute so many decodes."""
    for _ in range(times):
        compute(1, None, lambda: None)


def test_a_graph_that_is_captured_does_not_end_the_overlap(device: Device) -> None:
    """Two calls that take as long as their decode, as where the batch has a new shape."""
    compute = DecodeCall(gpu=True)
    decoded(compute, 3)
    device.called_s, device.left_s = 0.004, 0.001
    decoded(compute, 2)
    assert compute.goes_on
    device.called_s, device.left_s = 0.0002, 0.003
    decoded(compute, 20)
    device.called_s, device.left_s = 0.004, 0.001
    decoded(compute, OVER - 1)
    assert compute.goes_on


def test_a_driver_that_waits_in_the_call_is_found_out(device: Device) -> None:
    """Then the host's work comes before the call, until a decode goes on after it."""
    device.called_s, device.left_s = 0.004, 0.0
    compute = DecodeCall(gpu=True)
    decoded(compute, OVER)
    assert not compute.goes_on
    device.called_s, device.left_s = 0.0002, 0.003
    decoded(compute, 1)
    assert compute.goes_on


def test_a_cpu_never_goes_on(device: Device) -> None:
    """It computes in the call."""
    compute = DecodeCall(gpu=False)
    decoded(compute, 3)
    assert not compute.goes_on
    assert device.now < 0.001  # nothing was waited for
