"""`uma-trio metrics`: the daemon's figures, with what each of them means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from uma_trio.cli.output import OK, USAGE, attempt, complain, console, print_json, socket_path


def metrics(
    *,
    json: Annotated[bool, Parameter(help="Print JSON, one line each time.", negative="")] = False,
    watch: Annotated[
        float | None, Parameter(help="Again every so many seconds, until Ctrl-C.")
    ] = None,
    socket: Annotated[str | None, Parameter(help="The daemon's socket; UMA_SOCK.")] = None,
) -> int:
    """Show the daemon's figures, once or repeatedly."""
    if watch is not None and not 0.1 <= watch <= 86_400:
        complain(f"--watch: {watch:g} is out of range, 0.1 to 86400 seconds.")
        return USAGE
    return attempt(_metrics, socket_path(socket), json, watch)


async def _metrics(path: Path, as_json: bool, every: float | None) -> int:
    import trio

    from uma_trio.client import connect

    async with connect(path) as client:
        while True:
            found = await client.metrics()
            if as_json:
                print_json(found)
            else:
                _show(found, clear=every is not None)
            if every is None:
                return OK
            await trio.sleep(every)


def _show(found: dict[str, Any], *, clear: bool) -> None:
    from rich.table import Table

    from uma_trio.telemetry.catalogue import METRICS

    out = console()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    if out.is_terminal:  # a pipe gets what can be cut and compared
        table.add_column(no_wrap=True, overflow="ellipsis", style="dim")
    meaning = {metric.name: metric for metric in METRICS}
    for name, value in found.items():
        metric = meaning.get(name)
        unit = metric.unit if metric and metric.kind in ("gauge", "histogram") else ""
        cells = [name, _text(value, unit), metric.help if metric else ""]
        table.add_row(*cells[: len(table.columns)])
    if clear and out.is_terminal:
        out.clear()
    out.print(table)


def _text(value: Any, unit: str = "") -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, dict):
        shown = {name: value[name] for name in ("p50", "p95", "p99") if name in value} or value
        parts = [f"{name} {_text(number)}" for name, number in shown.items()]
        return "  ".join(parts) + (f" {unit}" if unit else "")
    if isinstance(value, float):
        value = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    elif isinstance(value, int):
        value = f"{value:,}"
    return f"{value} {unit}".rstrip()
