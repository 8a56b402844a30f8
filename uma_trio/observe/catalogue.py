"""Every metric, declared once: its name, type, unit and meaning.

A name means the same in the JSON of a ``metrics`` request and, with the prefix ``uma_``, in the
Prometheus text. docs/METRICS.md is rendered from here, including the columns of the scorecard.
"""

from __future__ import annotations

import re
from typing import Literal, cast, get_args

from attrs import field, frozen, validators

Kind = Literal["counter", "gauge", "histogram", "info", "scorecard"]


@frozen
class Metric:
    """One metric. `label` names the key of a metric with one value for each key, such as a lane.

    One `of_daemon` is counted once for all models; the others are of each.
    """

    name: str
    kind: Kind = field(validator=validators.in_(get_args(Kind)))
    unit: str
    help: str
    label: str = ""
    of_daemon: bool = False


def _read(table: str) -> tuple[Metric, ...]:
    """Return the metrics of a table: ``name{label} | kind | unit | help``; indented lines go on."""
    found = []
    for row in re.split(r"\n(?! )", table.strip()):
        if row.startswith("#"):
            continue
        name, kind, unit, text = (re.sub(r"\s+", " ", part).strip() for part in row.split("|"))
        name, _, label = name.partition("{")
        kind, _, of_daemon = kind.partition(" of the ")
        found.append(Metric(name, cast(Kind, kind), unit, text, label.rstrip("}"), bool(of_daemon)))
    return tuple(found)


