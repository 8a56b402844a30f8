"""The daemon's figures for a person: eight lines, of the hundred that a scraper reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from uma_trio.words import harmless

Figures = Mapping[str, Any]


def overview(found: Figures) -> list[str]:
    """Return a line for each of: TTFT, the gaps that readers see, tokens/s, slots, queue, KV, cache, lag.

    Figures that the daemon does not have (yet) are "-". The percentiles are of all requests since it started,
    tokens/s of the latest interval of the scorecard. Several models have a heading and lines of their own.
    """
    width = max(map(len, _LINES))
    models: Mapping[str, Figures] = found.get("models") or {}
    if len(models) < 2:
        return [f"{name.ljust(width)}  {line(found)}" for name, line in _LINES.items()]
    of_each = {name: line for name, line in _LINES.items() if line is not _lag}
    lines: list[str] = []
    for model, each in models.items():
        lines.append(f"{harmless(model)}:")
        lines += [f"  {name.ljust(width)}  {line(each)}" for name, line in of_each.items()]
    return [*lines, f"{'loop lag'.ljust(width + 2)}  {_lag(found)}"]


def _ttft(found: Figures) -> str:
    return _percentiles(found.get("ttft_ms"))


def _gap(found: Figures) -> str:
    """Return the gaps between tokens as readers see them, and how many tokens missed the promise.

    A token is late if it was not computed a step after the one before it was shown (docs/POLICY.md).
    """
    shown = found.get("interactive_shown_ms") or {}
    text, late = _percentiles(shown), found.get("late_tokens_total")
    if late is None or not shown.get("count"):
        return text
    missed = sum(late.values())
    return f"{text} shown; {missed:,} of {shown['count']:,} later than promised beside other work"


def _speed(found: Figures) -> str:
    card = found.get("scorecard") or {}
    generated, computed = card.get("tokens_generated_per_s"), card.get("tokens_per_s")
    if generated is None or computed is None:
        return "-"
    interactive, background = (
        card.get(f"{lane}_tokens_per_s") or 0.0 for lane in ("interactive", "background")
    )
    return (
        f"{generated:.1f} generated; {computed:.1f} computed with prompts "
        f"(interactive {interactive:.1f}, background {background:.1f})"
    )


def _slots(found: Figures) -> str:
    text = _part(found, "active_sessions", "slots_total", "taken")
    parked = found.get("parked_sessions")
    return f"{text}, {parked} of them wait for their readers" if parked else text


def _queue(found: Figures) -> str:
    waiting = found.get("queued_sessions")
    count = "-" if waiting is None else f"{waiting:,} waiting"
    return f"{count}; waited {_percentiles(found.get('queue_ms'))}"


def _memory(found: Figures) -> str:
    return _part(found, "kv_cells_used", "kv_cells_total", "cells used", share=True)


def _cached(found: Figures) -> str:
    """Return the part of all prompt tokens that were not computed again."""
    cached, computed = found.get("prefix_tokens_total"), found.get("prompt_tokens_total")
    if cached is None or computed is None or not cached + computed:
        return "-"
    return f"{cached / (cached + computed):.0%} of {cached + computed:,} prompt tokens"


def _lag(found: Figures) -> str:
    lag = found.get("loop_lag_ms") or {}
    text, most = _percentiles(lag), lag.get("max")
    return text if most is None else f"{text}, at most {_ms(most)}"


_LINES: Mapping[str, Callable[[Figures], str]] = {
    "first token": _ttft,
    "between tokens": _gap,
    "tokens/s": _speed,
    "slots": _slots,
    "queue": _queue,
    "KV cache": _memory,
    "cached": _cached,
    "loop lag": _lag,
}


def _percentiles(histogram: Mapping[str, float | None] | None) -> str:
    known = {name: (histogram or {}).get(name) for name in ("p50", "p95")}
    if any(value is None for value in known.values()):
        return "-"
    return ", ".join(f"{name} {_ms(value)}" for name, value in known.items() if value is not None)


def _part(found: Figures, part: str, whole: str, what: str, *, share: bool = False) -> str:
    taken, total = found.get(part), found.get(whole)
    if taken is None or total is None:
        return "-"
    behind = f" ({taken / total:.0%})" if share and total else ""
    return f"{taken:,} of {total:,} {what}{behind}"


def _ms(value: float) -> str:
    """Return milliseconds as a person says them: 0.19 ms, 9.0 ms, 412 ms, 3.2 s."""
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    return (
        f"{value:.2f} ms" if value < 1 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
    )
