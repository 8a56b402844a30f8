"""When the first tokens of all requests are due, whether they have a slot or wait for one.

A prompt is noted once, when it gets a slot or has to wait for one, and keeps what it is noted with. Their
common stretch is searched anew when a prompt has come or is done (:mod:`uma_trio.policy.stretch`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

from uma_trio.engine.sequences import Sequence
from uma_trio.policy.state import FirstTokens, Memory
from uma_trio.policy.stretch import (
    CHANGED,
    Wanted,
    common_stretch,
    deadline,
    first_token,
    level_of,
    prefill_s,
)


class FirstTokenBook:
    """What is `known` of first tokens. For the engine's thread; `memory` is that of the latest plan."""

    def __init__(self, n_batch: int) -> None:
        self.known = FirstTokens()
        self.memory = Memory()
        self.late_from = math.inf  # from then on somebody who waits for a slot would be late
        self.changed = False  # a prompt has come or gone since the latest search
        self._n_batch = n_batch
        self._ends: dict[
            int, float
        ] = {}  # by who shares, when its latest prompt would be done alone
        self._share = 1.0

    def note(self, sequence: Sequence, covered: int, now: float) -> None:
        """Note a prompt that has come, of which `covered` tokens need not be computed.

        One that has lost its slot has come `now`.
        """
        cost, view = self.memory.cost, sequence.view
        if cost is None or view.lane == "background" or view.first is not None:
            return
        own_s = prefill_s(cost, self._n_batch, max(1, sequence.known - covered), covered)
        arrived = now if sequence.preempted else view.arrived
        first = first_token(self._ends, arrived, view.path, own_s)
        sequence.wait_for(first)
        self._ends.update(
            {node: since + own_s for node, since in zip(view.path, first.since, strict=True)}
        )
        self.changed = True

    def due(self, sequence: Sequence) -> float | None:
        """Return when a prompt is due that waits for a slot; None if it has no deadline.

        What is not noted yet comes behind all that is.
        """
        if self.memory.cost is None or sequence.lane == "background":
            return None
        return math.inf if sequence.view.first is None else deadline(self.known, sequence.view)

    def refresh(self, now: float, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Search the stretch of the prompts that have slots or wait for one, if anything has changed."""
        share = self.memory.prompts_share
        if not self.changed and abs(share - self._share) <= CHANGED * self._share:
            return
        self.changed, self._share = False, share
        in_line = tuple(waiting)
        views = [
            (sequence.view, sequence.view.first)
            for sequence in chain(running, in_line)
            if not sequence.view.started
        ]
        prompts = [(view, first) for view, first in views if first is not None]
        self._ends = {node: at for node, at in self._ends.items() if at > now}
        if not prompts:
            self.known, self.late_from = FirstTokens(), math.inf
            return
        level = level_of([view.path for view, _ in prompts])
        waited = []
        for view, first in prompts:
            left_s = first.own_s * view.due / max(1, view.due + view.uncached)
            since = first.since[min(level, len(first.since) - 1)]
            waited.append(Wanted(since, first.own_s, left_s))
        waited.sort()
        self.known = FirstTokens(common_stretch(now, waited, share, self.known.stretch), level)
        self.late_from = min(
            [
                sequence.waiting(self.due(sequence)).late_from
                for sequence in in_line
                if not sequence.preempted
            ],
            default=math.inf,
        )
