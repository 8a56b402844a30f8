"""Who may have a shape compiled when: helper threads of their own, shared fairly between clients.

A thread waits for a process that compiles, or compiles here what has passed there. Text is tokenised
in other threads, so that nobody's prompt waits for somebody's grammar.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import trio

from uma_trio.service.fair import FairLimiter, FairPlaces, RunBlocking, UserProgram
from uma_trio.text.shape import NotChecked, Patience, Unconstrainable, patient

Answer = TypeVar("Answer")

COMPILE_S: Final = 10.0
"""For all shapes of a request, from when it has its place; the first one waits for a second of preparation."""
QUEUE_S: Final = 60.0
"""How long a request waits for its place."""
# Their processes are niced, and more would only take cores.
_PLACES: Final = 4
_TOO_LONG: Final = f"takes longer than {COMPILE_S:g} s to be compiled; simplify it"


class RunFor(Protocol):
    """Runs a slow function for a client without holding up the event loop."""

    def __call__(self, function: Callable[[], Answer], client: UserProgram, /) -> Awaitable[Answer]:
        """Return the function's result or raise its exception. If cancelled, abandon it.

        Raises:
            NotChecked: it was not begun in :data:`QUEUE_S`.
            Unconstrainable: it was, and took longer than :data:`COMPILE_S`.
        """


class _Turn(FairLimiter):
    """A place for one request, whose time to compile begins with it."""

    def __init__(self, places: FairPlaces, client: UserProgram, scope: trio.CancelScope) -> None:
        super().__init__(places, client)
        self._scope = scope
        self.patience = Patience()

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for the place. Raises :class:`NotChecked` if that takes too long."""
        with trio.move_on_after(QUEUE_S) as waiting:
            await super().acquire_on_behalf_of(borrower)
        if waiting.cancelled_caught:
            raise NotChecked(f"waited {QUEUE_S:g} s for others that are compiled first; try again")
        self._scope.deadline = trio.current_time() + COMPILE_S
        self.patience.until = time.monotonic() + COMPILE_S


def in_fair_threads(places: FairPlaces | None = None) -> RunFor:
    """Return a :class:`RunFor`. A thread that is given up keeps its place until it ends.

    It ends soon: nothing is begun for a request that was given up, and what was begun is bounded.
    """
    shared = places or FairPlaces(_PLACES)

    async def run(function: Callable[[], Answer], client: UserProgram, /) -> Answer:
        with trio.CancelScope() as scope:
            turn: Any = _Turn(shared, client, scope)

            def work() -> Answer:
                with patient(turn.patience):
                    return function()

            try:
                return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=turn)
            except trio.Cancelled:
                turn.patience.until = 0.0
                raise
        raise Unconstrainable(_TOO_LONG)

    return run


def unqueued(run_blocking: RunBlocking) -> RunFor:
    """Return a :class:`RunFor` without places: for a service with few clients, and for tests."""

    async def run(function: Callable[[], Answer], client: UserProgram, /) -> Answer:
        with trio.move_on_after(COMPILE_S):
            return await run_blocking(function)
        raise Unconstrainable(_TOO_LONG)

    return run
