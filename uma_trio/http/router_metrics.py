"""The load in ten lines of Prometheus' text format, under the names that routers look for. Pure.

The names with ``vllm:`` are those of llm-d-router's default engine, docs/plugin-metric-protocol.md there.
"""

from __future__ import annotations

from typing import Final

from uma_trio.service.pulse import LoadReading

#: Cells of a block, as routers count them: they take no smaller ones.
BLOCK: Final = 64


def router_metrics(reading: LoadReading) -> str:
    """Return the gauges of a reading, without help texts: it is asked for twenty times a second."""
    load = reading.load
    cells = max(1, load.cells_total)
    labels = f'{{block_size="{BLOCK}",num_gpu_blocks="{cells // BLOCK}"}}'
    return "".join(
        f"{name} {value:.6g}\n"
        for name, value in (
            ("uma_headroom_ratio", 0.0 if reading.hangs else reading.headroom),
            ("uma_backlog_seconds", load.backlog_s),
            ("vllm:num_requests_running", load.running),
            ("vllm:num_requests_waiting", load.waiting),
            ("vllm:kv_cache_usage_perc", load.cells_reserved / cells),
            (f"vllm:cache_config_info{labels}", 1),
        )
    )
