"""How a request spent its time, in sentences and in shares. Pure: values in, text out."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from uma_trio.cli.output import duration, harmless, several

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from uma_protocol import BeginningInfo, GapInfo, ItemInfo, PhaseInfo, StoryInfo, TickInfo

PARTS = ("queued", "prefill", "decode", "parked", "preempted")
_GIVEN_UP = 2  # the status of a tick that did not fail: it was ended for somebody else's sake
_SLOW = 1.3  # times its prediction: twice the error from which a cost model is not trusted (policy/cost.py)
_LEAST_MS = 0.5  # shorter than this is not worth a sentence
_FOLDED = " " * 6  # before what stands under a line of a table that is too wide
BALLAST = (
    "Ballast: rows that are computed and thrown away, where a tick of more rows takes less time."
)


def parts_ms(timeline: StoryInfo) -> dict[str, float]:
    """Return the milliseconds that each of `PARTS` took."""
    return {
        "queued": timeline.queue_ms,
        "prefill": timeline.prefill.computing_ms + timeline.prefill.waiting_ms,
        "decode": timeline.decode.computing_ms + timeline.decode.waiting_ms,
        "parked": timeline.parked_ms,
        "preempted": timeline.preempted_ms,
    }


def shares(timeline: StoryInfo) -> dict[str, float]:
    """Return the share of the request's time that each of `PARTS` took, 0 to 1."""
    whole = max(timeline.total_ms, 1e-9)
    return {name: min(1.0, ms / whole) for name, ms in parts_ms(timeline).items()}


def sentences(timeline: StoryInfo, ticks: Sequence[TickInfo] = ()) -> list[str]:
    """Return the story of one request: the head, then a sentence for each part of its time.

    `ticks` are those that are known; the one of its worst gap may be among them.
    """
    lines = [_head(timeline)]
    if timeline.queue_ms >= _LEAST_MS or timeline.queue_reason:
        lines.append(_queued(timeline))
    if timeline.beginning is not None:
        lines.append(_began(timeline.beginning, timeline.prompt_tokens))
    lines += _phase("prefill", timeline.prefill)
    if timeline.ttft_ms is not None:
        lines.append(f"first token after {_time(timeline.ttft_ms)}")
    lines += _phase("decode", timeline.decode)
    if timeline.parked_ms >= _LEAST_MS:
        lines.append(f"parked {_time(timeline.parked_ms)}: its reader was behind")
    if timeline.held_ms >= _LEAST_MS:
        lines.append(
            f"computed up to {_time(timeline.held_ms)} ahead of its reader: "
            "tokens were held so that they came evenly"
        )
    if timeline.preemptions:
        lines.append(
            f"preempted {_times(timeline.preemptions)}, {_time(timeline.preempted_ms)} without a slot: "
            "the KV cache had no room, or a person needed its place; "
            "what of that was not in the cache any more was computed again"
        )
    if timeline.worst_gap is not None:
        lines.append(f"worst gap {worst_gap(timeline.worst_gap, ticks)}")
    if (rest_ms := timeline.total_ms - sum(parts_ms(timeline).values())) >= _LEAST_MS:
        lines.append(f"{_time(rest_ms)} in none of these parts")
    if slow := _slowdown(timeline.request, ticks):
        lines.append(slow)
    return lines


def _slowdown(request: int, ticks: Sequence[TickInfo]) -> str:
    """Say that the machine was slower than it is known to be; "" if it was not."""
    timed = [
        (tick.measured_ms, tick.predicted_ms)
        for tick in ticks
        if tick.predicted_ms and any(item.request == request for item in tick.items)
    ]
    took, predicted = (sum(times) for times in zip(*timed, strict=True)) if timed else (0.0, 0.0)
    if took < _SLOW * predicted or not predicted:
        return ""
    return (
        f"the machine took {took / predicted:.1f} x its prediction in the {several(len(timed), 'tick')} "
        "below: another program may use the processor (`uma-trio doctor`)"
    )


_SOURCES = {
    "running": "shared with a request that ran",
    "leaf": "still in the KV cache",
    "saved": "restored from memory",
    "fork": "computed by another request at the time",
}


