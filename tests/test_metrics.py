"""Metrics: what is counted, what it is called, and that counting is cheap and cannot fail."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import define

from tests.drafts_kit import Babbler, speaking
from tests.engine_kit import Bench, Sink
from tests.machine_kit import TRUTH, Clock, Machine
from uma_trio.api.llama.metrics import llama_metrics
from uma_trio.engine.inbox import Inbox
from uma_trio.engine.loop import Engine
from uma_trio.engine.messages import SamplingParams, Submit, Targets
from uma_trio.engine.outlet import Outlet
from uma_trio.engine.planner import EngineSettings
from uma_trio.observe.catalogue import COLUMNS, METRICS
from uma_trio.observe.exposition import prometheus
from uma_trio.observe.histogram import Histogram, Recent, bounds_ms
from uma_trio.observe.memory import (
    SharedMemory,
    proportional_bytes,
    resident_bytes,
    storage_bytes,
)
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.scorecard import Scorecard
from uma_trio.observe.table_file import TableFile
from uma_trio.policy.cost import Traffic
from uma_trio.policy.deadline import deadline
from uma_trio.policy.pipeline import Policy
from uma_trio.policy.state import Contract
from uma_trio.words import Lane
from uma_trio_sim.fake import FakeBackend

SPECIFIED = (
    *("model", "sessions", "active_sessions", "parked_sessions", "tokens_total", "rss_gb"),
    *("tokens_generated_total", "batch_calls_total", "avg_batch", "last_batch_size"),
    *("decode_ms_last", "decode_ms_ewma", "decode_ms_avg", "p50_ms", "p95_ms", "p99_ms"),
    *("ttft_ms", "inter_token_ms", "decode_ms", "ttf5_ms", "worst_pause_ms"),
    *("tokens_per_s_at_cap", "latency_cap", "scheduler_efficiency", "copy_free_ratio"),
    *("tokens_per_tick_decode", "tokens_per_tick_prefill", "served_decoders"),
    *("sum_bmt_mb_per_token", "sum_bmt_mb_last", "sum_bmt_budget_mb_last"),
    *("prefill_guard_active", "ticks_over_budget", "sampling_ms_last"),
    *("time_logits_to_first_chunk", "overlap_active", "gpu_idle_pct"),
    "residency_churn_mb_per_token",
)


BATCH: dict[str, Any] = {
    "decode_tokens": 3,
    "prefill_tokens": 5,
    "rows": 3,
    "rows_in_place": 3,
    "decode_s": 0.020,
    "host_s": 0.001,
    "sampling_s": 0.0005,
}


def summary(value: object) -> dict[str, Any]:
    """Return a histogram as the snapshot shows it."""
    assert isinstance(value, dict)
    return value


def ticked(metrics: Metrics, *, decode: int = 3, prefill: int = 5, ms: float = 20.0) -> None:
    """Record one batch."""
    batch = {"decode_tokens": decode, "prefill_tokens": prefill, "rows": decode}
    metrics.tick(**{**BATCH, **batch, "rows_in_place": decode, "decode_s": ms / 1e3})


def test_every_declared_metric_is_in_the_snapshot_and_no_other() -> None:
    """The catalogue is the whole truth, also before anything has happened."""
    assert set(Metrics().snapshot()) == {metric.name for metric in METRICS} | {"scorecard"}
    assert len(METRICS) <= 70


def test_every_metric_says_what_an_operator_does_with_it_and_no_name_is_used_twice() -> None:
    """Names in Prometheus have base units, and counters end in _total."""
    assert all(metric.help and metric.use for metric in METRICS)
    exported = [metric for metric in METRICS if metric.prometheus and metric.kind != "info"]
    assert len({metric.prometheus for metric in exported}) == len(exported)
    for metric in exported:
        assert metric.prometheus.endswith("_total") is (metric.kind == "counter"), metric.name
        assert not metric.prometheus.endswith(("_ms", "_gb", "_mb", "_pct")), metric.name
        if metric.unit in ("ms", "seconds"):
            assert "seconds" in metric.prometheus, metric.name


@pytest.mark.parametrize("name", SPECIFIED)
def test_a_specified_figure_is_in_the_json_and_in_the_scorecard(name: str) -> None:
    """Also those that no platform measures yet: they are null."""
    metrics = Metrics()
    Scorecard(metrics, 1.0).update(None)
    shown = metrics.snapshot()
    assert name in shown
    assert name in COLUMNS
    assert name in summary(shown["scorecard"])


def test_the_snapshot_is_json_from_the_first_moment() -> None:
    """What is not known yet is null, never NaN."""
    json.dumps(Metrics().snapshot(), allow_nan=False)


def test_ticks_add_up() -> None:
    """Counters count, means are means, and the last batch is the last."""
    metrics = Metrics()
    ticked(metrics, decode=3, prefill=5, ms=20)
    ticked(metrics, decode=1, prefill=0, ms=10)
    shown = metrics.snapshot()
    assert shown["tokens_total"] == 9
    assert shown["prompt_tokens_total"] == 5
    assert shown["tokens_generated_total"] == 4
    assert shown["batch_calls_total"] == 2
    assert shown["last_batch_size"] == shown["served_decoders"] == 1
    assert shown["avg_batch"] == 4.5
    assert shown["decode_ms_last"] == pytest.approx(10)
    assert shown["decode_ms_avg"] == pytest.approx(15)
    assert shown["decode_ms_ewma"] == pytest.approx(18)
    assert shown["copy_free_ratio"] == 1.0


def test_who_is_there_is_what_was_said_last() -> None:
    """Gauges follow the engine's latest word."""
    metrics = Metrics()
    metrics.load(running=3, waiting=2, parked=1, cells_used=100)
    metrics.describe(model="m", backend="b", policy="p", version="0.1.0", n_ctx=4096, n_slots=8)
    shown = metrics.snapshot()
    assert [shown[f"{what}_sessions"] for what in ("active", "queued", "parked")] == [3, 2, 1]
    assert shown["kv_cells_used"] == 100
    assert (shown["kv_cells_total"], shown["slots_total"], shown["model"]) == (4096, 8, "m")


