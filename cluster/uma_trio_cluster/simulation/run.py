"""A fleet in virtual time: one heap of events, from the first request to the last first token."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

from uma_trio_cluster.simulation.edge import Place
from uma_trio_cluster.simulation.node import FluidNode, Job, Rates
from uma_trio_cluster.simulation.requests import BLOCK, TraceRequest

_AWAY_S: Final = 60.0  # from a death until the machine is there again, with an empty cache


@frozen(kw_only=True)
class Machines:
    """How many machines, and what each is. One dies every `death_every_s`, in turn; 0: none does."""

    n: int
    rates: Rates
    slots: int = 16
    blocks: int = 4000
    death_every_s: float = 0.0


@frozen(kw_only=True)
class Result:
    """What came of it: times to first tokens in seconds, sorted, and shares of all prompt tokens and turns."""

    ttft_s: tuple[float, ...]
    cached: float
    moved: float
    lost: int
    sent_again: int
    jobs: tuple[Job, ...] = field(repr=False, default=())

    def quantile(self, share: float) -> float:
        """Return a quantile of the times to first tokens."""
        return self.ttft_s[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]


@define(eq=False)
class _Fleet:
    nodes: list[FluidNode]
    place: Place
    events: list[tuple[float, int, str, object, int]] = field(factory=list)
    jobs: list[Job] = field(factory=list)
    lost: int = 0
    again: int = 0
    _count: int = 0

    def put(self, at: float, what: str, about: object, version: int = 0) -> None:
        self._count += 1
        heapq.heappush(self.events, (at, self._count, what, about, version))

    def send(self, job: Job, now: float) -> None:
        up = [node for node in self.nodes if node.up]
        node = self.place(job, up, now)
        node.take(job, now)
        self.plan(node)

    def plan(self, node: FluidNode) -> None:
        node.version += 1
        if (at := node.next_at()) < math.inf:
            self.put(at, "node", node, node.version)

    def die(self, node: FluidNode, now: float) -> None:
        if not node.up or sum(one.up for one in self.nodes) == 1:
            return
        node.advance(now)
        again, lost = node.die()
        node.version += 1
        self.lost += lost
        self.again += len(again)
        for job in again:
            self.send(job, now)
        self.put(now + _AWAY_S, "join", node)


def simulate(requests: Sequence[TraceRequest], machines: Machines, place: Place) -> Result:
    """Send the requests to so many machines, placed as `place` says; every one gets its first token."""
    nodes = [
        FluidNode(i, machines.rates, machines.slots, machines.blocks, BLOCK)
        for i in range(machines.n)
    ]
    fleet = _Fleet(nodes, place)
    for asked in requests:
        fleet.put(asked.at, "asked", asked)
    if machines.death_every_s > 0:
        last = max(asked.at for asked in requests)
        for i in range(int(last / machines.death_every_s)):
            fleet.put((i + 1) * machines.death_every_s, "die", nodes[i % machines.n])
    while fleet.events:
        now, _, what, about, version = heapq.heappop(fleet.events)
        _happen(fleet, now, what, about, version)
    times = tuple(sorted(job.first_at - job.at for job in fleet.jobs))
    tokens = sum(job.asked.prompt for job in fleet.jobs)
    return Result(
        ttft_s=times,
        cached=sum(job.cached for job in fleet.jobs) / max(1, tokens),
        moved=sum(job.moved for job in fleet.jobs) / max(1, len(fleet.jobs)),
        lost=fleet.lost,
        sent_again=fleet.again,
        jobs=tuple(fleet.jobs),
    )


def _happen(fleet: _Fleet, now: float, what: str, about: object, version: int) -> None:
    if isinstance(about, TraceRequest):
        job = Job(about, now)
        fleet.jobs.append(job)
        fleet.send(job, now)
    elif isinstance(about, FluidNode):
        if what == "die":
            fleet.die(about, now)
        elif what == "join":
            about.advance(now)
            about.up = True
        elif version == about.version:
            about.end_what_is_due(now)
            fleet.plan(about)