METRICS = _read("""
# What is running.
model | info | | The name of the loaded model.
backend | info | | The backend, its threads and the KV type.
policy | info | | The scheduling policy in use.
version | info | | The daemon's version.
uptime_s | gauge of the daemon | seconds | Time since the daemon was ready.
rss_gb | gauge of the daemon | GB | Resident memory of the process (10^9 bytes), including the model.
# Who is served.
sessions | gauge of the daemon | connections | Open client connections.
sessions_total | counter of the daemon | connections | Client connections accepted since the start.
active_sessions | gauge | requests | Requests that have a KV slot.
queued_sessions | gauge | requests | Requests that wait for a slot.
parked_sessions | gauge | requests | Requests that are left out of ticks because their reader is behind.
active_interactive | gauge | requests | The interactive part of `active_sessions`.
active_background | gauge | requests | The background part of `active_sessions`.
queued_interactive | gauge | requests | The interactive part of `queued_sessions`.
queued_background | gauge | requests | The background part of `queued_sessions`.
requests_total{outcome} | counter | requests | Ended requests, by outcome.
errors_total{code} | counter of the daemon | events | Errors sent to clients, by code.
accept_failures_total | counter of the daemon | connections | Connections that could not be accepted.
preemptions_total | counter | requests | Preemptions: a running request lost its slot and cells to another one.
aborted_ticks_total | counter | ticks | Ticks that were aborted for an arriving interactive request.
policy_failures_total | counter | ticks | Ticks that the baseline planned because the policy failed.
# What was computed.
tokens_total | counter | tokens | Tokens computed, including prompts.
tokens_by_lane_total{lane} | counter | tokens | `tokens_total` by lane.
prompt_tokens_total | counter | tokens | Prompt tokens computed.
tokens_generated_total | counter | tokens | Tokens sampled. The token by which the model ends an answer is one of
    them; `usage` does not count it.
batch_calls_total | counter | calls | Batches computed (one llama_decode each).
batch_sequences_total | counter | sequences | Requests that had tokens in a batch, summed over `batch_calls_total`.
longest_context | gauge | tokens | The largest number of tokens that one request had in the KV cache.
last_batch_size | gauge | tokens | Tokens in the last batch.
avg_batch | gauge | tokens | Mean number of tokens in a batch, since the start.
served_decoders | gauge | requests | Requests that got their next token in the last batch.
tokens_per_tick_decode | gauge | tokens | Tokens of the last batch that continued an answer.
tokens_per_tick_prefill | gauge | tokens | Tokens of the last batch that belonged to prompts.
budget_target | gauge | tokens | The number of tokens that the policy wanted in the last batch; null under a policy
    that budgets time.
budget_used | gauge | tokens | The number of tokens in the last batch, for comparison with `budget_target`.
copy_free_ratio | gauge | ratio | Share of the sampled logits rows that were sampled in place, without a copy.
    Temperature without a filter, and top_p without top_k, change the whole row and need a copy.
# How long it took.
decode_ms_last | gauge | ms | Time inside llama_decode, last batch.
decode_ms_ewma | gauge | ms | Time inside llama_decode, moving average (weight of a new value: a fifth).
decode_ms_avg | gauge | ms | Time inside llama_decode, mean since the start.
sampling_ms_last | gauge | ms | Time to sample the next tokens, last batch.
host_ms_last | gauge | ms | Time of the last tick outside llama_decode.
decode_seconds_total | counter | seconds | Time inside llama_decode, sum.
prompt_seconds_total | counter | seconds | Time from KV slot to first token, summed over all requests.
host_seconds_total | counter | seconds | Time of ticks outside llama_decode, sum.
time_logits_to_first_chunk | gauge | ms | Time from the logits of the latest first token until its frame was written.
p50_ms | gauge | ms | Inter-token latency, median of the latest 4,096.
p95_ms | gauge | ms | Inter-token latency, 95th percentile of the latest 4,096.
p99_ms | gauge | ms | Inter-token latency, 99th percentile of the latest 4,096.
ttft_ms | histogram | ms | Time from a request's arrival to its first token.
inter_token_ms | histogram | ms | Inter-token latency, from the end of one computation to the end of the next. Several
    tokens of one computation (right drafts) share its time equally.
interactive_gap_ms | histogram | ms | `inter_token_ms` of the interactive lane only.
interactive_shown_ms | histogram | ms | Time between two writes of a streamed request's tokens to its connection,
    interactive lane: the gap that a reader sees. Time in which the daemon waits for the reader is not counted.
background_shown_ms | histogram | ms | The same for the background lane.
decode_ms | histogram | ms | Time inside llama_decode, per batch.
mask_ms | histogram | ms | Time to compute the mask of allowed tokens, after the grammar of an answer refused the
    sampled token.
late_masks_total | counter | tokens | Tokens whose mask was not ready within 2 ms. Their requests were left out of
    ticks until it was ready; other requests were not delayed.
shapes_checked_total{outcome} | counter | shapes | New schemas, grammars and expressions, by outcome: plain ones are
    followed in the daemon, apart in a process of their own; refused ones cannot be enforced; ended ones were stopped
    by --shape-cpu, --shape-memory or the time limit.
shape_events_total{event} | counter | events | By event. refused again: a shape was refused at once, because it had
    been refused before; moved: an answer was moved to a process of its own, because a token of it took too
    long in the daemon; stopped: an answer was ended by a limit of its process.
shape_check_ms | histogram | ms | Time to compile a new shape in its process.
shape_processes | gauge | processes | Processes that compile or follow shapes.
shape_bytes | gauge | bytes | Memory of the compiled shapes cached in the daemon.
encoded_inputs_total | counter of the daemon | inputs | Texts that a vector or a score was made of.
encoded_tokens_total | counter of the daemon | tokens | Tokens of these texts.
encode_s_total | counter of the daemon | s | Time in which encoders computed.
queue_ms | histogram | ms | Time from a request's arrival to its KV slot.
loop_lag_ms | histogram of the daemon | ms | How much later than asked for trio's thread ran, which writes all tokens.
    Measured 50 times a second while there are requests, else 4 times.
loop_lag_max_ms | gauge of the daemon | ms | The longest `loop_lag_ms` since the start.
batch_size | histogram | tokens | Tokens in each batch.
# The KV cache.
kv_cells_used | gauge | cells | KV cells that contain a token.
kv_cells_reserved | gauge | cells | KV cells reserved for admitted requests.
kv_cells_total | gauge | cells | KV cells in total.
# The prefix cache (docs/MEMORY.md).
prefix_hits_total{source} | counter | requests | Requests that started with a cached prefix, by its source: the cells
    of a running request or of one that ended, saved pages, pages on disk, or a prompt that another request was computing.
prefix_tokens_total | counter | tokens | Prompt tokens that were not computed because of these hits.
prefix_failures_total{what} | counter | events | Copies, saves, restores, moves and reads from disk that failed, and incomplete
    prefixes. The missing tokens are computed.
prefix_rent_seconds_total | counter | seconds | Time that the cells of cached prefixes added to ticks, by the
    cost model.
prefix_moved_cells_total | counter | cells | Cells of running requests and cached prefixes that were moved down,
    so that ticks span fewer cells.
prefix_evicted_total | counter | pages | Saved pages that were evicted.
prefix_ghost_hits_total | counter | pages | Evicted pages that were requested again: hits that twice the
    `--prefix-ram` would have had.
prefix_bytes | gauge | bytes | Memory of saved pages, including bookkeeping.
prefix_pages | gauge | pages | Saved pages.
prefix_leaves | gauge | prefixes | Prefixes in the KV cache without a running request.
prefix_leaf_tokens | gauge | tokens | Tokens of these prefixes; shared tokens count once for each.
prefix_disk_bytes | gauge of the daemon | bytes | Files of saved pages (`--prefix-disk`), of all models.
prefix_disk_written_bytes_total | counter of the daemon | bytes | Bytes of saved pages that were written to the disk.
# The latency contract (docs/POLICY.md); empty under a policy without a limit.
latency_cap | gauge | ratio | The promised limit on the p95 inter-token latency of an interactive stream, as a
    multiple of `solo_ms`. `shown_ratio_p95` is the measured value.
shown_ratio_p95 | gauge | ratio | Time between two writes to an interactive reader (`interactive_shown_ms`) divided by
    `solo_ms` at that moment, 95th percentile of the latest 1,024. Requests with an `slo` of their own are included.
tick_limit_ms | gauge | ms | The time limit of the last tick. A newcomer's prompt may exceed it.
step_ms | gauge | ms | The promised time between two shown tokens, the shortest of the last tick's interactive
    streams. `interactive_p95_ms` of the scorecard is what the latest interval showed.
solo_ms | gauge | ms | Predicted time of the last tick with the interactive streams only.
alone_ms | gauge | ms | Predicted time of the last tick with one interactive stream only.
solo_ratio_p95 | gauge | ratio | Measured time of a tick divided by `solo_ms`, 95th percentile of the latest 1,024
    ticks with a limit. It may exceed `latency_cap`: readers do not see a long tick for which tokens were computed
    ahead.
alone_ratio_p95 | gauge | ratio | The same for `alone_ms`: the cost of all other work for a stream, including other
    streams.
predicted_ms_last | gauge | ms | Predicted time of the last tick.
ticks_over_budget | counter | ticks | Ticks that took longer than `tick_limit_ms`, including those of newcomers.
prefill_guard_active | gauge | 0 or 1 | Whether a prompt was left out of the last tick.
skipped_prefill_due_to_latency_total | counter | prompts | Prompts that were left out of a tick to keep its limit.
floor_grants_total | counter | ticks | Longer ticks that were granted to the background floor.
guard_infeasible_total | counter | ticks | Ticks with interactive streams only that took longer than `latency_cap`
    times `solo_ms`. Only tokens that are computed ahead can hide such a delay.
background_share | gauge | ratio | Share of machine time of background work, smoothed over ten seconds, as of the last
    tick.
slo_violations_total{target} | counter | tokens | First tokens and later tokens that took longer than the `slo` of
    their request.
drafts_total | counter | drafts | Drafts: guesses at one or several next tokens.
draft_rows_total | counter | rows | Rows computed to verify guessed tokens.
draft_accepted_total | counter | tokens | Guessed tokens that were right.
draft_rows_by_source_total{source} | counter | rows | `draft_rows_total` by the source of the guess: own text, earlier
    answers.
draft_accepted_by_source_total{source} | counter | tokens | `draft_accepted_total` by the source of the guess.
draft_failures_total | counter | failures | Failures of the search for drafts. After three it rests for a minute, then
    for twice as long each time, up to an hour.
ballast_rows_total | counter | rows | Rows that are computed and discarded, where a larger tick is faster.
cost_error | gauge | ratio | Smoothed absolute error of the cost model's predictions.
cost_error_p50 | gauge | ratio | Absolute error of a tick's prediction, median of the latest 1,024.
cost_error_p95 | gauge | ratio | Absolute error of a tick's prediction, 95th percentile of the latest 1,024.
cost_trusted | gauge | 0 or 1 | 1 if `cost_error`, or the same error of the measured table, is at most 15 %.
cost_others_share | gauge | ratio | The part of the machine that other programs used when it was measured, if that was
    a tenth or more: it is measured again when it is idle and quiet. Else 0.
cost_scale | gauge | ratio | The scale factor: how much slower the machine is at the moment than when it was measured.
cost_staircase_ms{tokens} | gauge | ms | Predicted time of a batch with this many tokens, with an empty context and
    one row of logits.
scheduler_efficiency | gauge | ratio | Predicted time of the computed batches divided by the measured time from decode
    to decode; accurate to `cost_error`.
sum_bmt_mb_last | gauge | MB | Bytes that the last tick moved, computed from the sizes of the model.
sum_bmt_mb_per_token | gauge | MB | Bytes moved per token, since the start.
bmt_budget_gbps | gauge | GB/s | Memory bandwidth that ticks may use.
sum_bmt_budget_mb_last | gauge | MB | Bytes that the last tick could have moved at that bandwidth in its predicted
    time. Background work is reduced to this amount.
sum_bmt_budget_mb_per_token | gauge | MB | The same per token, since the start.
tokens_per_s_at_cap | gauge | tokens/s | Tokens computed per second in ticks that protected an interactive stream.
worst_pause_ms | histogram | ms | The longest inter-token latency in the first 3 s of each interactive stream.
ttf5_ms | histogram | ms | Time from the arrival of an interactive request to its fifth token.
# The playout buffer; empty under a policy that paces nobody.
held_tokens | gauge of the daemon | tokens | Computed tokens that are held until they are due.
held_tokens_total | counter of the daemon | tokens | Tokens that were held, since the start.
slack_ms_least | gauge of the daemon | ms | Time between the computation of a paced token and its due time, minimum of
    the latest 1,024; negative if the token was late.
slack_ms_p5 | gauge of the daemon | ms | The same, 5th percentile.
ran_dry_total{cause} | counter of the daemon | tokens | Paced tokens that were not computed when they were due, by
    cause: `planned`, the policy allowed the tick to take longer; `mispredicted`, the tick took longer than predicted;
    `left_out`, the stream was left out of the ticks before.
slots_total | gauge | slots | KV slots in total.
scorecard | scorecard | | An object with the columns below; JSON only. Empty during the first second.
""")

