"""The interfaces of constraints: the grammar is followed in this process or in another one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from uma_trio.text.shape import Shape


class Compiler(Protocol):
    """Compiles shapes. Its methods raise :class:`.shape.Unconstrainable` and `Unknown`."""

    def follow(self, shape: Shape) -> Constraint:
        """Return the constraint of one answer."""

    def check(self, shape: Shape) -> None:
        """Find out whether a shape can be enforced."""


class Constraint(Protocol):
    """A constraint on one answer, token by token. Used by one thread at a time: the engine's, once submitted."""

    @property
    def elsewhere(self) -> bool:
        """Whether another process computes the mask: call `deferred`, and never wait for `allows`."""

    @property
    def problem(self) -> str | None:
        """The limit that ended the answer, for a message; None if none did."""

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; for an end token, whether the answer may end."""

    def allowed(self) -> NDArray[np.intp]:
        """Return all tokens that may come next, ascending; none if the answer cannot go on."""

    def deferred(self) -> Callable[[], NDArray[np.intp]]:
        """Return `allowed` of this place as a call for any thread, once; an `UnderWay` is running already."""

    def accept(self, token: int) -> None:
        """Advance by `token`, which is not an end token."""

    def take_back(self) -> None:
        """Undo the latest `accept`; every one can be undone."""


Ids = NDArray[np.intp]
NONE: Final[Ids] = np.empty(0, np.intp)


def holds(ids: NDArray[np.integer[Any]], token: int) -> bool:
    """Whether `token` is one of `ids`, which ascend."""
    at = int(np.searchsorted(ids, token))
    return at < len(ids) and int(ids[at]) == token


class UnderWay:
    """A set of tokens that another process is computing. Calling it blocks until `future` is done."""

    def __init__(self, future: Future[Ids]) -> None:
        self.future = future

    def __call__(self) -> Ids:
        return self.future.result()

    def then(self, change: Callable[[Ids], Ids]) -> UnderWay:
        """Return the same with `change` applied, on the thread that completes it."""
        changed: Future[Ids] = Future()
        changed.set_running_or_notify_cancel()

        def pass_on(done: Future[Ids]) -> None:
            try:
                changed.set_result(change(done.result(0)))
            except Exception as error:  # the waiter must receive any error
                changed.set_exception(error)

        self.future.add_done_callback(pass_on)
        return UnderWay(changed)
