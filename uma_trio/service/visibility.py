"""The rule of privacy: what of a request somebody who looks may see.

A principal sees its own requests, an operator all. Any other request is shown as "another user": that
it is there, its state and its lane, without app, name, process, id or counts. The rule holds for
`ps` and `sessions`, for `/slots`, `/events` and the page; metrics have no labels that name anybody.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from uma_trio.engine.messages import SequenceReport
from uma_trio.service.ask import Origin
from uma_trio.sockets.principal import Principal

#: The app and the handle of another principal's request.
ANOTHER_USER: Final = "another user"
HIDDEN: Final = 0


@frozen
class Running:
    """One live request: the names from its front end, and the report of the engine."""

    handle: int
    origin: Origin
    choice: int
    report: SequenceReport

    @property
    def is_hidden(self) -> bool:
        """Whether it is another principal's, of which the viewer sees only that it is there."""
        return self.handle == HIDDEN


def shown_to(viewer: Principal, running: Running) -> Running:
    """Return a live request as `viewer` may see it."""
    origin, report = running.origin, running.report
    if viewer.may_change(origin.principal):
        return running
    somebody = Principal(connection=0)
    hidden = Origin(principal=somebody, door=origin.door, name="", app=ANOTHER_USER)
    bare = SequenceReport(HIDDEN, report.state, report.lane, 0, 0, 0, 0.0, 0.0)
    return Running(HIDDEN, hidden, 0, bare)
