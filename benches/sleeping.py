"""A daemon on a machine that sleeps as long as another one computes: run by `benches lateness`.

    python -m benches.sleeping h200 serve --socket …

It computes nothing, and its decodes overlap with the host, as a GPU's do. So what a client sees of
short ticks is what the daemon itself adds: the engine's work, the doors, the timer and the sockets.
"""

from __future__ import annotations

import random
import sys
import time

from benches.metered import fake_config, serve_on
from benches.ticks import NoBackend
from uma_trio.backend.base import DecodeStatus, Overlap, nothing
from uma_trio_sim.machine import TABLES, gaussian, staircase

_NOISE = gaussian(0.02)


class Sleeping(NoBackend):
    """Takes as long as one of the measured tables says, with a noise of 2 %."""

    def __init__(self, table: str) -> None:
        super().__init__(overlaps=True)
        self._seconds = staircase(TABLES[table])
        self._random = random.Random(0)

    def decode(self, n_tokens: int, while_computing: Overlap = nothing) -> int:
        """Do the host's work, and sleep for the rest of the tick without the interpreter's lock."""
        until = time.monotonic() + self._seconds(n_tokens) * _NOISE(self._random, n_tokens, 0.0)
        while_computing()
        self.decodes += 1
        time.sleep(max(0.0, until - time.monotonic()))
        return DecodeStatus.OK


if __name__ == "__main__":
    serve_on(Sleeping(sys.argv[1]), fake_config(sys.argv[2:]))
