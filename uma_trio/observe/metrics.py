"""The metrics of one model, and those of the daemon: cheap to record, rendered when they are read.

Each value is written by one thread, so there are no locks; recording neither raises nor waits. A reader may see a
tick half recorded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import asdict, define, evolve, field, fields

from uma_trio.observe.catalogue import METRICS
from uma_trio.observe.figures import (
    NO_PROMISE,
    EncodingFigures,
    Outlook,
    PrefixFigures,
    Promise,
    prompt_rate,
    ratio,
)
from uma_trio.observe.histogram import Histogram, Recent, bounds_ms
from uma_trio.observe.memory import resident_bytes, storage_bytes
from uma_trio.policy.cost import CostModel

_EWMA_SHARE: Final = 0.2
_RECENT_TOKENS: Final = 4096
_RECENT_GAPS: Final = 1024
_SHARE_S: Final = (
    10.0  # background work is computed in few large ticks: its share is smoothed over several
)
# Steps of half a millisecond where delays begin to matter, so that a benchmark can tell 4 ms from 6.
_LAG_MS: Final = (0.1, 0.2, *(n / 2 for n in range(1, 21)), *bounds_ms(20, 100_000))
_BOUNDS_MS: Final[Mapping[str, tuple[float, ...]]] = {
    "loop_lag_ms": _LAG_MS,
    "decode_ms": bounds_ms(0.1, 10_000),
    "ttft_ms": bounds_ms(1, 1_000_000),
    "ttf5_ms": bounds_ms(1, 1_000_000),
    "queue_ms": bounds_ms(0.1, 1_000_000),
}
#: Labels that are shown before the first event.
_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "requests_total": ("stop", "length", "cancelled", "error"),
    "slo_violations_total": ("ttft", "tbt"),
    "late_tokens_total": ("planned", "mispredicted", "left_out"),
    "irregular_ticks_total": ("aborted", "policy"),
}

_SHAPE_EVENTS: Final = ("plain", "apart", "refused", "ended", "refused again", "moved", "stopped")

_MEASURED: Final = ("overlap_active", "gpu_idle_pct", "residency_churn_mb_per_token")


@define
class Totals:
    """Sums since the start; the difference of two is an interval. Times in seconds.

    `prompt_tokens` and `answer_tokens` were computed, `tokens` and `moved_bytes` in the `ticks` of a policy that
    predicts them. `protected` ticks had a limit. `ideal_s` is what the cost model predicted for the ticks that took
    `judged_s`. `bins` are the counts of each histogram, `storage_bytes` what the process read from storage.
    """

    at: float = 0.0
    batches: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    rows: int = 0
    in_place: int = 0
    sequences: int = 0
    drafted: int = 0
    drafts: int = 0
    drafts_right: int = 0
    decode_s: float = 0.0
    host_s: float = 0.0
    prompt_s: float = 0.0
    ticks: int = 0
    tokens: int = 0
    moved_bytes: float = 0.0
    over_budget: int = 0
    granted: int = 0
    infeasible: int = 0
    protected_tokens: int = 0
    protected_s: float = 0.0
    ideal_s: float = 0.0
    judged_s: float = 0.0
    lanes: dict[str, int] = field(factory=dict)
    bins: Mapping[str, list[int]] = field(factory=dict)
    storage_bytes: int | None = None

    @property
    def computed(self) -> int:
        """Tokens computed."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def sampled(self) -> int:
        """Tokens sampled: a row behind a wrong guess gives none."""
        return self.rows - (self.drafts - self.drafts_right)

    @property
    def busy_s(self) -> float:
        """Time of ticks."""
        return self.decode_s + self.host_s

    def since(self, earlier: Totals) -> Totals:
        """Return the sums after `earlier`."""
        now, then = asdict(self, recurse=False), asdict(earlier, recurse=False)
        known = None not in (self.storage_bytes, earlier.storage_bytes)
        return Totals(
            **{name: now[name] - then[name] for name in _SUMS},
            lanes={lane: n - earlier.lanes.get(lane, 0) for lane, n in self.lanes.items()},
            bins={
                name: [late - early for late, early in zip(bins, earlier.bins[name], strict=True)]
                for name, bins in self.bins.items()
            },
            storage_bytes=now["storage_bytes"] - then["storage_bytes"] if known else None,
        )

    def values(self) -> dict[str, object]:
        """Return the figures that exist since the start and for an interval."""
        return {
            "tokens_per_s_at_cap": ratio(self.protected_tokens, self.protected_s),
            "ticks_over_budget": self.over_budget,
            "sum_bmt_mb_per_token": ratio(self.moved_bytes / 1e6, self.tokens),
            "scheduler_efficiency": ratio(self.ideal_s, self.judged_s),
            "copy_free_ratio": ratio(self.in_place, self.rows),
        }


