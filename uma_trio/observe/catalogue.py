"""Every metric, declared once: its names, type, unit, meaning, and what an operator does with it.

``uma-trio metrics``, the JSON, the Prometheus text, the scorecard and `uma-trio help metrics` follow from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, cast, get_args

from attrs import field, frozen, validators

Kind = Literal["counter", "gauge", "histogram", "info"]

#: Base units of Prometheus: what a value in this unit is multiplied by.
BASE_UNITS: Final[Mapping[str, float]] = {"ms": 1e-3, "GB": 1e9, "MB": 1e6, "%": 1e-2}


@frozen
class Metric:
    """One metric.

    `name` is its key in JSON, `prometheus` its name in Prometheus' text after ``uma_``, "" where a scraper
    computes it from others. `label` names the key of a metric with one value for each key. One `of_daemon` is
    counted once for all models; the others exist for each model. `use` says what an operator does with it.
    """

    name: str
    kind: Kind = field(validator=validators.in_(get_args(Kind)))
    unit: str
    prometheus: str
    help: str
    use: str
    label: str = ""
    of_daemon: bool = False
    group: str = ""

    @property
    def base(self) -> float:
        """What a value is multiplied by for Prometheus."""
        return BASE_UNITS.get(self.unit, 1.0)


def _read(table: str) -> tuple[Metric, ...]:
    """Parse rows of ``name{label} | kind | unit | prometheus | meaning | use``; indented lines continue a row."""
    found, group = [], ""
    for row in re.split(r"\n(?! )", table.strip()):
        if row.startswith("#"):
            group = row.strip("# ")
            continue
        cells = (re.sub(r"\s+", " ", cell).strip() for cell in row.split("|"))
        name, kind, unit, prometheus, text, use = cells
        name, _, label = name.partition("{")
        kind, _, scope = kind.partition(" of the ")
        found.append(
            Metric(
                *(name, cast(Kind, kind), unit, prometheus, text, use, label.rstrip("}")),
                of_daemon=bool(scope),
                group=group,
            )
        )
    return tuple(found)


METRICS: Final = _read("""
# Do readers get their tokens in time?
ttft_ms | histogram | ms | time_to_first_token_seconds | Arrival to first token. | If `queue_ms` is as long,
    add slots; otherwise keep prefixes cached or shorten prompts.
ttf5_ms | histogram | ms | time_to_fifth_token_seconds | Arrival to fifth token, interactive lane. | Far above
    `ttft_ms`: streams stall at their start.
worst_pause_ms | histogram | ms | startup_pause_seconds | Longest inter-token latency in the first 3 s of an
    interactive stream. | If high while prompts arrive, lower `--latency-cap`.
inter_token_ms | histogram | ms | inter_token_latency_seconds | Between two computed tokens of a request. | Alert on
    a change.
interactive_shown_ms | histogram | ms | interactive_shown_seconds | Between two writes to an interactive reader. |
    Alert on p95: this is what a reader sees.
p50_ms | gauge | ms | | Median of the latest 4,096 inter-token latencies. | Read it without a scraper.
p95_ms | gauge | ms | | Their 95th percentile. | The same.
p99_ms | gauge | ms | | Their 99th percentile. | The same.
latency_cap | gauge | ratio | latency_cap_ratio | Promised p95 of `interactive_shown_ms`, in ticks with
    interactive streams only. | Set `--latency-cap`.
shown_ratio_p95 | gauge | ratio | shown_ratio_p95 | The measured value, latest 1,024 gaps. | Above `latency_cap`,
    see `late_tokens_total`.
step_ms | gauge | ms | step_seconds | Promised time between two shown tokens, last tick. | The target for
    `interactive_shown_ms`.
late_tokens_total{cause} | counter | tokens | late_tokens_total | Tokens not computed when due:
    `planned` so, `mispredicted`, or `left_out` of earlier ticks. | If planned, lower `--latency-cap`; if mispredicted,
    see `cost_error`.
slo_violations_total{target} | counter | tokens | slo_violations_total | Tokens later than their request's
    `slo`. | Relax it, or reduce load.
ticks_over_budget | counter | ticks | ticks_over_budget_total | Ticks longer than their limit. | If it grows
    steadily, see `cost_error`.
guard_infeasible_total | counter | ticks | guard_infeasible_total | Ticks above `latency_cap` with interactive
    streams only. | Use fewer slots or a smaller model.
prefill_guard_active | gauge | 0 or 1 | | Whether the last tick left out a prompt for readers. | Explains a slow
    prompt.
tokens_per_s_at_cap | gauge | tokens/s | | Tokens per second of ticks with a limit. | Compare machines and settings.
time_logits_to_first_chunk | gauge | ms | | Logits of the latest first token until its frame was written. | Above
    5 ms, see `loop_lag_ms`.
