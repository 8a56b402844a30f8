"""One log line per answer: the program, the tokens and the times; never text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from uma_trio.engine.messages import Finished
from uma_trio.service.ask import Origin
from uma_trio.words import Lane

LogRequest = Callable[[Mapping[str, object]], None]


def no_log(_: Mapping[str, object]) -> None:
    """Log nothing."""


def line_of(
    handle: int, origin: Origin, choice: int, lane: Lane, end: Finished | None, total_s: float
) -> dict[str, object]:
    """Return the fields of the line; without an `end` the reader left first."""
    line: dict[str, object] = {"id": handle, "app": origin.app or "-", "lane": lane}
    if choice:
        line["choice"] = choice
    if end is None:
        return {**line, "total_s": round(total_s, 3), "reason": "left"}
    decode_s = end.total_s - (end.ttft_s or 0.0)
    after_first = end.completion_tokens - 1
    return {
        **line,
        "prompt_tokens": end.prompt_tokens,
        "cached_tokens": end.cached_tokens,
        "tokens": end.completion_tokens,
        "queue_ms": round(end.queue_s * 1e3, 1),
        **({} if end.ttft_s is None else {"ttft_ms": round(end.ttft_s * 1e3, 1)}),
        "total_s": round(end.total_s, 3),
        **(
            {"tokens_per_s": round(after_first / decode_s, 1)}
            if after_first > 0 and decode_s > 0
            else {}
        ),
        "reason": end.reason,
        **({} if end.code is None else {"code": end.code}),
    }