_SUMS: Final = tuple(
    one.name for one in fields(Totals) if one.name not in ("lanes", "bins", "storage_bytes")
)
_NO_DRAFTS: Mapping[str, tuple[int, int]] = {}


class Metrics:
    """All metrics of the catalogue. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._model, self._info = "", dict[str, str]()
        self._latency_cap: float | None = None
        self.histograms: Mapping[str, Histogram] = {
            metric.name: Histogram(_BOUNDS_MS.get(metric.name, bounds_ms(0.1, 100_000)))
            for metric in METRICS
            if metric.kind == "histogram"
        }
        # By label.
        self._counts: dict[str, dict[str, int]] = {
            metric.name: dict.fromkeys(_LABELS.get(metric.name, ()), 0)
            for metric in METRICS
            if metric.kind == "counter" and metric.label
        }
        self.sums = Totals()
        #: The promise of the latest tick.
        self.promise = NO_PROMISE
        #: Share of machine time of background work, smoothed over ten seconds.
        self.background_share = 0.0
        #: Figures of the platform, None while they are not measured.
        self.measured: dict[str, float | None] = dict.fromkeys(_MEASURED)
        self.prefix = PrefixFigures()  # replaced by the engine's thread
        #: Schemas, grammars and expressions by event. Written by helper threads, under their lock.
        self.shape_events = dict.fromkeys(_SHAPE_EVENTS, 0)
        self.encoding = EncodingFigures()  # written by the engine's thread
        # Written by the engine's thread.
        self._longest = self._preempted = self._late_masks = 0
        self._last_decode = self._last_prefill = 0
        self._decode_last = self._decode_ewma = self._sampling_last = 0.0
        self._load = (0, 0, 0, 0)
        self._slots = self._cells = 0
        self._recent_itl = Recent(_RECENT_TOKENS)
        # Written by trio's thread.
        self._open = 0
        self._ended_early: dict[str, int] = {}
        self._first_chunk: float | None = None
        self._shown_ratios = Recent(_RECENT_GAPS)
        self.scorecard: Mapping[str, object] | None = None

    def describe(
        self,
        *,
        model: str,
        backend: str,
        policy: str,
        version: str,
        n_ctx: int,
        n_slots: int,
        latency_cap: float | None = None,
    ) -> None:
        """Set once what runs. `latency_cap` is None under a policy without a limit."""
        self._model = model
        self._info = {"backend": backend, "policy": policy, "version": version}
        self._cells, self._slots = n_ctx, n_slots
        self._latency_cap = latency_cap

    # --- on the engine's thread ---

    def count(self, name: str, label: str, n: int = 1) -> None:
        """Add to the counter `name` of the catalogue."""
        counts = self._counts[name]
        counts[label] = counts.get(label, 0) + n

    def observe(self, name: str, seconds: float, n: int = 1) -> None:
        """Record a time in the histogram `name` of the catalogue, `n` times."""
        self.histograms[name].record(seconds * 1e3, n)

    def tick(
        self,
        *,
        decode_tokens: int,
        prefill_tokens: int,
        decode_s: float,
        host_s: float,
        sampling_s: float,
        rows: int,
        rows_in_place: int,
        lane_tokens: Mapping[str, int] | None = None,
        drafts: Mapping[str, tuple[int, int]] = _NO_DRAFTS,
        late_masks: int = 0,
        sequences: int = 0,
        drafted: int = 0,
        longest: int = 0,
    ) -> None:
        """Record one computed batch.

        `rows` of logits were sampled, `rows_in_place` of them without a copy. `drafts` has by source the number of
        guessed tokens, and of right ones, which are among `decode_tokens`. `drafted` of the `sequences` had guesses;
        the longest sequence then had `longest` tokens in the KV cache.
        """
        decode_ms, sums = decode_s * 1e3, self.sums
        self._decode_last, self._sampling_last = decode_ms, sampling_s * 1e3
        change = decode_ms - self._decode_ewma
        self._decode_ewma += _EWMA_SHARE * change if sums.batches else change
        self.histograms["decode_ms"].record(decode_ms)
        sums.batches += 1
        sums.answer_tokens += decode_tokens
        sums.prompt_tokens += prefill_tokens
        sums.rows += rows
        sums.in_place += rows_in_place
        sums.sequences += sequences
        sums.drafted += drafted
        sums.decode_s += decode_s
        sums.host_s += host_s
        for source, (n, right) in drafts.items():
            sums.drafts += n
            sums.drafts_right += right
            self.count("draft_tokens_total", source, n)
            self.count("draft_accepted_tokens_total", source, right)
        for lane, n in (lane_tokens or {}).items():
            sums.lanes[lane] = sums.lanes.get(lane, 0) + n
        self._last_decode, self._last_prefill = decode_tokens, prefill_tokens
        self._longest = max(self._longest, longest)
        self._late_masks += late_masks

    def promised(self, promise: Promise, took_s: float) -> None:
        """Record a tick that took `took_s` from decode to decode, and what the policy promised of it."""
        if promise is NO_PROMISE:
            return
        self.promise, sums = promise, self.sums
        sums.ticks += 1
        sums.tokens += promise.tokens
        sums.granted += promise.granted
        sums.infeasible += promise.infeasible
        sums.moved_bytes += promise.moved_bytes
        if took_s > 0:
            share = max(0.0, 1.0 - promise.solo_s / took_s) * promise.background
            weight = 1.0 - math.exp(-took_s / _SHARE_S)
            self.background_share += weight * (share - self.background_share)
        if math.isfinite(promise.limit_s):
            sums.over_budget += took_s > promise.limit_s
            sums.protected_s += took_s
            sums.protected_tokens += promise.tokens
        if promise.cost is not None and promise.predicted_s > 0:
            # Ballast is predicted where it makes the batch cheaper; host time is not part of the ideal.
            sums.ideal_s += max(0.0, promise.predicted_s - promise.between_s)
            sums.judged_s += took_s

    def cost_measured(self, cost: CostModel) -> None:
        """Record a cost model that was measured between ticks."""
        self.promise = evolve(self.promise, cost=cost)

    def first_token(self, ttft_s: float, queue_s: float = 0.0) -> None:
        """Record a first token, `ttft_s` after the request's arrival, of which `queue_s` without a slot."""
        self.observe("ttft_ms", ttft_s)
        if math.isfinite(ttft_s):
            self.sums.prompt_s += max(0.0, ttft_s - queue_s)

    def inter_token(self, seconds: float, tokens: int = 1) -> None:
        """Record an inter-token latency: of several streams, or of several `tokens` of one computation."""
        self.observe("inter_token_ms", seconds, tokens)
        self._recent_itl.record(seconds * 1e3, tokens)

    def compare(self, target: str, seconds: float, target_s: float | None) -> None:
        """Count a first token ("ttft") or a later one ("tbt") that took longer than its `slo`."""
        if target_s is not None and seconds > target_s:
            self.count("slo_violations_total", target)

    def finished(self, outcome: str, queue_s: float) -> None:
        """Record the end of a request that the engine had."""
        self.count("requests_total", outcome)
        self.observe("queue_ms", queue_s)

    def preempted(self) -> None:
        """Record that a request lost its slot."""
        self._preempted += 1

    def load(self, *, running: int, waiting: int, parked: int, cells_used: int) -> None:
        """Record the present requests and KV cells."""
        self._load = (running, waiting, parked, cells_used)

    # --- on trio's thread ---

    def session_opened(self) -> None:
        """Record an accepted connection."""
        self._open += 1

    def session_closed(self) -> None:
        """Record the end of a connection."""
        self._open -= 1

    def error_sent(self, code: str) -> None:
        """Record an error that was sent to a client."""
        self.count("errors_total", code)

    def accept_failed(self) -> None:
        """Record a connection that could not be accepted, for lack of descriptors or memory."""
        self.count("errors_total", "accept")

    def ended_early(self, outcome: str) -> None:
        """Record the end of a request that the engine never had."""
        self._ended_early[outcome] = self._ended_early.get(outcome, 0) + 1

    def first_chunk(self, seconds: float) -> None:
        """Record the time from the logits of a first token until it was written."""
        self._first_chunk = seconds * 1e3

    def shown(self, seconds: float, lane: str) -> None:
        """Record the time between two writes of tokens to a connection."""
        if lane != "interactive":
            return
        self.observe("interactive_shown_ms", seconds)
        if (solo_s := self.promise.solo_s) > 0:
            self._shown_ratios.record(seconds / solo_s)

    def loop_lagged(self, seconds: float) -> None:
        """Record how much later than scheduled trio's thread ran."""
        self.observe("loop_lag_ms", seconds)

    # --- on any thread ---

    def snapshot(self) -> dict[str, Any]:
        """Return every metric by name, ready for JSON, with the scorecard; unknown values are None."""
        return {
            name: value.summary() if isinstance(value, Histogram) else value
            for name, value in self.values().items()
        } | {"scorecard": self.scorecard}

    def outlook(self) -> Outlook:
        """Return the figures that headroom is computed from."""
        sums, cost, moved = self.sums, self.promise.cost, self.promise.moved_bytes
        if cost is not None:
            rate = prompt_rate(cost.table(), cost.scale)
        else:  # ticks without prompts count, too
            rate = ratio(sums.prompt_tokens, sums.busy_s) or None
        return Outlook(
            shown_ratio_p95=self._shown_ratio_p95,
            latency_cap=self._latency_cap,
            moved_ratio=ratio(moved, self.promise.budget_bytes),
            prompt_tokens_per_s=rate,
        )

    def totals(self) -> Totals:
        """Return a copy of the sums until now."""
        return evolve(
            self.sums,
            at=self._clock(),
            lanes=dict(self.sums.lanes),
            bins={name: histogram.counts() for name, histogram in self.histograms.items()},
            storage_bytes=storage_bytes(),
        )

    def llama_values(self) -> dict[str, float]:
        """Return what llama-server counts, too, and no metric of the catalogue has."""
        return {
            "prompt_seconds_total": self.sums.prompt_s,
            "batch_sequences_total": self.sums.sequences,
            "longest_context": self._longest,
            "drafts_total": self.sums.drafted,
        }

    def values(self) -> dict[str, object]:
        """Return every metric of the catalogue by name."""
        running, waiting, parked, used = self._load
        p50, p95, p99 = self._recent_itl.quantiles((0.50, 0.95, 0.99))
        sums, last, cost = self.sums, self.promise, self.promise.cost
        limited = math.isfinite(last.limit_s)
        found: dict[str, object] = {
            **self.histograms,
            **{name: dict(counts) for name, counts in self._counts.items()},
            **self.prefix.values(),
            **sums.values(),
            "model": self._model,
            "info": dict(self._info),
            "rss_gb": resident_bytes() / 1e9,
            "sessions": self._open,
            "slots_total": self._slots,
            "active_sessions": running,
            "queued_sessions": waiting,
            "parked_sessions": parked,
            "requests_total": _sums(self._counts["requests_total"], self._ended_early),
            "preemptions_total": self._preempted,
            "kv_cells_used": used,
            "kv_cells_total": self._cells,
            "busy_seconds_total": {"decode": sums.decode_s, "host": sums.host_s},
            "tokens_total": sums.computed,
            "prompt_tokens_total": sums.prompt_tokens,
            "tokens_generated_total": sums.sampled,
            "encoded_tokens_total": self.encoding.tokens,
            "batch_calls_total": sums.batches,
            "avg_batch": ratio(sums.computed, sums.batches),
            "last_batch_size": self._last_decode + self._last_prefill,
            "tokens_per_tick_decode": self._last_decode,
            "tokens_per_tick_prefill": self._last_prefill,
            "served_decoders": self._last_decode,
            "decode_ms_last": self._decode_last,
            "decode_ms_ewma": self._decode_ewma,
            "decode_ms_avg": ratio(sums.decode_s * 1e3, sums.batches),
            "sampling_ms_last": self._sampling_last,
            "time_logits_to_first_chunk": self._first_chunk,
            "p50_ms": p50,
            "p95_ms": p95,
            "p99_ms": p99,
            "latency_cap": self._latency_cap,
            "shown_ratio_p95": self._shown_ratio_p95,
            "structured_output_total": {**self.shape_events, "late mask": self._late_masks},
            "step_ms": last.step_s * 1e3 if limited and last.step_s else None,
            "prefill_guard_active": int(last.skipped > 0),
            "guard_infeasible_total": sums.infeasible,
            "cost_error": None if cost is None else cost.error,
            "cost_others_share": None if cost is None else cost.others,
            "cost_scale": None if cost is None else cost.scale,
            "sum_bmt_mb_last": last.moved_bytes / 1e6,
            "sum_bmt_budget_mb_last": last.budget_bytes / 1e6 if last.bmt_budget else None,
            **self.measured,
        }
        return {metric.name: found[metric.name] for metric in METRICS}

    @property
    def _shown_ratio_p95(self) -> float | None:
        return self._shown_ratios.quantiles((0.95,))[0]


def _sums(*counts: Mapping[str, int]) -> dict[str, int]:
    """Return the sums by label. The dictionaries may be written meanwhile."""
    copies = [dict(one) for one in counts]
    return {
        label: sum(one.get(label, 0) for one in copies)
        for label in dict.fromkeys(label for one in copies for label in one)
    }
