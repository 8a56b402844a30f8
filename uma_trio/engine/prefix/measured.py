"""What moving a token in or out of the KV cache takes on this machine, as far as it was measured."""

from __future__ import annotations

import math
from typing import Final

from uma_trio.backend.base import Backend

_RATE: Final = 0.2  # how quickly later measurements change it
_SCATTERED: Final = 20.0  # times what cells take that lie together, on a CPU


class Measured:
    """Seconds a token, apart for cells that lie scattered and cells that do not.

    Until the first measurement it is a guess, which that one replaces: between a CPU and a GPU on a
    bus lies a factor of ten.
    """

    @classmethod
    def of(cls, backend: Backend, together_s: float) -> Measured:
        """Return a guess for a backend; on a device it is infinite, so that idle time is used to measure.

        There llama.cpp copies each run of cells in each layer by a call of its own, over a bus of
        unknown speed: on an H200 a page of cells that lie together took 16 to 34 ms, and a request
        waited 180 ms for scattered ones.
        """
        if backend.traits.shape_costs:
            return cls(math.inf, math.inf)
        return cls(together_s, _SCATTERED * together_s)

    def __init__(self, together_s: float, scattered_s: float) -> None:
        self._seconds = {False: together_s, True: scattered_s}
        self._guessed = {False, True}

    def __getitem__(self, scattered: bool) -> float:
        """Return the seconds a token."""
        return self._seconds[scattered]

    def guessed(self, *, scattered: bool) -> bool:
        """Whether it was never measured."""
        return scattered in self._guessed

    def learn(self, *, scattered: bool, token_s: float) -> None:
        """Learn from a measurement."""
        if scattered in self._guessed:
            self._guessed.remove(scattered)
            self._seconds[scattered] = token_s
        else:
            self._seconds[scattered] += _RATE * (token_s - self._seconds[scattered])