loop_lag_ms | histogram of the daemon | ms | loop_lag_seconds | Delay of the thread that writes all tokens. | If p99
    exceeds 10 ms, leave it a core: lower `--threads`.
# Is there room?
sessions | gauge of the daemon | connections | connections | Open client connections. | Near `--max-sessions`,
    raise it.
slots_total | gauge | slots | slots | KV slots. | Set `--parallel`.
active_sessions | gauge | requests | num_requests_running | Requests with a slot. | At `slots_total`, see
    `queued_sessions`.
queued_sessions | gauge | requests | num_requests_waiting | Requests without a slot. | If it stays above 0, add
    slots or machines.
parked_sessions | gauge | requests | num_requests_parked | Requests whose reader is behind. | Find the slow client:
    `uma-trio ps`.
queue_ms | histogram | ms | request_queue_time_seconds | Arrival to slot. | As `queued_sessions`.
requests_total{outcome} | counter | requests | requests_total | Ended requests. | Alert on the rate of `error`.
errors_total{code} | counter of the daemon | events | errors_total | Errors sent to clients; `accept`:
    connections not accepted. | Codes are those of error messages; for `accept` raise `ulimit -n`.
preemptions_total | counter | requests | num_preemptions_total | Running requests that lost their slot. | If
    frequent, raise `--n-ctx`.
kv_cells_used | gauge | cells | kv_cells_used | KV cells with a token. | Near `kv_cells_total`, raise `--n-ctx`.
kv_cells_total | gauge | cells | kv_cells | KV cells. | The same.
rss_gb | gauge of the daemon | GB | resident_memory_bytes | Resident memory, weights included. | Alert near the
    machine's memory.
busy_seconds_total{work} | counter | seconds | busy_seconds_total | Time of ticks in llama_decode
    (`decode`) and outside (`host`). | A rate near 1 is a full machine; much `host` a slow CPU.
# What is computed?
model | info | | info | Name of the loaded model. | Tell series apart.
info | info | | info | Backend, policy and version. | Check after an upgrade.
tokens_total | counter | tokens | tokens_total | Tokens computed, prompts included. | Throughput.
prompt_tokens_total | counter | tokens | prompt_tokens_total | Prompt tokens computed. | With
    `prefix_tokens_total`: the cached share.
tokens_generated_total | counter | tokens | generation_tokens_total | Tokens sampled. | Throughput of answers.
encoded_tokens_total | counter of the daemon | tokens | encoded_tokens_total | Tokens of embeddings and scores. |
    Throughput of encoders.
batch_calls_total | counter | calls | batch_calls_total | Batches (llama_decode calls). | If flat with
    requests running, restart.
avg_batch | gauge | tokens | | Mean tokens of a batch. | Near 1 with many requests, report it.
last_batch_size | gauge | tokens | | Tokens of the last batch. | Explains `decode_ms_last`.
tokens_per_tick_decode | gauge | tokens | | Its tokens that continued answers. | The same.
tokens_per_tick_prefill | gauge | tokens | | Its tokens of prompts. | The same.
served_decoders | gauge | requests | | Requests that it gave a next token. | Compare with `active_sessions`.
decode_ms | histogram | ms | decode_seconds | Time of a llama_decode call. | Sets the pace of all streams.
decode_ms_last | gauge | ms | | The last call. | Read it without a scraper.
decode_ms_ewma | gauge | ms | | Moving average; a new value weighs a fifth. | The same.
decode_ms_avg | gauge | ms | | Mean. | The same.
sampling_ms_last | gauge | ms | | Time to sample the last batch. | If high, avoid samplers that copy rows.
overlap_active | gauge | 0 or 1 | | Whether the host works on a tick while the next one is decoded. |
    If 0 on a GPU, not all layers are on it: see `--gpu-layers`.
copy_free_ratio | gauge | ratio | copy_free_ratio | Share of logits rows sampled in place. | If low, set `top_k`
    with `top_p`.
gpu_idle_pct | gauge | % | gpu_idle_ratio | Share of time without GPU work; null where unmeasured. | If high under
    load, see `busy_seconds_total`.
residency_churn_mb_per_token | gauge | MB | | MB read from storage per token, latest interval; null where
    unmeasured. | Above 0 for long, memory is short: weights are read again.
sum_bmt_mb_last | gauge | MB | | Bytes that the last tick moved. | Compare with its budget.
sum_bmt_budget_mb_last | gauge | MB | | Bytes that `--bmt-budget` allowed it. | Set `--bmt-budget`.
sum_bmt_mb_per_token | gauge | MB | moved_bytes_per_token | Bytes moved per token. | Falls with larger batches and
    smaller KV types.
scheduler_efficiency | gauge | ratio | scheduler_efficiency_ratio | Predicted time of batches divided by measured
    time. | Below 0.8, look for other programs.
cost_error | gauge | ratio | cost_error_ratio | Smoothed error of predicted tick times. | Above 0.15, see
    `uma-trio doctor --cost`.
