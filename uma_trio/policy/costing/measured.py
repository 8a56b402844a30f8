"""This machine's cost model, measured or recalled: what the daemon starts with."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from attrs import evolve, frozen

from uma_trio.backend.base import Backend
from uma_trio.backend.polite import politely
from uma_trio.policy.cost import CostModel
from uma_trio.policy.costing.calibrate import ONE, Calibration
from uma_trio.policy.costing.neighbours import BUSY, Reader, cpu_times, others_share
from uma_trio.policy.costing.stopwatch import Stopwatch
from uma_trio.policy.costing.store import Unusable, cost_file, recall, remember


@frozen
class Measured:
    """A cost model, and whether it was measured before; `file` is where it is kept.

    `unusable` is why what was kept there could not be used, "" if it could.
    """

    cost: CostModel
    recalled: bool
    file: Path
    unusable: str = ""


@frozen
class Neighbour:
    """A model that is computed on the same machine: what its ticks cost, and how large it is."""

    cost: CostModel
    backend: Backend


def measured_cost(
    backend: Backend,
    *,
    beside: Neighbour | None = None,
    fresh: bool = False,
    on_progress: Callable[[float], None] | None = None,
    read: Reader = cpu_times,
) -> Measured:
    """Measure what ticks cost here, or recall it unless it has to be `fresh`.

    Uses the backend's slots, which must be empty, for two seconds, ten where a token takes long. `on_progress` is
    told the part of this time that has passed. A table that was measured while other programs used a tenth of the
    machine or more is marked with their share. Where a GPU computes beside the host, it is not: they hardly matter.

    `beside` a model that others use nothing is measured, which would take the machine from them for seconds: what is not known is
    concluded from that one, and measured when the daemon is idle. One token is computed in any case, so that the first
    tick of a request finds weights and graphs in memory.
    """
    path, weight_bytes = cost_file(backend), backend.model.weight_bytes
    try:
        cost = None if fresh else recall(path, weight_bytes)
        unusable = ""
    except Unusable as error:
        cost, unusable = None, str(error)
    if beside is not None:
        politely(partial(Stopwatch(backend, time.perf_counter).time, ONE))
        alike = beside.backend.traits.shape_costs == backend.traits.shape_costs
        if cost is None and alike and not fresh:
            return Measured(_concluded(beside, backend), False, path, unusable)
    if cost is not None:
        return Measured(cost, recalled=True, file=path)
    before = read()
    cost = Calibration(backend, time.perf_counter, on_progress).measure()
    others = 0.0 if backend.traits.overlaps else others_share(before, read())
    if others >= BUSY:
        cost = evolve(cost, others=others)
    remember(path, cost, weight_bytes)
    return Measured(cost, False, path, unusable)


def _concluded(known: Neighbour, backend: Backend) -> CostModel:
    """Return what ticks probably cost, by the sizes of both models; it is marked as to be measured again.

    A token reads all weights, a long prompt computes with all parameters: the larger ratio counts, since a tick that
    takes longer than predicted is late for readers, and one that is shorter is corrected by the next ones.
    """
    here, there = backend.model, known.backend.model
    ratios = [
        mine / other
        for mine, other in (
            (here.weight_bytes, there.weight_bytes),
            (float(here.n_params), float(there.n_params)),
        )
        if mine > 0 and other > 0
    ]
    cost = known.cost.times(known.cost.scale * max(ratios, default=1.0))
    return evolve(cost, scale=1.0, error=0.0, table_error=0.0, others=1.0)
