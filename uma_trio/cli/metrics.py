"""`uma-trio metrics`: the daemon's figures, with what each of them means."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from uma_trio.cli.attempt import attempt
from uma_trio.cli.output import OK, USAGE, SocketFlag, complain, console, print_json, socket_path
from uma_trio.cli.parser import Parameter
from uma_trio.words import harmless

if TYPE_CHECKING:
    from rich.console import Console

    from uma_trio.observe.catalogue import Metric

Figures = Mapping[str, Any]
_SILENT = {"ratio", "0 or 1"}  # units that add nothing to a number
_LEAST_ROOM = 30  # columns; less would cut every explanation


def metrics(
    *,
    every: Annotated[
        bool, Parameter(name="--all", help="Show every metric, not eight lines.")
    ] = False,
    json: Annotated[bool, Parameter(help="Print one line of JSON each time.")] = False,
    prometheus: Annotated[bool, Parameter(help="Print Prometheus' text format, once.")] = False,
    watch: Annotated[
        float | None, Parameter(help="Repeat at this interval in seconds, until Ctrl-C.")
    ] = None,
    socket: SocketFlag = None,
) -> int:
    """Show the daemon's metrics, once or repeatedly: eight lines of each model, or all of them with --all.

    --json and --prometheus always print all.
    """
    if watch is not None and not 0.1 <= watch <= 86_400:
        complain(f"--watch: {watch:g} is out of range, 0.1 to 86400 seconds.")
        return USAGE
    if prometheus and (json or watch is not None):
        complain("--prometheus cannot be combined with --json or --watch.")
        return USAGE
    show = partial(_show if every else _show_overview, clear=watch is not None)
    write = _write_prometheus if prometheus else print_json if json else show
    return attempt(_metrics, socket_path(socket), write, watch)


async def _metrics(path: Path, write: Callable[[dict[str, Any]], None], every: float | None) -> int:
    import trio

    from uma_trio.client import Client

    client = Client(path)
    while True:
        write(await client.metrics())
        if every is None:
            return OK
        await trio.sleep(every)


def _write_prometheus(found: dict[str, Any]) -> None:
    from uma_trio.observe.exposition import prometheus

    sys.stdout.write(prometheus(found, found.get("models") or {}))


def _show_overview(found: dict[str, Any], *, clear: bool) -> None:
    if clear and sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")
    sys.stdout.write("".join(f"{line}\n" for line in overview(found)))
    sys.stdout.flush()


def _show(found: dict[str, Any], *, clear: bool) -> None:
    out = console()
    rows = list(_rows(found))
    if clear and out.is_terminal:
        out.clear()
    _print(rows, out)


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    from uma_trio.observe.catalogue import INTERVAL, METRICS

    metrics, columns = {metric.name: metric for metric in METRICS}, dict(INTERVAL)
    for name, value in _of_models(found, metrics):
        key = name.partition(" ")[0]
        if key != "scorecard":
            yield _row(name, value, metrics.get(key))
        else:
            for column, figure in (value or {}).items():
                yield f"{name}.{column}", _text(figure), columns.get(column, "")


def _of_models(found: dict[str, Any], metrics: Mapping[str, Metric]) -> Iterator[tuple[str, Any]]:
    """Yield every metric; those of each of several models have its name in brackets."""
    models = found.get("models") or {}
    for name, value in found.items():
        if name == "models":
            continue
        if not models or ((metric := metrics.get(name)) is not None and metric.of_daemon):
            yield name, value
        else:
            yield from ((f"{name} [{model}]", each.get(name)) for model, each in models.items())


def _row(name: str, value: Any, metric: Metric | None) -> tuple[str, str, str]:
    if metric is None:
        return name, _text(value), ""
    has_unit = metric.kind in ("gauge", "histogram") and metric.unit not in _SILENT
    return name, _text(value, metric.unit if has_unit else ""), f"{metric.help} {metric.use}"


def _print(rows: list[tuple[str, str, str]], out: Console) -> None:
    # Names and figures are never cut, meanings are.
    from rich.text import Text

    names, figures = (max(len(row[column]) for row in rows) for column in (0, 1))
    # A pipe gets what can be cut and compared.
    room = out.width - names - figures - 4 if out.is_terminal else 0
    for name, figure, meaning in rows:
        line = Text.assemble((name.ljust(names), "bold"), "  ", figure)
        if room >= _LEAST_ROOM:
            shown = meaning if len(meaning) <= room else f"{meaning[: room - 3]}..."
            line = Text.assemble(line, " " * (figures - len(figure)), "  ", (shown, "dim"))
        out.print(line, soft_wrap=True)
    if out.is_terminal and room < _LEAST_ROOM:
        wide = names + figures + 4 + _LEAST_ROOM
        out.print(f"What they mean: in a window of {wide} columns, and in `uma-trio help metrics`.")


def _text(value: Any, unit: str = "") -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, dict):
        shown = {name: value[name] for name in ("p50", "p95", "p99") if name in value} or value
        if all(number is None for number in shown.values()):
            return "-"
        parts = [f"{name} {_text(number)}" for name, number in shown.items()]
        return "  ".join(parts) + (f" {unit}" if unit else "")
    if isinstance(value, float):
        value = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    elif isinstance(value, int):
        value = f"{value:,}"
    return f"{value} {unit}".rstrip()


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
    """Return the gaps between tokens that readers see, and how many tokens were late.

    A token is late if it was not computed a step after the one before it was shown.
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
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    return (
        f"{value:.2f} ms" if value < 1 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
    )
