"""This machine's cost model, measured or recalled: what the daemon starts with."""

from __future__ import annotations

import time
from pathlib import Path

from attrs import frozen

from uma_trio.backend.base import Backend
from uma_trio.costing.calibrate import Calibration
from uma_trio.costing.store import Unusable, cost_file, recall, remember
from uma_trio.policy.cost import CostModel
from uma_trio.telemetry import log


@frozen
class Measured:
    """A cost model, and whether it was measured before; `file` is where it is kept."""

    cost: CostModel
    recalled: bool
    file: Path


def measured_cost(backend: Backend, *, fresh: bool = False) -> Measured:
    """Measure what ticks cost here, or recall it unless it has to be `fresh`.

    Uses the backend's slots, which must be empty, for two seconds, ten where a token takes long.
    """
    path, weight_bytes = cost_file(backend), backend.model.weight_bytes
    try:
        cost = None if fresh else recall(path, weight_bytes)
    except Unusable as why:
        report = log.get("cost").warning
        report("what was stored of this machine is measured again", file=str(path), why=str(why))
        cost = None
    if cost is not None:
        return Measured(cost, recalled=True, file=path)
    cost = Calibration(backend, time.perf_counter).measure()
    remember(path, cost, weight_bytes)
    return Measured(cost, recalled=False, file=path)
