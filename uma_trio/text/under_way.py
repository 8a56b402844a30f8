"""Tokens that somebody else is finding: another process, which is not waited for with the lock held."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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
            except Exception as error:  # whoever asked for it has to be told, whatever it is
                changed.set_exception(error)

        self.future.add_done_callback(pass_on)
        return UnderWay(changed)
