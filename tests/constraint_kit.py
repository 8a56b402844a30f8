"""Constraints on answers for tests of the engine: each says what is allowed, the rest follows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from uma_trio_sim.fake import EOS

IdArray = NDArray[np.intp]


class Constraining:
    """A constraint by what `allowed` returns behind the tokens that were `told`."""

    elsewhere = False
    problem = None

    def __init__(self) -> None:
        self.told: list[int] = []

    def allowed(self) -> IdArray:
        """Return what may come next."""
        raise NotImplementedError

    def allows(self, token: int) -> bool:
        """Whether it may come next."""
        return token in self.allowed()

    def deferred(self) -> Callable[[], IdArray]:
        """Return the same, found already."""
        here = self.allowed()
        return lambda: here

    def accept(self, token: int) -> None:
        """Go on."""
        self.told.append(token)

    def take_back(self) -> None:
        """Go back."""
        self.told.pop()


class Only(Constraining):
    """Allows the same tokens at every step; counts the masks that it was asked for."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self.masks = 0

    def allows(self, token: int) -> bool:
        """Whether it is one of them."""
        return token in self._tokens

    def allowed(self) -> IdArray:
        """Return them."""
        self.masks += 1
        return np.array(sorted(self._tokens), np.intp)


class Turns(Constraining):
    """Allows "a" and "b", never three of one kind in a row, and an end behind `most` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def allowed(self) -> IdArray:
        """Return what may come next."""
        if len(self.told) >= self._most:
            return np.array([EOS], np.intp)
        return np.array([token for token in b"ab" if self.told[-2:] != [token, token]], np.intp)
