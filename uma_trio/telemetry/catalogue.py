"""Every metric, declared once: its name, type, unit and meaning.

A name means the same in the JSON of a ``metrics`` request and, with the prefix ``uma_``, in the
Prometheus text. docs/METRICS.md is rendered from here, including the columns of the scorecard.
"""

from __future__ import annotations

from uma_trio.telemetry.catalogue_planning import PLANNING
from uma_trio.telemetry.metric import Metric

METRICS: tuple[Metric, ...] = (
    # What is running.
    Metric("model", "info", "", "The name of the loaded model."),
    Metric("backend", "info", "", "The backend, its threads and the KV type."),
    Metric("policy", "info", "", "The scheduling policy in use."),
    Metric("version", "info", "", "The daemon's version."),
    Metric("uptime_s", "gauge", "seconds", "Time since the daemon was ready.", of_daemon=True),
    Metric(
        "rss_gb",
        "gauge",
        "GB",
        "Resident memory of the process (10^9 bytes), including the model.",
        of_daemon=True,
    ),
    # Who is served.
    Metric("sessions", "gauge", "connections", "Open client connections.", of_daemon=True),
    Metric(
        "sessions_total",
        "counter",
        "connections",
        "Client connections accepted since the start.",
        of_daemon=True,
    ),
    Metric("active_sessions", "gauge", "requests", "Requests that have a KV slot."),
    Metric("queued_sessions", "gauge", "requests", "Requests that wait for a slot."),
    Metric(
        "parked_sessions",
        "gauge",
        "requests",
        "Requests that are left out of ticks because their reader is behind.",
    ),
    Metric("active_interactive", "gauge", "requests", "The interactive part of `active_sessions`."),
    Metric("active_background", "gauge", "requests", "The background part of `active_sessions`."),
    Metric("queued_interactive", "gauge", "requests", "The interactive part of `queued_sessions`."),
    Metric("queued_background", "gauge", "requests", "The background part of `queued_sessions`."),
    Metric("requests_total", "counter", "requests", "Ended requests, by outcome.", "outcome"),
    Metric(
        "errors_total",
        "counter",
        "events",
        "Errors sent to clients, by code.",
        "code",
        of_daemon=True,
    ),
    Metric(
        "accept_failures_total",
        "counter",
        "connections",
        "Connections that could not be accepted.",
        of_daemon=True,
    ),
    Metric(
        "preemptions_total",
        "counter",
        "requests",
        "Preemptions: a running request lost its slot and cells to another one.",
    ),
    Metric(
        "aborted_ticks_total",
        "counter",
        "ticks",
        "Ticks that were aborted for an arriving interactive request.",
    ),
    Metric(
        "policy_failures_total",
        "counter",
        "ticks",
        "Ticks that the baseline planned because the policy failed.",
    ),
    # What was computed.
    Metric("tokens_total", "counter", "tokens", "Tokens computed, including prompts."),
    Metric("tokens_by_lane_total", "counter", "tokens", "`tokens_total` by lane.", "lane"),
    Metric("prompt_tokens_total", "counter", "tokens", "Prompt tokens computed."),
    Metric(
        "tokens_generated_total",
        "counter",
        "tokens",
        "Tokens sampled. The token by which the model ends an answer is one of them; `usage` does "
        "not count it.",
    ),
    Metric("batch_calls_total", "counter", "calls", "Batches computed (one llama_decode each)."),
    Metric(
        "batch_sequences_total",
        "counter",
        "sequences",
        "Requests that had tokens in a batch, summed over `batch_calls_total`.",
    ),
    Metric(
        "longest_context",
        "gauge",
        "tokens",
        "The largest number of tokens that one request had in the KV cache.",
    ),
    Metric("last_batch_size", "gauge", "tokens", "Tokens in the last batch."),
    Metric("avg_batch", "gauge", "tokens", "Mean number of tokens in a batch, since the start."),
    Metric(
        "served_decoders",
        "gauge",
        "requests",
        "Requests that got their next token in the last batch.",
    ),
    Metric(
        "tokens_per_tick_decode",
        "gauge",
        "tokens",
        "Tokens of the last batch that continued an answer.",
    ),
    Metric(
        "tokens_per_tick_prefill",
        "gauge",
        "tokens",
        "Tokens of the last batch that belonged to prompts.",
    ),
    Metric(
        "budget_target",
        "gauge",
        "tokens",
        "The number of tokens that the policy wanted in the last batch; null under a policy "
        "that budgets time.",
    ),
    Metric(
        "budget_used",
        "gauge",
        "tokens",
        "The number of tokens in the last batch, for comparison with `budget_target`.",
    ),
    Metric(
        "copy_free_ratio",
        "gauge",
        "ratio",
        "Share of the sampled logits rows that were sampled in place, without a copy. "
        "Temperature without a filter, and top_p without top_k, change the whole row and need a "
        "copy.",
    ),
    # How long it took.
    Metric("decode_ms_last", "gauge", "ms", "Time inside llama_decode, last batch."),
    Metric(
        "decode_ms_ewma",
        "gauge",
        "ms",
        "Time inside llama_decode, moving average (weight of a new value: a fifth).",
    ),
    Metric("decode_ms_avg", "gauge", "ms", "Time inside llama_decode, mean since the start."),
    Metric("sampling_ms_last", "gauge", "ms", "Time to sample the next tokens, last batch."),
    Metric("host_ms_last", "gauge", "ms", "Time of the last tick outside llama_decode."),
    Metric("decode_seconds_total", "counter", "seconds", "Time inside llama_decode, sum."),
    Metric(
        "prompt_seconds_total",
        "counter",
        "seconds",
        "Time from KV slot to first token, summed over all requests.",
    ),
    Metric("host_seconds_total", "counter", "seconds", "Time of ticks outside llama_decode, sum."),
    Metric(
        "time_logits_to_first_chunk",
        "gauge",
        "ms",
        "Time from the logits of the latest first token until its frame was written.",
    ),
    Metric("p50_ms", "gauge", "ms", "Inter-token latency, median of the latest 4,096."),
    Metric("p95_ms", "gauge", "ms", "Inter-token latency, 95th percentile of the latest 4,096."),
    Metric("p99_ms", "gauge", "ms", "Inter-token latency, 99th percentile of the latest 4,096."),
    Metric("ttft_ms", "histogram", "ms", "Time from a request's arrival to its first token."),
    Metric(
        "inter_token_ms",
        "histogram",
        "ms",
        "Inter-token latency, from the end of one computation to the end of the next. Several "
        "tokens of one computation (right drafts) share its time equally.",
    ),
    Metric(
        "interactive_gap_ms", "histogram", "ms", "`inter_token_ms` of the interactive lane only."
    ),
    Metric(
        "interactive_shown_ms",
        "histogram",
        "ms",
        "Time between two writes of a streamed request's tokens to its connection, interactive "
        "lane: the gap that a reader sees. Time in which the daemon waits for the reader is not "
        "counted.",
    ),
    Metric("background_shown_ms", "histogram", "ms", "The same for the background lane."),
    Metric("decode_ms", "histogram", "ms", "Time inside llama_decode, per batch."),
    Metric(
        "mask_ms",
        "histogram",
        "ms",
        "Time to compute the mask of allowed tokens, after the grammar of an answer refused the "
        "sampled token.",
    ),
    Metric(
        "late_masks_total",
        "counter",
        "tokens",
        "Tokens whose mask was not ready within 2 ms. Their requests were left out of ticks "
        "until it was ready; other requests were not delayed.",
    ),
    Metric(
        "shapes_checked_total",
        "counter",
        "shapes",
        "New schemas, grammars and expressions, by outcome: plain ones are followed in the daemon, "
        "apart in a process of their own; refused ones cannot be enforced; ended ones were stopped "
        "by --shape-cpu, --shape-memory or the time limit.",
        "outcome",
    ),
    Metric(
        "shape_events_total",
        "counter",
        "events",
        "By event. refused again: a shape was refused at once, because it had been refused before; "
        "moved: an answer was moved to a process of its own, because a step in the daemon was too "
        "large; stopped: an answer was ended by a limit of its process.",
        "event",
    ),
    Metric("shape_check_ms", "histogram", "ms", "Time to compile a new shape in its process."),
    Metric("shape_processes", "gauge", "processes", "Processes that compile or follow shapes."),
    Metric("shape_bytes", "gauge", "bytes", "Memory of the compiled shapes cached in the daemon."),
    Metric(
        "encoded_inputs_total",
        "counter",
        "inputs",
        "Texts that a vector or a score was made of.",
        of_daemon=True,
    ),
    Metric("encoded_tokens_total", "counter", "tokens", "Tokens of these texts.", of_daemon=True),
    Metric("encode_s_total", "counter", "s", "Time in which encoders computed.", of_daemon=True),
    Metric("queue_ms", "histogram", "ms", "Time from a request's arrival to its KV slot."),
    Metric(
        "loop_lag_ms",
        "histogram",
        "ms",
        "How much later than asked for trio's thread ran, which writes all tokens. Measured 50 times a "
        "second while there are requests, else 4 times.",
        of_daemon=True,
    ),
    Metric(
        "loop_lag_max_ms",
        "gauge",
        "ms",
        "The longest `loop_lag_ms` since the start.",
        of_daemon=True,
    ),
    Metric("batch_size", "histogram", "tokens", "Tokens in each batch."),
    # The KV cache.
    Metric("kv_cells_used", "gauge", "cells", "KV cells that contain a token."),
    Metric("kv_cells_reserved", "gauge", "cells", "KV cells reserved for admitted requests."),
    Metric("kv_cells_total", "gauge", "cells", "KV cells in total."),
    # The prefix cache (docs/MEMORY.md).
    Metric(
        "prefix_hits_total",
        "counter",
        "requests",
        "Requests that started with a cached prefix, by its source: the cells of a running "
        "request, a leaf, saved pages, or a prompt that another request was computing (fork).",
        "source",
    ),
    Metric(
        "prefix_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens that were not computed because of these hits.",
    ),
    Metric(
        "prefix_failures_total",
        "counter",
        "events",
        "Copies, saves, restores and moves that failed, and incomplete prefixes. The missing "
        "tokens are computed.",
        "what",
    ),
    Metric(
        "prefix_rent_seconds_total",
        "counter",
        "seconds",
        "Time that the cells of leaves added to ticks, by the cost model.",
    ),
    Metric(
        "prefix_moved_cells_total",
        "counter",
        "cells",
        "Cells of running requests and leaves that were moved down, so that ticks span fewer "
        "cells.",
    ),
    Metric("prefix_evicted_total", "counter", "pages", "Saved pages that were evicted."),
    Metric(
        "prefix_ghost_hits_total",
        "counter",
        "pages",
        "Evicted pages that were requested again: hits that twice the `--prefix-ram` would have "
        "had.",
    ),
    Metric("prefix_bytes", "gauge", "bytes", "Memory of saved pages, including bookkeeping."),
    Metric("prefix_pages", "gauge", "pages", "Saved pages."),
    Metric(
        "prefix_leaves",
        "gauge",
        "leaves",
        "Leaves: prefixes in the KV cache without a running request.",
    ),
    Metric(
        "prefix_leaf_tokens",
        "gauge",
        "tokens",
        "Tokens of these leaves; shared tokens count once for each leaf.",
    ),
    *PLANNING,
    Metric("slots_total", "gauge", "slots", "KV slots in total."),
    Metric(
        "scorecard",
        "scorecard",
        "",
        "An object with the columns below; JSON only. Empty during the first second.",
    ),
)