SCORECARD = _read("""
time | info | UTC | End of the interval, ISO 8601.
interval_s | gauge | seconds | Length of the interval. The last one of a file may be short.
busy_ratio | gauge | ratio | Share of the interval that ticks took, including host time.
tokens_per_s | gauge | tokens/s | All tokens computed, including prompts.
interactive_tokens_per_s | gauge | tokens/s | The part of the interactive lane.
background_tokens_per_s | gauge | tokens/s | The part of the background lane.
tokens_generated_per_s | gauge | tokens/s | Tokens sampled, both lanes.
tokens_per_s_at_cap | gauge | tokens/s | All tokens of ticks with a limit, divided by the time of these ticks.
interactive_gaps | gauge | gaps | Number of gaps between tokens shown to interactive readers (`interactive_shown_ms`).
interactive_p95_ms | gauge | ms | 95th percentile of these gaps, accurate to 1 %.
interactive_p99_ms | gauge | ms | 99th percentile of these gaps, accurate to 1 %.
ticks_over_budget | gauge | ticks | Ticks that took longer than their limit.
sum_bmt_mb_per_token | gauge | MB | Bytes moved per token.
sum_bmt_mb_per_tick | gauge | MB | Bytes moved per tick, on average.
scheduler_efficiency | gauge | ratio | The metric of the same name, for the ticks of the interval.
copy_free_ratio | gauge | ratio | The metric of the same name, for the rows sampled in the interval.
draft_accepted_ratio | gauge | ratio | Share of the computed guesses that were right.
rss_gb | gauge | GB | Resident memory at the end of the interval, including the model.
pss_gb | gauge | GB | Proportional share of that memory: a page that n processes map counts as 1/n. Linux only;
    updated less often where reading it takes long.
""")
