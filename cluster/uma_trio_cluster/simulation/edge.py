"""How requests are placed: as HAProxy does with the file of `uma-trio cluster`, and with full knowledge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from attrs import define, field, frozen

from uma_trio_cluster.haproxy import MOVES_WAITING, moves_at
from uma_trio_cluster.simulation.node import FluidNode, Job

STALE_S: Final = 0.5

Place = Callable[[Job, Sequence[FluidNode], float], FluidNode]
"""Chooses among the nodes that are up, at a time."""


@frozen(kw_only=True)
class Rules:
    """What the edge goes by. `moves_at` None is what the file has; 0: a pin never gives way to headroom."""

    pins: bool = True
    weights: bool = True
    moves_at: float | None = None
    stale_s: float = STALE_S


@define(eq=False)
class Edge:
    """HAProxy: pins, connections that it counts itself, and weights that are as old as the last agent check."""

    rules: Rules = field(factory=Rules)
    _pins: dict[int, int] = field(factory=dict)
    _weights: dict[int, int] = field(factory=dict)
    _told_at: dict[int, float] = field(factory=dict)

    def __call__(self, job: Job, nodes: Sequence[FluidNode], now: float) -> FluidNode:
        """Return the node of a request, and pin its conversation there."""
        weights = {node.number: self._weight(node, now) for node in nodes}
        by_number = {node.number: node for node in nodes}
        pinned = by_number.get(self._pins.get(job.asked.chat, -1)) if self.rules.pins else None
        if pinned is not None and not self._gives_way(pinned, weights):
            return pinned
        best = min(nodes, key=lambda node: (node.connections + 1) / weights[node.number])
        job.moved = pinned is not None and best is not pinned
        self._pins[job.asked.chat] = best.number
        return best

    def _gives_way(self, pinned: FluidNode, weights: dict[int, int]) -> bool:
        if len(pinned.waiting) - 2 * pinned.slots > MOVES_WAITING:
            return True
        at = moves_at(len(weights)) if self.rules.moves_at is None else self.rules.moves_at
        return at > 0 and weights[pinned.number] * at < max(weights.values())

    def _weight(self, node: FluidNode, now: float) -> int:
        """Return what the agent said last; each is asked at moments of its own."""
        if not self.rules.weights:
            return 100
        number, stale = node.number, self.rules.stale_s
        phase = (number * 0.618) % 1.0 * stale
        checked = now if stale <= 0 else ((now - phase) // stale) * stale + phase
        if number not in self._weights or self._told_at[number] < checked or stale <= 0:
            self._told_at[number] = now
            self._weights[number] = node.percent()
        return self._weights[number]


def full_knowledge(job: Job, nodes: Sequence[FluidNode], now: float) -> FluidNode:
    """Return the node with the earliest first token, by exact backlogs and caches."""
    return min(nodes, key=lambda node: node.wait_s(job.asked))
