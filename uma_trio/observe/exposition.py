"""The metrics in Prometheus' text format, made from the JSON answer of a `metrics` request.

Names begin with ``uma_`` and follow Prometheus' conventions: base units (seconds, bytes), ``_total`` for counters;
where vLLM or llama.cpp has the same metric, its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from uma_trio.observe.catalogue import METRICS, Metric

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_MODEL = "model"
_NONE: Mapping[str, Mapping[str, Any]] = {}


def prometheus(figures: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]] = _NONE) -> str:
    """Return every known metric of `figures`.

    Metrics that are not the daemon's are taken from each of `models`, if there are any, with the label ``model``.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exposition(figures, models))
    return generate_latest(registry).decode()


class _Exposition(Collector):
    """Hands the figures to prometheus_client."""

    def __init__(self, figures: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> None:
        self._figures, self._models = figures, models

    def collect(self) -> Iterator[Family | InfoMetricFamily]:
        info = InfoMetricFamily("uma", "What runs.")
        for name, figures in self._models.items() or [("", self._figures)]:
            labels = {"model": name or str(figures.get("model", "")), **(figures.get("info") or {})}
            info.add_metric([], labels)
        yield info
        for metric in METRICS:
            if metric.kind == "info" or not metric.prometheus:
                continue
            if (family := self._family(metric)) is not None:
                yield family

    def _family(self, metric: Metric) -> Family | None:
        """Return a metric of the daemon or of each model; None if it is unknown."""
        if metric.of_daemon or not self._models:
            found: dict[tuple[str, ...], Any] = {(): self._figures.get(metric.name)}
        else:
            found = {(name,): each.get(metric.name) for name, each in self._models.items()}
        known = {labels: value for labels, value in found.items() if value is not None}
        if not known:
            return None
        family = _empty(metric, [] if () in known else [_MODEL])
        for labels, value in known.items():
            _add(family, metric, labels, value)
        return family


def _empty(metric: Metric, labels: Sequence[str]) -> Family:
    name, text = f"uma_{metric.prometheus}", f"{metric.help} {metric.use}"
    if metric.kind == "histogram":
        return HistogramMetricFamily(name, text, labels=labels)
    own = [*labels, metric.label] if metric.label else labels
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(name, text, labels=own)


def _add(family: Family, metric: Metric, labels: Sequence[str], value: Any) -> None:
    base = metric.base
    if isinstance(family, HistogramMetricFamily):
        buckets = [
            (bound if bound == "+Inf" else f"{float(bound) * base:g}", float(count))
            for bound, count in value["buckets"].items()
        ]
        family.add_metric(labels, buckets, value["sum"] * base)
        return
    for label, number in value.items() if metric.label else [("", value)]:
        family.add_metric([*labels, label] if metric.label else labels, float(number) * base)
