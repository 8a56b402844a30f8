"""The machine that a trace shows: its sizes, what attention costs, its noise, its pauses.

The time of a tick depends on its kind (tokens, and rows that give logits) and on the KV cells that
attention looks at. What is left over is noise. Noise is drawn from what was measured around the
same time: other programs slow a machine for seconds at a time, and no simulation of ours foretells
those, so they are taken as they were, like the arrivals.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from attrs import frozen

from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import TracedTick
from uma_trio.policy.state import SchedulerState
from uma_trio_sim.machine import Profile

ENOUGH = 20  # ticks of like size from which noise is drawn, and not from all
NEIGHBOURS = 8  # ticks before and after a moment from which its noise is drawn
TYPICAL = 3  # ticks of a kind from which its own median is taken, and not its neighbours'
LEAST = 0.2  # of a tick is not attention, whatever the slopes say
SPIKE = 1.5  # a tick this many times its kind's median tells of noise and is in no slope

Kind = tuple[int, int]  # tokens of a tick, and how many of them give logits


@frozen
class Load:
    """What of a tick takes time, by its plan: its kind, and the cells that attention looks at."""

    kind: Kind
    own_cells: float  # by each token of its own sequence, summed
    all_cells: float  # by each token in the whole cache, summed

    @classmethod
    def of(cls, state: SchedulerState, plan: Plan) -> Load:
        """Return the load of a plan."""
        views = {view.key: view for view in state.sequences}
        rows = own = 0
        for item in plan.items:
            view = views[item.key]
            rows += view.rows(item.n_tokens, item.n_drafts)
            own += item.n_tokens * view.computed + item.n_tokens * item.n_tokens // 2
        n = plan.n_tokens + plan.ballast
        return cls((n, rows + plan.ballast), own, float(n * state.used_cells))


@frozen
class Fitted:
    """Seconds of a decode: a time for each kind that was seen, and what each cell adds."""

    by_kind: dict[Kind, float]
    between: Staircase  # by tokens, for kinds that were not seen
    per_cell: tuple[float, float]

    def __call__(self, load: Load) -> float:
        """Return the seconds."""
        seconds = self.by_kind.get(load.kind)
        return (self.between(load.kind[0]) if seconds is None else seconds) + self.cells_s(load)

    def cells_s(self, load: Load) -> float:
        """Return what attention takes."""
        return self.per_cell[0] * load.own_cells + self.per_cell[1] * load.all_cells


def fit(loads: Sequence[Load], seconds: Sequence[float]) -> Fitted:
    """Return the machine whose ticks took those `seconds`."""
    kinds: dict[Kind, list[int]] = {}
    for i, load in enumerate(loads):
        kinds.setdefault(load.kind, []).append(i)
    calm = _calm(kinds, seconds)
    per_cell = _per_cell(calm, loads, seconds)
    bare = Fitted({}, Staircase((1,), (0.0,)), per_cell)
    left = [max(LEAST * s, s - bare.cells_s(x)) for x, s in zip(loads, seconds, strict=True)]
    by_kind = {
        kind: median(left[i] for i in members)
        for kind, members in kinds.items()
        if len(members) >= TYPICAL
    }
    return Fitted(
        by_kind, _between([(x.kind[0], s) for x, s in zip(loads, left, strict=True)]), per_cell
    )


def _between(ticks: Iterable[tuple[int, float]]) -> Staircase:
    """Return the time by tokens; counts that were seldom seen share a time with their neighbours."""
    by_size: dict[int, float] = {}
    together: list[tuple[int, float]] = []
    ordered = sorted(ticks)
    for i, (n, seconds) in enumerate(ordered):
        together.append((n, seconds))
        last = i == len(ordered) - 1
        if last or (len(together) >= TYPICAL and ordered[i + 1][0] > n):
            by_size[round(median(n for n, _ in together))] = median(s for _, s in together)
            together = []
    return Staircase(tuple(by_size), tuple(by_size.values()))


def _calm(kinds: dict[Kind, list[int]], seconds: Sequence[float]) -> list[list[int]]:
    """Return the ticks of each kind without its spikes; kinds with one tick tell no slope."""
    found = []
    for members in kinds.values():
        most = SPIKE * median(seconds[i] for i in members)
        found.append([i for i in members if seconds[i] <= most])
    return [members for members in found if len(members) > 1]


def _per_cell(
    groups: Sequence[Sequence[int]], loads: Sequence[Load], seconds: Sequence[float]
) -> tuple[float, float]:
    """Return what a cell adds, from how ticks of the same kind differ; never less than nothing."""
    x, y = [], []
    for members in groups:
        cells = np.array([(loads[i].own_cells, loads[i].all_cells) for i in members], float)
        took = np.array([seconds[i] for i in members])
        # Each is compared with the one before it: a slow phase of a machine lasts longer than that.
        x.append(np.diff(cells, axis=0))
        y.append(np.diff(took))
    if not x:
        return 0.0, 0.0
    cells, took = np.concatenate(x), np.concatenate(y)
    for columns in ([0, 1], [0], [1]):
        part = cells[:, columns]
        slopes, _, rank, _ = np.linalg.lstsq(part, took, rcond=None)
        if rank == len(columns) and (slopes >= 0).all():
            own_all = dict(zip(columns, slopes.tolist(), strict=True))
            return own_all.get(0, 0.0), own_all.get(1, 0.0)
    return 0.0, 0.0


class Nearby:
    """What was measured of a machine, by when it was and by the size of the tick.

    A value is drawn from those that were measured around the same time, in ticks of like size if
    there are enough of them.
    """

    def __init__(self, seen: Iterable[tuple[float, int, float]], otherwise: float) -> None:
        """`seen` has moment, size and value, by moment; `otherwise` is drawn when it is empty."""
        self._all: list[tuple[float, float]] = []
        self._alike: dict[int, list[tuple[float, float]]] = {}
        for at, n, value in seen:
            self._all.append((at, value))
            self._alike.setdefault(_size(n), []).append((at, value))
        self._otherwise = otherwise

    def __call__(self, draw: random.Random, n: int, now: float) -> float:
        """Return a value for a tick of that size at that moment."""
        known = self._alike.get(_size(n), [])
        if len(known) < ENOUGH:
            known = self._all
        if not known:
            return self._otherwise
        i = bisect_right(known, (now, math.inf))
        first = max(0, min(i - NEIGHBOURS, len(known) - 2 * NEIGHBOURS))
        return draw.choice(known[first : first + 2 * NEIGHBOURS])[1]


def profile(ticks: Sequence[TracedTick]) -> Profile:
    """Return the machine of a trace: its sizes, how ticks scattered around them, and its pauses.

    A policy starts with the cost model that the recorded one had, or else with what the trace
    shows. The machine overlaps if a tick of the trace was prepared beside the one before it.
    """
    good = [tick for tick in ticks if tick.status == 0]
    loads = [Load.of(tick.state, tick.plan) for tick in good]
    fitted = fit(loads, [tick.decode_s for tick in good])
    zero = min((view.arrived for view in ticks[0].state.sequences), default=ticks[0].state.now)
    scatter = Nearby(
        (
            (tick.state.now - zero, load.kind[0], tick.decode_s / fitted(load))
            for tick, load in zip(good, loads, strict=True)
        ),
        1.0,
    )
    pauses = [
        (tick.state.now - zero, len(tick.state.sequences), tick.host_s)
        for tick in ticks
        if tick.host_s > 0
    ]
    typical = median([host_s for _, _, host_s in pauses] or [0.0])

    def cost(_work: Work, state: SchedulerState, plan: Plan) -> float:
        return fitted(Load.of(state, plan))

    believed = ticks[0].state.memory.cost or CostModel(fitted.between, host_s=typical)
    name = f"a trace of {len(ticks)} ticks"
    overlaps = any(tick.state.prepared for tick in ticks)
    return Profile(name, cost, believed, scatter, Nearby(pauses, typical), overlaps)


def _size(n: int) -> int:
    """Ticks of like size scatter alike: 1, 2 to 3, 4 to 7, and so on."""
    return n.bit_length()
