"""Every metric, declared once: its name, type, unit and meaning.

A name means the same in the JSON of a ``metrics`` request and, with ``uma_`` before it, in the
Prometheus text. docs/METRICS.md is rendered from here, the scorecard's columns among it.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

Kind = Literal["counter", "gauge", "histogram", "info", "scorecard"]


@frozen
class Metric:
    """One metric. `label` is set where there is one value for each of something."""

    name: str
    kind: Kind
    unit: str
    help: str
    label: str = ""


def _m(name: str, kind: Kind, unit: str, text: str, label: str = "") -> Metric:
    return Metric(name, kind, unit, text, label)


METRICS: tuple[Metric, ...] = (
    # What is running.
    _m("model", "info", "", "The loaded model's name."),
    _m("backend", "info", "", "What computes: the backend, its threads, the KV type."),
    _m("policy", "info", "", "The scheduling policy in use."),
    _m("version", "info", "", "The daemon's version."),
    _m("uptime_s", "gauge", "seconds", "Since the daemon was ready."),
    _m("rss_gb", "gauge", "GB", "Resident memory of the process (10^9 bytes), model included."),
    # Who is served.
    _m("sessions", "gauge", "connections", "Client connections that are open."),
    _m("sessions_total", "counter", "connections", "Client connections ever accepted."),
    _m("active_sessions", "gauge", "requests", "Requests that own a KV slot."),
    _m("queued_sessions", "gauge", "requests", "Requests that wait for a slot."),
    _m("parked_sessions", "gauge", "requests", "Requests left out because their reader is behind."),
    _m("active_interactive", "gauge", "requests", "Of `active_sessions`, the interactive lane."),
    _m("active_background", "gauge", "requests", "Of `active_sessions`, the background lane."),
    _m("queued_interactive", "gauge", "requests", "Of `queued_sessions`, the interactive lane."),
    _m("queued_background", "gauge", "requests", "Of `queued_sessions`, the background lane."),
    _m("requests_total", "counter", "requests", "Requests that ended, by how.", "outcome"),
    _m("errors_total", "counter", "events", "Errors sent to clients, by code.", "code"),
    _m(
        "accept_failures_total", "counter", "connections", "Connections that could not be accepted."
    ),
    _m("preemptions_total", "counter", "requests", "Times a request lost its KV to let others on."),
    _m("aborted_ticks_total", "counter", "ticks", "Ticks given up for an interactive newcomer."),
    _m(
        "policy_failures_total",
        "counter",
        "ticks",
        "Ticks that baseline planned, as the policy failed.",
    ),
    # What was computed.
    _m("tokens_total", "counter", "tokens", "Tokens computed, prompts included."),
    _m("tokens_by_lane_total", "counter", "tokens", "The same, by lane.", "lane"),
    _m("prompt_tokens_total", "counter", "tokens", "Prompt tokens computed."),
    _m("tokens_generated_total", "counter", "tokens", "Tokens sampled."),
    _m("batch_calls_total", "counter", "calls", "Batches computed (one llama_decode each)."),
    _m(
        "batch_sequences_total",
        "counter",
        "sequences",
        "Requests that had tokens in a batch, summed over `batch_calls_total`.",
    ),
    _m("longest_context", "gauge", "tokens", "The most tokens that a request had in the KV cache."),
    _m("last_batch_size", "gauge", "tokens", "Tokens in the last batch."),
    _m("avg_batch", "gauge", "tokens", "Mean tokens in a batch, since the start."),
    _m(
        "served_decoders",
        "gauge",
        "requests",
        "Requests that got their next token in the last batch.",
    ),
    _m("tokens_per_tick_decode", "gauge", "tokens", "Of the last batch, the part that continued."),
    _m(
        "tokens_per_tick_prefill", "gauge", "tokens", "Of the last batch, the part that was prompt."
    ),
    _m(
        "budget_target",
        "gauge",
        "tokens",
        "How many tokens the policy wanted in the last batch; empty under one that budgets time.",
    ),
    _m("budget_used", "gauge", "tokens", "How many it then had, to be compared with the target."),
    _m(
        "copy_free_ratio",
        "gauge",
        "ratio",
        "Logits rows sampled where the backend wrote them, of all sampled; others were copied, "
        "for temperature without a filter or top_p without top_k need the whole row changed.",
    ),
    # How long it took.
    _m("decode_ms_last", "gauge", "ms", "The last batch: time inside llama_decode."),
    _m("decode_ms_ewma", "gauge", "ms", "The same, as a moving average (a fifth of each new one)."),
    _m("decode_ms_avg", "gauge", "ms", "The same, as a mean since the start."),
    _m("sampling_ms_last", "gauge", "ms", "The last batch: time to choose the next tokens."),
    _m("host_ms_last", "gauge", "ms", "The last tick: everything but llama_decode."),
    _m("decode_seconds_total", "counter", "seconds", "Time inside llama_decode."),
    _m(
        "prompt_seconds_total",
        "counter",
        "seconds",
        "From a request's KV slot to its first token, all requests together.",
    ),
    _m("host_seconds_total", "counter", "seconds", "Time of ticks outside llama_decode."),
    _m(
        "time_logits_to_first_chunk",
        "gauge",
        "ms",
        "The last first token: from its logits until its frame was written.",
    ),
    _m("p50_ms", "gauge", "ms", "Inter-token latency, median of the latest 4,096."),
    _m("p95_ms", "gauge", "ms", "The same, 95th percentile."),
    _m("p99_ms", "gauge", "ms", "The same, 99th percentile."),
    _m("ttft_ms", "histogram", "ms", "From a request's arrival to its first token."),
    _m(
        "inter_token_ms",
        "histogram",
        "ms",
        "Inter-token latency, from the end of one computation to the end of the next. Tokens of one "
        "computation, guessed right, share that time.",
    ),
    _m("interactive_gap_ms", "histogram", "ms", "The same, of the interactive lane alone."),
    _m(
        "interactive_shown_ms",
        "histogram",
        "ms",
        "Time between two writes of a streamed request's tokens to its connection, interactive "
        "lane: what a reader sees. A wait for the reader is left out.",
    ),
    _m("background_shown_ms", "histogram", "ms", "The same, of the background lane."),
    _m("decode_ms", "histogram", "ms", "Time inside llama_decode, each batch."),
    _m(
        "mask_ms",
        "histogram",
        "ms",
        "Time to find another token for one that the grammar of an answer refused.",
    ),
    _m(
        "late_masks_total",
        "counter",
        "tokens",
        "Such tokens for which all that the grammar allows was not found within 2 ms: their requests "
        "sat out until it was, and held nobody up.",
    ),
    _m("queue_ms", "histogram", "ms", "From a request's arrival to its KV slot."),
    _m("batch_size", "histogram", "tokens", "Tokens in each batch."),
    # The KV cache.
    _m("kv_cells_used", "gauge", "cells", "KV cells that hold a token."),
    _m("kv_cells_reserved", "gauge", "cells", "KV cells promised to admitted requests."),
    _m("kv_cells_total", "gauge", "cells", "KV cells there are."),
    # The prefix cache (docs/MEMORY.md).
    _m(
        "prefix_hits_total",
        "counter",
        "requests",
        "Requests that began with what was computed before, by where that was: the cells of a "
        "running request, a leaf, saved pages, or a prompt that was just being computed (fork).",
        "source",
    ),
    _m("prefix_tokens_total", "counter", "tokens", "Tokens that needed not be computed by that."),
    _m(
        "prefix_failures_total",
        "counter",
        "events",
        "Copies, saves, restores and moves that failed, and beginnings that were incomplete; what "
        "was not there is computed.",
        "what",
    ),
    _m(
        "prefix_rent_seconds_total",
        "counter",
        "seconds",
        "What ticks took longer for cells of leaves, by the cost model.",
    ),
    _m(
        "prefix_moved_cells_total",
        "counter",
        "cells",
        "Cells of running requests and leaves that were moved down, so that ticks span fewer.",
    ),
    _m("prefix_evicted_total", "counter", "pages", "Saved pages that went to make room."),
    _m(
        "prefix_ghost_hits_total",
        "counter",
        "pages",
        "Evicted pages that were asked for again: hits with twice the `--prefix-ram`.",
    ),
    _m("prefix_bytes", "gauge", "bytes", "What saved pages take, books included."),
    _m("prefix_pages", "gauge", "pages", "Saved pages."),
    _m("prefix_leaves", "gauge", "leaves", "Beginnings in the KV cache that nobody computes on."),
    _m("prefix_leaf_tokens", "gauge", "tokens", "Tokens of these, shared ones counted each time."),
    # The latency contract (docs/POLICY.md); empty under a policy without a limit.
    _m(
        "latency_cap",
        "gauge",
        "ratio",
        "What was promised: the p95 of an interactive stream's inter-token latency over `solo_ms`.",
    ),
    _m(
        "tick_limit_ms",
        "gauge",
        "ms",
        "How long the last tick was allowed to take; a newcomer's prompt may exceed it.",
    ),
    _m("solo_ms", "gauge", "ms", "What the interactive streams alone would have cost."),
    _m("alone_ms", "gauge", "ms", "What one interactive stream wholly alone would have cost."),
    _m(
        "solo_ratio_p95",
        "gauge",
        "ratio",
        "Measured time over `solo_ms`, 95th percentile of the latest 1,024 ticks with a limit.",
    ),
    _m(
        "alone_ratio_p95",
        "gauge",
        "ratio",
        "The same over `alone_ms`: what all other work costs a stream, other streams included.",
    ),
    _m("predicted_ms_last", "gauge", "ms", "What the cost model expected of the last tick."),
    _m(
        "ticks_over_budget",
        "counter",
        "ticks",
        "Ticks that took longer than `tick_limit_ms`, those of newcomers among them.",
    ),
    _m("prefill_guard_active", "gauge", "0 or 1", "Whether the last tick left a prompt out."),
    _m(
        "skipped_prefill_due_to_latency_total",
        "counter",
        "prompts",
        "Prompts left out of a tick so that it stayed within its limit.",
    ),
    _m("floor_grants_total", "counter", "ticks", "Longer ticks granted to the background floor."),
    _m(
        "guard_infeasible_total",
        "counter",
        "ticks",
        "Ticks that took longer than the cap times `solo_ms` although they held no other work: what readers "
        "are ahead has to hide that.",
    ),
    _m(
        "background_share",
        "gauge",
        "ratio",
        "The part of machine time that background work got, smoothed over ten seconds, as of "
        "the last tick.",
    ),
    _m(
        "slo_violations_total",
        "counter",
        "tokens",
        "First and later tokens that took longer than their request's `slo` asked for.",
        "target",
    ),
    _m("drafts_total", "counter", "drafts", "Guesses at the next tokens, one or several at once."),
    _m("draft_rows_total", "counter", "rows", "Rows computed to check guesses at the next tokens."),
    _m("draft_accepted_total", "counter", "tokens", "Tokens that had been guessed right."),
    _m(
        "draft_rows_by_source_total",
        "counter",
        "rows",
        "`draft_rows_total` by where the guess was found: own text, earlier answers.",
        "source",
    ),
    _m(
        "draft_accepted_by_source_total",
        "counter",
        "tokens",
        "`draft_accepted_total`, the same way.",
        "source",
    ),
    _m("ballast_rows_total", "counter", "rows", "Rows computed and thrown away, to be quicker."),
    _m("cost_error", "gauge", "ratio", "Smoothed error of the cost model's predictions."),
    _m(
        "cost_error_p50",
        "gauge",
        "ratio",
        "How far a tick was from its prediction, up or down; median of the latest 1,024.",
    ),
    _m("cost_error_p95", "gauge", "ratio", "The same, 95th percentile."),
    _m(
        "cost_trusted",
        "gauge",
        "0 or 1",
        "Whether `cost_error`, or what it would be by the table as it was measured, is at most 15 %.",
    ),
    _m(
        "cost_scale",
        "gauge",
        "ratio",
        "The scale factor on all steps: how much slower the machine is now than when it was measured.",
    ),
    _m(
        "cost_staircase_ms",
        "gauge",
        "ms",
        "What a batch of so many tokens is expected to take now, in an empty context and with one "
        "row of logits.",
        "tokens",
    ),
    _m(
        "scheduler_efficiency",
        "gauge",
        "ratio",
        "What the staircase allows for the batches that were computed, over the time from decode "
        "to decode that they took; right to `cost_error`.",
    ),
    _m("sum_bmt_mb_last", "gauge", "MB", "Bytes that the last tick moved, by the model's sizes."),
    _m("sum_bmt_mb_per_token", "gauge", "MB", "The same for each token, since the start."),
    _m("bmt_budget_gbps", "gauge", "GB/s", "Memory bandwidth that ticks may use."),
    _m(
        "sum_bmt_budget_mb_last",
        "gauge",
        "MB",
        "Bytes that the last tick might have moved at that bandwidth in the time that it was "
        "expected to take; background work is trimmed to that.",
    ),
    _m("sum_bmt_budget_mb_per_token", "gauge", "MB", "The same for each token, since the start."),
    _m(
        "tokens_per_s_at_cap",
        "gauge",
        "tokens/s",
        "All tokens computed while an interactive stream was protected, over that time.",
    ),
    _m(
        "worst_pause_ms",
        "histogram",
        "ms",
        "The longest inter-token latency of each interactive stream's first 3 s.",
    ),
    _m("ttf5_ms", "histogram", "ms", "From submitting an interactive request to its fifth token."),
    # The playout buffer; empty under a policy that paces nobody.
    _m("held_tokens", "gauge", "tokens", "Tokens that are held back until they are due."),
    _m("held_tokens_total", "counter", "tokens", "Tokens that were ever held back."),
    _m(
        "slack_ms_least",
        "gauge",
        "ms",
        "How long before it was due a paced stream's token was there, least of the latest 1,024; "
        "below 0 it was late.",
    ),
    _m("slack_ms_p5", "gauge", "ms", "The same, 5th percentile."),
    _m(
        "ran_dry_total",
        "counter",
        "tokens",
        "Paced tokens that were not there when they were due, by cause: `planned`, the policy let "
        "the tick take longer; `mispredicted`, it took longer than expected; `left_out`, the stream "
        "had no part in the ticks before.",
        "cause",
    ),
    _m("slots_total", "gauge", "slots", "KV slots there are."),
    _m(
        "scorecard",
        "scorecard",
        "",
        "An object with the columns below; JSON only. Empty until the first second is over.",
    ),
)

SCORECARD: tuple[Metric, ...] = (
    _m("time", "info", "UTC", "When the interval ended, ISO 8601."),
    _m("interval_s", "gauge", "seconds", "How long it was; the last one of a file may be short."),
    _m("busy_ratio", "gauge", "ratio", "The part of it that ticks took, host time included."),
    _m("tokens_per_s", "gauge", "tokens/s", "All tokens computed in it, prompts included."),
    _m("interactive_tokens_per_s", "gauge", "tokens/s", "Of these, the interactive lane."),
    _m("background_tokens_per_s", "gauge", "tokens/s", "Of these, the background lane."),
    _m("tokens_generated_per_s", "gauge", "tokens/s", "Tokens sampled in it, of both lanes."),
    _m(
        "tokens_per_s_at_cap",
        "gauge",
        "tokens/s",
        "All tokens of its ticks that had a limit, over the time of these ticks.",
    ),
    _m(
        "interactive_gaps",
        "gauge",
        "gaps",
        "Times between tokens in it as interactive readers were shown them: `interactive_shown_ms`.",
    ),
    _m("interactive_p95_ms", "gauge", "ms", "95th percentile of these, right to 1 %."),
    _m("interactive_p99_ms", "gauge", "ms", "99th percentile of these, right to 1 %."),
    _m("ticks_over_budget", "gauge", "ticks", "Ticks in it that took longer than their limit."),
    _m("sum_bmt_mb_per_token", "gauge", "MB", "Bytes moved for each token computed in it."),
    _m("sum_bmt_mb_per_tick", "gauge", "MB", "Bytes moved by each tick in it, on average."),
    _m("scheduler_efficiency", "gauge", "ratio", "The metric of that name, of its ticks."),
    _m("copy_free_ratio", "gauge", "ratio", "The metric of that name, of rows sampled in it."),
    _m(
        "draft_accepted_ratio",
        "gauge",
        "ratio",
        "Of the guesses at next tokens computed in it, how many were right.",
    ),
    _m("rss_gb", "gauge", "GB", "Resident memory at its end, model included."),
    _m(
        "pss_gb",
        "gauge",
        "GB",
        "Of that, this process's fair part: a page that n processes map counts as 1/n. Linux "
        "only; read seldom where reading takes long.",
    ),
)
