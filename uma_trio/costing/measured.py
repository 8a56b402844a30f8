"""This machine's cost model, measured or recalled: what the daemon starts with."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from attrs import evolve, frozen

from uma_trio.backend.base import Backend
from uma_trio.costing.calibrate import Calibration
from uma_trio.costing.neighbours import BUSY, Reader, cpu_times, others_share
from uma_trio.costing.store import Unusable, cost_file, recall, remember
from uma_trio.policy.cost import CostModel
from uma_trio.telemetry import log


@frozen
class Measured:
    """A cost model, and whether it was measured before; `file` is where it is kept."""

    cost: CostModel
    recalled: bool
    file: Path


def measured_cost(
    backend: Backend,
    *,
    fresh: bool = False,
    on_progress: Callable[[float], None] | None = None,
    read: Reader = cpu_times,
) -> Measured:
    """Measure what ticks cost here, or recall it unless it has to be `fresh`.

    Uses the backend's slots, which must be empty, for two seconds, ten where a token takes long. `on_progress` is
    told the part of this time that has passed. A table that was measured while other programs used a tenth of the
    machine or more is marked with their share. Where a GPU computes beside the host, it is not: they hardly matter.
    """
    path, weight_bytes = cost_file(backend), backend.model.weight_bytes
    try:
        cost = None if fresh else recall(path, weight_bytes)
    except Unusable as why:
        log.get("cost").warning(
            "what was stored of this machine is measured again", file=str(path), why=str(why)
        )
        cost = None
    if cost is not None:
        return Measured(cost, recalled=True, file=path)
    before = read()
    cost = Calibration(backend, time.perf_counter, on_progress).measure()
    others = 0.0 if backend.traits.overlaps else others_share(before, read())
    if others >= BUSY:
        cost = evolve(cost, others=others)
    remember(path, cost, weight_bytes)
    return Measured(cost, recalled=False, file=path)
