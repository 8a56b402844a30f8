"""Who may have a shape compiled when: helper threads of their own, shared fairly between clients.

A thread waits for a process that compiles, or compiles here what has passed there. Text is tokenised
in other threads, so that nobody's prompt waits for somebody's grammar.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import trio

from uma_trio.service.fair import Client, FairPlaces, Place
from uma_trio.text.patience import Patience, patient

Answer = TypeVar("Answer")

COMPILE_S: Final = (
    10.0  # for all shapes of a request; the first one waits for a second of preparation
)
# Their processes are niced, and more would only take cores.
_PLACES: Final = 4


class RunFor(Protocol):
    """Runs a slow function for a client without holding up the event loop."""

    def __call__(self, function: Callable[[], Answer], client: Client, /) -> Awaitable[Answer]:
        """Return the function's result or raise its exception. If cancelled, abandon it."""


def in_fair_threads(places: FairPlaces | None = None) -> RunFor:
    """Return a :class:`RunFor`. A thread that is given up keeps its place until it ends.

    It ends soon: nothing is begun for a request that was given up, and what was begun is bounded.
    """
    shared = places or FairPlaces(_PLACES)

    async def run(function: Callable[[], Answer], client: Client, /) -> Answer:
        patience = Patience(time.monotonic() + COMPILE_S)

        def work() -> Answer:
            with patient(patience):
                return function()

        limiter: Any = Place(shared, client)
        try:
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
        except trio.Cancelled:
            patience.until = 0.0
            raise

    return run
