"""The daemon's figures under the names that llama-server gives them, for dashboards that know these.

Only what the daemon counts in the same sense is here, as far as it is among the figures. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_SAME: Final = (
    ("prompt_tokens_total", "counter", "prompt_tokens_total", "Prompt tokens computed."),
    (
        "prompt_tokens_cached_total",
        "counter",
        "prefix_tokens_total",
        "Prompt tokens that needed not be computed.",
    ),
    (
        "prompt_seconds_total",
        "counter",
        "prompt_seconds_total",
        "From slots to first tokens, all requests together.",
    ),
    ("tokens_predicted_total", "counter", "tokens_generated_total", "Tokens sampled."),
    ("n_decode_total", "counter", "batch_calls_total", "Batches computed."),
    ("n_tokens_max", "counter", "longest_context", "The most tokens of a request so far."),
    ("spec_decode_num_drafts_total", "counter", "drafts_total", "Guesses, several tokens or one."),
    (
        "spec_decode_num_draft_tokens_total",
        "counter",
        "draft_tokens_total",
        "Guesses at tokens that were computed.",
    ),
    (
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "draft_accepted_tokens_total",
        "Tokens that had been guessed right.",
    ),
    ("requests_processing", "gauge", "active_sessions", "Requests that own a slot."),
    ("requests_deferred", "gauge", "queued_sessions", "Requests that wait for a slot."),
)


def llama_metrics(figures: Mapping[str, Any]) -> str:
    """Return the figures that llama-server has, too, in Prometheus' text format."""
    return "".join(
        f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value!r}\n"
        for name, kind, value, text in _families(figures)
    )


def _families(figures: Mapping[str, Any]) -> Iterator[tuple[str, str, float, str]]:
    for name, kind, own, text in _SAME:
        if own in figures:
            value = figures[own]
            yield name, kind, sum(value.values()) if isinstance(value, dict) else value, text
    if "batch_sequences_total" in figures:
        busy = _ratio(figures["batch_sequences_total"], figures["batch_calls_total"])
        yield "n_busy_slots_per_decode", "gauge", busy, "Requests in a batch, on average."
    if "inter_token_ms" in figures:
        gaps = figures["inter_token_ms"]
        spent = gaps["sum"] / 1e3
        text = "From first tokens to last ones, all requests together."
        yield "tokens_predicted_seconds_total", "counter", spent, text
        text = "Tokens a second of one request, on average since the start."
        yield "predicted_tokens_seconds", "gauge", _ratio(gaps["count"], spent), text
    if "prompt_seconds_total" in figures and "prompt_tokens_total" in figures:
        rate = _ratio(figures["prompt_tokens_total"], figures["prompt_seconds_total"])
        yield "prompt_tokens_seconds", "gauge", rate, "Prompt tokens a second, since the start."


def _ratio(over: float, under: float) -> float:
    return over / under if under > 0 else 0.0
