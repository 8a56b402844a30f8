"""`uma-trio explain`: why a request waited, and how its time was spent."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attrs import define, evolve

from uma_trio.cli.attempt import attempt
from uma_trio.cli.output import (
    OK,
    USAGE,
    JsonFlag,
    SocketFlag,
    complain,
    console,
    print_json,
    socket_path,
)
from uma_trio.cli.parser import Parameter
from uma_trio.observe.sentences import (
    PARTS,
    maybe_ms,
    sentences,
    shares,
    slowdown,
    time_ms,
    worst_gap,
)
from uma_trio.words import duration, harmless, several

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from uma_protocol import Explanation, ItemInfo, StoryInfo, TickInfo

_MOST_TICKS = 1000
_FOLLOW_S = 0.5
_FIGURES_MS = 5000.0  # between two lines that differ by their figures only
_SAMPLE_S = 0.25
_LEAST_SHARE = 0.005
_LONGEST_APP = 16
_LEFT = {"APP", "LANE", "STATE", "GOT", "WORST GAP", "WHY"}  # the others are numbers

_GIVEN_UP = 2  # the status of a tick that was aborted for another request
_FOLDED = " " * 6  # before columns that do not fit into the line
BALLAST = (
    "Ballast: rows that are computed and thrown away, where a tick of more rows takes less time."
)


def explain(
    request: Annotated[
        int | None, Parameter(help="The daemon's handle of a request, as `uma-trio ps` shows it.")
    ] = None,
    /,
    *,
    ticks: Annotated[
        int | None,
        Parameter(
            help="The number of ticks to show: around the worst gap of the request, or else the latest."
        ),
    ] = None,
    last: Annotated[
        int | None,
        Parameter(help="Show this many of the latest requests, not all that are recorded."),
    ] = None,
    follow: Annotated[
        bool, Parameter(help="Print what the request waits for as it changes, until it ends.")
    ] = False,
    json: JsonFlag = False,
    socket: SocketFlag = None,
) -> int:
    """Show how the latest requests spent their time, or the timeline of one request."""
    if request is not None and not 1 <= request < 1 << 63:
        complain(f"{request} is no handle of a request; `uma-trio explain` lists them.")
        return USAGE
    if ticks is not None and not 0 <= ticks <= _MOST_TICKS:
        complain(f"--ticks: {ticks} is out of range, 0 to {_MOST_TICKS}.")
        return USAGE
    if last is not None and (last < 1 or request is not None):
        complain("--last takes a number of requests from 1, and no handle.")
        return USAGE
    if follow:
        if request is None or json:
            complain("--follow takes the handle of a request, and no --json.")
            return USAGE
        return attempt(_follow, socket_path(socket), request)
    return attempt(_explain, socket_path(socket), request, ticks, last, json)


async def _follow(path: Path, request: int) -> int:
    """Print a line whenever the request waits for something else; at its end, how its time was spent."""
    import trio

    from uma_trio.client import Client

    client, news = Client(path), News()
    while True:
        found = await client.explain(request)
        story = found.requests[0]
        if story.reason is not None:
            _show(found, request)
            return OK
        if line := news.line(story):
            _print_wrapped(line, "")
        await trio.sleep(_FOLLOW_S)


@define
class News:
    """The last line about a followed request, so that it is not repeated too soon."""

    _last: str = ""
    _at_ms: float = 0.0

    def line(self, story: StoryInfo) -> str:
        """Return a line about a live request; "" if only figures have changed recently."""
        now = progress(story)
        words = re.sub(r"\d[\d,.]*", "", now)
        if words == self._last and story.age_ms < self._at_ms + _FIGURES_MS:
            return ""
        self._last, self._at_ms = words, story.age_ms
        return f"{duration(story.age_ms / 1e3)}: {now}"


def progress(story: StoryInfo) -> str:
    """Return in a line how far a live request is, and what it waits for."""
    far = ""
    if story.state == "prefill":
        cached = story.beginning.tokens if story.beginning is not None else 0
        done = min(cached + story.prefill.tokens, story.prompt_tokens)
        far = f", {done:,} of {several(story.prompt_tokens, 'token')} of its prompt"
    elif story.completion_tokens:
        far = f", {several(story.completion_tokens, 'token')} of answer"
    return f"{story.state}{far}" + (f"; {harmless(story.waits)}" if story.waits else "")


async def _explain(
    path: Path, request: int | None, ticks: int | None, last: int | None, as_json: bool
) -> int:
    import msgspec

    from uma_trio.client import Client

    found = await Client(path).explain(request, ticks=ticks)
    found = msgspec.structs.replace(found, requests=latest(found.requests, last))
    if as_json:
        print_json(msgspec.to_builtins(found))
        return OK
    _show(found, request)
    if request is not None and slowdown(request, found.ticks):
        share = await neighbours_share(path)
        if share is not None:
            _print_wrapped(f"other programs use {share:.0%} of the machine now", "  ")
    return OK


async def neighbours_share(path: Path) -> float | None:
    """Return the part of the machine that other programs use in a quarter of a second; None if unknown."""
    import trio

    from uma_trio.config.hardware import cpu_seconds_of
    from uma_trio.policy.costing.neighbours import cpu_times, others_share
    from uma_trio.sockets.path import holder_of

    def read() -> Any:
        daemon = holder_of(str(path))
        spent = None if daemon is None else cpu_seconds_of(daemon)
        times = cpu_times()
        return None if spent is None else evolve(times, own_s=times.own_s + spent)

    before = read()
    await trio.sleep(_SAMPLE_S)
    after = read()
    return None if before is None or after is None else others_share(before, after)


def latest(stories: Sequence[StoryInfo], last: int | None) -> tuple[StoryInfo, ...]:
    """Return the stories of the requests that came `last`, in the order given; None is all."""
    handles = sorted({story.request for story in stories}, reverse=True)[:last]
    return tuple(story for story in stories if story.request in handles)


def _show(found: Explanation, request: int | None) -> None:
    out = console()
    if request is not None:
        head, *rest = sentences(found.requests[0], found.ticks)
        _print_wrapped(head, "")
        for line in rest:
            _print_wrapped(line, "  ")
    elif found.requests:
        _print_table(_requests(found.requests))
    else:
        out.print("Nothing has run yet.")
    if found.ticks:
        out.print()
        _print_table(tick_table(found.ticks, request))
    if any(tick.ballast for tick in found.ticks):
        _print_wrapped(BALLAST, "")
    if found.ticks_left_out:
        out.print(f"{found.ticks_left_out} more ticks do not fit into one answer.")


def _requests(timelines: tuple[StoryInfo, ...]) -> list[dict[str, str]]:
    """Return one row for each request; parts without time are left out."""
    parts = [shares(timeline) for timeline in timelines]
    shown = [name for name in PARTS if any(part[name] >= _LEAST_SHARE for part in parts)]
    several = any(timeline.choice for timeline in timelines)
    models = len({timeline.model for timeline in timelines}) > 1
    return [
        {
            "REQUEST": str(timeline.request),
            **({"CHOICE": str(timeline.choice)} if several else {}),
            "APP": _cut(harmless(timeline.app or "-")),
            **({"MODEL": _cut(harmless(timeline.model or "-"))} if models else {}),
            "LANE": timeline.lane,
            "STATE": timeline.state,
            "TIME": duration(timeline.total_ms / 1e3),
            **{name.upper(): f"{part[name]:.0%}" for name in shown},
            "TTFT": "-" if timeline.ttft_ms is None else duration(timeline.ttft_ms / 1e3),
            "WORST GAP": "-" if timeline.worst_gap is None else worst_gap(timeline.worst_gap),
        }
        for timeline, part in zip(timelines, parts, strict=True)
    ]


def _cut(app: str) -> str:
    return app if len(app) <= _LONGEST_APP else f"{app[: _LONGEST_APP - 1]}…"


def _print_table(rows: list[dict[str, str]]) -> None:
    out = console()
    head, *rest = aligned(rows, _LEFT, out.width)
    out.print(head, style="bold", soft_wrap=True)
    for line in rest:
        out.print(line, soft_wrap=True)


def _print_wrapped(text: str, indent: str) -> None:
    out = console()
    for line in textwrap.wrap(
        text, out.width, initial_indent=indent, subsequent_indent=indent + "  "
    ):
        out.print(line, soft_wrap=True)


def tick_table(ticks: Sequence[TickInfo], request: int | None) -> list[dict[str, str]]:
    """Return a row for each tick, by its headings: without columns that say nothing."""
    rows = [_tick_row(tick, request) for tick in ticks]
    empty = set() if any(tick.ballast for tick in ticks) else {"BALLAST"}
    if request is None:
        empty.add("GOT")
    return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]


def _tick_row(tick: TickInfo, request: int | None) -> dict[str, str]:
    tokens = {"decode": 0, "prefill": 0}
    for item in tick.items:
        tokens[item.phase] = tokens.get(item.phase, 0) + item.tokens
    got, why = _part_of(tick, request)
    if tick.status == _GIVEN_UP and tick.recovery:
        why = tick.recovery
    elif tick.status:
        why = f"the decode failed ({tick.status}): {tick.recovery or 'nothing was done'}"
    return {
        "TICK": str(tick.tick),
        "AGO": duration(tick.age_ms / 1e3),
        "GOT": got,
        "DECODE": str(tokens["decode"]),
        "PREFILL": str(tokens["prefill"]),
        "BALLAST": str(tick.ballast),
        "LIMIT": maybe_ms(tick.limit_ms),
        "PREDICTED": maybe_ms(tick.predicted_ms),
        "TOOK": time_ms(tick.measured_ms),
        "WHY": harmless(why),
    }


def aligned(rows: Sequence[Mapping[str, str]], left: set[str], width: int) -> list[str]:
    """Return a table as lines, the headings first; the columns in `left` begin at their left.

    Nothing is cut. Columns that do not fit into `width` characters follow in a second line, with their headings;
    consecutive equal second lines are printed once.
    """
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    fitting = list(sizes)
    while len(fitting) > 1 and sum(sizes[name] + 2 for name in fitting) - 2 > width:
        fitting.pop()
    lines = [_line({name: name for name in sizes}, sizes, fitting, left)]
    last = ""
    for row in rows:
        lines.append(_line(row, sizes, fitting, left))
        below = ", ".join(f"{name.lower()}: {row[name]}" for name in sizes if name not in fitting)
        if below != last:
            lines += textwrap.wrap(
                below, width, initial_indent=_FOLDED, subsequent_indent=_FOLDED + "  "
            )
        last = below
    return lines


def _line(
    row: Mapping[str, str], sizes: Mapping[str, int], names: Sequence[str], left: set[str]
) -> str:
    cells = (
        row[name].ljust(sizes[name]) if name in left else row[name].rjust(sizes[name])
        for name in names
    )
    return "  ".join(cells).rstrip()


def _part_of(tick: TickInfo, request: int | None) -> tuple[str, str]:
    for item in tick.items:
        if item.request == request:
            # What it got explains itself; how long that was allowed to take may not.
            limited = tick.limit_ms is not None and tick.limit_reason not in item.reason
            why = tick.limit_reason if limited else item.reason
            return f"{item.tokens} {item.phase}", why + _drafted(item) + _late(item)
    for skip in tick.skipped:
        if skip.request == request:
            return "-", skip.reason
    return "-", tick.limit_reason


def _drafted(item: ItemInfo) -> str:
    """Say what was guessed of an answer in a tick, and what was right of it."""
    if not item.drafted:
        return ""
    found = f"{item.source}, match {item.match}" if item.source else f"match {item.match}"
    return f"; 1 + {item.drafted} drafted ({found}), {item.accepted} accepted"


def _late(item: ItemInfo) -> str:
    """Say why the last of its tokens is computed again."""
    return "; its next token waits: a mask was late" if item.late else ""
