"""The engine of an encoder: a tick of it is what parts of its batches fit into the time that others leave.

It has the machine as an engine that writes has it (:mod:`uma_trio.machine.work`): its work is work that nobody reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from uma_trio.engine.encoding import Encodings
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.messages import (
    Encode,
    Explain,
    InboxMessage,
    Inspect,
    Prefix,
    Snapshot,
    StopEncoding,
)
from uma_trio.engine.records import CellReport, PrefixReport, Recorded
from uma_trio.machine.background import Background
from uma_trio.machine.work import Claim, Grant, Work

LOOK_S: Final = 0.005
"""Within a turn the encoder looks after so long whether a message came for any engine."""
LOOKS: Final = 10
"""So many times, where none came: then the turn ends. A turn costs 0.3 ms, a look 0.05."""
_MOST: Final = 256  # requests that a snapshot describes of each kind


class EncoderEngine:
    """The :class:`uma_trio.machine.work.Work` of one encoder."""

    #: Nothing that it waits for only needs time.
    rest_s = math.inf
    can_stop = False
    background = Background()

    def __init__(
        self,
        queue: Encodings,
        inbox: Inbox,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self.queue, self.inbox = queue, inbox
        self._post, self._clock = post, clock

    @property
    def running(self) -> Mapping[int, object]:
        """The requests of which something is to be computed, by their handles."""
        return self.queue.running

    @property
    def delayed_by(self) -> Work | None:
        """The work of another model that has the machine while this one waits for it."""
        return self.queue.delayed_by

    @delayed_by.setter
    def delayed_by(self, work: Work | None) -> None:
        self.queue.delayed_by = work

    @property
    def is_called(self) -> bool:
        """Whether a message came since the latest claim."""
        return self.inbox.rung

    def claim(self, now: float) -> Claim:
        """Take in what has arrived, and return the next part."""
        self._take_in()
        if not self.queue.has_work:
            return Claim()
        return Claim(has_work=True, least_s=self.queue.next_s(), kind="background")

    def advance(self, grant: Grant) -> bool:
        """Compute parts until a message comes, the limit is reached, or there are no more; False if there were none."""
        self._take_in()
        left_s = min(grant.most_s, LOOKS * LOOK_S)
        queue, began = self.queue, self._clock()
        if not queue.has_work:
            return False
        while queue.has_work:
            queue.advance(min(left_s, LOOK_S))
            left_s -= self._clock() - began
            began = self._clock()
            if self.inbox.bell.rang or queue.next_s() > left_s or left_s <= 0:
                break
        return True

    def interrupt(self) -> None:
        """Do nothing: the time of each part is measured by itself."""

    def publish(self) -> None:
        """Reply to what was asked. Results are handed over as they come."""
        self._take_in()

    def close(self) -> None:
        """Accept no further messages. For trio's thread."""
        self.inbox.close()

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error, also those that were not taken in."""
        self._take_in()
        self.queue.fail_all(code, message)

    def _take_in(self) -> None:
        self.inbox.rung = False
        for message in self.inbox.drain():
            self._handle(message)

    def _handle(self, message: InboxMessage) -> None:
        match message:
            case Encode():
                self.queue.submit(message)
            case StopEncoding(handle):
                self.queue.cancel(handle)
            case Inspect(tell):
                self._post(partial(tell, self._snapshot()))
            case Explain(explain, handle):
                recorded = Recorded(self._clock(), self.queue.records(handle), ())
                self._post(partial(explain, recorded))
            case Prefix(report):
                self._post(partial(report, PrefixReport(0, 0, ())))

    def _snapshot(self) -> Snapshot:
        now = self._clock()
        running, queued = self.queue.reports(now, _MOST)
        return Snapshot(
            at=now,
            tick=-1,
            running=tuple(running),
            queue=tuple(queued),
            waiting=sum(1 for _ in queued),
            ticks=(),
            cells=CellReport(0, 0, 0),
        )
