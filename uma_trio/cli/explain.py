"""`uma-trio explain`: why a request waited, and how its time was spent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from uma_trio.cli.output import (
    OK,
    USAGE,
    attempt,
    complain,
    console,
    duration,
    harmless,
    print_json,
    socket_path,
)
from uma_trio.cli.story import PARTS, sentences, shares, tick_row, worst_gap

if TYPE_CHECKING:
    from rich.table import Table

    from uma_protocol import Explanation, StoryInfo, TickInfo

_MOST_TICKS = 1000


def explain(
    request: Annotated[
        int | None,
        Parameter(help="The daemon's handle of a request, as `uma-trio ps` shows it."),
    ] = None,
    *,
    ticks: Annotated[
        int | None,
        Parameter(
            help="How many ticks to show: around the worst gap of the request, or the latest."
        ),
    ] = None,
    json: Annotated[bool, Parameter(help="Print JSON.", negative="")] = False,
    socket: Annotated[str | None, Parameter(help="The daemon's socket; UMA_SOCK.")] = None,
) -> int:
    """Show how the latest requests spent their time, or tell the story of one."""
    if request is not None and not 1 <= request < 1 << 63:
        complain(f"{request} is no handle of a request; `uma-trio explain` lists them.")
        return USAGE
    if ticks is not None and not 0 <= ticks <= _MOST_TICKS:
        complain(f"--ticks: {ticks} is out of range, 0 to {_MOST_TICKS}.")
        return USAGE
    return attempt(_explain, socket_path(socket), request, ticks, json)


async def _explain(path: Path, request: int | None, ticks: int | None, as_json: bool) -> int:
    import msgspec

    from uma_trio.client import connect

    async with connect(path) as client:
        found = await client.explain(request, ticks=ticks)
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        _show(found, request)
    return OK


def _show(found: Explanation, request: int | None) -> None:
    out = console()
    if request is not None:
        head, *rest = sentences(found.requests[0])
        out.print(head, soft_wrap=True)
        for line in rest:
            out.print(f"  {line}", soft_wrap=True)
    elif found.requests:
        out.print(_requests(found.requests))
    else:
        out.print("Nothing has run yet.")
    if found.ticks:
        out.print()
        out.print(_ticks(found.ticks, request))
    if found.ticks_left_out:
        out.print(f"{found.ticks_left_out} more ticks do not fit into one answer.")


def _requests(stories: tuple[StoryInfo, ...]) -> Table:
    """Return one line for each request; parts that took nobody's time are left out."""
    parts = {story.request: shares(story) for story in stories}
    shown = [name for name in PARTS if any(part[name] >= 0.005 for part in parts.values())]
    table = _table(("REQUEST", "APP", "LANE", "STATE", "TIME"), right={"REQUEST", "TIME"})
    for name in (*shown, "TTFT"):
        table.add_column(name.upper(), justify="right", no_wrap=True)
    table.add_column("WORST GAP", overflow="fold")
    for story in stories:
        ttft = "-" if story.ttft_ms is None else duration(story.ttft_ms / 1e3)
        gap = "-" if story.worst_gap is None else worst_gap(story.worst_gap)
        table.add_row(
            str(story.request),
            harmless(story.app or "-"),
            story.lane,
            story.state,
            duration(story.total_ms / 1e3),
            *(f"{parts[story.request][name]:.0%}" for name in shown),
            ttft,
            gap,
        )
    return table


def _ticks(ticks: tuple[TickInfo, ...], request: int | None) -> Table:
    """Return one line for each tick; times are milliseconds."""
    table = _table(
        ("TICK", "AGO", "GOT", "TOKENS", "LIMIT", "PREDICTED", "TOOK"),
        right={"TICK", "AGO", "LIMIT", "PREDICTED", "TOOK"},
    )
    table.add_column("WHY", overflow="fold")
    for tick in ticks:
        table.add_row(*tick_row(tick, request))
    return table


def _table(headings: tuple[str, ...], right: set[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    return table