cost_scale | gauge | ratio | cost_scale_ratio | How much slower the machine is than when measured. | Above 1.3, look
    for other programs or heat.
cost_others_share | gauge | ratio | cost_others_ratio | Share of the machine that other programs used while it was
    measured; 0 below a tenth. | Above 0, free the machine: it is measured again when idle.
irregular_ticks_total{kind} | counter | ticks | irregular_ticks_total | Ticks `aborted` for an interactive arrival,
    or planned by the baseline since the policy failed (`policy`). | For `policy` read the log.
draft_tokens_total{source} | counter | tokens | spec_decode_num_draft_tokens_total | Guessed tokens verified, by
    source. | With the next: the acceptance rate.
draft_accepted_tokens_total{source} | counter | tokens | spec_decode_num_accepted_tokens_total | Guessed tokens that
    were right. | If rarely right, set `--speculation off`.
structured_output_total{event} | counter | events | structured_output_total | New schemas and grammars: `plain`,
    `apart` (in a process), `refused`, `refused again`, `ended` by a limit; answers `moved` to a process or `stopped` by a
    limit; tokens with a `late mask`. | Simplify the schema, or raise `--shape-cpu`, `--shape-memory`.
# Is the prefix cache worth its memory?
prefix_tokens_total | counter | tokens | prefix_cache_hits_total | Prompt tokens taken from the cache. | With
    `prompt_tokens_total`: the cached share.
prefix_hits_total{source} | counter | requests | prefix_cache_requests_total | Requests that started with a cached
    prefix, by source. | Many from `disk`: raise `--prefix-ram`.
prefix_ghost_hits_total | counter | pages | prefix_cache_ghost_hits_total | Evicted pages requested again. | If
    large, double `--prefix-ram`.
prefix_failures_total{what} | counter | events | prefix_cache_failures_total | Failed copies, saves, restores and
    reads; their tokens are computed. | If it grows, check the disk and the log.
prefix_bytes | gauge | bytes | prefix_cache_bytes | Memory of saved prefixes. | Compare with `--prefix-ram`.
prefix_disk_written_bytes_total | counter of the daemon | bytes | prefix_disk_written_bytes_total | Bytes written to
    `--prefix-disk`. | Watch the wear of the SSD.
""")

#: Figures of one interval: the first columns of the scorecard.
INTERVAL: Final[tuple[tuple[str, str], ...]] = (
    ("time", "End of the interval, ISO 8601, UTC."),
    ("interval_s", "Its length in seconds."),
    ("busy_ratio", "Share of it that ticks took."),
    ("tokens_per_s", "Tokens computed, prompts included."),
    ("interactive_tokens_per_s", "Those of the interactive lane."),
    ("background_tokens_per_s", "Those of the background lane."),
    ("tokens_generated_per_s", "Tokens sampled."),
    ("tokens_per_s_at_cap", "Tokens of ticks with a limit, per second of these ticks."),
    ("interactive_gaps", "Number of gaps shown to interactive readers."),
    ("interactive_p95_ms", "95th percentile of these gaps."),
    ("interactive_p99_ms", "99th percentile of these gaps."),
    ("ticks_over_budget", "Ticks longer than their limit."),
    ("sum_bmt_mb_per_token", "MB moved per token."),
    ("sum_bmt_mb_per_tick", "MB moved per tick."),
    ("scheduler_efficiency", "Predicted time of batches divided by measured time."),
    ("copy_free_ratio", "Share of logits rows sampled in place."),
    ("draft_accepted_ratio", "Share of guessed tokens that were right."),
    ("rss_gb", "Resident memory at its end."),
    ("pss_gb", "Proportional share of that memory (Linux; read less often)."),
)

#: Metrics repeated in the scorecard: values at the end of the interval, of histograms the interval's p95.
AT_THE_END: Final = (
    *("model", "sessions", "active_sessions", "parked_sessions", "latency_cap"),
    *("ttft_ms", "ttf5_ms", "worst_pause_ms", "inter_token_ms", "p50_ms", "p95_ms", "p99_ms"),
    *("tokens_total", "tokens_generated_total", "batch_calls_total", "avg_batch"),
    *("last_batch_size", "tokens_per_tick_decode", "tokens_per_tick_prefill", "served_decoders"),
    *("decode_ms", "decode_ms_last", "decode_ms_ewma", "decode_ms_avg"),
    *("sampling_ms_last", "time_logits_to_first_chunk", "overlap_active"),
    *("sum_bmt_mb_last", "sum_bmt_budget_mb_last", "prefill_guard_active"),
    *("gpu_idle_pct", "residency_churn_mb_per_token"),
)

#: Columns of the scorecard, in the order of its file.
COLUMNS: Final = (*(name for name, _ in INTERVAL), *AT_THE_END)
