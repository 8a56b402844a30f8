"""The metrics in Prometheus' text format, made from what a `metrics` request answers.

So whoever has the JSON can make it, the command line above all, and the daemon needs nothing of
it. Names get ``uma_`` before them, and counters ``_total`` behind where it is not there.
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
_JSON_ONLY = ("info", "scorecard")  # one family for all of the first; rates are a scraper's own


def prometheus(figures: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]] = _NONE) -> str:
    """Return every metric of `figures` that is known and in the catalogue.

    Of `models`, each with figures of its own, metrics that are not the daemon's get the label ``model``.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exposition(figures, models))
    return generate_latest(registry).decode()


class _Exposition(Collector):
    """Gives the figures to prometheus_client, which asks once."""

    def __init__(self, figures: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> None:
        self._figures, self._models = figures, models

    def collect(self) -> Iterator[Family | InfoMetricFamily]:
        info = InfoMetricFamily("uma", "What is running.")
        for name, figures in self._models.items() or [("", self._figures)]:
            infos = {m.name: str(figures.get(m.name, "")) for m in METRICS if m.kind == "info"}
            info.add_metric([], infos | ({"model": name} if name else {}))
        yield info
        for metric in METRICS:
            if metric.kind not in _JSON_ONLY and (family := self._family(metric)) is not None:
                yield family

    def _family(self, metric: Metric) -> Family | None:
        """Return a metric, of the daemon or of each model; None if nobody has it."""
        if metric.of_daemon or not self._models:
            found: dict[tuple[str, ...], Any] = {(): self._figures.get(metric.name)}
        else:
            found = {(name,): each.get(metric.name) for name, each in self._models.items()}
        known = {labels: value for labels, value in found.items() if value is not None}
        if not known:
            return None
        of_models = [_MODEL] if () not in known else []
        family = _empty(metric, of_models)
        for labels, value in known.items():
            _add(family, metric, labels, value)
        return family


def _empty(metric: Metric, labels: Sequence[str]) -> Family:
    name, text = f"uma_{metric.name}", f"{metric.help} Unit: {metric.unit}."
    if metric.kind == "histogram":
        return HistogramMetricFamily(name, text, labels=labels)
    own = [*labels, metric.label] if metric.label else labels
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(name, text, labels=own)


def _add(family: Family, metric: Metric, labels: Sequence[str], value: Any) -> None:
    if isinstance(family, HistogramMetricFamily):
        buckets = [(bound, float(count)) for bound, count in value["buckets"].items()]
        family.add_metric(labels, buckets, value["sum"])
        return
    for label, number in value.items() if metric.label else [("", value)]:
        family.add_metric([*labels, label] if metric.label else labels, float(number))
