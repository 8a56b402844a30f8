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
from uma_trio.cli.story import PARTS, aligned, sentences, shares, tick_row, worst_gap

if TYPE_CHECKING:
    from uma_protocol import Explanation, StoryInfo

_MOST_TICKS = 1000
_LEAST_SHARE = 0.005


def explain(
    request: Annotated[
        int | None,
        Parameter(help="The daemon's handle of a request, as `uma-trio ps` shows it."),
    ] = None,
    /,
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
        _print_table(*_requests(found.requests))
    else:
        out.print("Nothing has run yet.")
    if found.ticks:
        out.print()
        _print_table(_TICK_HEADINGS, [tick_row(tick, request) for tick in found.ticks], _TICK_RIGHT)
    if found.ticks_left_out:
        out.print(f"{found.ticks_left_out} more ticks do not fit into one answer.")


_TICK_HEADINGS = ("TICK", "AGO", "GOT", "TOKENS", "LIMIT", "PREDICTED", "TOOK", "WHY")
_TICK_RIGHT = {"TICK", "AGO", "LIMIT", "PREDICTED", "TOOK"}  # the last three are milliseconds


def _requests(
    stories: tuple[StoryInfo, ...],
) -> tuple[tuple[str, ...], list[tuple[str, ...]], set[str]]:
    """Return one line for each request; parts that took nobody's time are left out."""
    parts = [shares(story) for story in stories]
    shown = [name for name in PARTS if any(part[name] >= _LEAST_SHARE for part in parts)]
    names = tuple(name.upper() for name in shown)
    headings = ("REQUEST", "APP", "LANE", "STATE", "TIME", *names, "TTFT", "WORST GAP")
    rows = [
        (
            str(story.request),
            harmless(story.app or "-"),
            story.lane,
            story.state,
            duration(story.total_ms / 1e3),
            *(f"{part[name]:.0%}" for name in shown),
            "-" if story.ttft_ms is None else duration(story.ttft_ms / 1e3),
            "-" if story.worst_gap is None else worst_gap(story.worst_gap),
        )
        for story, part in zip(stories, parts, strict=True)
    ]
    return headings, rows, {"REQUEST", "TIME", *names, "TTFT"}


def _print_table(headings: tuple[str, ...], rows: list[tuple[str, ...]], right: set[str]) -> None:
    out = console()
    head, *rest = aligned(headings, rows, right)
    out.print(head, style="bold", soft_wrap=True)
    for line in rest:
        out.print(line, soft_wrap=True)
