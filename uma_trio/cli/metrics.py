"""`uma-trio metrics`: the daemon's figures, with what each of them means."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from uma_trio.cli.attempt import attempt
from uma_trio.cli.flags import Parameter
from uma_trio.cli.output import (
    OK,
    USAGE,
    SocketFlag,
    complain,
    console,
    print_json,
    socket_path,
)

if TYPE_CHECKING:
    from rich.console import Console

    from uma_trio.observe.catalogue import Metric

_SILENT = {"ratio", "0 or 1"}  # units that add nothing to a number
_LEAST_ROOM = 30  # columns; less would cut every explanation


def metrics(
    *,
    every: Annotated[
        bool, Parameter(name="--all", help="Show every metric, not eight lines.", negative="")
    ] = False,
    json: Annotated[bool, Parameter(help="Print one line of JSON each time.", negative="")] = False,
    prometheus: Annotated[
        bool, Parameter(help="Print Prometheus' text format, once.", negative="")
    ] = False,
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
    from uma_trio.cli.overview import overview

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
    """Print names and figures whole, and what they mean where there is room for it."""
    from rich.text import Text

    names, figures = (max(len(row[column]) for row in rows) for column in (0, 1))
    # A pipe gets what can be cut and compared.
    room = out.width - names - figures - 4 if out.is_terminal else 0
    for name, figure, meaning in rows:
        line = Text.assemble((name.ljust(names), "bold"), "  ", figure)
        if room >= _LEAST_ROOM:
            told = meaning if len(meaning) <= room else f"{meaning[: room - 3]}..."
            line = Text.assemble(line, " " * (figures - len(figure)), "  ", (told, "dim"))
        out.print(line, soft_wrap=True)
    if out.is_terminal and room < _LEAST_ROOM:
        wide = names + figures + 4 + _LEAST_ROOM
        out.print(f"What they mean: in a window of {wide} columns, and in docs/METRICS.md.")


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
