"""When the first tokens of all requests are due, whether they have a slot or wait for one.

A prompt is noted once, when it gets a slot or has to wait for one, and keeps what it is noted with. Their
common stretch is searched again when a prompt has come or is done (:mod:`uma_trio.policy.stretch`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

from attrs import evolve

from uma_trio.engine.sequences import Sequence
from uma_trio.policy.state import FirstToken, FirstTokens, Memory
from uma_trio.policy.stretch import (
    CHANGED,
    OwnMachine,
    ShortLane,
    Wanted,
    common_stretch,
    deadline,
    eligible_from,
    is_brief,
    level_of,
    prefill_s,
)


class FirstTokenBook:
    """What is `known` of first tokens. For the engine's thread; `memory` is that of the latest plan.

    A prompt of at most `short_tokens` may be a short one.
    """

    def __init__(self, n_batch: int, short_tokens: int) -> None:
        self.known = FirstTokens()
        self.memory = Memory()
        self.late_from = math.inf  # from then on a request that waits for a slot would be late
        self.changed = False  # a prompt has arrived or ended since the latest search
        self._n_batch = n_batch
        self._short_tokens = min(n_batch, short_tokens)
        self._machines: defaultdict[int, OwnMachine] = defaultdict(OwnMachine)  # by sender
        self._share = 1.0
        self._lane = ShortLane()

    def note(self, sequence: Sequence, covered: int, now: float) -> None:
        """Note a prompt that has arrived, of which `covered` tokens need not be computed.

        One that has lost its slot has arrived `now`.
        """
        cost, view = self.memory.cost, sequence.view
        if cost is None or view.lane == "background" or view.first is not None:
            return
        n = max(1, sequence.known - covered)
        own_s = prefill_s(cost, self._n_batch, n, covered)
        arrived = now if sequence.preempted else view.arrived
        for node in view.path:
            self._machines[node].add(view.key, arrived, own_s)
        ends = tuple([self._machines[node].ends()[view.key] for node in view.path])
        first = FirstToken(arrived, own_s, ends)
        if n <= self._short_tokens and is_brief(cost, own_s):
            eligible_at = eligible_from(self.known, first)
            first = evolve(first, short=self._lane.admit(arrived, own_s, eligible_at))
        sequence.wait_for(first)
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
        prompts = [s for s in chain(running, in_line) if not s.view.started and s.view.first]
        self._follow_machines(now, prompts)
        if not prompts:
            self.known, self.late_from = FirstTokens(), math.inf
            return
        level = level_of([sequence.view.path for sequence in prompts])
        waited = []
        for view, first in [(s.view, s.view.first) for s in prompts]:
            if first is not None:
                left_s = first.own_s * view.due / max(1, view.due + view.uncached)
                end = first.ends[min(level, len(first.ends) - 1)]
                waited.append(Wanted(first.arrived, end - first.arrived, left_s))
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

    def _follow_machines(self, now: float, prompts: Iterable[Sequence]) -> None:
        idle = [node for node, machine in self._machines.items() if machine.is_idle(now)]
        for node in idle:
            del self._machines[node]
        ends = {node: machine.ends() for node, machine in self._machines.items()}
        for sequence in prompts:
            view, first = sequence.view, sequence.view.first
            if first is None:
                continue
            levels = zip(view.path, first.ends, strict=True)
            found = tuple([ends.get(node, {}).get(view.key, end) for node, end in levels])
            if found != first.ends:
                sequence.wait_for(evolve(first, ends=found))
