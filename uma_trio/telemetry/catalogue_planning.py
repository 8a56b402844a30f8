"""Metrics of plans: the latency contract, drafts, the cost model, memory bandwidth and playout."""

from __future__ import annotations

from uma_trio.telemetry.metric import Metric

PLANNING: tuple[Metric, ...] = (
    # The latency contract (docs/POLICY.md); empty under a policy without a limit.
    Metric(
        "latency_cap",
        "gauge",
        "ratio",
        "The promised limit on the p95 inter-token latency of an interactive stream, as a "
        "multiple of `solo_ms`. `shown_ratio_p95` is the measured value.",
    ),
    Metric(
        "shown_ratio_p95",
        "gauge",
        "ratio",
        "Time between two writes to an interactive reader (`interactive_shown_ms`) divided by "
        "`solo_ms` at that moment, 95th percentile of the latest 1,024. Requests with an `slo` "
        "of their own are included.",
    ),
    Metric(
        "tick_limit_ms",
        "gauge",
        "ms",
        "The time limit of the last tick. A newcomer's prompt may exceed it.",
    ),
    Metric(
        "step_ms",
        "gauge",
        "ms",
        "The promised time between two shown tokens, the shortest of the last tick's interactive streams. "
        "`interactive_p95_ms` of the scorecard is what the latest interval showed.",
    ),
    Metric(
        "solo_ms",
        "gauge",
        "ms",
        "Predicted time of the last tick with the interactive streams only.",
    ),
    Metric(
        "alone_ms",
        "gauge",
        "ms",
        "Predicted time of the last tick with one interactive stream only.",
    ),
    Metric(
        "solo_ratio_p95",
        "gauge",
        "ratio",
        "Measured time of a tick divided by `solo_ms`, 95th percentile of the latest 1,024 ticks "
        "with a limit. It may exceed `latency_cap`: readers do not see a long tick for which "
        "tokens were computed ahead.",
    ),
    Metric(
        "alone_ratio_p95",
        "gauge",
        "ratio",
        "The same for `alone_ms`: the cost of all other work for a stream, including other "
        "streams.",
    ),
    Metric("predicted_ms_last", "gauge", "ms", "Predicted time of the last tick."),
    Metric(
        "ticks_over_budget",
        "counter",
        "ticks",
        "Ticks that took longer than `tick_limit_ms`, including those of newcomers.",
    ),
    Metric(
        "prefill_guard_active", "gauge", "0 or 1", "Whether a prompt was left out of the last tick."
    ),
    Metric(
        "skipped_prefill_due_to_latency_total",
        "counter",
        "prompts",
        "Prompts that were left out of a tick to keep its limit.",
    ),
    Metric(
        "floor_grants_total",
        "counter",
        "ticks",
        "Longer ticks that were granted to the background floor.",
    ),
    Metric(
        "guard_infeasible_total",
        "counter",
        "ticks",
        "Ticks with interactive streams only that took longer than `latency_cap` times `solo_ms`. "
        "Only tokens that are computed ahead can hide such a delay.",
    ),
    Metric(
        "background_share",
        "gauge",
        "ratio",
        "Share of machine time of background work, smoothed over ten seconds, as of the last tick.",
    ),
    Metric(
        "slo_violations_total",
        "counter",
        "tokens",
        "First tokens and later tokens that took longer than the `slo` of their request.",
        "target",
    ),
    Metric("drafts_total", "counter", "drafts", "Drafts: guesses at one or several next tokens."),
    Metric("draft_rows_total", "counter", "rows", "Rows computed to verify guessed tokens."),
    Metric("draft_accepted_total", "counter", "tokens", "Guessed tokens that were right."),
    Metric(
        "draft_rows_by_source_total",
        "counter",
        "rows",
        "`draft_rows_total` by the source of the guess: own text, earlier answers.",
        "source",
    ),
    Metric(
        "draft_accepted_by_source_total",
        "counter",
        "tokens",
        "`draft_accepted_total` by the source of the guess.",
        "source",
    ),
    Metric(
        "draft_failures_total",
        "counter",
        "failures",
        "Failures of the search for drafts. After three it rests for a minute, then for twice as "
        "long each time, up to an hour.",
    ),
    Metric(
        "ballast_rows_total",
        "counter",
        "rows",
        "Ballast rows: computed and discarded, where a larger tick is faster.",
    ),
    Metric(
        "cost_error", "gauge", "ratio", "Smoothed absolute error of the cost model's predictions."
    ),
    Metric(
        "cost_error_p50",
        "gauge",
        "ratio",
        "Absolute error of a tick's prediction, median of the latest 1,024.",
    ),
    Metric(
        "cost_error_p95",
        "gauge",
        "ratio",
        "Absolute error of a tick's prediction, 95th percentile of the latest 1,024.",
    ),
    Metric(
        "cost_trusted",
        "gauge",
        "0 or 1",
        "1 if `cost_error`, or the same error of the measured table, is at most 15 %.",
    ),
    Metric(
        "cost_others_share",
        "gauge",
        "ratio",
        "The part of the machine that other programs used when it was measured, if that was a tenth or "
        "more: it is measured again when it is idle and quiet. Else 0.",
    ),
    Metric(
        "cost_scale",
        "gauge",
        "ratio",
        "The scale factor: how much slower the machine is at the moment than when it was measured.",
    ),
    Metric(
        "cost_staircase_ms",
        "gauge",
        "ms",
        "Predicted time of a batch with this many tokens, with an empty context and one row of "
        "logits.",
        "tokens",
    ),
    Metric(
        "scheduler_efficiency",
        "gauge",
        "ratio",
        "Predicted time of the computed batches divided by the measured time from decode to "
        "decode; accurate to `cost_error`.",
    ),
    Metric(
        "sum_bmt_mb_last",
        "gauge",
        "MB",
        "Bytes that the last tick moved, computed from the sizes of the model.",
    ),
    Metric("sum_bmt_mb_per_token", "gauge", "MB", "Bytes moved per token, since the start."),
    Metric("bmt_budget_gbps", "gauge", "GB/s", "Memory bandwidth that ticks may use."),
    Metric(
        "sum_bmt_budget_mb_last",
        "gauge",
        "MB",
        "Bytes that the last tick could have moved at that bandwidth in its predicted time. "
        "Background work is reduced to this amount.",
    ),
    Metric("sum_bmt_budget_mb_per_token", "gauge", "MB", "The same per token, since the start."),
    Metric(
        "tokens_per_s_at_cap",
        "gauge",
        "tokens/s",
        "Tokens computed per second in ticks that protected an interactive stream.",
    ),
    Metric(
        "worst_pause_ms",
        "histogram",
        "ms",
        "The longest inter-token latency in the first 3 s of each interactive stream.",
    ),
    Metric(
        "ttf5_ms",
        "histogram",
        "ms",
        "Time from the arrival of an interactive request to its fifth token.",
    ),
    # The playout buffer; empty under a policy that paces nobody.
    Metric(
        "held_tokens",
        "gauge",
        "tokens",
        "Computed tokens that are held until they are due.",
        of_daemon=True,
    ),
    Metric(
        "held_tokens_total",
        "counter",
        "tokens",
        "Tokens that were held, since the start.",
        of_daemon=True,
    ),
    Metric(
        "slack_ms_least",
        "gauge",
        "ms",
        "Time between the computation of a paced token and its due time, minimum of the latest "
        "1,024; negative if the token was late.",
        of_daemon=True,
    ),
    Metric("slack_ms_p5", "gauge", "ms", "The same, 5th percentile.", of_daemon=True),
    Metric(
        "ran_dry_total",
        "counter",
        "tokens",
        "Paced tokens that were not computed when they were due, by cause: `planned`, the "
        "policy allowed the tick to take longer; `mispredicted`, the tick took longer than "
        "predicted; `left_out`, the stream was left out of the ticks before.",
        "cause",
        of_daemon=True,
    ),
)
