"""What an answer took, in the words of OpenAI (`usage`) and of llama-server (`timings`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uma_trio.engine.messages import Finished, PromptProgress
from uma_trio.service.answers import combined_end


def usage(
    every: Sequence[Finished], n_prompts: int = 1, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """Return the tokens of one request; answers to the same prompt count it once.

    `reasoning_tokens` is how many of an answer's were reasoning, where there may be any.
    """
    per_prompt = max(1, len(every) // n_prompts)
    each = [combined_end(every[i : i + per_prompt]) for i in range(0, len(every), per_prompt)]
    prompt = sum(end.prompt_tokens for end in each)
    completion = sum(end.completion_tokens for end in each)
    details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    return {
        **({"completion_tokens_details": details} if details else {}),
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in each)},
    }


def timings(end: Finished) -> dict[str, Any]:
    """Return where the time of one answer went; the wait for a slot is not in it."""
    computed = end.prompt_tokens - end.cached_tokens
    prompt_ms = round(max(0.0, ((end.ttft_s or end.total_s) - end.queue_s) * 1e3), 3)
    predicted_ms = round(max(0.0, (end.total_s - (end.ttft_s or end.total_s)) * 1e3), 3)
    n = end.completion_tokens
    decoded = max(0, n - 1)  # the first token comes of the prompt
    drafts = {"draft_n": end.drafted_tokens, "draft_n_accepted": end.accepted_tokens}
    return {
        **(drafts if end.drafted_tokens else {}),
        "cache_n": end.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, computed),
        "prompt_per_second": _ratio(computed * 1e3, prompt_ms),
        "predicted_n": n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, decoded),
        "predicted_per_second": _ratio(decoded * 1e3, predicted_ms),
        "queue_ms": round(end.queue_s * 1e3, 3),
    }


def timings_until(item: PromptProgress) -> dict[str, Any]:
    """Return where the time of a prompt went that is not computed yet, in the same words."""
    so_far = Finished(
        reason="length",
        text="",
        prompt_tokens=item.computed_tokens,
        completion_tokens=0,
        cached_tokens=item.cached_tokens,
        queue_s=item.queue_s,
        ttft_s=None,
        total_s=item.queue_s + item.prompt_s,
    )
    return timings(so_far)


def progress(item: PromptProgress) -> dict[str, Any]:
    """Return how much of a prompt is computed, as llama-server's `prompt_progress` has it.

    `processed` counts the cached tokens, too; `time_ms` begins when the request got its slot.
    """
    return {
        "total": item.prompt_tokens,
        "cache": item.cached_tokens,
        "processed": item.computed_tokens,
        "time_ms": round(item.prompt_s * 1e3),
    }


def _ratio(over: float, under: float) -> float:
    return over / under if under > 0 else 0.0