def _began(found: BeginningInfo, prompt_tokens: int) -> str:
    """Say what of the prompt was cached, and where it and the most similar one differ."""
    if found.tokens:
        where = _SOURCES.get(found.source, harmless(found.source))
        text = f"{found.tokens:,} of {prompt_tokens:,} prompt tokens were cached, {where}: "
        text += f"{_time(found.saved_ms)} saved"
    else:
        text = f"nothing of the prompt was cached; the most similar one has the same first {found.apart:,} tokens"
    if found.apart >= prompt_tokens - 1 or found.mine is None:
        return text
    other = "ends" if found.other is None else f"has {harmless(found.other)!r}"
    return f"{text}; token {found.apart:,} is {harmless(found.mine)!r} where the most similar one {other}"


def worst_gap(gap: GapInfo, ticks: Sequence[TickInfo] = ()) -> str:
    """Return how long it was and where, and what kept it waiting or how its tick was planned."""
    why = harmless(gap.reason)
    if gap.skipped:
        left_out = f"left out of {several(gap.skipped, 'tick')} before it"
        return f"{_time(gap.gap_ms)} until tick {gap.tick}, {left_out}: {why}"
    text = f"{_time(gap.gap_ms)} in tick {gap.tick}" + (f" (plan: {why})" if why else "")
    for tick in ticks:
        if tick.tick == gap.tick:
            limit = "no limit" if tick.limit_ms is None else f"limit {_time(tick.limit_ms)}"
            text += f": {limit}, predicted {_maybe(tick.predicted_ms)}, "
            text += f"took {_time(tick.measured_ms)}"
    return text


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
        "LIMIT": _maybe(tick.limit_ms),
        "PREDICTED": _maybe(tick.predicted_ms),
        "TOOK": _time(tick.measured_ms),
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


def _head(timeline: StoryInfo) -> str:
    names = [harmless(name) for name in (timeline.app, timeline.id) if name]
    if timeline.choice:
        names.append(f"choice {timeline.choice}")
    who = f"Request {timeline.request}" + (f" ({', '.join(names)})" if names else "")
    if timeline.reason is None:
        how = f"{timeline.state}, {_time(timeline.total_ms)} old"
    else:
        code = f" {timeline.code}" if timeline.code else ""
        how = f"ended ({timeline.reason}{code}) after {_time(timeline.total_ms)}"
    return (
        f"{who}, {timeline.lane}{_waits(timeline)}: {how}; {several(timeline.prompt_tokens, 'token')} of prompt, "
        f"{timeline.completion_tokens} of answer."
    )


def _waits(timeline: StoryInfo) -> str:
    """Say what somebody waits for, where it is not what the lane says."""
    return ", its end is waited for" if timeline.awaits == "answer" else ""


def _queued(timeline: StoryInfo) -> str:
    text = f"queued {_time(timeline.queue_ms)}"
    if timeline.queue_reason:
        text += f": {harmless(timeline.queue_reason)}"
    if timeline.passed_over:
        text += f"; later requests were let in before it {_times(timeline.passed_over)}"
    return text


def _phase(name: str, phase: PhaseInfo) -> list[str]:
    if not phase.ticks and not phase.skipped:
        return []
    text = f"{name} {several(phase.tokens, 'token')} in {several(phase.ticks, 'tick')} over "
    text += _time(phase.computing_ms)
    if phase.drafted:
        text += f", {phase.accepted} of them guessed right of {phase.drafted} drafted"
    if phase.skipped:
        left_out = several(sum(phase.skipped.values()), "tick")
        text += f", left out of {left_out} over {_time(phase.waiting_ms)}: "
        text += _reasons(phase.skipped)
    return [text]


def _reasons(skipped: Mapping[str, int]) -> str:
    """Return the reasons, the most frequent first, each with its count if there are several."""
    if len(skipped) == 1:
        return harmless(next(iter(skipped)))
    ordered = sorted(skipped.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{n} x {harmless(reason)}" for reason, n in ordered)


def _maybe(ms: float | None) -> str:
    return "-" if ms is None else _time(ms)


def _time(ms: float) -> str:
    return duration(ms / 1e3) if ms >= 100 else f"{ms:.1f} ms"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"
