"""One decode from its call to its end, and when in it the engine's thread is free."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from uma_trio.backend import _llama_lib as lib
from uma_trio.backend.base import DecodeStatus, Overlap

# After so many decodes in a row that were over when their call came back a device is taken for one that waits. On
# CUDA the first two decodes of a shape launch each kernel and capture a graph, which may take as long as they do.
OVER = 8


class Compute:
    """Calls llama_decode and waits for its end, with `while_computing` before the longer of the two.

    The CPU computes inside of the call. A GPU goes on after it came back, unless layers were
    left to the CPU or its driver is one that waits; which it is shows in the latest decodes.
    """

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self.goes_on = gpu  # whether it computes on after the call, as it lately did
        self._over = 0  # decodes in a row that were over when their call came back

    def __call__(self, context: int, batch: Any, while_computing: Overlap) -> int:
        """Return the status, with the logits there if it is OK."""
        goes_on = self.goes_on
        if not goes_on:
            while_computing()
        began = perf_counter()
        status: int = lib.decode(context, batch)
        back = waiting = perf_counter()
        if goes_on:
            while_computing()
            waiting = perf_counter()
        if self._gpu and status == DecodeStatus.OK:
            lib.synchronize(context)
            called_s = back - began
            # Where that took longer than the call, whether there was anything to wait for is unknown.
            hidden = waiting - back > called_s
            if perf_counter() - waiting > called_s or (goes_on and hidden):
                self._over, self.goes_on = 0, True
            else:
                self._over += 1
                self.goes_on = goes_on and self._over < OVER
        return status
