"""The compute thread in virtual time: it runs while trio's thread waits for it, and what it costs is slept on trio's clock.

So one example of several models, with loads, saves and closings that take time, runs in milliseconds and is the same each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import trio

from uma_trio.machine.bell import Bell


class LockstepBell(Bell):
    """A bell at which the compute thread sleeps in virtual time."""

    def __init__(self, lockstep: Lockstep) -> None:
        super().__init__()
        self._lockstep = lockstep

    def ring(self) -> None:
        """Wake it, on either thread."""
        self.rang = True
        self._lockstep.ring()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep, on the compute thread."""
        self.asleep = True
        rang = self._lockstep.sleep(timeout_s)
        self.asleep = False
        return rang


class Lockstep:
    """Runs one function on a thread, in turn with trio's. For one :func:`trio.run`."""

    def __init__(self) -> None:
        self.bell = LockstepBell(self)
        self._mine, self._trios = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._costs_s = self._now = 0.0
        self._timeout_s: float | None = None
        self._sleeps = self._rung = self._woke_by_ring = False
        self._ring: trio.Event | None = None
        self._posted: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._error: BaseException | None = None
        #: Seconds that functions on trio's thread have cost within :meth:`helped`; None outside.
        self.helper_s: float | None = None

    # --- on either thread ---

    def clock(self) -> float:
        """Return the time on trio's clock."""
        return self._now if threading.current_thread() is self._thread else trio.current_time()

    def pay(self, seconds: float) -> None:
        """Let work take so long. On trio's thread only a helper's work may."""
        if threading.current_thread() is self._thread:
            self._costs_s += seconds
            self._yield()
        elif self.helper_s is None:
            raise AssertionError(f"trio's thread stands still for {seconds} s")
        else:
            self.helper_s += seconds

    def ring(self) -> None:
        """Wake the compute thread, now or when it sleeps next."""
        self._rung = True
        if threading.current_thread() is not self._thread and self._ring is not None:
            self._ring.set()

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call something on trio's thread soon, on behalf of the compute thread."""
        self._posted.append((call, arguments))

    # --- on trio's thread ---

    async def helped(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function as if in a helper thread: it takes the time that it pays for. Cancelled, it is waited for."""
        await trio.lowlevel.checkpoint()
        self.helper_s = 0.0
        try:
            return function(*arguments)
        finally:
            seconds, self.helper_s = self.helper_s, None
            if seconds:
                with trio.CancelScope(shield=True):
                    await trio.sleep(seconds)

    async def run(self, target: Callable[[], None]) -> None:
        """Run `target` to its end. Raises what it raises."""

        def work() -> None:
            self._mine.acquire()
            try:
                target()
            except BaseException as error:
                self._error = error
            self._thread = None
            self._trios.release()

        thread = self._thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while True:
            self._now = trio.current_time()
            self._mine.release()
            self._trios.acquire()
            posted, self._posted = self._posted, []
            for call, arguments in posted:
                call(*arguments)
            if self._thread is None:
                break
            with trio.CancelScope(shield=True):
                await self._pass()
        if self._error is not None:
            raise self._error

    async def _pass(self) -> None:
        """Let the time pass that the compute thread has used, or sleeps."""
        seconds, self._costs_s = self._costs_s, 0.0
        if not self._sleeps:
            await trio.sleep(seconds)
            return
        self._sleeps = False
        if not self._rung:
            self._ring = trio.Event()
            with trio.move_on_after(float("inf") if self._timeout_s is None else self._timeout_s):
                await self._ring.wait()
            self._ring = None
        else:
            await trio.lowlevel.checkpoint()
        self._woke_by_ring, self._rung = self._rung, False

    # --- on the compute thread ---

    def sleep(self, timeout_s: float | None) -> bool:
        """Sleep until it rings; False if it did not within the time."""
        self._sleeps, self._timeout_s = True, timeout_s
        self._yield()
        return self._woke_by_ring

    def _yield(self) -> None:
        self._trios.release()
        self._mine.acquire()
