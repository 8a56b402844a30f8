"""What reasoning and budgets wrap: a grammar that is followed here or in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from uma_trio.text.shape import Shape


class Compiler(Protocol):
    """Makes of a shape what keeps an answer to it: a `Grammarian`, or what of its shapes is known."""

    def follow(self, shape: Shape) -> Constraint:
        """Return what follows one answer. Raises :class:`.shape.Unconstrainable`, `Unknown`."""

    def check(self, shape: Shape) -> None:
        """Find out whether a shape can be enforced. Raises as `follow` does."""


class Constraint(Protocol):
    """A constraint on an answer, checked token by token. For one thread at a time, and the engine's once submitted."""

    @property
    def elsewhere(self) -> bool:
        """Whether another process knows what is allowed here: ask for all of it, and wait for `allows` never."""

    @property
    def problem(self) -> str | None:
        """Which limit leaves no way on, for a message; None if none does."""

    def allows(self, token: int) -> bool:
        """Whether the answer may go on with `token`; with an end token, whether it may end."""

    def allowed(self) -> NDArray[np.intp]:
        """Return all tokens that the answer may go on with, ascending; none if there is no way on."""

    def deferred(self) -> Callable[[], NDArray[np.intp]]:
        """Return what `allowed` is here and now, to be called later, in any thread, once.

        An :class:`.under_way.UnderWay` is on its way already, and needs no thread.
        """

    def accept(self, token: int) -> None:
        """Go on behind `token`, which is no end."""

    def take_back(self) -> None:
        """Go back to before the latest `accept`. As many can be taken back as were accepted."""
