"""How a request spent its time, as sentences and as shares."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from uma_trio.words import duration, harmless, several

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from uma_protocol import BeginningInfo, GapInfo, PhaseInfo, StoryInfo, TickInfo

PARTS = ("queued", "prefix", "prefill", "decode", "mask", "aside", "parked", "preempted")
_SLOW = 1.3  # times the prediction: twice the error from which a cost model is not trusted (policy/cost.py)
_MOST = 0.4  # of the whole time: the least share of the verdict
_LEAST_VERDICT_MS = 200.0  # shorter requests have no verdict
_ADMITTED_LATE = "the tick in progress had to end"
_LEAST_MS = 0.5  # shorter times have no sentence


def parts_ms(request: StoryInfo) -> dict[str, float]:
    """Return the milliseconds of each of `PARTS`."""
    return {
        "queued": request.queue_ms,
        "prefix": request.prefix_ms,
        "prefill": request.prefill.computing_ms + request.prefill.waiting_ms,
        "decode": request.decode.computing_ms + request.decode.waiting_ms,
        "mask": request.mask_ms,
        "aside": request.aside_ms,
        "parked": request.parked_ms,
        "preempted": request.preempted_ms,
    }


def shares(request: StoryInfo) -> dict[str, float]:
    """Return the share of the request's time of each of `PARTS`, 0 to 1."""
    whole = max(request.total_ms, 1e-9)
    return {name: min(1.0, ms / whole) for name, ms in parts_ms(request).items()}


def sentences(request: StoryInfo, ticks: Sequence[TickInfo] = ()) -> list[str]:
    """Describe a request: the head, why it waits, the verdict, then each part of its time.

    `ticks` are the known ones; the tick of its worst gap may be among them.
    """
    lines = [_head(request)]
    if request.waits:
        lines.append(f"now: {harmless(request.waits)}")
    lines += verdict(request)
    lines += _parts(request)
    if request.worst_gap is not None:
        lines.append(f"worst gap {worst_gap(request.worst_gap, ticks)}")
    if (rest_ms := request.total_ms - sum(parts_ms(request).values())) >= _LEAST_MS:
        lines.append(f"{time_ms(rest_ms)} in none of these parts")
    if slow := slowdown(request.request, ticks):
        lines.append(slow)
    return lines


def verdict(request: StoryInfo) -> list[str]:
    """Return a sentence about the largest part of the time; none if it is small."""
    prefill, decode = request.prefill, request.decode
    left_out = Counter({**prefill.skipped}) + Counter({**decode.skipped})
    ((reason, _),) = left_out.most_common(1) or (("", 0),)
    why = harmless(request.queue_reason or "")
    parts = {
        "it waited for a slot" + (f": {why}" if why else ""): request.queue_ms,
        "it waited for its prefix": request.prefix_ms,
        "it had lost its slot": request.preempted_ms,
        "its reader was behind": request.parked_ms,
        f"ticks left it out: {harmless(reason)}": prefill.waiting_ms + decode.waiting_ms,
        "it waited for masks of its schema or grammar": request.mask_ms,
        "the engine did other work between ticks, or computed another model": request.aside_ms,
        "its prompt was computed": prefill.computing_ms,
        "its answer was computed": decode.computing_ms,
    }
    most = max(parts, key=lambda name: parts[name])
    if request.total_ms < _LEAST_VERDICT_MS or parts[most] < _MOST * request.total_ms:
        return []
    return [f"mostly, {time_ms(parts[most])} of {time_ms(request.total_ms)}, {most}"]


def _parts(request: StoryInfo) -> list[str]:
    def timed(ms: float, before: str, after: str) -> list[str]:
        return [f"{before}{time_ms(ms)}{after}"] if ms >= _LEAST_MS else []

    lines = [_queued(request)] if request.queue_ms >= _LEAST_MS or request.queue_reason else []
    lines += timed(
        request.prefix_ms,
        "waited ",
        " until its prefix was restored from memory or disk, or computed by another request",
    )
    if request.beginning is not None:
        lines.append(_began(request.beginning, request.prompt_tokens))
    lines += _phase("prefill", request.prefill)
    if request.ttft_ms is not None:
        lines.append(f"first token after {time_ms(request.ttft_ms)}")
    lines += _phase("decode", request.decode)
    lines += timed(request.mask_ms, "waited ", " for masks of its schema or grammar")
    lines += timed(
        request.aside_ms,
        "",
        " between ticks: prefixes were saved or restored, texts encoded, or another model was computed",
    )
    lines += timed(request.parked_ms, "parked ", ": its reader was behind")
    lines += timed(
        request.held_ms,
        "computed up to ",
        " ahead of its reader: tokens were held to be shown evenly",
    )
    if request.preemptions:
        lines.append(
            f"preempted {_times(request.preemptions)}, {time_ms(request.preempted_ms)} without a slot: "
            "the KV cache was full, or an interactive request needed the slot; "
            "tokens that were not cached were computed again"
        )
    return lines


