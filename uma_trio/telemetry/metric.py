"""A metric's declaration."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

Kind = Literal["counter", "gauge", "histogram", "info", "scorecard"]


@frozen
class Metric:
    """One metric. `label` names the key of a metric with one value for each key, such as a lane.

    One `of_daemon` is counted once for all models; the others are of each.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    label: str = ""
    of_daemon: bool = False
