"""What the daemon counts: recorded in a microsecond, rendered only when somebody asks.

Recording touches plain numbers and lists; the engine's thread and trio's each write fields of
their own, so there is no lock, and nothing here can raise or wait. Reading may see a tick half
recorded, which no figure here is spoiled by.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen

from uma_trio.observe.encoding import EncodingFigures
from uma_trio.observe.histogram import Histogram, Recent, bounds_ms
from uma_trio.observe.memory import resident_bytes
from uma_trio.observe.outlook import Outlook
from uma_trio.observe.playout import PlayoutFigures
from uma_trio.observe.prefix import PrefixFigures
from uma_trio.observe.promise import PromiseFigures, PromiseTotals
from uma_trio.observe.shapes import ShapeFigures
from uma_trio.words import LANES

_EWMA_SHARE = 0.2
_RECENT_TOKENS = 4096
# Steps of half a millisecond around what is noticed, so that a benchmark tells 4 ms from 6.
_LAG_MS = (0.1, 0.2, *(n / 2 for n in range(1, 21)), *bounds_ms(20, 100_000))
_OUTCOMES = ("stop", "length", "cancelled", "error")


@frozen
class Totals:
    """What has added up since the start; two of them make an interval. Times in seconds.

    `shown` counts the times between tokens that interactive readers were shown, by step of their
    histogram. `lanes` is empty while nobody said which lane tokens were of.
    """

    at: float
    tokens: int
    sampled: int
    rows: int
    drafts: int
    drafts_right: int
    in_place: int
    busy_s: float
    lanes: Mapping[str, int]
    shown: list[int]
    promise: PromiseTotals = field(factory=PromiseTotals)


_NO_DRAFTS: Mapping[str, tuple[int, int]] = {}


class Metrics:
    """Everything in the catalogue. `clock` is in seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._info: dict[str, str] = {"model": "", "backend": "", "policy": "", "version": ""}
        self._slots = self._cells = 0
        self._latency_cap: float | None = None
        # Written by the engine's thread.
        self._batches = self._decoded = self._prefilled = self._rows = self._in_place = 0
        self._sequences = self._drafted = self._longest = 0
        self._drafts: dict[str, int] = {}
        self._drafts_right: dict[str, int] = {}
        self._last_decode = self._last_prefill = 0
        self._lane_tokens: dict[str, int] = {}
        self._budget_target: int | None = None
        self._decode_s = self._host_s = 0.0
        self._decode_last = self._decode_ewma = self._host_last = self._sampling_last = 0.0
        self._first_chunk: float | None = None
        self._preempted = self._aborted = self._policy_failures = 0
        self._load = (0, 0, 0, 0, 0)
        self._active: Mapping[str, int] = {}
        self._queued: Mapping[str, int] = {}
        self._decode_ms = Histogram(bounds_ms(0.1, 10_000))
        self._batch_size = Histogram(tuple(float(1 << n) for n in range(15)))
        self._ttft_ms = Histogram(bounds_ms(1, 1_000_000))
        self._mask_ms = Histogram(bounds_ms(0.01, 1_000))
        self._late_masks = 0
        self._prompt_s = 0.0
        self._itl_ms = Histogram(bounds_ms(0.1, 100_000))
        self.interactive_itl_ms = Histogram(bounds_ms(0.1, 100_000))
        self._queue_ms = Histogram(bounds_ms(0.1, 1_000_000))
        self._recent_itl = Recent(_RECENT_TOKENS)
        self.promise = PromiseFigures()
        self.playout = PlayoutFigures()
        self.prefix = PrefixFigures()  # replaced by the engine's thread
        self.shapes = ShapeFigures()  # written by helper threads
        self.encoding = EncodingFigures()  # written by the engine's thread
        self.draft_failures = 0  # set by the engine's thread
        self._outcomes = dict.fromkeys(_OUTCOMES, 0)
        # Written by trio's thread.
        self._open = self._accepted = self._accept_failures = 0
        self._errors: dict[str, int] = {}
        self._ended_early: dict[str, int] = {}
        self._loop_lag_ms = Histogram(_LAG_MS)
        self._loop_lag_max_s = 0.0
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
        """Say once what is running; `uptime_s` counts from here.

        `latency_cap` is what the policy promises, None if it promises nothing.
        """
        self._info = {"model": model, "backend": backend, "policy": policy, "version": version}
        self._cells, self._slots = n_ctx, n_slots
        self._latency_cap = latency_cap
        self._started = self._clock()

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
        budget_target: int | None = None,
        drafts: Mapping[str, tuple[int, int]] = _NO_DRAFTS,
        masks_s: Sequence[float] = (),
        late_masks: int = 0,
        sequences: int = 0,
        drafted: int = 0,
        longest: int = 0,
    ) -> None:
        """Record one computed batch: `rows` of logits were sampled, `rows_in_place` uncopied.

        `drafts` has by source how many guesses it held, and how many of them were what the model
        says; those count as decoded tokens. `masks_s` is for each token that an answer's grammar
        refused how long it took to find another; `late_masks` more of them sit out.

        `sequences` had tokens in it, `drafted` of them guesses, and the longest then had `longest`
        tokens in the KV cache.
        `lane_tokens` are its tokens by lane, `budget_target` how many the policy wanted, where
        it budgets tokens.
        """
        self._time(decode_s * 1e3, host_s * 1e3, sampling_s * 1e3)
        self._batches += 1
        self._decoded += decode_tokens
        self._prefilled += prefill_tokens
        self._rows += rows
        self._sequences += sequences
        self._drafted += drafted
        self._longest = max(self._longest, longest)
        self._count_drafts(drafts)
        self._in_place += rows_in_place
        self._last_decode, self._last_prefill = decode_tokens, prefill_tokens
        for lane, n in (lane_tokens or {}).items():
            self._lane_tokens[lane] = self._lane_tokens.get(lane, 0) + n
        self._budget_target = budget_target
        self._decode_s += decode_s
        self._host_s += host_s
        self._batch_size.record(decode_tokens + prefill_tokens)
        for seconds in masks_s:
            self._mask_ms.record(seconds * 1e3)
        self._late_masks += late_masks

    def _time(self, decode_ms: float, host_ms: float, sampling_ms: float) -> None:
        """Note the parts of a tick's time; `_batches` counts those before it."""
        self._decode_last, self._host_last = decode_ms, host_ms
        self._sampling_last = sampling_ms
        change = decode_ms - self._decode_ewma
        self._decode_ewma += _EWMA_SHARE * change if self._batches else change
        self._decode_ms.record(decode_ms)

    def _count_drafts(self, drafts: Mapping[str, tuple[int, int]]) -> None:
        for source, (n, right) in drafts.items():
            self._drafts[source] = self._drafts.get(source, 0) + n
            self._drafts_right[source] = self._drafts_right.get(source, 0) + right

    def first_token(self, ttft_s: float, queue_s: float = 0.0) -> None:
        """Record a request's first token, `ttft_s` after it arrived, of which it waited `queue_s`."""
        self._ttft_ms.record(ttft_s * 1e3)
        if math.isfinite(ttft_s):
            self._prompt_s += max(0.0, ttft_s - queue_s)

    def first_chunk(self, seconds: float) -> None:
        """Record how long a first token took from its logits to its connection."""
        self._first_chunk = seconds * 1e3

    def inter_token(self, seconds: float, lane: str = "", tokens: int = 1) -> None:
        """Record the time between two tokens of a stream, of a lane if it is known.

        So many `tokens` took as long: of several streams, or of one computation.
        """
        milliseconds = seconds * 1e3
        self._itl_ms.record(milliseconds, tokens)
        if lane == "interactive":
            self.interactive_itl_ms.record(milliseconds, tokens)
        self._recent_itl.record(milliseconds, tokens)

    def shown(self, seconds: float, lane: str) -> None:
        """Record the time between two writes of a stream's tokens to its connection."""
        self.playout.shown(seconds, lane, self.promise.solo_s)

    def held(self, change: int) -> None:
        """Record that so many tokens more, or fewer, are held back."""
        self.playout.held(change)

    def finished(self, outcome: str, queue_s: float) -> None:
        """Record the end of an accepted request."""
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        self._queue_ms.record(queue_s * 1e3)

    def ended_early(self, outcome: str) -> None:
        """Record the end of a request that was never in the engine. Called on trio's thread only."""
        self._ended_early[outcome] = self._ended_early.get(outcome, 0) + 1

    def preempted(self) -> None:
        """Record that a request lost its KV cells and will be computed again."""
        self._preempted += 1

    def aborted(self) -> None:
        """Record a tick that was given up for an interactive newcomer: nothing was computed."""
        self._aborted += 1

    def policy_failed(self) -> None:
        """Record a tick that the baseline planned, since the policy failed."""
        self._policy_failures += 1

    def load(
        self,
        *,
        running: int,
        waiting: int,
        parked: int,
        cells_used: int,
        cells_reserved: int,
        active: Mapping[str, int] | None = None,
        queued: Mapping[str, int] | None = None,
    ) -> None:
        """Record who is there and how full the KV cache is, now.

        `active` and `queued` are `running` and `waiting` by lane; a lane left out has nobody.
        """
        self._load = (running, waiting, parked, cells_used, cells_reserved)
        if active is not None:
            self._active = dict.fromkeys(LANES, 0) | dict(active)
        if queued is not None:
            self._queued = dict.fromkeys(LANES, 0) | dict(queued)

    def session_opened(self) -> None:
        """Record a client connection that was accepted."""
        self._open += 1
        self._accepted += 1

    def session_closed(self) -> None:
        """Record that a client connection has ended."""
        self._open -= 1

    def error_sent(self, code: str) -> None:
        """Record an error event, or an end with an error, by its code."""
        self._errors[code] = self._errors.get(code, 0) + 1

    def accept_failed(self) -> None:
        """Record a connection that could not be accepted, for want of descriptors say."""
        self._accept_failures += 1

    def loop_lagged(self, seconds: float) -> None:
        """Record how much later than asked for trio's thread ran."""
        self._loop_lag_ms.record(seconds * 1e3)
        self._loop_lag_max_s = max(self._loop_lag_max_s, seconds)

    def snapshot(self) -> dict[str, object]:
        """Return every metric by its name, ready for JSON; what is not known yet is None."""
        values = self.values()
        return {
            name: _summary(value) if isinstance(value, Histogram) else value
            for name, value in values.items()
        }

    def outlook(self) -> Outlook:
        """Return the few figures that say how much more work this machine can take."""
        busy_s, rate = self._decode_s + self._host_s, self.promise.prompt_tokens_per_s
        if rate is None and busy_s > 0 and self._prefilled:
            rate = self._prefilled / busy_s  # no cost model: ticks without a prompt count, too
        return Outlook(
            shown_ratio_p95=self.playout.shown_ratio_p95,
            latency_cap=self._latency_cap,
            moved_ratio=self.promise.moved_ratio,
            prompt_tokens_per_s=rate,
        )

    def totals(self) -> Totals:
        """Return what has added up until now."""
        return Totals(
            at=self._clock(),
            tokens=self._decoded + self._prefilled,
            sampled=self._sampled,
            rows=self._rows,
            drafts=sum(self._drafts.values()),
            drafts_right=sum(self._drafts_right.values()),
            in_place=self._in_place,
            busy_s=self._decode_s + self._host_s,
            lanes=dict(self._lane_tokens),
            shown=self.playout.shown_ms["interactive"].counts(),
            promise=self.promise.totals(),
        )

    def values(self) -> dict[str, object]:
        """Return every metric of the catalogue by its name; histograms as they are."""
        return {
            **self._info,
            "uptime_s": self._clock() - self._started,
            "rss_gb": resident_bytes() / 1e9,
            **self._people(),
            **self._batches_so_far(),
            **self._times(),
            **self._cells_now(),
            "latency_cap": self._latency_cap,
            **self.prefix.values(),
            **self.promise.values(),
            **self.playout.values(),
            **self.shapes.values(),
            **self.encoding.values(),
            "scorecard": self.scorecard,
        }

    @property
    def _sampled(self) -> int:
        """How many tokens were sampled: a row behind a wrong guess gives none."""
        wrong = sum(self._drafts.values()) - sum(self._drafts_right.values())
        return self._rows - wrong

    def _people(self) -> dict[str, object]:
        running, waiting, parked, _, _ = self._load
        return {
            "sessions": self._open,
            "sessions_total": self._accepted,
            "active_sessions": running,
            "queued_sessions": waiting,
            "parked_sessions": parked,
            **{f"active_{lane}": self._active.get(lane) for lane in LANES},
            **{f"queued_{lane}": self._queued.get(lane) for lane in LANES},
            "requests_total": self._requests(),
            "errors_total": dict(self._errors),
            "accept_failures_total": self._accept_failures,
            "preemptions_total": self._preempted,
            "aborted_ticks_total": self._aborted,
            "policy_failures_total": self._policy_failures,
        }

    def _requests(self) -> dict[str, int]:
        """Return the ended requests by outcome, those that the engine had and the others."""
        early, ended = dict(self._ended_early), dict(self._outcomes)  # others write them meanwhile
        return {
            outcome: ended.get(outcome, 0) + early.get(outcome, 0)
            for outcome in (*ended, *(one for one in early if one not in ended))
        }

    def _batches_so_far(self) -> dict[str, object]:
        computed, last = self._decoded + self._prefilled, self._last_decode + self._last_prefill
        target = self._budget_target
        return {
            "tokens_total": computed,
            "tokens_by_lane_total": dict(self._lane_tokens),
            "prompt_tokens_total": self._prefilled,
            "tokens_generated_total": self._sampled,
            "drafts_total": self._drafted,
            "draft_rows_total": sum(self._drafts.values()),
            "draft_accepted_total": sum(self._drafts_right.values()),
            "draft_rows_by_source_total": dict(self._drafts),
            "draft_accepted_by_source_total": dict(self._drafts_right),
            "draft_failures_total": self.draft_failures,
            "batch_calls_total": self._batches,
            "batch_sequences_total": self._sequences,
            "longest_context": self._longest,
            "last_batch_size": last,
            "avg_batch": computed / self._batches if self._batches else None,
            "served_decoders": self._last_decode,
            "tokens_per_tick_decode": self._last_decode,
            "tokens_per_tick_prefill": self._last_prefill,
            "budget_target": target,
            "budget_used": None if target is None else last,
            "copy_free_ratio": self._in_place / self._rows if self._rows else None,
            "batch_size": self._batch_size,
        }

    def _times(self) -> dict[str, object]:
        p50, p95, p99 = self._recent_itl.quantiles((0.50, 0.95, 0.99))
        return {
            "decode_ms_last": self._decode_last,
            "decode_ms_ewma": self._decode_ewma,
            "decode_ms_avg": self._decode_s * 1e3 / self._batches if self._batches else None,
            "sampling_ms_last": self._sampling_last,
            "host_ms_last": self._host_last,
            "decode_seconds_total": self._decode_s,
            "prompt_seconds_total": self._prompt_s,
            "host_seconds_total": self._host_s,
            "time_logits_to_first_chunk": self._first_chunk,
            "p50_ms": p50,
            "p95_ms": p95,
            "p99_ms": p99,
            "ttft_ms": self._ttft_ms,
            "mask_ms": self._mask_ms,
            "late_masks_total": self._late_masks,
            "inter_token_ms": self._itl_ms,
            "interactive_gap_ms": self.interactive_itl_ms,
            "decode_ms": self._decode_ms,
            "queue_ms": self._queue_ms,
            "loop_lag_ms": self._loop_lag_ms,
            "loop_lag_max_ms": self._loop_lag_max_s * 1e3,
        }

    def _cells_now(self) -> dict[str, object]:
        _, _, _, used, reserved = self._load
        return {
            "kv_cells_used": used,
            "kv_cells_reserved": reserved,
            "kv_cells_total": self._cells,
            "slots_total": self._slots,
        }


def _summary(histogram: Histogram) -> dict[str, object]:
    count = histogram.count
    return {
        "count": count,
        "sum": histogram.total,
        "mean": histogram.total / count if count else None,
        "p50": histogram.quantile(0.50),
        "p95": histogram.quantile(0.95),
        "p99": histogram.quantile(0.99),
        "buckets": {_bound(bound): n for bound, n in histogram.cumulative()},
    }


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else f"{value:g}"