def test_rows_that_were_copied_lower_the_copy_free_ratio() -> None:
    """The ratio is of rows, not of ticks."""
    metrics = Metrics()
    metrics.tick(**{**BATCH, "rows": 3, "rows_in_place": 1})
    metrics.tick(**{**BATCH, "rows": 1, "rows_in_place": 1})
    assert metrics.snapshot()["copy_free_ratio"] == 0.5


def test_connections_requests_and_errors_are_counted_by_kind() -> None:
    """What ended is told apart by how, what was refused by its code."""
    metrics = Metrics()
    metrics.session_opened()
    metrics.session_opened()
    metrics.session_closed()
    metrics.finished("stop", 0.010)
    metrics.finished("error", 0.020)
    metrics.error_sent("E_PROTO_001")
    metrics.accept_failed()
    metrics.preempted()
    shown = metrics.snapshot()
    assert shown["sessions"] == 1
    assert shown["requests_total"] == {"stop": 1, "length": 0, "cancelled": 0, "error": 1}
    assert shown["errors_total"] == {"E_PROTO_001": 1, "accept": 1}
    assert shown["preemptions_total"] == 1


def test_percentiles_follow_the_latest_gaps() -> None:
    """A slow hour long ago does not hide that it is quick now."""
    metrics = Metrics()
    for gap in [1.0] * 5000 + [0.010] * 4096:
        metrics.inter_token(gap)
    shown = metrics.snapshot()
    assert shown["p50_ms"] == shown["p99_ms"] == pytest.approx(10)
    histogram = shown["inter_token_ms"]
    assert isinstance(histogram, dict)
    assert histogram["count"] == 9096
    assert histogram["p95"] == pytest.approx(1000, rel=0.02)


@define
class Reading(Clock):
    """A clock that moves a little each time it is read, so that everything takes some time."""

    def __call__(self) -> float:
        """Return the time."""
        self.now += 1e-5
        return self.now