def slowdown(request: int, ticks: Sequence[TickInfo]) -> str:
    """Return a sentence if the machine was slower than predicted, else ""."""
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
    "disk": "read from the disk",
    "fork": "computed by another request at the time",
}


def _began(found: BeginningInfo, prompt_tokens: int) -> str:
    if found.tokens:
        where = _SOURCES.get(found.source, harmless(found.source))
        text = f"{found.tokens:,} of {prompt_tokens:,} prompt tokens were cached, {where}: "
        text += f"{time_ms(found.saved_ms)} saved"
    else:
        text = f"nothing of the prompt was cached; the most similar one has the same first {found.apart:,} tokens"
    if found.apart >= prompt_tokens - 1 or found.mine is None:
        return text
    other = "ends" if found.other is None else f"has {harmless(found.other)!r}"
    return f"{text}; token {found.apart:,} is {harmless(found.mine)!r} where the most similar one {other}"


def worst_gap(gap: GapInfo, ticks: Sequence[TickInfo] = ()) -> str:
    """Describe the worst gap: its length, its tick, and the reason."""
    why = harmless(gap.reason)
    if gap.skipped:
        left_out = f"left out of {several(gap.skipped, 'tick')} before it"
        return f"{time_ms(gap.gap_ms)} until tick {gap.tick}, {left_out}: {why}"
    text = f"{time_ms(gap.gap_ms)} in tick {gap.tick}" + (f" (plan: {why})" if why else "")
    for tick in ticks:
        if tick.tick == gap.tick:
            limit = "no limit" if tick.limit_ms is None else f"limit {time_ms(tick.limit_ms)}"
            text += f": {limit}, predicted {maybe_ms(tick.predicted_ms)}, "
            text += f"took {time_ms(tick.measured_ms)}"
    return text


def _head(request: StoryInfo) -> str:
    names = [harmless(name) for name in (request.app, request.id) if name]
    if request.choice:
        names.append(f"choice {request.choice}")
    if request.model:
        names.append(f"model {harmless(request.model)}")
    name = f"Request {request.request}" + (f" ({', '.join(names)})" if names else "")
    if request.reason is None:
        how = f"{request.state}, {time_ms(request.total_ms)} old"
    else:
        code = f" {request.code}" if request.code else ""
        how = f"ended ({request.reason}{code}) after {time_ms(request.total_ms)}"
    return (
        f"{name}, {request.lane}{_waits(request)}: {how}; {several(request.prompt_tokens, 'token')} of prompt, "
        f"{request.completion_tokens} of answer."
    )


def _waits(request: StoryInfo) -> str:
    return ", read as a whole" if request.awaits == "answer" else ""


def _queued(request: StoryInfo) -> str:
    text = f"queued {time_ms(request.queue_ms)}"
    text += f": {harmless(request.queue_reason or _ADMITTED_LATE)}"
    if request.passed_over:
        text += f"; later requests were admitted before it {_times(request.passed_over)}"
    return text


def _phase(name: str, phase: PhaseInfo) -> list[str]:
    if not phase.ticks and not phase.skipped:
        return []
    text = f"{name} {several(phase.tokens, 'token')} in {several(phase.ticks, 'tick')} over "
    text += time_ms(phase.computing_ms)
    if phase.drafted:
        text += f", {phase.accepted} of them guessed right of {phase.drafted} drafted"
    if phase.skipped:
        left_out = several(sum(phase.skipped.values()), "tick")
        text += f", left out of {left_out} over {time_ms(phase.waiting_ms)}: "
        text += _reasons(phase.skipped)
    return [text]


def _reasons(skipped: Mapping[str, int]) -> str:
    if len(skipped) == 1:
        return harmless(next(iter(skipped)))
    ordered = sorted(skipped.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{n} x {harmless(reason)}" for reason, n in ordered)


def maybe_ms(ms: float | None) -> str:
    """Return :func:`time_ms`, or "-" for None."""
    return "-" if ms is None else time_ms(ms)


def time_ms(ms: float) -> str:
    """Return a time for a person: 3.4 ms, 120 ms, 4.0 s."""
    return duration(ms / 1e3) if ms >= 100 else f"{ms:.1f} ms"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"
