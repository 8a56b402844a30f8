"""Requests that wait until their model is loaded: listed, explained and ended like those that an engine has."""

from __future__ import annotations

from typing import Final

import trio

from uma_trio.models.model import Model
from uma_trio.observe.records import RequestRecord, Snapshot, Wait
from uma_trio.service.ask import Origin
from uma_trio.service.directory import Directory
from uma_trio.words import Lane

_MOST: Final = 256  # requests of a snapshot


class WaitsForModel:
    """A request of a front end that needs its model before it knows what is asked. It is in the directory meanwhile.

    :meth:`end` cancels `scope`, in which the front end has to wait; `ended` has the code and the message then.
    """

    model: str | None = None
    choice = 0
    streams = False

    def __init__(
        self, handle: int, origin: Origin, lane: Lane, awaited: Model | None, arrived: float
    ) -> None:
        self.handle, self.origin, self.lane = handle, origin, lane
        self.awaited = awaited
        self.arrived = arrived
        self.scope = trio.CancelScope()
        self.ended: tuple[str | None, str | None] | None = None

    def end(self, code: str | None = None, message: str | None = None) -> None:
        """End it: as cancelled, or with an error code."""
        self.ended = self.ended or (code, message)
        self.scope.cancel()

    def move_to(self, lane: Lane) -> None:
        """Show it in a lane; the request says itself in which it is computed."""
        self.lane = lane


def snapshot(directory: Directory, now: float) -> Snapshot:
    """Return the requests that wait for a model, as an engine describes those of its queue."""
    every = records(directory, None)
    return Snapshot(at=now, tick=-1, queue=tuple(every[:_MOST]), waiting=len(every))


def records(directory: Directory, handle: int | None) -> list[RequestRecord]:
    """Return the records of the requests that wait for a model, or of one of them."""
    return [
        RequestRecord(
            handle=request.handle,
            lane=request.lane,
            state="queued",
            submitted=request.arrived,
            queue_reason=wait,
            wait=Wait(wait),
        )
        for request in directory
        if request.awaited is not None
        and (wait := request.awaited.wait_reason)
        and handle in (None, request.handle)
    ]
