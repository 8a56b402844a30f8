"""The latest ticks as a table, and tables that are not cut. Pure: values in, text out."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from uma_trio.observe.sentences import maybe_ms, time_ms
from uma_trio.words import duration, harmless

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from uma_protocol import ItemInfo, TickInfo

_GIVEN_UP = 2  # the status of a tick that did not fail: it was ended for somebody else's sake
_FOLDED = " " * 6  # before what stands under a line of a table that is too wide
BALLAST = (
    "Ballast: rows that are computed and thrown away, where a tick of more rows takes less time."
)


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

    Nothing is cut. Columns that do not fit into `width` characters stand under their line, each
    behind its heading; what is the same for lines that follow each other stands under the first.
    """
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    beside = list(sizes)
    while len(beside) > 1 and sum(sizes[name] + 2 for name in beside) - 2 > width:
        beside.pop()
    lines = [_line({name: name for name in sizes}, sizes, beside, left)]
    said = ""
    for row in rows:
        lines.append(_line(row, sizes, beside, left))
        below = ", ".join(f"{name.lower()}: {row[name]}" for name in sizes if name not in beside)
        if below != said:
            lines += textwrap.wrap(
                below, width, initial_indent=_FOLDED, subsequent_indent=_FOLDED + "  "
            )
        said = below
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
