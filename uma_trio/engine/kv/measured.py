"""The measured time of moving a token into or out of the KV cache on this machine."""

from __future__ import annotations

import math
from typing import Final

from uma_trio.backend.base import Backend
from uma_trio.policy.prefix import Copying

_RATE: Final = 0.2  # how quickly later measurements change it
_SCATTERED: Final = 20.0  # times what cells take that lie together, on a CPU


class CellTimes:
    """Seconds per token, separately for scattered and contiguous cells.

    Until the first measurement it is an estimate, which that measurement replaces: a CPU and a GPU
    on a bus differ by a factor of ten.
    """

    @classmethod
    def saving(cls, backend: Backend, together_s: float, copying: Copying | None) -> CellTimes:
        """Return what saving takes: as measured at start-up (`copying`), or an estimate.

        On a device that was not measured it is infinite until it is, in idle time. There llama.cpp copies each
        run of cells in each layer with a separate call, over a bus of unknown speed: on an H200 a page of
        contiguous cells took 16 to 34 ms, and a request waited 180 ms for scattered ones.
        """
        if copying is not None:
            return cls(copying.save_s, copying.scattered_s, guessed=False)
        if backend.traits.shape_costs:
            return cls(math.inf, math.inf)
        return cls(together_s, _SCATTERED * together_s)

    def __init__(self, together_s: float, scattered_s: float, *, guessed: bool = True) -> None:
        self._seconds = {False: together_s, True: scattered_s}
        self._guessed = {False, True} if guessed else set()

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
