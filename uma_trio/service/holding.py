"""Who uses a loaded model at the moment: its memory is freed only while nobody does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from uma_trio.service.fair import RunBlocking

Answer = TypeVar("Answer")


class Uses:
    """The uses of one model: requests, and what helper threads compute of its text.

    :meth:`begin` and :meth:`during` are for trio's thread. A helper thread that was abandoned still reads the model's
    vocabulary, so that its use ends with the thread and not with the request.
    """

    def __init__(self) -> None:
        # Helper threads end uses, too: changes of a set are atomic.
        self._uses: set[object] = set()

    def __bool__(self) -> bool:
        """Whether somebody uses the model."""
        return bool(self._uses)

    def begin(self) -> Callable[[], None]:
        """Begin a use; what is returned ends it, and is idempotent."""
        use = object()
        self._uses.add(use)
        return lambda: self._uses.discard(use)

    def during(self, run: RunBlocking) -> RunBlocking:
        """Return what runs functions as `run` does, each of which uses the model until it returns."""

        async def run_using(function: Callable[[], Answer], /) -> Answer:
            use, begun = object(), []

            def call() -> Answer:
                begun.append(True)
                self._uses.add(use)
                try:
                    return function()
                finally:
                    self._uses.discard(use)

            self._uses.add(use)
            try:
                return await run(call)
            finally:
                if not begun:
                    self._uses.discard(use)

        return run_using
