"""The metrics in Prometheus' text format, made from what a `metrics` request answers.

So whoever has the JSON can make it, the command line above all, and the daemon needs nothing of
it. Names get ``uma_`` before them, and counters ``_total`` behind where it is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from uma_trio.telemetry.catalogue import METRICS
from uma_trio.telemetry.metric import Metric

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily

_JSON_ONLY = ("info", "scorecard")  # one family for all of the first; rates are a scraper's own


def prometheus(figures: Mapping[str, Any]) -> str:
    """Return every metric of `figures` that is known and in the catalogue."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exposition(figures))
    return generate_latest(registry).decode()


class _Exposition(Collector):
    """Gives the figures to prometheus_client, which asks once."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Family]:
        figures = self._figures
        infos = {m.name: str(figures.get(m.name, "")) for m in METRICS if m.kind == "info"}
        yield InfoMetricFamily("uma", "What is running.", value=infos)
        for metric in METRICS:
            value = figures.get(metric.name)
            if metric.kind not in _JSON_ONLY and value is not None:
                yield _family(metric, value)


def _family(metric: Metric, value: Any) -> Family:
    name, text = f"uma_{metric.name}", f"{metric.help} Unit: {metric.unit}."
    if metric.kind == "histogram":
        buckets = [(bound, float(count)) for bound, count in value["buckets"].items()]
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=value["sum"])
    labels = [metric.label] if metric.label else []
    family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
        name, text, labels=labels
    )
    for label, number in value.items() if metric.label else [("", value)]:
        family.add_metric([label] if metric.label else [], float(number))
    return family