class Busy:
    """A restless machine on which people read while more prompts come than there are slots."""

    def __init__(self, policy: Policy) -> None:
        clock, beat = Reading(), count()
        self.inbox, self.clock = Inbox(1000), clock
        self.metrics = Metrics(clock)
        self.card = Scorecard(self.metrics, 1.0)
        noise = lambda: 4.0 if next(beat) % 7 == 6 else 1.0  # noqa: E731
        self.engine = Engine(
            Machine(TRUTH, clock, noise=noise, n_slots=9),
            policy,
            self.inbox,
            Outlet(lambda deliver: deliver()),
            self.metrics,
            clock,
            settings=EngineSettings(
                contract=Contract(bmt_budget=1e12),
                scratch_slots=1,
                cost=TRUTH,
                traffic=Traffic(weight_bytes=4e8, cell_bytes=1e4),
            ),
        )
        for handle in range(3):
            self.submit(handle, 20, 900, "interactive")
        self.submit(3, 20, 300, "background", credit=3)  # its reader falls behind
        for handle in range(4, 24):
            self.submit(handle, 200, 2, "interactive" if handle % 5 == 0 else "background")

    def submit(self, handle: int, prompt: int, answer: int, lane: Lane, credit: int = 999) -> None:
        """Ask for something, in less time than there can be."""
        self.inbox.submit(
            Submit(
                handle=handle,
                prompt=np.full(prompt, 97),
                max_tokens=answer,
                params=SamplingParams(ignore_eos=True),
                stop=(),
                lane=lane,
                client=handle,
                credit=credit,
                sink=Sink(),
                submitted=self.clock.now,
                targets=Targets(ttft_s=0.001),
            )
        )

    def ticks(self, n: int) -> bool:
        """Tick so often; return whether there is more to do."""
        return [self.engine.tick() for _ in range(n)][-1]

    def moved(self) -> dict[str, tuple[object, str]]:
        """Return what each figure was when it first differed, and Prometheus' text of then.

        A figure that never moved is not there.
        """
        before, found = self.metrics.snapshot(), dict[str, tuple[object, str]]()
        while self.ticks(10):
            now = self.metrics.snapshot()
            fresh = {k: v for k, v in now.items() if k not in found and v != before[k]}
            if fresh:
                text = prometheus(json.loads(json.dumps(now, allow_nan=False)))
                found |= {name: (value, text) for name, value in fresh.items()}
        return found


MOVING = (
    *("decode_ms_last", "decode_ms_ewma", "decode_ms_avg", "sampling_ms_last", "decode_ms"),
    *("tokens_per_tick_decode", "tokens_per_tick_prefill", "served_decoders", "busy_seconds_total"),
    *("parked_sessions", "active_sessions", "queued_sessions", "queue_ms"),
    *("sum_bmt_mb_last", "sum_bmt_mb_per_token", "sum_bmt_budget_mb_last"),
    *("prefill_guard_active", "ticks_over_budget", "guard_infeasible_total"),
    *("slo_violations_total", "tokens_per_s_at_cap", "scheduler_efficiency", "copy_free_ratio"),
    *("worst_pause_ms", "ttf5_ms", "ttft_ms", "inter_token_ms", "p50_ms", "p95_ms", "p99_ms"),
    *("cost_error", "kv_cells_used", "tokens_total", "batch_calls_total", "requests_total"),
)


@pytest.fixture(scope="module")
def moved() -> dict[str, tuple[object, str]]:
    """What moved on a busy machine."""
    return Busy(deadline).moved()


@pytest.mark.parametrize("name", MOVING)
def test_a_figure_moves_in_a_run_of_the_engine_and_is_exported(
    name: str, moved: dict[str, tuple[object, str]]
) -> None:
    """As JSON, and in Prometheus' text unless a scraper computes it from others."""
    value, text = moved[name]
    assert value is not None
    (metric,) = [metric for metric in METRICS if metric.name == name]
    assert not metric.prometheus or f"\numa_{metric.prometheus}" in text


def test_the_scorecard_of_a_busy_machine_has_a_value_in_every_column(tmp_path: Path) -> None:
    """In the metrics as an object, in the file as a line; what nobody knows would be empty."""
    busy = Busy(deadline)
    while busy.clock.now < 12.0:
        busy.engine.tick()
        busy.metrics.shown(0.03, "interactive")  # which a front would have done
    card = busy.card.update(2_000_000_000)
    assert card is not None
    shown = json.loads(json.dumps(busy.metrics.snapshot()["scorecard"], allow_nan=False))
    file = TableFile(tmp_path / "card.csv", COLUMNS)
    file.append(card[name] for name in COLUMNS)
    file.close()
    with (tmp_path / "card.csv").open(newline="") as lines:
        (line,) = csv.DictReader(lines)
    assert set(shown) == set(line) == set(COLUMNS)
    # No drafts, no front end, no description, and no GPU; not every platform tells what was read.
    unknown = {"draft_accepted_ratio", "time_logits_to_first_chunk", "model", "latency_cap"}
    unknown |= {"gpu_idle_pct"}
    if storage_bytes() is None:
        unknown.add("residency_churn_mb_per_token")
    assert {name for name, value in line.items() if value == ""} == unknown
    assert {name for name, value in shown.items() if value in (None, "")} == unknown


