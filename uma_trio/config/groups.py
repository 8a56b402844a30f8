"""Under which heading the help and docs/CONFIG.md show each option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from uma_trio.config.option import Option

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Model": (
        "model", "load", "model_dir", "llama", "threads", "gpu_layers", "flash_attention", "mlock", "mmap", "alias",
        "chat_template_file", "reasoning", "reply_format", "lora", "lora_contexts", "embedding_model", "rerank_model",
        "encoder_ttl_s",
    ),
    "Clients": (
        "socket", "token_file", "max_sessions", "max_queue", "max_prompt_bytes", "max_tokens", "max_tokens_cap",
        "idle_timeout_s", "drain_s", "shape_cpu_s", "shape_memory",
    ),
    "KV cache": ("n_ctx", "parallel", "kv_layout", "kv_type", "prefix_ram", "prefix_disk", "session_ttl_s"),
    "Scheduling": (
        "policy", "latency_cap", "reading_pace", "pause_cap", "playout_ms", "background_floor", "interactive_prompt",
        "interactive_priority", "bmt_budget", "tick_budget_ms",
    ),
    "Speculative decoding": ("speculation",),
    "HTTP": (
        "http", "http_key_file", "http_admin_key_file", "http_host", "http_origin", "http_strict",
        "http_reasoning", "http_max_prompt_bytes", "http_max_connections", "http_trusted_proxy", "agent",
    ),
    "Logs and records": ("log_level", "trace", "scorecard", "scorecard_interval_s"),
}  # fmt: skip


def grouped(options: Sequence[Option]) -> Mapping[str, tuple[Option, ...]]:
    """Return the options under each heading, in the order in which they are shown.

    Raises:
        KeyError: a heading names an option that does not exist.
    """
    named = {item.name: item for item in options}
    return {heading: tuple(named[name] for name in names) for heading, names in GROUPS.items()}
