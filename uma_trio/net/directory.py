"""The requests that run now, on all connections: what ``ps`` shows and a drain waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import trio
from attrs import define, field

from uma_protocol import Generate, SessionInfo
from uma_trio.engine.messages import Abort, SequenceReport, SetLane

if TYPE_CHECKING:
    from uma_protocol.events import Priority
    from uma_trio.engine.inbox import Inbox
    from uma_trio.net.peers import Peer


_REMEMBERED = 256  # as many as the engine can explain


@define(eq=False)
class Running:
    """One request from its frame to its terminal event.

    Until it is `submitted` the engine does not know it: ending it then leaves a `verdict` (a
    code and a message, or None for "cancelled") and stops the tokenising in `preparing`.
    """

    handle: int
    generate: Generate
    peer: Peer
    arrived: float
    inbox: Inbox
    lane: Priority
    preparing: trio.CancelScope = field(factory=trio.CancelScope)
    submitted: bool = False
    ended: bool = False
    code: str | None = None
    message: str | None = None

    def end(self, code: str | None = None, message: str | None = None) -> None:
        """Bring it to its terminal event: cancelled, or an error with a code."""
        if self.submitted:
            self.inbox.put(Abort(self.handle, code, message))
        elif not self.ended:
            self.ended, self.code, self.message = True, code, message
            self.preparing.cancel()

    def move_to(self, lane: Priority) -> None:
        """Promote or demote it."""
        self.lane = lane
        if self.submitted:
            self.inbox.put(SetLane(self.handle, lane))

    def described(self, report: SequenceReport) -> SessionInfo:
        """Join what the engine reports with what only its connection knows."""
        return SessionInfo(
            request=self.handle,
            id=self.generate.id,
            app=self.generate.app,
            pid=self.peer.pid,
            uid=self.peer.uid,
            state=report.state,
            lane=report.lane,
            prompt_tokens=report.prompt_tokens,
            computed_tokens=report.computed_tokens,
            completion_tokens=report.completion_tokens,
            tokens_per_s=round(report.tokens_per_s, 3),
            age_ms=round(report.age_s * 1e3, 3),
        )


class Directory:
    """All running requests by handle, and how the latest of those that ran were called."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        self._past: dict[int, tuple[str, str | None]] = {}
        self._empty: trio.Event | None = None

    def __iter__(self) -> Iterator[Running]:
        return iter(tuple(self._running.values()))

    def __len__(self) -> int:
        return len(self._running)

    def add(self, running: Running) -> None:
        """Note a request that was read from a connection."""
        self._running[running.handle] = running

    def remove(self, running: Running) -> None:
        """Forget one whose terminal event is written, or whose client is gone."""
        self._running.pop(running.handle, None)
        self._past[running.handle] = (running.generate.id, running.generate.app)
        if len(self._past) > _REMEMBERED:
            del self._past[next(iter(self._past))]
        if not self._running and self._empty is not None:
            self._empty.set()
            self._empty = None

    def get(self, handle: int) -> Running | None:
        """Return the request with this handle."""
        return self._running.get(handle)

    def name_of(self, handle: int) -> tuple[str | None, str | None]:
        """Return the id and the label that a request had, of the latest also when it is over."""
        if (running := self._running.get(handle)) is not None:
            return running.generate.id, running.generate.app
        return self._past.get(handle, (None, None))

    async def wait_until_empty(self) -> None:
        """Wait until no request runs."""
        while self._running:
            if self._empty is None:
                self._empty = trio.Event()
            await self._empty.wait()

    def joined(self, reports: tuple[SequenceReport, ...]) -> tuple[SessionInfo, ...]:
        """Return the engine's reports, each with its connection's part.

        A request that is over between the report and now is left out.
        """
        return tuple(
            running.described(report)
            for report in reports
            if (running := self._running.get(report.handle)) is not None
        )