def test_bytes_read_from_storage_are_divided_by_the_tokens_of_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights that do not stay in memory are read again; null where nobody says what was read."""
    read: list[int | None] = [5_000_000]
    monkeypatch.setattr("uma_trio.observe.metrics.storage_bytes", lambda: read[0])
    metrics = Metrics()
    card = Scorecard(metrics, 1.0)
    ticked(metrics, decode=3, prefill=5)
    read[0] = 21_000_000
    card.update(None)
    assert metrics.snapshot()["residency_churn_mb_per_token"] == pytest.approx(2.0)
    assert metrics.scorecard is not None
    assert metrics.scorecard["residency_churn_mb_per_token"] == pytest.approx(2.0)
    read[0] = None
    other = Metrics()
    Scorecard(other, 1.0).update(None)
    assert other.snapshot()["residency_churn_mb_per_token"] is None


def test_prometheus_text_has_every_metric_that_is_known() -> None:
    """A scraper finds the same names with uma_ before them, in the right types."""
    metrics = Metrics()
    ticked(metrics)
    metrics.first_token(0.1)
    metrics.inter_token(0.012)
    metrics.finished("length", 0.0)
    metrics.scorecard = {"tokens_per_s": 7.0}
    text = prometheus(json.loads(json.dumps(metrics.snapshot())))
    assert "# TYPE uma_generation_tokens_total counter" in text
    assert 'uma_requests_total{outcome="length"} 1.0' in text
    assert 'uma_inter_token_latency_seconds_bucket{le="0.02"} 1.0' in text
    assert 'uma_inter_token_latency_seconds_bucket{le="0.01"} 0.0' in text
    assert 'uma_inter_token_latency_seconds_bucket{le="+Inf"} 1.0' in text
    assert "uma_time_to_first_token_seconds_count 1.0" in text
    assert "time_logits_to_first_chunk" not in text
    assert "scorecard" not in text


def test_dashboards_of_llama_server_find_its_names() -> None:
    """Prompt time is without the wait for a slot, a rate is over the time that it belongs to."""
    metrics = Metrics()
    ticked(metrics, decode=3, prefill=5)
    metrics.first_token(0.75, queue_s=0.25)
    metrics.inter_token(0.020, tokens=4)
    text = llama_metrics(metrics.snapshot() | metrics.llama_values())
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, value in map(str.split, lines)}
    assert found["llamacpp:prompt_tokens_total"] == 5
    assert found["llamacpp:prompt_seconds_total"] == 0.5
    assert found["llamacpp:prompt_tokens_seconds"] == 10
    assert found["llamacpp:n_decode_total"] == 1
    assert found["llamacpp:tokens_predicted_seconds_total"] == pytest.approx(0.08)
    assert found["llamacpp:predicted_tokens_seconds"] == pytest.approx(50)
    assert found["llamacpp:requests_processing"] == 0
    for name in found:
        assert f"# HELP {name} " in text
        assert f"# TYPE {name} " in text


def test_llama_servers_names_tell_how_full_batches_are() -> None:
    """Requests a batch, the longest of them so far, and how often any was guessed at."""
    bench = Bench(FakeBackend(n_batch=64))
    bench.submit([1] * 40, 9)
    bench.submit([2] * 10, 9)
    bench.run()
    figures = bench.metrics.snapshot() | bench.metrics.llama_values()
    lines = [line for line in llama_metrics(figures).splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, value in map(str.split, lines)}
    assert 1.5 < found["llamacpp:n_busy_slots_per_decode"] <= 2
    assert found["llamacpp:n_tokens_max"] == 40 + 9 - 1  # nothing follows the last
    assert found["llamacpp:spec_decode_num_drafts_total"] == 0
    guessed = speaking(drafts=True, kind=Babbler)
    guessed.submit("abba baba abba baba ab", 40)
    guessed.run()
    rows = guessed.metrics.totals().drafts
    assert 0 < guessed.metrics.llama_values()["drafts_total"] <= rows


def test_no_time_has_no_rate_in_llama_servers_names() -> None:
    """A daemon that has done nothing divides nothing by nothing; what is unknown is left out."""
    assert "llamacpp:prompt_tokens_seconds 0.0\n" in llama_metrics(
        Metrics().snapshot() | Metrics().llama_values()
    )
    assert llama_metrics({"sessions": 3}) == ""


def test_prometheus_text_takes_the_figures_of_another_version() -> None:
    """A figure that this client does not know is left out, and one that is missing too."""
    text = prometheus({"sessions": 3, "p95_ms": None, "figure_of_tomorrow": {"a": [1]}})
    assert "uma_connections 3.0" in text
    assert "tomorrow" not in text


def test_histogram_bounds_are_exact() -> None:
    """A value on a bound belongs to it, as Prometheus defines it."""
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.0001, 5.0, 99.0):
        histogram.record(value)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 4), (5.0, 6), (float("inf"), 7)]
    assert histogram.count == 7


def test_histogram_quantiles_are_right_to_one_percent() -> None:
    """Two thousand times are summed up in a few hundred counters."""
    draw = random.Random(1)
    values = sorted(draw.lognormvariate(3, 1) for _ in range(2000))
    histogram = Histogram(bounds_ms(0.1, 100_000))
    for value in values:
        histogram.record(value)
    for share in (0.5, 0.95, 0.99):
        exact = values[int(share * len(values)) - 1]
        assert histogram.quantile(share) == pytest.approx(exact, rel=0.0101)


def test_an_empty_histogram_has_no_quantiles() -> None:
    """Nothing recorded is not zero."""
    assert Histogram((1.0, 2.0)).quantile(0.5) is None
    assert Recent(4).quantiles((0.5,)) == [None]


def test_recent_forgets_the_oldest() -> None:
    """Five values in four places leave the last four."""
    recent = Recent(4)
    for value in (100.0, 1.0, 2.0, 3.0, 4.0):
        recent.record(value)
    assert recent.quantiles((0.0, 1.0)) == [1.0, 4.0]


RECORDINGS: dict[str, Callable[[Metrics], None]] = {
    "tick": ticked,
    "gap": lambda metrics: metrics.inter_token(float("nan")),
    "negative gap": lambda metrics: metrics.inter_token(-1.0),
    "endless first token": lambda metrics: metrics.first_token(float("inf")),
    "unknown outcome": lambda metrics: metrics.finished("exploded", 0.0),
    "unknown code": lambda metrics: metrics.error_sent(""),
}


@pytest.mark.parametrize("record", RECORDINGS.values(), ids=RECORDINGS)
def test_recording_never_raises(record: Callable[[Metrics], None]) -> None:
    """A figure out of the ordinary is not worth a failed request."""
    metrics = Metrics()
    record(metrics)
    prometheus(metrics.snapshot())


def test_memory_is_that_of_this_process() -> None:
    """A Python with numpy in it takes between a megabyte and a terabyte."""
    assert 1e6 < resident_bytes() < 1e12


def test_what_is_shared_is_counted_in_parts() -> None:
    """The fair part of a process is no more than all that it has in memory, and not nothing."""
    share = proportional_bytes()
    assert share is None or 1e6 < share < 2 * resident_bytes()


def test_reading_what_is_shared_rests_a_thousand_times_as_long_as_it_took() -> None:
    """The kernel walks all pages for it, which for a large model takes long."""
    now = [0.0]

    def slow() -> int:
        now[0] += 0.3
        return 7

    memory = SharedMemory(slow, lambda: now[0])
    assert memory.due
    memory.refresh()
    assert memory.bytes == 7
    now[0] += 299
    assert not memory.due
    now[0] += 2
    assert memory.due


def test_tokens_that_come_at_once_share_the_time_since_those_before() -> None:
    """So the time for a token is what the contract counts."""
    metrics = Metrics()
    metrics.inter_token(0.010, 4)
    each = metrics.snapshot()["inter_token_ms"]
    assert isinstance(each, dict)
    assert (each["count"], each["mean"]) == (4, pytest.approx(10.0))


def test_what_ended_before_the_engine_had_it_is_among_the_requests() -> None:
    """By outcome, beside those that the engine ended; any code may come from either."""
    metrics = Metrics()
    metrics.finished("cancelled", 0.0)
    metrics.ended_early("cancelled")
    metrics.ended_early("E_LIFECYCLE_001")
    ended = metrics.snapshot()["requests_total"]
    assert ended["cancelled"] == 2
    assert ended["E_LIFECYCLE_001"] == 1
    assert ended["stop"] == 0


def test_metrics_of_several_models_are_labelled() -> None:
    """With the model's name, also while one is loaded; what is the daemon's has none, and neither has a daemon of one model."""
    one, two = Metrics(), Metrics()
    one.session_opened()
    figures = {"chat": one.snapshot(), "code": two.snapshot()}
    text = prometheus(figures["chat"], figures)
    for series in (
        'uma_batch_calls_total{model="code"} 0.0',
        'uma_requests_total{model="chat",outcome="stop"} 0.0',
        'uma_time_to_first_token_seconds_bucket{le="+Inf",model="code"} 0.0',
        "\numa_connections 1.0\n",
        'uma_info{model="code"}',
    ):
        assert series in text, series
    assert 'uma_batch_calls_total{model="chat"}' in prometheus(
        figures["chat"], {"chat": figures["chat"]}
    )
    alone = prometheus(figures["chat"])
    assert "uma_batch_calls_total 0.0" in alone
