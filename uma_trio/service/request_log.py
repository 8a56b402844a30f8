"""One line in the log for each answer: who asked, how much was computed, how long it took. Never text."""

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
    """Return the fields of the line of an answer; without an `end` its reader left before there was one."""
    who: dict[str, object] = {"id": handle, "app": origin.app or "-", "lane": lane}
    if choice:
        who["choice"] = choice
    if end is None:
        return {**who, "total_s": round(total_s, 3), "reason": "left"}
    decode_s = end.total_s - (end.ttft_s or 0.0)
    spoken = end.completion_tokens - 1
    return {
        **who,
        "prompt_tokens": end.prompt_tokens,
        "cached_tokens": end.cached_tokens,
        "tokens": end.completion_tokens,
        "queue_ms": round(end.queue_s * 1e3, 1),
        **({} if end.ttft_s is None else {"ttft_ms": round(end.ttft_s * 1e3, 1)}),
        "total_s": round(end.total_s, 3),
        **({"tokens_per_s": round(spoken / decode_s, 1)} if spoken > 0 and decode_s > 0 else {}),
        "reason": end.reason,
        **({} if end.code is None else {"code": end.code}),
    }