SCORECARD: tuple[Metric, ...] = (
    Metric("time", "info", "UTC", "End of the interval, ISO 8601."),
    Metric(
        "interval_s",
        "gauge",
        "seconds",
        "Length of the interval. The last one of a file may be short.",
    ),
    Metric(
        "busy_ratio",
        "gauge",
        "ratio",
        "Share of the interval that ticks took, including host time.",
    ),
    Metric("tokens_per_s", "gauge", "tokens/s", "All tokens computed, including prompts."),
    Metric("interactive_tokens_per_s", "gauge", "tokens/s", "The part of the interactive lane."),
    Metric("background_tokens_per_s", "gauge", "tokens/s", "The part of the background lane."),
    Metric("tokens_generated_per_s", "gauge", "tokens/s", "Tokens sampled, both lanes."),
    Metric(
        "tokens_per_s_at_cap",
        "gauge",
        "tokens/s",
        "All tokens of ticks with a limit, divided by the time of these ticks.",
    ),
    Metric(
        "interactive_gaps",
        "gauge",
        "gaps",
        "Number of gaps between tokens shown to interactive readers (`interactive_shown_ms`).",
    ),
    Metric("interactive_p95_ms", "gauge", "ms", "95th percentile of these gaps, accurate to 1 %."),
    Metric("interactive_p99_ms", "gauge", "ms", "99th percentile of these gaps, accurate to 1 %."),
    Metric("ticks_over_budget", "gauge", "ticks", "Ticks that took longer than their limit."),
    Metric("sum_bmt_mb_per_token", "gauge", "MB", "Bytes moved per token."),
    Metric("sum_bmt_mb_per_tick", "gauge", "MB", "Bytes moved per tick, on average."),
    Metric(
        "scheduler_efficiency",
        "gauge",
        "ratio",
        "The metric of the same name, for the ticks of the interval.",
    ),
    Metric(
        "copy_free_ratio",
        "gauge",
        "ratio",
        "The metric of the same name, for the rows sampled in the interval.",
    ),
    Metric(
        "draft_accepted_ratio", "gauge", "ratio", "Share of the computed guesses that were right."
    ),
    Metric(
        "rss_gb", "gauge", "GB", "Resident memory at the end of the interval, including the model."
    ),
    Metric(
        "pss_gb",
        "gauge",
        "GB",
        "Proportional share of that memory: a page that n processes map counts as 1/n. Linux "
        "only; updated less often where reading it takes long.",
    ),
)
