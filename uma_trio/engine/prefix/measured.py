"""What moving a token in or out of the KV cache takes on this machine, as far as it was measured."""

from __future__ import annotations

from typing import Final

_RATE: Final = 0.2  # how quickly later measurements change it


class Measured:
    """Seconds a token, apart for cells that lie scattered and cells that do not.

    Until the first measurement it is a guess, which that one replaces: between a CPU and a GPU on a
    bus lies a factor of ten.
    """

    def __init__(self, together_s: float, scattered_s: float) -> None:
        self._seconds = {False: together_s, True: scattered_s}
        self._guessed = {False, True}

    def __getitem__(self, scattered: bool) -> float:
        """Return the seconds a token."""
        return self._seconds[scattered]

    def learn(self, *, scattered: bool, token_s: float) -> None:
        """Learn from a measurement."""
        if scattered in self._guessed:
            self._guessed.remove(scattered)
            self._seconds[scattered] = token_s
        else:
            self._seconds[scattered] += _RATE * (token_s - self._seconds[scattered])
